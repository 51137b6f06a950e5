"""A model cut into stages, and the weights that several of them use."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from penstock._engine.placeholders import Location, leave_placeholder
from penstock.errors import PartitionError, listed

Example = tuple[Sequence[Any], Mapping[str, Any]]
"""The ``(args, kwargs)`` of a model's call for one microbatch."""


class Shared(NamedTuple):
    """A parameter or buffer that several stages use, or that has several names.

    Attributes:
        names: all its names in the model; it is counted and saved under the first.
        holders: the stages that use it, ascending, each with its name in that stage's module.
    """

    names: tuple[str, ...]
    holders: tuple[tuple[int, str], ...]

    @property
    def stages(self) -> tuple[int, ...]:
        """The stages that use it."""
        return tuple(stage for stage, _ in self.holders)


@runtime_checkable
class Releases(Protocol):
    """A stage that can free its data."""

    def release(self, put: Callable[[str, Tensor], Tensor]) -> None:
        """Replace each tensor by what ``put`` makes of it and its name."""


@dataclass(frozen=True)
class Partition:
    """The stages of a model, in order, each holding its own parameters under the model's names.

    Args:
        modules: one for each stage.
        shared: the weights that several stages use.
        planner: plans calls, and checks that the model has not changed.
    """

    modules: tuple[nn.Module, ...]
    shared: tuple[Shared, ...] = ()
    planner: Any = None

    def plan(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Plan a call from one run without data: what the stages do, and the values that travel.

        Each call makes a new plan.

        Args:
            args: positional arguments for one microbatch. Only shapes, types and plain values count;
                processes that give the same get the same plan.
            kwargs: arguments by name.

        Raises:
            PartitionError: the model cannot be cut this way; the message names the module and the line.
        """
        return self.planner.rehearsed(args, kwargs)

    @property
    def units(self) -> list[str]:
        """The paths of the modules that are placed as a whole; none of stages that were made by hand."""
        return (
            []
            if self.planner is None
            else [interceptor.path for interceptor in self.planner.interceptors]
        )

    @property
    def shares(self) -> Sequence[float]:
        """The part of the work that each stage has in the first call that was planned; empty before it."""
        return () if self.planner is None else self.planner.shares

    @property
    def heaviest(self) -> tuple[str, float]:
        """The unit with the most work in that call, and its part of the work."""
        unit: tuple[str, float] = self.planner.heaviest
        return unit

    def check_unchanged(self) -> None:
        """Check that the model has the modules and parameters that it had when it was cut.

        Raises:
            UsageError: one was replaced, added or removed.
        """
        if self.planner is not None:
            self.planner.check_unchanged()

    def check_covers(self, model: nn.Module) -> None:
        """Check that every parameter and buffer of ``model`` is in a stage.

        Raises:
            PartitionError: the message names what is missing.
        """
        held = {id(tensor) for module in self.modules for _, tensor in named_tensors(module)}
        missing = [name for name, tensor in named_tensors(model) if id(tensor) not in held]
        if missing:
            raise PartitionError(
                f"in no stage: {listed(missing, 5)}; name the modules that hold them in stages="
            )

    def keep(self, stages: Collection[int], rank_of: Sequence[int], device: torch.device) -> None:
        """Free the data of all other stages, where the stages share a model that would keep it alive.

        The model then has placeholders in its place: tensors with names and shapes, and no numbers.

        Args:
            stages: the stages to keep.
            rank_of: the rank of each stage.
            device: where the stages of this process live.
        """
        kept = [tensor for index in stages for _, tensor in named_tensors(self.modules[index])]
        known = {id(tensor): (tensor, tensor) for tensor in kept}

        def put(rank: int, name: str, tensor: Tensor) -> Tensor:
            if id(tensor) not in known:
                # The tensor itself is kept too: its id must not be used again.
                known[id(tensor)] = leave_placeholder(tensor, Location(name, rank, device)), tensor
            return known[id(tensor)][0]

        for index, module in enumerate(self.modules):
            if index not in stages and isinstance(module, Releases):
                module.release(partial(put, rank_of[index]))


def named_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Parameters and buffers, under each of their names."""
    parameters = module.named_parameters(remove_duplicate=False)
    return [*parameters, *module.named_buffers(remove_duplicate=False)]


def home_of(model: nn.Module) -> torch.device:
    """The device of a model; the CPU for one without data."""
    tensors = [*model.parameters(), *model.buffers()]
    return next((t.device for t in tensors if t.device.type != "meta"), torch.device("cpu"))


def count_parameters(module: nn.Module) -> int:
    """The number of elements in a module's parameters."""
    return sum(parameter.numel() for parameter in module.parameters())


def paths_in(model: nn.Module) -> list[str]:
    """Every path to a module; a module that is used in several places has several."""
    return [path for path, _ in model.named_modules(remove_duplicate=False) if path]


def check_paths(model: nn.Module, paths: Iterable[str]) -> None:
    """Check that each path leads to a module of the model.

    Raises:
        PartitionError: an unknown path; the message names the nearest ones.
    """
    known = paths_in(model)
    for path in paths:
        if path not in known:
            near = get_close_matches(path, known, 3, 0.4) or known[:3]
            raise PartitionError(
                f"no module {path!r} in the model; did you mean {' or '.join(near)}?"
            )


def check_lists(model: nn.Module, stages: Sequence[Sequence[str]]) -> None:
    """Check that each stage has modules, and that these are in the model.

    Raises:
        PartitionError: an unknown path, or a stage without modules.
    """
    check_paths(model, (path for paths in stages for path in paths))
    empty = [index for index, paths in enumerate(stages) if not paths]
    if empty:
        raise PartitionError(f"stages {empty} have no modules; name at least one for each stage")


# ---- the weights that several stages use: found by identity, before anything is copied or moved


_Uses = dict[int, list[tuple[int, str]]]
"""By the identity of a tensor: the stages that hold it, each with its name there."""


def find_shared(model: nn.Module, modules: Sequence[nn.Module]) -> tuple[Shared, ...]:
    """The parameters and buffers that several stages use, or that have several names.

    Args:
        model: the whole model. A weight is shared if several names lead to it, or if several stages call
            its module.
        modules: its stages, which hold the model's own tensors.
    """
    return _shared([model], dict(enumerate(modules)))


def find_shared_between(modules: Mapping[int, nn.Module]) -> tuple[Shared, ...]:
    """Like :func:`find_shared`, without the whole model: names are those in the stages.

    Args:
        modules: the stages, by index.
    """
    return _shared(modules.values(), modules)


def _shared(named: Iterable[nn.Module], modules: Mapping[int, nn.Module]) -> tuple[Shared, ...]:
    uses = _uses(modules)
    names: dict[int, dict[str, None]] = {}
    for name, tensor in chain.from_iterable(map(named_tensors, named)):
        names.setdefault(id(tensor), {})[name] = None
    weights = (Shared(tuple(names[key]), tuple(uses.get(key, ()))) for key in names)
    return tuple(one for one in weights if len(one.names) > 1 or len(one.holders) > 1)


def _uses(modules: Mapping[int, nn.Module]) -> _Uses:
    uses: _Uses = {}
    for stage, module in sorted(modules.items()):
        for name, tensor in named_tensors(module):
            held = uses.setdefault(id(tensor), [])
            if not held or held[-1][0] != stage:
                held.append((stage, name))
    return uses
