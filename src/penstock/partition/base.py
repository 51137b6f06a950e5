"""A model cut into stages, and the weights that several of them use."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, NamedTuple, Protocol, runtime_checkable

from torch import Tensor, nn

from penstock.errors import PartitionError, UsageError
from penstock.schedule import Edge
from penstock.values import ValueSpec


class Description(NamedTuple):
    """What travels between the stages for one call.

    Attributes:
        edges: the values that travel, each with the stage that makes it and those that use it.
        specs: the spec of each edge's value by its name, and that of the model's output as ``"output"``.
    """

    edges: tuple[Edge, ...]
    specs: Mapping[str, ValueSpec]


Example = tuple[Sequence[Any], Mapping[str, Any]]
"""The ``(args, kwargs)`` of a model's call for one microbatch."""

Describe = Callable[[ValueSpec, bool], Description]
"""Describes a call, given the spec of its ``(args, kwargs)`` and whether gradients are wanted."""


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
    """A stage that can let go of its data."""

    def release(self, kept: Collection[Tensor]) -> None:
        """Let go of all data except that of the tensors in ``kept``."""


@dataclass(frozen=True)
class Partition:
    """The stages of a model, in order, each holding its own parameters under the model's names.

    A stage's module is called as a module is, or, where it has the attribute ``wired = True``, as
    ``module(values, args, kwargs)``: the values that it uses by name, and the arguments of the model, in
    which tensors that this process was not given are on the meta device. It then returns a dict of all
    values that it makes, or, in the last stage, the model's output.

    Args:
        modules: one for each stage.
        edges: which values travel; empty for the chain, where each stage feeds the next.
        shared: the weights that several stages use.
        describe: finds the edges and specs of a call, where these depend on the call.
        how: the way in which it was cut, as in :func:`penstock.partition.partition`.
        reason: why that way was chosen.
    """

    modules: tuple[nn.Module, ...]
    edges: tuple[Edge, ...] = ()
    shared: tuple[Shared, ...] = ()
    describe: Describe | None = None
    how: str = ""
    reason: str = ""

    def check_covers(self, model: nn.Module) -> None:
        """Check that every parameter and buffer of ``model`` is in one stage, or in ``shared``.

        Raises:
            PartitionError: the message names what is missing or shared, and the stages that share it.
        """
        holders = self._holders()
        missing = [name for name, tensor in named_tensors(model) if id(tensor) not in holders]
        if missing:
            raise PartitionError(
                f"in no stage: {_listed(missing)}; name the modules that hold them in stages="
            )
        self._check_table()
        listed = {
            name: {stage for stage, _ in one.holders} for one in self.shared for name in one.names
        }
        used = {name: holders[id(tensor)] for name, tensor in named_tensors(model)}
        wrong = {
            name: sorted(stages)
            for name, stages in used.items()
            if len(stages) > 1 and stages != listed.get(name)
        }
        if wrong:
            raise PartitionError(
                f"used by several stages: {wrong}, which the partition does not list as shared; make its "
                "shared= with find_shared(model, modules), or put the modules that share it into one stage"
            )

    def keep(self, stages: Collection[int]) -> None:
        """Let go of the data of all other stages, where these share a model that would hold on to it.

        The model then has tensors on the meta device in their place.
        """
        kept = [tensor for index in stages for _, tensor in named_tensors(self.modules[index])]
        for index, module in enumerate(self.modules):
            if index not in stages and isinstance(module, Releases):
                module.release(kept)

    def _check_table(self) -> None:
        """Check that the stages hold what ``shared`` says."""
        held = [dict(named_tensors(module)) for module in self.modules]
        wrong = [
            (stage, name)
            for one in self.shared
            for stage, name in one.holders
            if not 0 <= stage < len(held) or name not in held[stage]
        ]
        if wrong:
            raise PartitionError(
                f"shared= says that stages hold {wrong}, which they do not; "
                "make it with find_shared(model, modules)"
            )

    def _holders(self) -> dict[int, set[int]]:
        holders: dict[int, set[int]] = {}
        for index, module in enumerate(self.modules):
            for _, tensor in named_tensors(module):
                holders.setdefault(id(tensor), set()).add(index)
        return holders


def named_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Parameters and buffers under every name that they have."""
    parameters = module.named_parameters(remove_duplicate=False)
    return [*parameters, *module.named_buffers(remove_duplicate=False)]


def count_parameters(module: nn.Module) -> int:
    """How many numbers a module's parameters hold."""
    return sum(parameter.numel() for parameter in module.parameters())


def paths_in(model: nn.Module) -> list[str]:
    """Every path to a module; one that is used at several places has several."""
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


