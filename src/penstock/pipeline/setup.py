"""Set a Pipeline up: check its arguments, connect this process, and give its ranks their stages."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any

import torch
from torch import nn

from penstock.errors import UnknownArgumentError, UsageError
from penstock.faults import Patience
from penstock.parallel import group_across, group_of
from penstock.pipeline.plan import Plan
from penstock.runtime import Rank, check_stages
from penstock.runtime.describing import Describe
from penstock.schedule import Schedule
from penstock.stage import PipelineStage, home_of
from penstock.step import (
    Loss,
    LossFunction,
    LossOptions,
    LossWeight,
    Metric,
    NonFinite,
    Reduction,
    Replicas,
)
from penstock.transport import Circle, Transport, connect, in_process, launched


def placed_on(device: torch.device | str | None) -> torch.device | None:
    """The device that ``device=`` means: ``"cuda"`` is the one of ``LOCAL_RANK``, which torchrun sets."""
    if device is None:
        return None
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        said = str(error).partition(" at start of")[0]
        raise UsageError(f"device={device!r}: {said}") from None
    if found.type != "cpu" and found.index is None:
        found = torch.device(found.type, int(os.environ.get("LOCAL_RANK", "0")))
    _check_there(found, device)
    return found


def _check_there(device: torch.device, asked: torch.device | str) -> None:
    """Check that this machine has a device.

    Raises:
        UsageError: it does not.
    """
    if device.type in ("cpu", "meta"):
        return
    kind = torch.get_device_module(device.type)
    count = kind.device_count() if kind.is_available() else 0
    if not count:
        raise UsageError(
            f"device={str(asked)!r}: torch.{device.type}.is_available() is False in this process; use "
            "device='cpu', or install a driver and a torch build for it"
        )
    if device.index is not None and device.index >= count:
        numbered = "" if torch.device(asked).index is not None else ", by LOCAL_RANK"
        raise UsageError(
            f"device={str(asked)!r}: this process would take number {device.index}{numbered}, but there are "
            f"only {count}; start at most {count} processes on this machine, or give each its device"
        )


def home_for(
    model: nn.Module, device: torch.device | str | None, *, filled: bool
) -> torch.device | None:
    """The device for the stages; the CPU for a model on the meta device that is about to be filled."""
    found = placed_on(device)
    if found is None and filled and home_of(model).type == "meta":
        return torch.device("cpu")
    return found


def check_given(stages: Sequence[PipelineStage]) -> None:
    """Check that what was given are stages.

    Raises:
        UsageError: no stages were given, or something that is not a stage.
    """
    if not stages:
        raise UsageError("from_stages was given no stages; give it the stages of this rank")
    others = [type(stage).__name__ for stage in stages if not isinstance(stage, PipelineStage)]
    if others:
        raise UsageError(
            f"from_stages was given {', '.join(others)}; "
            "make a stage of each module with PipelineStage(module, index, count)"
        )


Wrap = Callable[[nn.Module, int], nn.Module | None]
"""Wraps a stage's module, called with the module and its index; None means it was changed in place."""


def check_wrap(wrap: Wrap | None) -> None:
    """Check that wrap= is a function.

    Raises:
        UsageError: it is not.
    """
    if wrap is not None and not callable(wrap):
        raise UsageError(
            f"wrap={wrap!r}: must be a function of a stage's module and its index, such as "
            'lambda module, stage: fully_shard(module, mesh=mesh["dp"])'
        )


def wrap_stages(stages: Sequence[PipelineStage], wrap: Wrap | None) -> None:
    """Let the user wrap each stage's module.

    Raises:
        UsageError: what it returned is no module, or no longer contains the stage's module.
    """
    for stage in stages if wrap is not None else ():
        before = stage.module
        found = wrap(before, stage.index)  # type: ignore[misc] # checked above
        if not isinstance(found, nn.Module | None):
            raise UsageError(
                f"wrap returned {found!r} for stage {stage.index}; it must return the wrapped module, or "
                "None if it has changed the module in place"
            )
        if found is not None and all(part is not before for part in found.modules()):
            raise UsageError(
                f"wrap returned a {type(found).__name__} for stage {stage.index} that does not contain the "
                "stage's module; it must return that module, wrapped or as it is"
            )
        stage.module = before if found is None else found


def check_options(options: Mapping[str, Any], function: Callable[..., Any]) -> None:
    """Check that keyword arguments beyond a function's own are options of the loss.

    Raises:
        UnknownArgumentError: there is no such argument; the message names the nearest one.
    """
    parameters = inspect.signature(function).parameters.values()
    own = [p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY]
    known = [*own, *LossOptions.__annotations__]
    for name in options.keys() - LossOptions.__annotations__.keys():
        near = get_close_matches(name, known, n=1)
        hint = _INSTEAD.get(name) or (f"did you mean {near[0]}=?" if near else "there are")
        listed = "" if name in _INSTEAD or near else f" {', '.join(f'{of}=' for of in known)}"
        raise UnknownArgumentError(f"there is no argument {name}=; {hint}{listed}")


