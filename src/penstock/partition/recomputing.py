"""Recompute a unit in its backward without running its state on a second time.

A unit may change what it keeps while it runs: running statistics, a codebook, the vectors of spectral_norm.
The second run must begin where the first one began, or it gives other activations, and must leave behind what
the first one left, or the state moves twice.
"""

from __future__ import annotations

import copy
import operator
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import checkpoint as checkpointing

from penstock._engine.values import leaves_in, map_tensors
from penstock.errors import PartitionError, StageError
from penstock.partition.kept import (
    GENERATORS,
    MISSING,
    REGISTRIES,
    draw_from,
    drawn,
    is_of_library,
    put_back,
    replaced,
)

Run = Callable[..., Any]
_Holder = dict[str, Any]
_Entry = tuple[_Holder, str, Any]


def recomputed(
    run: Run, unit: nn.Module | None, name: str, again: Callable[[], Any] | None = None
) -> Run:
    """A call of a unit that runs again in its backward, and draws the same there.

    Args:
        run: makes the call.
        unit: the unit, whose state moves once; None in a checkpoint of the author's, where it moves twice.
        name: the path of the unit, for messages.
        again: makes the context in which it runs again, for what only surrounds the first run.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        function = run if unit is None else _Repeatable(run, unit)
        if again is not None:
            function = _later_within(function, again)
        try:
            return checkpointing.checkpoint(function, *args, use_reentrant=False, **kwargs)
        except RuntimeError as error:
            if unit is None or "saved tensor hooks" not in str(error):
                raise
            raise PartitionError(
                f"{name} takes gradients by torch.func, and PyTorch cannot recompute such code ({error}); "
                "leave this module out of recompute="
            ) from error

    return call


def _later_within(run: Run, again: Callable[[], Any]) -> Run:
    been = False

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal been
        with again() if been else nullcontext():
            been = True
            return run(*args, **kwargs)

    return call


class _Repeatable:
    """One call of a unit, which begins with the same state each time, and changes it the first time alone."""

    def __init__(self, run: Run, unit: nn.Module) -> None:
        self._run, self._unit = run, unit
        self._begun: StateKept | None = None
        self._before: list[_Entry] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._run(*args, **kwargs)
        if self._begun is None:
            return self._first(args, kwargs)
        if not (self._before or self._begun.generators):
            return self._run(*args, **kwargs)
        copies = _Copies()
        # Other objects than those that are there, whose version counters do not move.
        again = [(holder, name, _copy_of(value, copies)) for holder, name, value in self._before]
        now = [(generator, drawn(generator)) for generator, _ in self._begun.generators]
        try:
            _draw_from_all(self._begun.generators)
            with replaced(again):
                return self._run(*args, **kwargs)
        finally:
            _draw_from_all(now)

    def _first(self, args: Any, kwargs: Any) -> Any:
        begun = StateKept(self._unit.modules())
        weights = [(name, p, p._version) for name, p in _weights(self._unit)]
        output = self._run(*args, **kwargs)
        for name, parameter, version in weights:
            if parameter._version != version:
                raise StageError(
                    f"{type(self._unit).__name__} changes its parameter {name} in place in its forward, "
                    "which must run again; make that a buffer, or leave the module out of recompute="
                )
        self._begun, self._before = begun, begun.changed()
        return output


class StateKept:
    """What modules keep now, but for parameters: buffers, attributes, and what is in these.

    Args:
        modules: the modules, each for itself.

    Attributes:
        generators: the generators of random numbers among it, with their states.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules, copies = list(modules), _Copies()
        self._state = [
            (holder, name, value, _copy_of(value, copies), _versions(value))
            for holder, name, value in _state(self._modules)
        ]
        draws = {id(v): v for _, _, v, *_ in self._state if isinstance(v, GENERATORS)}
        self.generators = [(generator, drawn(generator)) for generator in draws.values()]

    def changed(self) -> list[_Entry]:
        """What is other now, with what was there; ``MISSING`` for nothing."""
        entries: list[_Entry] = []
        for holder, name, value, before, versions in self._state:
            if _is_changed(value, before, versions):
                entries.append((holder, name, before))
            elif holder.get(name, MISSING) is not value:
                entries.append((holder, name, value))
        return entries + [(holder, name, MISSING) for holder, name in self._added()]

    def _added(self) -> list[tuple[_Holder, str]]:
        there = {(id(holder), name) for holder, name, *_ in self._state}
        now = [(holder, name) for holder, name, _ in _state(self._modules)]
        return [(holder, name) for holder, name in now if (id(holder), name) not in there]

    def put_back(self) -> None:
        """Let the modules keep this again; a container or tensor stays the same object."""
        copies = _Copies()
        for holder, name in self._added():
            del holder[name]
        for holder, name, value, before, versions in self._state:
            if isinstance(value, Tensor):
                if not value.is_meta:
                    value.data.copy_(before)
            elif not isinstance(value, tuple) and _is_changed(value, before, versions):
                put_back(value, _copy_of(before, copies))
            if holder.get(name, MISSING) is not value:
                holder[name] = value
        _draw_from_all(self.generators)