def holder_in(root: nn.Module, path: str) -> tuple[nn.Module, str]:
    """The module that is to hold what has this path, and its name there; modules on the way are made."""
    *way, name = path.split(".")
    holder = root
    for step in way:
        if not isinstance(getattr(holder, step, None), nn.Module):
            holder.add_module(step, nn.Module())
        holder = holder.get_submodule(step)
    return holder, name


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"


# ---- the weights that several stages use: found by identity, before anything is copied or moved
# A user may change a model after it was cut, as between two steps of a hand-written loop. The stages share
# its tensors and so change with it; what that means for the other stages is found out below.


_Uses = dict[int, list[tuple[int, str]]]
"""By the identity of a tensor: the stages that hold it, each with its name there."""


def find_shared(model: nn.Module, modules: Sequence[nn.Module]) -> tuple[Shared, ...]:
    """The parameters and buffers that several stages use, or that have several names.

    Args:
        model: the whole model. Weights are tied there where one tensor is reached by several names, or
            where one module is called in several stages.
        modules: its stages, which hold the model's own tensors.
    """
    uses = _uses(dict(enumerate(modules)))
    names: dict[int, list[str]] = {}
    for name, tensor in named_tensors(model):
        names.setdefault(id(tensor), []).append(name)
    found = (Shared(tuple(names[key]), tuple(uses.get(key, ()))) for key in names)
    return tuple(one for one in found if len(one.names) > 1 or len(one.holders) > 1)


def find_shared_between(modules: Mapping[int, nn.Module]) -> tuple[Shared, ...]:
    """Like :func:`find_shared` where the whole model is not at hand: names are those in the stages.

    Args:
        modules: by the index of the stage.
    """
    known: dict[int, dict[str, None]] = {}
    for module in modules.values():
        for name, tensor in named_tensors(module):
            known.setdefault(id(tensor), {})[name] = None
    uses = _uses(modules)
    found = (Shared(tuple(names), tuple(uses[key])) for key, names in known.items())
    return tuple(one for one in found if len(one.names) > 1 or len(one.holders) > 1)


def _uses(modules: Mapping[int, nn.Module]) -> _Uses:
    uses: _Uses = {}
    for stage, module in sorted(modules.items()):
        for name, tensor in named_tensors(module):
            held = uses.setdefault(id(tensor), [])
            if not held or held[-1][0] != stage:
                held.append((stage, name))
    return uses


# ---- what is changed after the cut


@runtime_checkable
class Follows(Protocol):
    """A stage with references of its own to the parameters of the user's model."""

    def follow(self) -> None:
        """Take over the parameters that the user has put in their place."""


