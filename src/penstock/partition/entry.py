"""Cut any model: the one entry, which chooses how."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torch import nn

from penstock.errors import PartitionError, UsageError
from penstock.partition.balance import choose_cuts
from penstock.partition.base import Partition
from penstock.partition.calls import cut_calls, cut_points, units_in_order
from penstock.partition.chain import cut_chain, cut_sequential
from penstock.partition.shared import find_shared
from penstock.partition.traced import Cuts, Point, cut_into, cut_traced
from penstock.rng import is_compiled
from penstock.schedule import Placement

Where = int | Sequence[str] | Sequence[Sequence[str]]
"""How many stages, or the module paths to cut before, or for each stage its modules' paths."""

Example = tuple[Sequence[Any], Mapping[str, Any]]
"""Arguments of a model for one microbatch."""


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
            ``"memory"`` or ``"time"``, of which all but the first need the example, or a weight for each
            module that can be placed. By default parameters; for traces flops; the children of an
            ``nn.Sequential`` count alike.
        placement: which rank holds which stage, where their number is given: the ranks are made equal.

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
        choose_cuts([1.0], stages, placement)
        made, reason = Partition((model,), shared=find_shared(model, (model,))), "one stage is all"
        how = "whole"
    elif _is_chain(model, stages):
        made, reason = _chain(model, stages, asked), "its forward is the chain of them"
        how = "chain"
    else:
        made, reason = _calls(model, stages, asked), "it has a forward of its own"
        how = "calls"
    return replace(made, how=how, reason=reason)


def unit_paths(model: nn.Module, stages: int, *, example: Example | None = None) -> list[str]:
    """The modules that can be placed for so many stages, in the order of their calls.

    Args:
        model: any module.
        stages: how many there may have to be: the model is taken apart as far as they need.
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
    example, balance, placement = asked
    return cut_sequential(model, stages, example=example, balance=balance, placement=placement)


def _calls(model: nn.Module, stages: Where, asked: _Asked) -> Partition:
    return cut_calls(
        model,
        stages,
        example=asked.example,
        balance=asked.balance,
        placement=asked.placement,
    )


def _traced(model: nn.Module, stages: Where, asked: _Asked) -> Partition:
    if asked.example is None:
        raise PartitionError("how='traced' traces a call: give example=(args, kwargs)")
    args, kwargs = asked.example
    if isinstance(stages, int):
        balance: Any = "flops" if asked.balance is None else asked.balance
        placement = asked.placement
        return cut_into(model, stages, args, kwargs, balance=balance, placement=placement).partition
    points = tuple(Point(path) for path in cut_points(model, stages))
    return cut_traced(model, args, kwargs, Cuts(points, in_code=False)).partition


_CUTTERS = {"calls": _calls, "traced": _traced, "chain": _chain}
