"""Set a Pipeline up: connect this process, and hold its stages against the schedule and the other ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from inspect import signature
from typing import Any

from torch import nn

from penstock._engine.devices import use
from penstock._engine.faults import Activity, Watch, decline, meet, noticing_gone_machines
from penstock._engine.launchers import check_launcher
from penstock._engine.parallel import (
    begin_equal,
    group_across,
    group_of,
    left_alone,
    members_of,
    ranks_in,
    spread_parts,
)
from penstock._engine.runtime import StepLoss, forwards_first
from penstock._engine.transport import Job, Replicas, Transport, join, launched
from penstock.errors import PenstockError, ScheduleError, UsageError, listed
from penstock.partition import Partition, Shared
from penstock.pipeline.plan import for_batch_losses
from penstock.pipeline.settings import REMEDIES, Settings, Wrap
from penstock.schedule import Schedule
from penstock.stage import PipelineStage, StageModule

log = logging.getLogger("penstock")


def modules_in(stage: nn.Module) -> str:
    """The modules that a stage runs, as text: ``2 to 3 (Tanh), 4 (Linear)``."""
    units = {id(unit) for unit in stage.units} if isinstance(stage, StageModule) else set()
    named = {path: module for path, module in stage.named_modules() if id(module) in units}
    rows: list[tuple[str, str, str]] = []
    for path, module in (named or {"": stage}).items():
        kind = type(module).__name__
        if rows and rows[-1][2] == kind and _numbered(path) == _numbered(rows[-1][1]) is not None:
            rows[-1] = (rows[-1][0], path, kind)
        else:
            rows.append((path, path, kind))
    texts = [f"{a} to {b} ({kind})" if a != b else f"{a} ({kind})".strip() for a, b, kind in rows]
    return ", ".join(texts)


def _numbered(path: str) -> str | None:
    """The last name of a path without its number; None if it has none."""
    name = path.rpartition(".")[2]
    return name.rstrip("0123456789") if name[-1:].isdecimal() else None


_UNEVEN = 1.25
"""How many times its fair part of the work a stage may have before the reason is said."""


def described_stages(
    schedule: Schedule, stages: Sequence[PipelineStage], partition: Partition | None
) -> list[str]:
    """A line for each stage: its rank, its modules and its part of the work; and what makes them uneven."""
    shares = () if partition is None else partition.shares
    modules = {stage.index: stage.code for stage in stages}
    if partition is not None:
        modules = dict(enumerate(partition.modules))
    rows = []
    for rank in range(schedule.ranks):
        for stage in schedule.placement.stages_on(rank):
            work = f" - {shares[stage]:.0%} of the work" if shares else ""
            held = modules_in(modules[stage]) if stage in modules else "in another process"
            rows.append(f"  rank {rank}, stage {stage}: {held}{work}")
    if partition is not None and max(shares, default=0) * len(shares) > _UNEVEN:
        path, share = partition.heaviest
        if share * len(shares) > 1:
            rows.append(
                f"  uneven: {path!r} holds {share:.0%} of the work; name its children in stages="
            )
    return rows


def wrap_stages(stages: Sequence[PipelineStage], wrap: Wrap | None) -> None:
    """Wrap each stage's module with the user's function.

    Raises:
        UsageError: the function returned no module, or one that does not contain the stage's module.
    """
    if wrap is None:
        return
    for stage in stages:
        before = stage.module
        wrapped = wrap(before, stage.index)
        if not isinstance(wrapped, nn.Module | None):
            raise UsageError(
                f"wrap returned {wrapped!r} for stage {stage.index}; it must return the wrapped module, or "
                "None if it has changed the module in place"
            )
        if wrapped is not None and all(part is not before for part in wrapped.modules()):
            raise UsageError(
                f"wrap returned a {type(wrapped).__name__} for stage {stage.index} that does not contain the "
                "stage's module; it must return that module, wrapped or as it is"
            )
        stage.module = before if wrapped is None else wrapped


def check_states(schedule: Schedule, stages: Sequence[PipelineStage]) -> None:
    """Check that stages hand on a state, if the schedule cuts sequences into slices.

    Raises:
        UsageError: the forward of one takes none.
    """
    for stage in stages if schedule.slices > 1 else ():
        named = signature(stage.code.forward).parameters
        if "state" not in named and all(p.kind is not p.VAR_KEYWORD for p in named.values()):
            raise UsageError(
                f"{schedule.name} cuts sequences into {schedule.slices} slices, and the forward of stage "
                f"{stage.index}, a {type(stage.code).__name__}, takes no state; write forward(self, x, "
                "state), which gets None for the first slice of a microbatch, else what it returned for the "
                "slice before, and returns its output and the state for the next slice"
            )


def check_loss(loss: StepLoss | None, schedule: Schedule) -> None:
    """Refuse a loss ``over="batch"`` where the last stage begins backward before its last forward.

    Raises:
        ScheduleError: the message names the schedules that do not.
    """
    if loss is None or loss.over != "batch" or not schedule.trains or forwards_first(schedule):
        return
    fitting = for_batch_losses(schedule.ranks, schedule.microbatches)
    raise ScheduleError(
        f'a loss over="batch" needs the outputs of all microbatches before the first backward, and in '
        f"{schedule.name} the last stage begins backward earlier; use {' or '.join(fitting)}"
    )


def warn_of_batch_norms(stages: Sequence[PipelineStage], microbatches: int | None) -> None:
    """Log once that batch norms normalise by each microbatch's statistics, not by those of the batch."""
    trained = [
        part.name
        for stage in stages
        for part in stage.parts()
        if isinstance(part.module, nn.modules.batchnorm._BatchNorm)
        and part.module.training
        and (part.module.track_running_stats or part.module.running_mean is None)
    ]
    if trained and (microbatches or 1) > 1:
        log.warning(
            "penstock: %s normalises each of the %d microbatches by its own statistics, not by those of the "
            "batch, as a plain loop over the microbatches does; use a norm of each sample, such as LayerNorm "
            "or GroupNorm, or evaluation mode, for results that do not depend on their number",
            listed(trained, 3),
            microbatches,
        )