def _draw_from_all(generators: Sequence[tuple[Any, Any]]) -> None:
    for generator, state in generators:
        draw_from(generator, state)


@contextmanager
def state_kept(modules: Iterable[nn.Module]) -> Iterator[None]:
    """A context after which modules keep what they kept before."""
    kept = StateKept(modules)
    try:
        yield
    finally:
        kept.put_back()


class _Copies:
    """Copies each tensor once, so that what is one tensor under two names stays one."""

    def __init__(self) -> None:
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, tensor: Tensor) -> Tensor:
        if isinstance(tensor, nn.Parameter):
            return tensor
        if id(tensor) not in self._copies:
            self._copies[id(tensor)] = tensor, tensor.clone()
        return self._copies[id(tensor)][1]


def _state(modules: Iterable[nn.Module]) -> Iterator[_Entry]:
    """What modules keep, but for parameters: where, by which name, and the value.

    These are buffers, and the attributes of the author's modules and of objects in them, such as a meter.
    """
    holders: list[tuple[_Holder, int]] = []
    for part in modules:
        holders.append((part._buffers, 0))
        if not is_of_library(type(part)):
            holders.append((vars(part), 0))
    seen = {id(holder) for holder, _ in holders}
    for holder, depth in holders:  # it grows
        for name, value in holder.items():
            if name in REGISTRIES:
                continue
            yield holder, name, value
            if isinstance(value, _WITHOUT_STATE) or not hasattr(value, "__dict__"):
                continue
            kind: type = type(value)
            inside: Any = vars(value)
            if depth < _DEEP and id(inside) not in seen and not is_of_library(kind):
                seen.add(id(inside))
                holders.append((inside, depth + 1))


def _weights(unit: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters that a forward may not change: all but those of a table that keeps its rows short."""
    for path, part in unit.named_modules():
        if getattr(part, "max_norm", None) is None:
            yield from part.named_parameters(path, recurse=False)


def _copy_of(value: Any, copies: _Copies) -> Any:
    if isinstance(value, _COPIED):
        return copy.copy(value)
    return map_tensors(value, copies) if isinstance(value, _SEARCHED) else value


_DEEP = 2
_WITHOUT_STATE = (Tensor, type, FunctionType, MethodType, ModuleType, nn.Module)
_SEARCHED = (Tensor, tuple, list, dict)
_COPIED = (deque, set)


def _versions(value: Any) -> list[tuple[Any, int]]:
    """The leaves of a value, and how often each was changed in place."""
    if not isinstance(value, _SEARCHED):
        return [(value, 0)]
    return [
        (leaf, leaf._version if isinstance(leaf, Tensor) and not leaf.is_inference() else 0)
        for _, leaf in leaves_in(value)
    ]


def _is_changed(value: Any, copied: Any, versions: list[tuple[Any, int]]) -> bool:
    """Whether something inside a value is another than before, or may have been changed in place."""
    if isinstance(value, set):
        return bool(value != copied)
    if isinstance(value, deque):
        held, before = list(value), list(copied)
        return len(held) != len(before) or any(map(operator.is_not, held, before))
    now = _versions(value)
    if len(now) != len(versions):
        return True
    for (leaf, version), (was, at), (twin, _) in zip(now, versions, _versions(copied), strict=True):
        if leaf is not was or version != at:
            return True
        if leaf is twin:
            continue
        # What is written through ``.data`` moves no version. To compare on a GPU would wait for it.
        if leaf.device.type != "cpu" or not torch.equal(leaf, twin):
            return True
    return False
