"""Find the specs of all values that travel, before any does."""

from __future__ import annotations

import hashlib
import json
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from penstock.errors import AgreementError, SpecError, StageError
from penstock.microbatch import Microbatch
from penstock.runtime.arguments import Inputs, as_values
from penstock.runtime.driver import Task, Wait
from penstock.runtime.exchange import Specs
from penstock.runtime.program import RankProgram
from penstock.runtime.reach import Links, mark_optional, name_links, positions_in
from penstock.schedule import Edge
from penstock.specs import Family, Inferred, ValueSpec, infer, spec_of_arguments
from penstock.stage import PipelineStage
from penstock.transport import Transport

OUTPUT = "output"
"""The name under which the last stage's output is agreed on."""

Describe = Callable[[ValueSpec, bool], tuple[Sequence[Edge], Mapping[str, ValueSpec]]]
"""A partition's own knowledge of what travels for a call, see ``penstock.partition.Describe``."""

Kin = Callable[[int, ValueSpec], Family[Inferred]]
"""What a stage has given for other sizes of its arguments."""


def describe_whole(
    transport: Transport, describe: Describe, calls: Sequence[ValueSpec], *, trains: bool
) -> Task[list[tuple[tuple[Edge, ...], Specs]]]:
    """The edges and specs of calls as the partition tells them; every rank finds out for itself.

    Raises:
        StageError: it cannot tell; raised on every rank.
        AgreementError: ranks find different things.
    """
    found, mine = _described(describe, calls, trains)
    ticket = transport.agree(mine)
    yield Wait(ticket, transport.rank, "waits to agree on what travels")
    answers = ticket.take()
    for rank, answer in enumerate(answers):
        if "error" in answer:
            raise _refused(f"rank {rank}, before microbatch 0", rank, answer)
    if len({answer["digest"] for answer in answers}) > 1:
        raise AgreementError(
            "ranks find different values between the stages; build the same model on every rank"
        )
    return found


def _described(
    describe: Describe, calls: Sequence[ValueSpec], trains: bool
) -> tuple[list[tuple[tuple[Edge, ...], Specs]], dict[str, str]]:
    try:
        found = [_as_tuple(describe(call, trains)) for call in calls]
        for _, specs in found:
            _check_travel({n: spec for n, spec in specs.items() if n != OUTPUT}, "the model")
    except Exception as error:
        return [], _trouble(error)
    text = json.dumps(
        [
            [str(edges), {name: spec.to_json() for name, spec in specs.items()}]
            for edges, specs in found
        ],
        sort_keys=True,
    )
    return found, {"digest": hashlib.sha256(text.encode()).hexdigest()}


def _as_tuple(description: Any) -> tuple[tuple[Edge, ...], Specs]:
    edges, specs = description
    return tuple(edges), specs


def describe_by_stage(
    program: RankProgram,
    stages: Mapping[int, PipelineStage],
    transport: Transport,
    inputs: Inputs,
    calls: Sequence[ValueSpec],
    family: Kin,
) -> Task[list[Specs]]:
    """The specs of calls, found stage after stage, each on its own rank.

    Raises:
        StageError: a stage refused its arguments; raised on every rank.
    """
    found: list[dict[str, ValueSpec]] = [{} for _ in calls]
    links: list[list[Links]] = [[] for _ in calls]
    for index in range(program.schedule.stages):
        owner = program.schedule.placement.rank_of[index]
        mine = None
        if owner == transport.rank:
            one = partial(_stage_specs, program, stages[index], inputs, family)
            mine = _stage_answer(one, calls, found)
        ticket = transport.agree(mine)
        yield Wait(ticket, transport.rank, f"waits for the shapes of stage {index}")
        answer: dict[str, Any] = ticket.take()[owner]
        if "error" in answer:
            raise _refused(f"rank {owner}, stage {index}, before microbatch 0", owner, answer)
        for specs, of, more in zip(found, links, answer["calls"], strict=True):
            specs |= {name: ValueSpec.from_json(spec) for name, spec in more["specs"].items()}
            of.append(more["links"])
    edges = program.schedule.edges
    return [mark_optional(edges, specs, of) for specs, of in zip(found, links, strict=True)]


def _stage_answer(
    one: Callable[[ValueSpec, Specs], dict[str, Any]],
    calls: Sequence[ValueSpec],
    known: Sequence[Specs],
) -> dict[str, Any]:
    """What a stage gives for these calls, or why it cannot."""
    try:
        return {"calls": list(map(one, calls, known))}
    except Exception as error:
        return _trouble(error)


def _stage_specs(
    program: RankProgram,
    stage: PipelineStage,
    inputs: Inputs,
    family: Kin,
    call: ValueSpec,
    known: Specs,
) -> dict[str, Any]:
    given, taken = program.given(stage.index), program.taken(stage.index)
    values = {edge.value: known[edge.value].without_data() for edge in taken}
    args, kwargs = call.without_data()
    part = Microbatch(args, kwargs, 0)
    arguments = spec_of_arguments(*inputs.arguments(stage, taken, values, part))
    sources = [(e.value, i) for e in taken for i in range(len(known[e.value].tensors))]
    try:
        kin = family(stage.index, arguments)
        output, reached = infer(stage.module, arguments, stage.device, inputs.aside, kin)
    except SpecError:
        if not stage.is_last:
            raise
        # The output stays here unless somebody asks for it.
        return {"specs": {}, "links": {OUTPUT: [sources]}}
    filled = output.without_data()
    found = as_values(given, filled, wired=stage.wired) if given else {OUTPUT: filled}
    specs = {name: ValueSpec.of(value) for name, value in found.items()}
    if given:
        _check_travel(specs, f"stage {stage.index}")
    return {
        "specs": {name: spec.to_json() for name, spec in specs.items()},
        "links": name_links(reached, sources, positions_in(filled, found)),
    }


def _check_travel(values: Specs, source: str) -> None:
    """Check that all values can be sent; that of stages on one rank is not, but could be tomorrow.

    Raises:
        SpecError: one cannot.
    """
    for name, spec in values.items():
        spec.check_travels(f"{source}, value {name!r}")


def _trouble(error: Exception) -> dict[str, str]:
    return {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}


def _refused(where: str, rank: int, answer: Mapping[str, str]) -> StageError:
    error = StageError(f"{where}: {answer['error']}")
    error.add_note(f"on rank {rank}:\n{answer['trace']}")
    return error