_CUT = "cut the model first: stages=penstock.partition.partition(model, stages, {}=...)"
_INSTEAD = {
    **{name: _CUT.format(name) for name in ("balance", "placement", "how")},
    "chunks": "did you mean microbatches=?",
    "loss": "did you mean loss_fn=?",
    "criterion": "did you mean loss_fn=?",
    "num_stages": "did you mean stages=?",
    "world_size": "did you mean ranks=?",
}
"""What other libraries call an argument, where the nearest name would not lead there."""


def loss_of(  # noqa: PLR0913 - as LossOptions
    function: LossFunction | None,
    *,
    reduction: Reduction = "mean",
    loss_weight: LossWeight | None = None,
    metrics: Mapping[str, Metric] | None = None,
    accumulate: int = 1,
    replicas: Any = None,
    nonfinite: NonFinite = "stop",
) -> Loss | None:
    """The loss of a Pipeline, see :class:`penstock.step.LossOptions`; None without a function.

    Raises:
        UsageError: an option is unknown, or is not a valid number.
    """
    if function is None:
        return None
    others = replicas_of(replicas)
    given = {} if metrics is None else metrics
    return Loss(function, reduction, loss_weight, given, accumulate, others, nonfinite)


def replicas_of(replicas: Any) -> Replicas:
    """The replicas of this pipeline, from a group or mesh of the ranks at the same place in each."""
    if replicas is None or isinstance(replicas, Replicas):
        return replicas or Replicas()
    group = group_across(replicas)
    if not callable(getattr(group, "allgather", None)):
        raise UsageError(
            f"replicas={replicas!r}: must be a process group of the ranks at this place in each pipeline, a "
            "mesh of that dimension, or penstock.Replicas"
        )
    circle = Circle(group)
    return Replicas(circle.size, circle.sum, index=circle.rank, exchange=circle.exchange)


def connect_if_launched(
    device: torch.device, group: Any, patience: Patience, mesh: Any = None
) -> list[Transport]:
    """This process's end of the transport, if each rank is a process; otherwise an empty list.

    Args:
        device: where its stages live.
        group: the pipeline's ranks, as :func:`penstock.parallel.group_of` takes them.
        patience: how long ranks may take.
        mesh: a mesh in place of the group.
    """
    found = group_of(group, mesh)
    if found is None and not launched():
        return []
    return [connect(device, found, patience)]


@contextmanager
def being_made(ends: Sequence[Transport]) -> Iterator[Callable[[str], None]]:
    """The context in which a pipeline is made: an error in it is told to the other ranks, and ends them.

    It gives a function that notes what is being done, so that the other ranks can tell.
    """
    watch = ends[0].watch if ends else None
    try:
        yield watch.activity.make if watch is not None else _told_to_nobody
    except BaseException as error:
        cause = error if watch is None else watch.failed(error)
        for end in ends:
            end.close()
        if cause is error:
            raise
        raise cause from None
    if watch is not None:
        watch.made()


def _told_to_nobody(doing: str) -> None:
    """Does nothing, as all ranks live in this process."""


def world_of(ends: Sequence[Transport]) -> int | None:
    """The number of ranks, if each is a process."""
    return ends[0].ranks if ends else None


def ends_of(plan: Plan, found: Sequence[Transport]) -> Sequence[Transport]:
    """The ends that were connected; or new ones for all ranks, within this process.

    Raises:
        UsageError: there are more or fewer processes than ranks.
    """
    if found and found[0].ranks != plan.ranks:
        raise UsageError(
            f"{found[0].ranks} processes were started for a pipeline of "
            f"{plan.ranks} ranks; start one process per rank"
        )
    return found or in_process(plan.ranks)


def ranks_of(
    plan: Plan,
    ends: Sequence[Transport],
    stages: Sequence[PipelineStage],
    describe: Describe | None = None,
    *,
    by_hand: bool = False,
) -> list[Rank]:
    """The ranks that live in this process, each with its end and its stages."""
    return [
        Rank(end, _held_by(plan.training, end, stages, len(ends)), describe, by_hand=by_hand)
        for end in ends
    ]


def _held_by(
    schedule: Schedule, end: Transport, stages: Sequence[PipelineStage], ends: int
) -> list[PipelineStage]:
    """The stages of a rank; if all ranks share this process, those of other ranks are left out.

    Raises:
        UsageError: the rank was not given exactly its stages.
    """
    expected = schedule.placement.stages_on(end.rank)
    held = [stage for stage in stages if stage.index in expected or ends == 1]
    check_stages(schedule, end.rank, held)
    return held