def make_equal(
    stages: Sequence[PipelineStage], replicas: Replicas, transport: Transport | None
) -> None:
    """Copy the first replica's weights to the stages here; no replica may be a rank of this pipeline."""
    if replicas.group is None:
        return
    beside = ranks_in(replicas.group)
    if others := beside & _other_ranks(transport):
        raise UsageError(
            f"replicas= holds the processes {sorted(beside)}, but this pipeline itself runs on "
            f"{sorted(others)} of them; replicas are the processes at the same place in other pipelines: "
            'name the dimension of the mesh that lies across this pipeline, as in replicas="dp"'
        )
    if transport is not None:
        transport.activity.come("the weights of the first replica", sorted(beside))
    begin_equal([stage.module for stage in stages], replicas.group, replicas.dims)
    if transport is not None:
        transport.activity.go_on()


def check_spread(stages: Sequence[PipelineStage], job: Job, *, weighted: bool) -> None:
    """Refuse wrappers and sharded weights that reduce gradients over processes other than the replicas.

    ``weighted`` says whether the loss has weights.
    """
    replicas = job.replicas
    beside = set() if replicas.group is None else ranks_in(replicas.group)
    for stage in stages:
        if replicas.group is not None:
            # Refuses weights that are sharded over some of the replicas.
            left_alone(stage.module, replicas.group, replicas.dims)
        for part in spread_parts(stage.module):
            ranks, how = part.ranks, part.how
            where = f"stage {stage.index}" + (f", module {part.path!r}," if part.path else "")
            said = f"{where} is in {how} over the processes {sorted(ranks)}"
            if others := ranks & _other_ranks(job.transport):
                raise UsageError(
                    f"{said}, but {sorted(others)} of them are ranks of this pipeline, which hold other "
                    f"stages; spread each stage over its replicas alone: {REMEDIES[how]}"
                )
            # FSDP2 may shard over more processes than the replicas, such as those that split a sequence.
            fits = beside <= ranks if how == "fully_shard" else beside == ranks
            if ranks and beside and not fits:
                each = f'give both one dimension of the mesh: replicas="dp" and {REMEDIES[how]}'
                if replicas.dims:
                    each = (
                        "give the wrapper all dimensions that replicas= names, as one: "
                        'mesh["dp", "ep"]._flatten()'
                    )
                raise UsageError(f"{said}, but replicas= holds {sorted(beside)}; {each}")
            if weighted and not beside and replicas.number == 1 and len(ranks) > 1:
                raise UsageError(
                    f"{said}, and the loss has weights without replicas=: each of these pipelines would "
                    "divide by the weights of its own part of the batch alone; add replicas=, the dimension "
                    'of the mesh that the batch is divided over, as in replicas="dp"'
                )


