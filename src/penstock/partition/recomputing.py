"""Recompute a unit in its backward without running its state on a second time.

A unit may change what it keeps while it runs: running statistics, a codebook, the vectors of spectral_norm.
The second run must begin where the first one began, or it gives other activations, and must leave behind what
the first one left, or the state moves twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import checkpoint as checkpointing

from penstock._engine.values import leaves_in, map_tensors
from penstock.errors import PartitionError, StageError
from penstock.partition.kept import MISSING, REGISTRIES, replaced

Run = Callable[..., Any]
_Holder = dict[str, Any]


def recomputed(run: Run, unit: nn.Module | None, name: str) -> Run:
    """A call of a unit that runs again in its backward, and draws the same there.

    Args:
        run: makes the call.
        unit: the unit, whose state moves once; None in a checkpoint of the author's, where it moves twice.
        name: the path of the unit, for messages.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        function = run if unit is None else _Repeatable(run, unit)
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


class _Repeatable:
    """One call of a unit, which begins with the same state each time, and changes it the first time alone."""

    def __init__(self, run: Run, unit: nn.Module) -> None:
        self._run, self._unit = run, unit
        self._before: list[tuple[_Holder, str, Any]] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._run(*args, **kwargs)
        if self._before is None:
            return self._first(args, kwargs)
        if not self._before:
            return self._run(*args, **kwargs)
        copies = _Copies()
        # Other objects than those that are there, whose version counters do not move.
        again = [(holder, name, _copy_of(value, copies)) for holder, name, value in self._before]
        with replaced(again):
            return self._run(*args, **kwargs)

    def _first(self, args: Any, kwargs: Any) -> Any:
        copies = _Copies()
        state = [
            (holder, name, value, _copy_of(value, copies), _versions(value))
            for holder, name, value in _state(self._unit)
        ]
        weights = [(name, p, p._version) for name, p in _weights(self._unit)]
        output = self._run(*args, **kwargs)
        for name, parameter, version in weights:
            if parameter._version != version:
                raise StageError(
                    f"{type(self._unit).__name__} changes its parameter {name} in place in its forward, "
                    "which must run again; make that a buffer, or leave the module out of recompute="
                )
        self._before = []
        for holder, name, value, copy, versions in state:
            if _is_changed(value, copy, versions):
                self._before.append((holder, name, copy))
            elif holder.get(name, MISSING) is not value:
                self._before.append((holder, name, value))
        there = {(id(holder), name) for holder, name, *_ in state}
        self._before += [
            (holder, name, MISSING)
            for holder, name, _ in _state(self._unit)
            if (id(holder), name) not in there
        ]
        return output


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


def _state(unit: nn.Module) -> Iterator[tuple[_Holder, str, Any]]:
    """What a unit and its parts keep, but for parameters: where, by which name, and the value.

    Of objects in their attributes, such as a counter that layers share, the numbers.
    """
    objects: dict[int, _Holder] = {}
    for holder in chain.from_iterable((part._buffers, vars(part)) for part in unit.modules()):
        for name, value in holder.items():
            if name not in REGISTRIES:
                yield holder, name, value
                if hasattr(value, "__dict__") and not isinstance(value, _WITHOUT_STATE):
                    objects[id(value)] = vars(value)
    for holder in objects.values():
        for name, value in holder.items():
            if isinstance(value, int | float):
                yield holder, name, value


def _weights(unit: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters that a forward may not change: all but those of a table that keeps its rows short."""
    for path, part in unit.named_modules():
        if getattr(part, "max_norm", None) is None:
            yield from part.named_parameters(path, recurse=False)


def _copy_of(value: Any, copies: _Copies) -> Any:
    return map_tensors(value, copies) if isinstance(value, _SEARCHED) else value


_WITHOUT_STATE = Tensor, type, FunctionType, ModuleType, nn.Module
_SEARCHED = Tensor, tuple, list, dict


def _versions(value: Any) -> list[tuple[Any, int]]:
    """The leaves of a value, and how often each was changed in place."""
    if not isinstance(value, _SEARCHED):
        return [(value, 0)]
    return [
        (leaf, leaf._version if isinstance(leaf, Tensor) and not leaf.is_inference() else 0)
        for _, leaf in leaves_in(value)
    ]


def _is_changed(value: Any, copy: Any, versions: list[tuple[Any, int]]) -> bool:
    """Whether something inside a value is another than before, or may have been changed in place."""
    now = _versions(value)
    if len(now) != len(versions):
        return True
    for (leaf, version), (was, at), (copied, _) in zip(now, versions, _versions(copy), strict=True):
        if leaf is not was or version != at:
            return True
        if leaf is copied:
            continue
        # What is written through ``.data`` moves no version. To compare on a GPU would wait for it.
        if leaf.device.type != "cpu" or not torch.equal(leaf, copied):
            return True
    return False
