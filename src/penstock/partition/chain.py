"""Cut a model whose forward is a chain of modules: each one's output is the next one's input."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

from torch import nn

from penstock.errors import PartitionError
from penstock.partition.balance import choose_cuts, use_up_to
from penstock.partition.base import Partition
from penstock.partition.costs import weigh_units
from penstock.partition.shared import find_shared
from penstock.schedule import Placement
from penstock.values import named_arguments


class ChainStage(nn.Module):
    """Some modules of a model, called one after the other, under the names they have in the model.

    Args:
        model: the whole model.
        paths: the modules' paths in it, in the order of the calls.
        spread: whether a tuple that one gives becomes the next one's positional arguments; else it is
            passed as it is, like ``nn.Sequential`` does.

    Attributes:
        spreads: the same, for whoever calls it with what another stage gave.
    """

    def __init__(self, model: nn.Module, paths: Sequence[str], *, spread: bool = True) -> None:
        super().__init__()
        self._paths = tuple(paths)
        self.spreads = spread
        self._takes: dict[str, tuple[str, ...]] = {}
        self._around = _models_around(model, self._paths)
        for path in self._paths:
            _graft(self, path, model.get_submodule(path))
            self._takes[path] = named_arguments(model.get_submodule(path))

    @property
    def initialisers(self) -> dict[str, Callable[[nn.Module], Any]]:
        """The ``_init_weights`` of the models around the modules, by their paths."""
        return {path: module._init_weights for path, module in self._around.items()}

    @property
    def takes(self) -> tuple[str, ...]:
        """The arguments by name that the modules take; all but the first get theirs from the one before."""
        first, *rest = self._paths
        later = (name for path in rest for name in self._takes[path][1:])
        return tuple(dict.fromkeys((*self._takes[first], *later)))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the modules in order; the first gets the arguments, and each those by name that it takes."""
        first, *rest = self._paths
        others = set(self.takes).difference(self._takes[first])
        own = {name: given for name, given in kwargs.items() if name not in others}
        value = self.get_submodule(first)(*args, **own)
        for path in rest:
            module = self.get_submodule(path)
            own = {name: kwargs[name] for name in self._takes[path][1:] if name in kwargs}
            spread = self.spreads and type(value) is tuple
            value = module(*value, **own) if spread else module(value, **own)
        return value


def _models_around(model: nn.Module, paths: Sequence[str]) -> dict[str, Any]:
    """The models inside the model that initialise what they hold, as shells without anything in them."""
    return {
        path: _shell(module)
        for path, module in model.named_modules()
        if callable(getattr(module, "_init_weights", None))
        and any(not path or inner.startswith(f"{path}.") for inner in paths)
    }


def _shell(module: nn.Module) -> nn.Module:
    """The module without its parameters, buffers and modules: a stage must not keep the others' alive."""
    shell = copy.copy(module)
    vars(shell).update(_parameters={}, _buffers={}, _modules={})
    return shell


def _graft(root: nn.Module, path: str, module: nn.Module) -> None:
    """Put a module at a path, with empty modules on the way."""
    *way, name = path.split(".")
    holder = root
    for step in way:
        if not isinstance(getattr(holder, step, None), nn.Module):
            holder.add_module(step, nn.Module())
        holder = holder.get_submodule(step)
    holder.add_module(name, module)


def cut_chain(model: nn.Module, stages: Sequence[Sequence[str]]) -> Partition:
    """Cut a model at module paths.

    Args:
        model: its forward calls the named modules one after the other and does nothing else.
        stages: for each stage the paths of its modules, in the order of the calls.

    Raises:
        PartitionError: an unknown path, a stage without modules, a parameter in no stage.
    """
    return _cut(model, stages, spread=True)


def _cut(model: nn.Module, stages: Sequence[Sequence[str]], *, spread: bool) -> Partition:
    known = _paths(model)
    unknown = [path for paths in stages for path in paths if path not in known]
    if unknown:
        raise PartitionError(
            f"no modules {unknown} in the model; its paths are like {', '.join(known[:5])}"
        )
    empty = [index for index, paths in enumerate(stages) if not paths]
    if empty:
        raise PartitionError(f"stages {empty} have no modules; name at least one for each stage")
    modules = tuple(ChainStage(model, paths, spread=spread) for paths in stages)
    partition = Partition(modules, shared=find_shared(model, modules))
    partition.check_covers(model)
    return partition


def _paths(model: nn.Module) -> list[str]:
    """Every path to a module; one that is used at several places has several."""
    return [path for path, _ in model.named_modules(remove_duplicate=False) if path]


def cut_sequential(
    model: nn.Sequential,
    stages: int,
    *,
    example: tuple[Sequence[Any], Mapping[str, Any]] | None = None,
    balance: str | Sequence[float] | None = None,
    placement: Placement | None = None,
) -> Partition:
    """Cut an ``nn.Sequential`` into runs of its children, as equal in number as can be.

    Args:
        model: whose children are cut.
        stages: how many.
        example: arguments for one microbatch, as ``(args, kwargs)``, where something is measured.
        balance: what is made equal instead of their number, see :func:`penstock.partition.partition`.
        placement: which rank holds which stage: the ranks are made equal.

    Raises:
        PartitionError: more stages than children, or a forward of its own.
    """
    if type(model).forward is not nn.Sequential.forward:
        raise PartitionError(
            f"{type(model).__name__} has a forward of its own, which may do more than call its modules "
            "one after the other; if that is all it does, name each stage's modules in stages="
        )
    names = [path for path in _paths(model) if "." not in path]
    if not 1 <= stages <= len(names):
        raise PartitionError(
            f"{len(names)} modules cannot be cut into {stages} stages; {use_up_to(len(names))}"
        )
    weights = [1.0] * len(names)
    if balance is not None:
        fine = partial(_cut, model, [[name] for name in names], spread=False)
        weights = weigh_units(model, names, balance, example, fine)
    starts = choose_cuts(weights, stages, placement)
    if balance is None and placement is None:
        # Of several cuts that are as even, the one whose first stages are the larger ones.
        size, rest = divmod(len(names), stages)
        starts = tuple(index * size + min(index, rest) for index in range(stages))
    return _cut(model, [names[a:b] for a, b in pairwise((*starts, len(names)))], spread=False)
