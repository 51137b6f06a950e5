"""Cut a model in the way that suits it, and the simplest of these ways: a chain of modules."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

from torch import nn

from penstock.errors import PartitionError, UsageError
from penstock.partition.balance import choose_cuts, use_up_to
from penstock.partition.base import (
    Example,
    Partition,
    check_lists,
    find_shared,
    holder_in,
    paths_in,
)
from penstock.partition.calls import cut_calls, cut_points, units_in_order
from penstock.partition.costs import weigh_units
from penstock.partition.traced import Cuts, Point, cut_into, cut_traced
from penstock.rng import is_compiled
from penstock.schedule import Placement
from penstock.values import named_arguments

Where = int | Sequence[str] | Sequence[Sequence[str]]
"""How many stages; or the module paths to cut before; or for each stage the paths of its modules."""


class _Asked(NamedTuple):
    example: Example | None
    balance: str | Sequence[float] | None
    placement: Placement | None


WAYS = ("auto", "calls", "traced", "chain")


def partition(
    model: nn.Module,
    stages: Where,
    *,
    how: str = "auto",
    example: Example | None = None,
    balance: str | Sequence[float] | None = None,
    placement: Placement | None = None,
) -> Partition:
    """Cut a model into stages that together compute what it computes.

    Args:
        model: any module; it is not changed, and its stages hold its own parameters.
        stages: how many; or the paths of the modules before which to cut; or for each stage the paths of
            its modules.
        how: ``"calls"`` runs the author's own forward in every stage and lets each run its own modules
            only; ``"traced"`` cuts the graph of a call, made by ``torch.export``; ``"chain"`` calls the
            modules one after the other. ``"auto"`` is a chain where the model is one, else calls.
        example: arguments for one microbatch, as ``(args, kwargs)``. Traces need them; for calls they show
            the order of the modules, where the source does not tell it.
        balance: what makes stages equal where their number is given: ``"parameters"``, ``"flops"``,
            ``"memory"`` or ``"time"``, of which all but the first need the example; or a weight for each
            module that can be placed. By default parameters, or flops for traces; the children of an
            ``nn.Sequential`` count alike.
        placement: which rank holds which stage, where their number is given: then ranks, rather than
            stages, are made equal.

    Returns:
        The stages; :attr:`Partition.how` and :attr:`Partition.reason` say which way was chosen and why.

    Raises:
        PartitionError: it cannot be cut so; the message says why, and what to do.
    """
    if how not in WAYS:
        raise UsageError(f"how={how!r}: must be one of {', '.join(WAYS)}")
    if not isinstance(stages, int) and (balance is not None or placement is not None):
        raise UsageError(
            "balance= and placement= say where to cut where the number of stages is given; stages= names "
            "the modules here: leave them out"
        )
    asked = _Asked(example, balance, placement)
    if is_compiled(model) and stages != 1:
        raise PartitionError(
            f"the {_compiled_name(model)} was compiled as a whole, which cannot be cut. Give the model as it "
            "was before, and compile its blocks: for block in model.layers: block.compile()"
        )
    if how != "auto":
        made, reason = _CUTTERS[how](model, stages, asked), "as asked for"
    elif isinstance(stages, int) and stages == 1:
        choose_cuts([1.0], stages, placement)  # for its checks
        made, reason = Partition((model,), shared=find_shared(model, (model,))), "one stage is all"
        how = "whole"
    elif _is_chain(model, stages):
        made, reason = _chain(model, stages, asked), "its forward is the chain of them"
        how = "chain"
    else:
        made, reason = cut_calls(model, stages, **asked._asdict()), "it has a forward of its own"
        how = "calls"
    return replace(made, how=how, reason=reason)


def unit_paths(model: nn.Module, stages: int, *, example: Example | None = None) -> list[str]:
    """The modules that can be placed for so many stages, in the order of their calls.

    Args:
        model: any module.
        stages: how many stages there are to be: the model is taken apart as far as that needs.
        example: arguments for one microbatch, where the source does not tell the order of the calls.

    Returns:
        Their paths; a run of them for each stage is a ``stages=`` of :func:`partition`.
    """
    if type(model).forward is nn.Sequential.forward:
        return [name for name, _ in model.named_children()]
    return units_in_order(model, stages, example)


def _compiled_name(model: nn.Module) -> str:
    return type(getattr(model, "_orig_mod", model)).__name__


def _is_chain(model: nn.Module, stages: Where) -> bool:
    if type(model).forward is nn.Sequential.forward:
        return isinstance(stages, int) or not _is_flat(stages)
    # A module that only holds others has no forward to follow.
    return type(model).forward is nn.Module.forward or isinstance(model, nn.ModuleDict)


def _is_flat(stages: Sequence[Any]) -> bool:
    return all(isinstance(path, str) for path in stages)


def _chain(model: nn.Module, stages: Where, asked: _Asked) -> Partition:
    if not isinstance(stages, int):
        return cut_chain(model, [list(paths) for paths in stages])
    if not isinstance(model, nn.Sequential):
        raise PartitionError(
            f"a {type(model).__name__} is cut at module paths: stages=[['embed', 'blocks.0'], ['blocks.1', "
            "'head']] names each stage's modules in the order of the calls"
        )
    return cut_sequential(model, stages, **asked._asdict())


def _traced(model: nn.Module, stages: Where, asked: _Asked) -> Partition:
    if asked.example is None:
        raise PartitionError("how='traced' traces a call: give example=(args, kwargs)")
    args, kwargs = asked.example
    if isinstance(stages, int):
        balance: Any = "parameters" if asked.balance is None else asked.balance
        placement = asked.placement
        return cut_into(model, stages, args, kwargs, balance=balance, placement=placement).partition
    points = tuple(Point(path) for path in cut_points(model, stages))
    return cut_traced(model, args, kwargs, Cuts(points, in_code=False)).partition


_CUTTERS: dict[str, Callable[[nn.Module, Where, _Asked], Partition]] = {
    "calls": lambda model, stages, asked: cut_calls(model, stages, **asked._asdict()),
    "traced": _traced,
    "chain": _chain,
}


# ---- a model whose forward is a chain of modules: each one's output is the next one's input


class ChainStage(nn.Module):
    """Some modules of a model, called one after the other, under the names they have in the model.

    Args:
        model: the whole model.
        paths: the modules' paths in it, in the order of the calls.
        spread: whether a tuple that one returns becomes the next one's positional arguments; otherwise it
            is passed as it is, as ``nn.Sequential`` does.

    Attributes:
        spreads: the same; the runtime asks for it when it hands over what the stage before returned.
    """

    def __init__(self, model: nn.Module, paths: Sequence[str], *, spread: bool = True) -> None:
        super().__init__()
        self._paths = tuple(paths)
        self.spreads = spread
        self._takes: dict[str, tuple[str, ...]] = {}
        self._around = _models_around(model, self._paths)
        for path in self._paths:
            holder, name = holder_in(self, path)
            holder.add_module(name, model.get_submodule(path))
            self._takes[path] = named_arguments(model.get_submodule(path))

    @property
    def initialisers(self) -> dict[str, Callable[[nn.Module], Any]]:
        """The ``_init_weights`` of the models around the modules, by their paths."""
        return {path: module._init_weights for path, module in self._around.items()}

    @property
    def takes(self) -> tuple[str, ...]:
        """The names of the arguments: later modules get their first one from the module before."""
        first, *rest = self._paths
        later = (name for path in rest for name in self._takes[path][1:])
        return tuple(dict.fromkeys((*self._takes[first], *later)))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the modules in order; all but the first get only those arguments that they take by name."""
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
    """The modules around the paths that initialise what they hold, as shells without contents."""
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
    check_lists(model, stages)
    modules = tuple(ChainStage(model, paths, spread=spread) for paths in stages)
    partition = Partition(modules, shared=find_shared(model, modules))
    partition.check_covers(model)
    return partition