class Watched:
    """Notices what a user changes in a model or in its stages between two calls.

    Args:
        model: the whole model, if there is one; it is not kept alive.
        stages: all its stages, or those of this process where it holds no others.
        here: the stages of this process, by index.
    """

    def __init__(
        self, model: nn.Module | None, stages: Sequence[nn.Module], here: Mapping[int, nn.Module]
    ) -> None:
        self._model: Callable[[], nn.Module | None]
        self._model = (lambda: None) if model is None else weakref.ref(model)
        self._here = dict(here)
        self._is_whole = len(stages) == len(here)
        self._placed = [] if model is None else list(_placed(model, stages))
        known = {} if model is None else dict(named_tensors(model))
        named = [pair for module in here.values() for pair in named_tensors(module)]
        self._names = [name for name, tensor in named if known.get(name) is tensor]
        self._look()

    def check_modules(self) -> None:
        """Check that the model's modules are those that the stages have.

        Raises:
            UsageError: one was replaced or taken away.
        """
        for parent, name, child, path in self._placed:
            module = parent()
            if module is not None and module._modules.get(name) is not child():
                raise UsageError(
                    f"the model's module {path!r} was replaced after the Pipeline was made, and its stages "
                    "have the old one; make a new Pipeline, or change what is inside the module"
                )

    def is_changed(self) -> bool:
        """Whether other parameters stand in the modules than at the last look."""
        if list(map(id, _parameters(self._modules))) == self._seen:
            return False
        for module in self._here.values():
            if isinstance(module, Follows):
                module.follow()
        self._check_held()
        self._look()
        return True

    def _check_held(self) -> None:
        """Check that the model still has the tensors of its stages, under the names it had them."""
        model = self._model()
        if model is None:
            return
        known = dict(named_tensors(model))
        held = dict(pair for module in self._here.values() for pair in named_tensors(module))
        for name in self._names:
            mine, other = held.get(name), known.get(name)
            if mine is not None and (other is None or (_is_filled(other) and other is not mine)):
                raise UsageError(
                    f"{name!r} was replaced in the model after the Pipeline was made, and its stages have "
                    "the old one; make a new Pipeline"
                )

    def foreign_gradients(self) -> dict[nn.Parameter, Tensor]:
        """The gradients of the model's parameters that stages of other processes have."""
        if self._is_whole:
            return {}
        found = (p for p in _parameters(self._modules) if id(p) not in self._held)
        return {parameter: parameter.grad for parameter in found if parameter.grad is not None}

    def names_of(self, parameters: Collection[nn.Parameter]) -> list[str]:
        """The names of parameters in the model."""
        model = self._model()
        named = [] if model is None else list(model.named_parameters())
        return [name for name, parameter in named if any(parameter is one for one in parameters)]

    def _look(self) -> None:
        model = self._model()
        roots = [*self._here.values(), *([] if model is None else [model])]
        modules = {id(module): module for root in roots for module in root.modules()}
        self._modules = [weakref.ref(module) for module in modules.values()]
        held = [one for module in self._here.values() for one in module.parameters()]
        # Not by weak references: torch refuses to move a parameter that has some to another device. Those
        # of this process are kept until the next look, so that no new one can get the id of an old one.
        self._held = {id(one): one for one in held}
        self._seen = list(map(id, _parameters(self._modules)))

    def table(self) -> tuple[Shared, ...]:
        """What the stages of this process share by identity now."""
        model = self._model() if self._is_whole else None
        if model is None:
            return find_shared_between(self._here)
        return find_shared(model, [self._here[index] for index in sorted(self._here)])

    def check_ties(self, table: Sequence[Shared]) -> None:
        """Check that weights shared with other processes are still shared as they were.

        Args:
            table: what was shared when the Pipeline was made.

        Raises:
            UsageError: a weight that several stages use was untied, or others were tied.
        """
        model = self._model()
        if model is None:
            return
        stages = [{name for name, _ in named_tensors(module)} for module in self._here.values()]
        held = set().union(*stages)
        known = {name: one for one in table for name in one.names}
        named = {name: tensor for name, tensor in named_tensors(model) if _is_filled(tensor)}
        for one in (one for one in table if len(one.stages) > 1):
            found = {id(named[name]): name for name in one.names if name in named}
            lost = [n for stage, n in one.holders if stage in self._here and n not in held]
            if len(found) > 1 or lost:
                raise UsageError(_changed("are no longer one weight", one.names))
        together: dict[int, list[str]] = {}
        for name, tensor in named.items():
            together.setdefault(id(tensor), []).append(name)
        for names in together.values():
            apart = len({id(known.get(name, name)) for name in names}) > 1
            in_one = any(stage.issuperset(names) for stage in stages)
            if apart and not held.isdisjoint(names) and not in_one:
                raise UsageError(_changed("have become one weight", names))


def _changed(how: str, names: Sequence[str]) -> str:
    listed = " and ".join(map(repr, names))
    return (
        f"{listed} {how} since the Pipeline was made, and several stages have them; "
        "make a new Pipeline"
    )


def _parameters(modules: Iterable[weakref.ref[nn.Module]]) -> list[nn.Parameter]:
    living = (module for ref in modules if (module := ref()) is not None)
    return [p for module in living for p in module._parameters.values() if p is not None]


def _is_filled(tensor: Tensor) -> bool:
    """Whether it is a plain parameter with data: sharding puts others in its place, which is no mistake."""
    return type(tensor) is nn.Parameter and not tensor.is_meta


_Place = tuple[weakref.ref[nn.Module], str, weakref.ref[nn.Module], str]


def _placed(model: nn.Module, stages: Sequence[nn.Module]) -> Iterator[_Place]:
    """Where the modules that stages have, and those around them, stand in the model; each with its path."""
    held = {id(module) for stage in stages for module in stage.modules()}
    known = dict(model.named_modules(remove_duplicate=False))
    inside: set[str] = set()
    ways: dict[str, None] = {}
    for path, module in known.items():
        around = path.rpartition(".")[0]
        if around in inside and path:
            inside.add(path)
        elif id(module) in held:
            inside.add(path)
            ways.update(dict.fromkeys(_prefixes(path)))
    for path in ways:
        around, _, name = path.rpartition(".")
        yield weakref.ref(known[around]), name, weakref.ref(known[path]), path


def _prefixes(path: str) -> Iterator[str]:
    steps = path.split(".") if path else []
    return (".".join(steps[: end + 1]) for end in range(len(steps)))