def check_shared(stages: Sequence[PipelineStage], shared: Sequence[Shared], job: Job) -> None:
    """Refuse a shared weight that ``wrap=`` wrapped in some stages only: its averages would differ."""
    replicas = job.replicas
    if replicas.group is None:
        return
    group, dims = replicas.group, replicas.dims
    plain = {id(p) for stage in stages for p in left_alone(stage.module, group, dims)}
    rows = [
        [one.names[0], stage.index, id(tensor) in plain]
        for one in shared
        for stage in stages
        for name, tensor in stage.named_tensors()
        if (stage.index, name) in one.holders
    ]
    kinds: dict[str, dict[int, bool]] = {}
    # All ranks gather, since with stages placed by hand each may list other shared weights.
    of_ranks = job.meet(lambda: rows, among=job.pipeline)
    for weight, index, is_plain in (row for of_rank in of_ranks for row in of_rank):
        kinds.setdefault(weight, {})[index] = is_plain
    for weight, by_stage in kinds.items():
        if len({*by_stage.values()}) > 1:
            wrapped = [index for index, is_plain in by_stage.items() if not is_plain]
            raise UsageError(
                f"stages {sorted(by_stage)} share {weight!r}, and wrap= has replicated or "
                f"sharded it in stages {wrapped} only; wrap all of these stages, or none"
            )


def _other_ranks(transport: Transport | None) -> set[int]:
    """The pipeline's other ranks, as their ranks among all processes."""
    if transport is None:
        return set()
    return {*transport.global_ranks} - {transport.global_ranks[transport.rank]}


@contextmanager
def before_meeting(mesh: Any, replicas: Any = None) -> Iterator[None]:
    """Make in this context what a rank makes before it meets the others, to whom an error in it is told.

    Args:
        mesh: a mesh, or the process group of the pipeline's ranks.
        replicas: as for :class:`Pipeline`.
    """
    try:
        yield
    except Exception as error:
        with suppress(PenstockError):  # a wrong mesh says nothing of the others
            plain = replicas is None or isinstance(replicas, Replicas)
            members = members_of(mesh, None if plain else group_across(replicas, mesh))
            decline(() if members is None else members.members, error)
        raise


def connect_process(settings: Settings) -> Transport | None:
    """Connect this process to the others, if each rank is a process; all of them call this together.

    Raises:
        UsageError: this process is not in the group, or its environment is wrong.
        AgreementError: not all processes of the job came in time.
        PeerFailed: another rank has failed, or is silent.
    """
    device, patience = settings.home, settings.patience
    group = group_of(settings.mesh)
    if group is None and not launched():
        check_launcher()
        return None
    use(device)
    members = members_of(settings.mesh, settings.replica_set.group)
    meeting = meet(group, patience, device, members)
    job = meeting.job
    activity = Activity(job.rank, job.pipeline, job.replica)
    watch = Watch(activity, meeting, patience)
    try:
        activity.prepare("connects with the others")
        with noticing_gone_machines():
            return join(meeting, watch, activity, device, patience.rendezvous)
    except BaseException as error:
        cause = watch.failed(error)
        watch.close()
        meeting.close()
        if cause is error:
            raise
        raise cause from None


@contextmanager
def set_up(transport: Transport | None) -> Iterator[Callable[[str], None]]:
    """Make a pipeline in this context: an error in it is reported to the other ranks, and ends them.

    Yields a function that notes what is being done, so that the other ranks can report it.
    """
    if transport is None:
        yield lambda doing: None
        return
    try:
        yield transport.activity.prepare
    except BaseException as error:
        cause = transport.watch.failed(error)
        transport.close()
        if cause is error:
            raise
        raise cause from None
    transport.watch.prepared()


def check_placed(
    schedule: Schedule, stages: Sequence[PipelineStage], transport: Transport | None
) -> None:
    """Refuse stages other than those that the schedule places in this process."""
    indices = sorted(stage.index for stage in stages)
    rank = None if transport is None else transport.rank
    expected = list(range(schedule.stages) if rank is None else schedule.placement.stages_on(rank))
    if indices != expected:
        where = "this process" if rank is None else f"rank {rank}"
        raise UsageError(f"{where} holds stages {indices}; {schedule.name} places {expected} there")
    counts = sorted({stage.count for stage in stages})
    if counts != [schedule.stages]:
        raise UsageError(
            f"the stages were made for pipelines of {counts} stages; {schedule.name} has {schedule.stages}"
        )