def cut_sequential(
    model: nn.Sequential,
    stages: int,
    *,
    example: Example | None = None,
    balance: str | Sequence[float] | None = None,
    placement: Placement | None = None,
) -> Partition:
    """Cut an ``nn.Sequential`` into runs of its children, as equal in number as can be.

    Args:
        model: the container whose children are shared out.
        stages: how many.
        example: arguments for one microbatch, as ``(args, kwargs)``, where something is measured.
        balance: what is made equal instead of their number, see :func:`penstock.partition.partition`.
        placement: which rank holds which stage; then ranks are made equal.

    Raises:
        PartitionError: more stages than children, or a forward of its own.
    """
    if type(model).forward is not nn.Sequential.forward:
        raise PartitionError(
            f"{type(model).__name__} has a forward of its own, which may do more than call its modules "
            "one after the other; if that is all it does, name each stage's modules in stages="
        )
    names = [path for path in paths_in(model) if "." not in path]
    if not 1 <= stages <= len(names):
        raise PartitionError(
            f"{len(names)} modules cannot be cut into {stages} stages; {use_up_to(len(names))}"
        )
    weights = [1.0] * len(names)
    if balance is not None:
        weights = weigh_units(model, names, balance, example)
    starts = choose_cuts(weights, stages, placement)
    if balance is None and placement is None:
        # Of several cuts that are equally even, the one whose first stages are the larger ones.
        size, rest = divmod(len(names), stages)
        starts = tuple(index * size + min(index, rest) for index in range(stages))
    return _cut(model, [names[a:b] for a, b in pairwise((*starts, len(names)))], spread=False)
