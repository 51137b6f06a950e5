"""What ranks agree on before data moves: that they run the same plan, and the specs of all values."""

from __future__ import annotations

import hashlib
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from penstock.errors import AgreementError, SpecError, StageError
from penstock.runtime.arguments import as_arguments, as_values
from penstock.runtime.driver import Task, Wait
from penstock.runtime.exchange import Specs
from penstock.runtime.program import RankProgram
from penstock.schedule import Schedule
from penstock.specs import ValueSpec, autocast_types, infer_output, spec_of_arguments
from penstock.stage import PipelineStage
from penstock.transport import Transport

OUTPUT = "output"
"""The name under which the last stage's output is agreed on."""


def agree_plan(transport: Transport, schedule: Schedule) -> Task[None]:
    """Check that all ranks run the same schedule with the same torch.

    Raises:
        AgreementError: they do not; the message lists what each has.
    """
    mine = {
        "schedule": f"{schedule.name} {hashlib.sha256(str(schedule).encode()).hexdigest()[:12]}",
        "microbatches": schedule.microbatches,
        "torch": torch.__version__,
    }
    ticket = transport.agree(mine)
    yield Wait(ticket, transport.rank, "waits to agree on the plan")
    plans = ticket.take()
    differing = [key for key in mine if len({str(plan[key]) for plan in plans}) > 1]
    if differing:
        listed = "; ".join(f"{key}: {[plan[key] for plan in plans]}" for key in differing)
        raise AgreementError(f"ranks differ, by rank: {listed}")


Traits = tuple[tuple[torch.dtype, bool], ...]
"""Of each parameter of a rank its type and whether it is trained."""


class SpecBook:
    """The specs that were agreed on, by what the model was called with."""

    def __init__(self) -> None:
        self._pages: dict[str, Specs] = {}
        self._traits: Traits | None = None

    def __contains__(self, call: str) -> bool:
        return call in self._pages

    def __getitem__(self, call: str) -> Specs:
        return self._pages[call]

    def write(self, call: str, specs: Specs) -> None:
        """Enter what was agreed on for a call."""
        self._pages[call] = specs

    def outdated(self, traits: Traits) -> bool:
        """Whether parameters were frozen, thawed or cast since the last call."""
        last, self._traits = self._traits, traits
        return last not in (None, traits)

    def clear(self) -> None:
        """Forget all calls."""
        self._pages.clear()


def agree_specs(
    program: RankProgram,
    stages: Mapping[int, PipelineStage],
    transport: Transport,
    calls: Sequence[ValueSpec],
    book: SpecBook,
) -> Task[list[Specs]]:
    """Find the specs of all values for each microbatch's call, or take them from the book.

    One control word tells whether anything is new on any rank; only then specs are exchanged.

    Args:
        program: the rank's program.
        stages: the rank's stages.
        transport: the rank's end.
        calls: for each microbatch the spec of its ``(args, kwargs)``.
        book: what is known; it is added to.

    Raises:
        AgreementError: ranks were called with different shapes.
        StageError: a stage refused its arguments; raised on every rank.
    """
    digests = _digests(calls, _mode(program))
    changed = book.outdated(_traits(stages))
    new = any(digest not in book for digest in digests)
    ticket = transport.sum(_control_word(changed, new, digests))
    yield Wait(ticket, transport.rank, "waits to hear whether shapes changed")
    outdated, news, first, second = (int(number) for number in ticket.take())
    # By Cauchy and Schwarz the ranks' numbers are all equal exactly if this holds.
    if transport.ranks * second != first * first:
        raise AgreementError(
            "ranks were called with different shapes; pass every rank the same batch"
        )
    if outdated:
        book.clear()
    if outdated or news:
        for digest, call in dict(zip(digests, calls, strict=True)).items():
            specs = yield from _exchange(program, stages, transport, call)
            book.write(digest, specs)
    return [book[digest] for digest in digests]


def _mode(program: RankProgram) -> str:
    """What else the values depend on: a model may give others in evaluation, and under autocast."""
    return " ".join(["train" if program.schedule.trains else "evaluate", *autocast_types()])


def _digests(calls: Sequence[ValueSpec], mode: str) -> list[str]:
    """A text for each call in a mode."""
    # Calls alike share one object, so that a step of many microbatches describes few of them.
    described = {key: call.digest() for key, call in {id(call): call for call in calls}.items()}
    return [f"{mode} {described[id(call)]}" for call in calls]


def _traits(stages: Mapping[int, PipelineStage]) -> Traits:
    return tuple(
        (parameter.dtype, parameter.requires_grad)
        for stage in stages.values()
        for parameter in stage.module.parameters()
    )


def _control_word(changed: bool, new: bool, digests: Sequence[str]) -> torch.Tensor:
    """Whether agreed specs are void or missing here, and a number for the shapes, with its square."""
    text = "\n".join(digests).encode()
    number = int.from_bytes(hashlib.sha256(text).digest()[:3])
    return torch.tensor([changed, new, number, number * number], dtype=torch.int64)


def _exchange(
    program: RankProgram,
    stages: Mapping[int, PipelineStage],
    transport: Transport,
    call: ValueSpec,
) -> Task[Specs]:
    specs: dict[str, ValueSpec] = {}
    for index in range(program.schedule.stages):
        owner = program.schedule.placement.rank_of[index]
        mine = _describe(program, stages[index], call, specs) if owner == transport.rank else None
        ticket = transport.agree(mine)
        yield Wait(ticket, transport.rank, f"waits for the shapes of stage {index}")
        found: dict[str, Any] = ticket.take()[owner]
        if "error" in found:
            raise _refused(owner, index, found)
        specs |= {name: ValueSpec.from_json(spec) for name, spec in found["specs"].items()}
    return specs


def _refused(rank: int, stage: int, found: Mapping[str, str]) -> StageError:
    error = StageError(f"rank {rank}, stage {stage}, before microbatch 0: {found['error']}")
    error.add_note(f"on rank {rank}:\n{found['trace']}")
    return error


def _describe(
    program: RankProgram, stage: PipelineStage, call: ValueSpec, specs: Specs
) -> dict[str, Any]:
    """What a stage gives for this call, or why it cannot."""
    try:
        given = program.given(stage.index)
        output = infer_output(
            stage.module, _call_of(program, stage.index, call, specs), stage.device
        )
        return {"specs": _by_name(given, output)}
    except Exception as error:
        if isinstance(error, SpecError) and stage.is_last:
            # The output stays here unless somebody asks for it.
            return {"specs": {}}
        return {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}


def _by_name(given: Sequence[Any], output: ValueSpec) -> dict[str, Any]:
    if not given:
        return {OUTPUT: output.to_json()}
    filled = output.fill([_placeholder(spec) for spec in output.tensors])
    return {name: ValueSpec.of(value).to_json() for name, value in as_values(given, filled).items()}


def _call_of(program: RankProgram, stage: int, call: ValueSpec, specs: Specs) -> ValueSpec:
    taken = program.taken(stage)
    if not taken:
        return call
    values = {
        edge.value: specs[edge.value].fill(
            [_placeholder(spec) for spec in specs[edge.value].tensors]
        )
        for edge in taken
    }
    return spec_of_arguments(*as_arguments(taken, values))


def _placeholder(spec: Any) -> torch.Tensor:
    tensor: torch.Tensor = spec.empty("meta")
    return tensor.requires_grad_(spec.requires_grad)
