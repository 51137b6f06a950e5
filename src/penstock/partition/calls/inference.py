"""Run a unit without data, to see the shapes of what it returns."""

from __future__ import annotations

import contextlib
import copy
import gc
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.autograd.graph import get_gradient_edge
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.errors import PartitionError
from penstock.partition.calls.tape import leaves, replaced, skeleton, tensors_in
from penstock.partition.faces import written_by
from penstock.values import (
    Family,
    Form,
    Found,
    NotGeneral,
    Unknowns,
    attributes_kept,
    autocast_types,
    surely_reached,
)
from penstock.values.trial import check_types

_PATIENCE = 250
"""After how many operations on ones the next one runs on zeros."""

_LOG = logging.getLogger("torch._subclasses.fake_tensor")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep torch from logging what cannot be computed without data: here it is run for real, or raises."""
    inner = _nothing in _LOG.filters
    _LOG.addFilter(_nothing)
    try:
        yield
    finally:
        if not inner:
            _LOG.removeFilter(_nothing)


class Numbers(Protocol):
    """Knows which tensors are followed."""

    def number_of(self, tensor: Tensor) -> int | None:
        """The number of a followed tensor."""

    def is_base(self, tensor: Tensor) -> bool:
        """Whether a followed tensor is a view of this one, which autograd then uses in its place."""


class Inference(TorchDispatchMode):
    """Sees what a unit computes on tensors without data.

    Where that cannot be computed, because it depends on the data, or is known for real tensors only, the
    single operation runs for real, with ones for the data.

    Args:
        numbers: knows which tensors are followed.
        mode: the mode of the tensors without data.

    Attributes:
        used: the numbers of the values that the running unit has used.
        borrowed: the other units of which it has used tensors that it was not given.
        written: the memory that was written into.
        fresh: the tensors that were made inside it.
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
        self._standing: list[tuple[Tensor, Tensor]] = []
        self.fresh: list[weakref.ref[Tensor]] = []
        self._may_run = True
        self._ran = 0

    @contextlib.contextmanager
    def of(self, unit: str, *, for_real: bool = True) -> Iterator[None]:
        """See what ``unit`` computes in the context.

        Args:
            unit: its path.
            for_real: whether operations may run for real.
        """
        self.forget()
        self._unit, self._may_run = unit, for_real
        with quiet(), self._mode, self:
            yield

    @contextlib.contextmanager
    def writes(self) -> Iterator[None]:
        """See what a function between the units writes into."""
        self.forget()
        self._unit = None
        with self:
            yield

    def forget(self) -> None:
        """Forget what was seen of a unit or a function."""
        self.used, self.borrowed, self.written, self.fresh = {}, {}, set(), []

    def maker(self, tensor: Tensor) -> str | None:
        """The unit inside which a tensor was made."""
        found = self._made.get(id(tensor))
        return None if found is None or found[0]() is not tensor else found[1]

    @contextlib.contextmanager
    def standing_for(self, given: Iterable[Tensor]) -> Iterator[None]:
        """Count what a unit writes into views of tensors with data as written into these tensors.

        Such views share the memory of a tensor without data, which must be the same one for all of them.
        """
        real = [tensor for tensor in given if not isinstance(tensor, FakeTensor)]
        # Held until the next unit, since the mode gives the same one only as long as it is alive.
        held = self._standing = [(tensor, self._mode.from_tensor(tensor)) for tensor in real]
        yield
        self.written.update(memory_of(t) for t, fake in held if memory_of(fake) in self.written)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """An operation."""
        options = kwargs or {}
        schema = getattr(func, "_schema", None)
        if schema is not None and schema.is_mutable:
            written = tensors_in(list(written_by(schema, args, options)))
            self.written.update(map(memory_of, written))
        if self._unit is None:
            return func(*args, **options)
        for tensor in tensors_in((args, options)):
            self._note_use(tensor)
        try:
            check_types(func, args)
            result = func(*args, **options)
        except Exception:
            if not self._may_run:
                raise
            result = self._for_real(func, args, options)
        for tensor in tensors_in(result):
            if self._numbers.number_of(tensor) is None and self.maker(tensor) is None:
                found = weakref.ref(tensor)
                self._made[id(tensor)] = found, self._unit
                self.fresh.append(found)
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
        self._ran += 1
        # Zeros now and then end a loop that draws until the numbers suit it, as trunc_normal_ does.
        numbers = _ones if self._ran % _PATIENCE else _zeros
        with torch.utils._python_dispatch._disable_current_modes():
            real = {id(t): numbers(t) if isinstance(t, FakeTensor) else t for t in given}
            back = {id(new): old for old in given if (new := real[id(old)]) is not old}
            real_args, real_kwargs = replaced((args, kwargs), lambda leaf: real.get(id(leaf), leaf))
            result = func(*real_args, **real_kwargs)
        return replaced(result, lambda leaf: self._without_data(leaf, back))

    def _without_data(self, leaf: Any, back: dict[int, Tensor]) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return back.get(id(leaf)) if id(leaf) in back else self._mode.from_tensor(leaf)


