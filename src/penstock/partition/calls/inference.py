"""Run a unit without data, to see the shapes of what it gives."""

from __future__ import annotations

import contextlib
import copy
import logging
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.errors import PartitionError
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

    def is_base(self, tensor: Tensor) -> bool:
        """Whether a followed tensor is a view of this one, which autograd then uses in its place."""


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
        written: the memory that was written into.
    """

    def __init__(self, numbers: Numbers, mode: FakeTensorMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._numbers = numbers
        self._mode = mode
        self._made: dict[int, tuple[weakref.ref[Tensor], str]] = {}
        self._unit: str | None = None
        self.used: dict[int, None] = {}
        self.borrowed: dict[str, None] = {}
        self.written: set[int] = set()

    @contextlib.contextmanager
    def of(self, unit: str) -> Iterator[None]:
        """See what ``unit`` computes in the context."""
        self._begin(unit)
        with quiet(), self._mode, self:
            yield

    @contextlib.contextmanager
    def writes(self) -> Iterator[None]:
        """See what a function between the units writes into."""
        self._begin(None)
        with self:
            yield

    def _begin(self, unit: str | None) -> None:
        self._unit, self.used, self.borrowed, self.written = unit, {}, {}, set()

    def maker(self, tensor: Tensor) -> str | None:
        """The unit inside which a tensor was made."""
        found = self._made.get(id(tensor))
        return None if found is None or found[0]() is not tensor else found[1]

    @contextlib.contextmanager
    def standing_for(self, given: Iterable[Tensor]) -> Iterator[None]:
        """What is written into the views that a unit makes of tensors with data is written into these.

        Such views show the memory of a tensor without data, which must be the same one for all of them.
        """
        real = [tensor for tensor in given if not isinstance(tensor, FakeTensor)]
        held = [(tensor, self._mode.from_tensor(tensor)) for tensor in real]
        yield
        self.written.update(memory_of(t) for t, fake in held if memory_of(fake) in self.written)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """An operation."""
        options = kwargs or {}
        self.written.update(map(memory_of, _written_by(func, args, options)))
        if self._unit is None:
            return func(*args, **options)
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
        if maker is not None and maker != self._unit and not self._numbers.is_base(tensor):
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


def memory_of(tensor: Tensor) -> int:
    """The memory that a tensor shows, as a number: for as long as somebody holds it."""
    try:
        # No public name tells a storage without data from another. Seen in torch 2.13.
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        # A sparse tensor has several.
        return -id(tensor)


def _written_by(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """The tensors that an operator writes into, as its schema tells."""
    schema = getattr(func, "_schema", None)
    if schema is None or not schema.is_mutable:
        return
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[position] if position < len(args) else kwargs.get(argument.name)
            yield from tensors_in(given)


def view_like(view: Tensor, old: Tensor, new: Tensor) -> Tensor:
    """What a view of one tensor would be of another of the same shape.

    Raises:
        PartitionError: their data lie in another order.
    """
    if old.stride() != new.stride() or view.dtype != new.dtype:
        raise PartitionError(
            f"between its modules the model writes into a tensor of shape {list(old.shape)} and strides "
            f"{list(old.stride())}, and reads it through a view of shape {list(view.shape)} and type "
            f"{view.dtype}, which other stages cannot make again; clone the tensor before it is written into"
        )
    start = view.storage_offset() - old.storage_offset() + new.storage_offset()
    # The view was there before, whatever is done now under no_grad().
    with torch.enable_grad():
        return new.as_strided(view.shape, view.stride(), start)


def run_for_real(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], mode: FakeTensorMode
) -> tuple[Any, list[Tensor]]:
    """Run a copy of a module with ones for all data, where its code does not run without.

    Returns:
        What it gives, without data, and which tensors among its arguments it has written into.
    """
    memo: dict[int, Any] = {
        id(parameter): nn.Parameter(_ones(parameter), parameter.requires_grad)
        for parameter in module.parameters()
    }
    memo |= {id(buffer): _ones(buffer) for buffer in module.buffers()}
    given = tensors_in((args, kwargs))
    args, kwargs = replaced((args, kwargs), _real)
    before = [(t, t._version) for t in tensors_in((args, kwargs))]
    result = copy.deepcopy(module, memo)(*args, **kwargs)
    written = [t for t, (real, was) in zip(given, before, strict=True) if real._version != was]

    def without_data(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return mode.from_tensor(leaf.detach()).requires_grad_(leaf.requires_grad)

    return replaced(result, without_data), written


def _real(leaf: Any) -> Any:
    if not isinstance(leaf, FakeTensor):
        return leaf
    return _ones(leaf).requires_grad_() * 1 if leaf.requires_grad else _ones(leaf)


def _nothing(record: logging.LogRecord) -> bool:
    return False


def _ones(tensor: Tensor) -> Tensor:
    return torch.ones(tensor.shape, dtype=tensor.dtype, device=tensor.device)
