"""Run a batch once more to find which module first makes something that is not finite."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from penstock.pipeline.ranks import LocalRanks
from penstock.rng import OwnHook
from penstock.runtime import Rank, Report
from penstock.runtime.health import OUTPUT, Spot
from penstock.stage import PipelineStage
from penstock.values import flatten, uncompiled


@dataclass(frozen=True)
class NonFiniteFinding:
    """The first thing of a step that is not finite; the same on every rank.

    Attributes:
        stage: where it was made; None for weights.
        rank: of that stage.
        microbatch: likewise.
        action: as text, such as ``"1F2"``.
        module: the path in its stage of the module that made it from finite inputs, if that was in forward.
        weights: the names of weights and buffers that are not finite already; then nothing was run.
        what: all that in words.
    """

    stage: int | None
    rank: int | None
    microbatch: int | None
    action: str
    module: str
    weights: tuple[str, ...]
    what: str

    def __str__(self) -> str:
        return self.what


def seek(local: LocalRanks, run: Callable[[], Sequence[Report]]) -> NonFiniteFinding | None:
    """Find it.

    Args:
        local: the ranks of this process.
        run: carries out a training step that looks whether everything is finite.

    Returns:
        None where everything is.
    """
    weights = _told(local, [name for stage in local.stages for name in _ill_tensors(stage)])
    if weights:
        listed = ", ".join(weights)
        said = f"weights are not finite before the step: {listed}"
        return NonFiniteFinding(None, None, None, "", "", tuple(weights), said)
    with _untouched(local), _traced(local) as seen:
        trouble = run()[0].trouble
    traces = _told(local, [[*place, path] for place, path in seen.items()])
    if trouble is None or trouble.first is None:
        return None
    spot = trouble.first
    paths = {(stage, microbatch): path for stage, microbatch, path in traces}
    module = paths.get((spot.stage, spot.microbatch), "") if spot.kind == OUTPUT else ""
    return _finding(spot, module)


def _finding(spot: Spot, module: str) -> NonFiniteFinding:
    maker = f", made by the module {module!r} from finite inputs" if module else ""
    return NonFiniteFinding(
        spot.stage, spot.rank, spot.microbatch, spot.action, module, (), f"{spot}{maker}"
    )


def _told(local: LocalRanks, mine: list[Any]) -> list[Any]:
    told: list[list[Any]] = local.each(lambda rank: rank.exchange(mine))
    # In one process every rank tells of all stages.
    return told[0] if len(local.ranks) > 1 else [item for of in told for item in of]


def _ill_tensors(stage: PipelineStage) -> list[str]:
    found = (name for name, tensor in stage.named_tensors() if not _is_finite([tensor]))
    return list(dict.fromkeys(found))


@contextmanager
def _untouched(local: LocalRanks) -> Iterator[None]:
    """Give gradients and buffers back as they were."""
    parameters = [p for stage in local.stages for p in stage.module.parameters()]
    buffers = [b for stage in local.stages for b in stage.module.buffers()]
    gradients, values = [p.grad for p in parameters], [b.detach().clone() for b in buffers]
    for parameter in parameters:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        for buffer, value in zip(buffers, values, strict=True):
            buffer.data.copy_(value)


@contextmanager
def _traced(local: LocalRanks) -> Iterator[dict[tuple[int, int], str]]:
    """For each stage and microbatch the first module whose output is not finite though its inputs are."""
    seen: dict[tuple[int, int], str] = {}
    with ExitStack() as stack, uncompiled():
        found = [(rank, stage) for rank in local.ranks for stage in rank.stages.values()]
        for rank, stage in found:
            for path, _, module in stage.parts():
                note = OwnHook(_note, rank, stage.index, path, seen)
                stack.callback(module.register_forward_hook(note, with_kwargs=True).remove)
        yield seen


def _note(  # noqa: PLR0913 - the last four are those of a forward hook
    rank: Rank,
    stage: int,
    path: str,
    seen: dict[tuple[int, int], str],
    module: nn.Module,
    args: Any,
    kwargs: Any,
    output: Any,
) -> None:
    action = rank.activity.doing
    place = (stage, getattr(action, "microbatch", None) or 0)
    if action is None or place in seen or _is_finite(flatten(output)[0]):
        return
    if _is_finite(flatten((args, kwargs))[0]):
        seen[place] = path or type(module).__name__


def _is_finite(tensors: Sequence[Tensor]) -> bool:
    plain = (tensor for tensor in tensors if tensor.is_floating_point() and not tensor.is_meta)
    return all(bool(tensor.isfinite().all()) for tensor in plain)