def memory_of(tensor: Tensor) -> int:
    """A number for the memory of a tensor, valid for as long as that is alive."""
    try:
        # There is no public way to tell one storage without data from another. As of torch 2.13.
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        # A sparse tensor has several storages.
        return -id(tensor)


def view_like(view: Tensor, old: Tensor, new: Tensor) -> Tensor:
    """A view of a tensor, made again of another tensor of the same shape.

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
    # The original view was made earlier, so whether gradients are off by now does not matter.
    with torch.enable_grad():
        return new.as_strided(view.shape, view.stride(), start)


@dataclass(frozen=True)
class UnitCall:
    """A call of a unit.

    Args:
        unit: its path.
        module: the unit.
        run: calls it.
        args: the arguments to call it with.
        kwargs: those by name.
    """

    unit: str
    module: nn.Module
    run: Callable[..., Any]
    args: Any
    kwargs: Any


class Sizes:
    """Runs units, and infers what they return for other sizes where that is certain.

    See ``penstock.values.Family``. It is certain for a unit that takes and returns tensors and plain values
    only, and does nothing else that could be seen: it changes none of its arguments, sets no hooks on them,
    leaves no tensor anywhere and adds no loss.

    Args:
        inference: sees what units compute.
        mode: the mode of the tensors without data.
        families: what units returned so far, in calls of the same kind.
        drawn: the generators that were drawn from; ``None`` for torch's own.
        losses: the losses that were added.
    """

    def __init__(
        self,
        inference: Inference,
        mode: FakeTensorMode,
        families: dict[Any, Family[Found | None]],
        drawn: Sequence[torch.Generator | None],
        losses: list[Tensor],
    ) -> None:
        self._inference, self._mode = inference, mode
        self._families, self._drawn, self._losses = families, drawn, losses

    def run(self, call: UnitCall) -> Any:
        """What a unit gives."""
        together = call.args, call.kwargs
        given = list({id(tensor): tensor for tensor in tensors_in(together)}.values())
        kind = _kind(together, given)
        made: list[Any] = []

        def look() -> Found | None:
            before = [hooks_on(tensor) for tensor in given]
            with self._inference.of(call.unit):
                made.append(call.run(*call.args, **call.kwargs))
            if kind is None or before != [hooks_on(tensor) for tensor in given]:
                return None
            return self._described(made[0], given, call.unit)

        if kind is None:
            look()
            return made[0]
        family = self._families.setdefault((call.unit, kind), Family(_alike))
        found = family.find(
            [Form.of(tensor) for tensor in given],
            look,
            lambda unknowns: self._followed(call, given, unknowns),
            lambda found: found,
        )
        if made:
            return made[0]
        assert found is not None
        self._inference.forget()
        return self._filled(found, given)

    def _followed(self, call: UnitCall, given: Sequence[Tensor], unknowns: Unknowns) -> Found:
        losses = len(self._losses)
        try:
            with attributes_kept(call.module), unknowns.within(self._mode) as sizes:
                inputs = [
                    _attached(partial(_empty_like, new)) if old.requires_grad else new
                    for new, old in zip(sizes, given, strict=True)
                ]
                found = self._ran(call, given, inputs)
                if _any_alive(self._inference.fresh):
                    raise NotGeneral(f"{call.unit} leaves tensors somewhere")
            if len(self._losses) > losses:
                raise NotGeneral(f"{call.unit} adds a loss")
        finally:
            del self._losses[losses:]
        return found

    def _ran(self, call: UnitCall, given: Sequence[Tensor], inputs: Sequence[Tensor]) -> Found:
        instead = {id(old): new for old, new in zip(given, inputs, strict=True)}
        together = call.args, call.kwargs
        args, kwargs = replaced(together, lambda leaf: instead.get(id(leaf), leaf))
        versions = [tensor._version for tensor in inputs]
        with self._inference.of(call.unit, for_real=False):
            result = call.run(*args, **kwargs)
        found, seen = self._described(result, inputs, call.unit), self._inference
        if found is None or seen.used or seen.borrowed or any(g is not None for g in self._drawn):
            raise NotGeneral(f"{call.unit} uses or gives more than tensors")
        written = any(memory_of(tensor) in seen.written for tensor in inputs)
        if written or [tensor._version for tensor in inputs] != versions:
            raise NotGeneral(f"{call.unit} changes its arguments")
        if any(map(hooks_on, inputs)):
            raise NotGeneral(f"{call.unit} sets hooks on its arguments")
        return found

    def _described(self, result: Any, given: Sequence[Tensor], unit: str) -> Found | None:
        """What a unit returned, if forms describe it: plain values, and tensors that it made or was given."""
        found = list(leaves(result))
        places = {id(tensor): index for index, tensor in enumerate(given)}
        own = [f for f in found if isinstance(f, Tensor) and id(f) not in places]
        if not all(_is_plain(t) and self._inference.maker(t) == unit for t in own):
            return None
        memories = {memory_of(tensor) for tensor in own}
        inputs = [t if isinstance(t, FakeTensor) else self._mode.from_tensor(t) for t in given]
        if len(memories) < len(own) or not memories.isdisjoint(map(memory_of, inputs)):
            return None
        if not all(isinstance(f, (Tensor, *_NUMBERS)) or type(f) in _PLAIN for f in found):
            return None
        told = [
            _Same(places[id(f)]) if id(f) in places else Form.of(f) if isinstance(f, Tensor) else f
            for f in found
        ]
        edges = {i: get_gradient_edge(t) for i, t in enumerate(given) if t.requires_grad}
        reached = [
            sorted(surely_reached(edges, [f])) if isinstance(f, Tensor) and f.requires_grad else []
            for f in found
        ]
        count = iter(range(len(found)))
        rest = skeleton(result), reached, replaced(result, lambda _: _Leaf(next(count)))
        return Found(tuple(told), rest)

    def _filled(self, found: Found, given: Sequence[Tensor]) -> Any:
        _, reached, result = found.rest
        with self._mode:
            values = [
                _value(leaf, given, reached[place]) for place, leaf in enumerate(found.leaves)
            ]
        return replaced(result, lambda leaf: values[leaf.place])


class _Leaf:
    """Stands where a leaf was."""

    def __init__(self, place: int) -> None:
        self.place = place


class _Same(NamedTuple):
    """A result that is one of the arguments itself."""

    place: int


_PLAIN = (bool, int, float, str, torch.dtype, torch.device, type(None))
_NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool)


def _kind(call: Any, given: Sequence[Tensor]) -> Any:
    """What calls that differ in sizes alone have in common; ``None`` if more than tensors is given."""
    places = {id(tensor): index for index, tensor in enumerate(given)}
    found = list(leaves(call))
    if not all(_is_plain(f) if isinstance(f, Tensor) else type(f) in _PLAIN for f in found):
        return None
    told = [_Same(places[id(f)]) if isinstance(f, Tensor) else (type(f), f) for f in found]
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *autocast_types()
    return skeleton(call), modes, *told, *(Form.of(tensor).kind for tensor in given)


def _is_plain(tensor: Tensor) -> bool:
    kinds = (Tensor, nn.Parameter, FakeTensor)
    return type(tensor) in kinds and tensor.layout is torch.strided


def _alike(one: Found | None, other: Found | None) -> bool:
    if one is None or other is None:
        return False
    return one.leaves == other.leaves and one.rest[:2] == other.rest[:2]


def _value(leaf: Any, given: Sequence[Tensor], reached: Sequence[int]) -> Any:
    if isinstance(leaf, _Same):
        return given[leaf.place]
    if not isinstance(leaf, Form):
        return leaf
    plain = leaf._replace(requires_grad=False)
    if not leaf.requires_grad:
        return plain.empty()
    return _attached(plain.empty, [given[index] for index in reached])


def _empty_like(tensor: Tensor) -> Tensor:
    shape, strides = tensor.shape, tensor.stride()
    return torch.empty_strided(shape, strides, dtype=tensor.dtype, device=tensor.device)


class _Attached(torch.autograd.Function):
    """Makes a tensor that is part of an autograd graph, as what a module returns is."""

    @staticmethod
    def forward(ctx: Any, make: Callable[[], Tensor], *anchors: Tensor) -> Tensor:
        """The tensor."""
        del ctx, anchors
        return make()


def _attached(make: Callable[[], Tensor], to: Sequence[Tensor] = ()) -> Tensor:
    """A tensor whose gradient flows on to some others."""
    anchor = torch.zeros((), requires_grad=True)
    with torch.enable_grad():
        found: Tensor = _Attached.apply(make, anchor, *to)  # type: ignore[no-untyped-call]
    return found


def hooks_on(tensor: Tensor) -> int:
    """How many hooks there are on a tensor's gradient, not counting those for several tensors at once.

    These are set by tools that follow modules, such as torch's counter of operations, and only listen.
    """
    found = (tensor._backward_hooks or {}).values()
    return sum(getattr(hook, "__module__", "") != "torch.autograd.graph" for hook in found)


def _any_alive(made: Sequence[weakref.ref[Tensor]]) -> bool:
    if all(found() is None for found in made):
        return False
    gc.collect()
    return any(found() is not None for found in made)


def run_for_real(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], mode: FakeTensorMode
) -> tuple[Any, list[Tensor]]:
    """Run a copy of a module with ones for all data, for code that does not run without data.

    Returns:
        What it returns, without data, and the tensors among its arguments that it has written into.
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


def _zeros(tensor: Tensor) -> Tensor:
    return torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)
