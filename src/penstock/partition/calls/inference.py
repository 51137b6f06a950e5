"""Run a unit without data, to see the shapes of what it gives."""

from __future__ import annotations

import contextlib
import copy
import logging
import weakref
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.partition.calls.trees import replaced, tensors_in
from penstock.specs.trial import check_types

_LOG = logging.getLogger("torch._subclasses.fake_tensor")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Log nothing of what cannot be computed without data: it is tried for real, or told as an error."""
    inner = _nothing in _LOG.filters
    _LOG.addFilter(_nothing)
    try:
        yield
    finally:
        if not inner:
            _LOG.removeFilter(_nothing)


class Numbers(Protocol):
    """Who knows which tensors are followed."""

    def number_of(self, tensor: Tensor) -> int | None:
        """The number of a followed tensor."""


class Inference(TorchDispatchMode):
    """Sees what a unit computes on tensors without data.

    Where that cannot be computed, because it depends on the data, or is known for real tensors only, the
    single operation runs for real, with ones for the data.

    Args:
        numbers: which tensors are followed.
        mode: of the tensors without data.

    Attributes:
        used: the numbers of the values that the unit now running has used.
        borrowed: the other units, some of whose tensors it has used without being given them.
    """

    def __init__(self, numbers: Numbers, mode: FakeTensorMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._numbers = numbers
        self._mode = mode
        self._made: dict[int, tuple[weakref.ref[Tensor], str]] = {}
        self._unit = ""
        self.used: dict[int, None] = {}
        self.borrowed: dict[str, None] = {}

    @contextlib.contextmanager
    def of(self, unit: str) -> Iterator[None]:
        """See what ``unit`` computes in the context."""
        self._unit, self.used, self.borrowed = unit, {}, {}
        with quiet(), self._mode, self:
            yield

    def maker(self, tensor: Tensor) -> str | None:
        """The unit inside which a tensor was made."""
        found = self._made.get(id(tensor))
        return None if found is None or found[0]() is not tensor else found[1]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """An operation."""
        options = kwargs or {}
        for tensor in tensors_in((args, options)):
            self._note_use(tensor)
        try:
            check_types(func, args)
            result = func(*args, **options)
        except Exception:
            result = self._for_real(func, args, options)
        for tensor in tensors_in(result):
            if self._numbers.number_of(tensor) is None and self.maker(tensor) is None:
                self._made[id(tensor)] = (weakref.ref(tensor), self._unit)
        return result

    def _note_use(self, tensor: Tensor) -> None:
        number = self._numbers.number_of(tensor)
        if number is not None:
            self.used[number] = None
            return
        maker = self.maker(tensor)
        if maker is not None and maker != self._unit:
            self.borrowed[maker] = None

    def _for_real(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = tensors_in((args, kwargs))
        with torch.utils._python_dispatch._disable_current_modes():
            real = {id(t): _ones(t) if isinstance(t, FakeTensor) else t for t in given}
            back = {id(new): old for old in given if (new := real[id(old)]) is not old}
            real_args, real_kwargs = replaced((args, kwargs), lambda leaf: real.get(id(leaf), leaf))
            result = func(*real_args, **real_kwargs)
        return replaced(result, lambda leaf: self._without_data(leaf, back))

    def _without_data(self, leaf: Any, back: dict[int, Tensor]) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return back.get(id(leaf)) if id(leaf) in back else self._mode.from_tensor(leaf)


def run_for_real(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], mode: FakeTensorMode
) -> Any:
    """Run a copy of a module with ones for all data, where its code does not run without.

    Returns:
        What it gives, without data.
    """
    memo: dict[int, Any] = {
        id(parameter): nn.Parameter(_ones(parameter), parameter.requires_grad)
        for parameter in module.parameters()
    }
    memo |= {id(buffer): _ones(buffer) for buffer in module.buffers()}
    args, kwargs = replaced((args, kwargs), _real)
    result = copy.deepcopy(module, memo)(*args, **kwargs)

    def without_data(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return mode.from_tensor(leaf.detach()).requires_grad_(leaf.requires_grad)

    return replaced(result, without_data)


def _real(leaf: Any) -> Any:
    if not isinstance(leaf, FakeTensor):
        return leaf
    return _ones(leaf).requires_grad_() * 1 if leaf.requires_grad else _ones(leaf)


def _nothing(record: logging.LogRecord) -> bool:
    return False


def _ones(tensor: Tensor) -> Tensor:
    return torch.ones(tensor.shape, dtype=tensor.dtype, device=tensor.device)
