"""Find out what will travel, before anything does: the spec of every value, and which gradients come back."""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from penstock.errors import AgreementError, MessageError, SpecError, StageError
from penstock.faults import failing_module, without_own_frames
from penstock.parallel import alone
from penstock.runtime.driver import Task, Wait
from penstock.runtime.exchange import Inputs, Specs, as_values
from penstock.runtime.program import RankProgram
from penstock.schedule import Edge
from penstock.stage import PipelineStage
from penstock.transport import Transport
from penstock.values import (
    Family,
    Inferred,
    Microbatch,
    ValueSpec,
    flatten,
    infer,
    infer_output,
    spec_of_arguments,
)

# ---- for which tensors a gradient certainly comes back, and for which it may be missing
# A value that a stage gives may be used by no other, or only on a branch that is not always taken. Then no
# gradient comes back for it, and that is not the same as a gradient of zeros: in the plain model, the weights
# behind such a value get no gradient either.


Links = dict[str, list[list[list[str | int]] | None]]
"""For each value of a stage and each tensor in it, the tensors that it was made of.

Each is ``[value, index]``; in place of the list, ``None`` stands for a tensor that requires no gradient.
"""


def name_links(
    reached: Sequence[Sequence[int] | None],
    arguments: Sequence[tuple[str, int]],
    values: Mapping[str, Sequence[int]],
) -> Links:
    """The links of a stage by the names of values.

    Args:
        reached: for each tensor of the module's output, those of its arguments that it was made of.
        arguments: the value and the index in it of each tensor among the arguments; tensors of the batch
            follow after these.
        values: for each value that the stage gives, the positions of its tensors in the output.
    """
    named: list[list[list[str | int]] | None] = [
        None if row is None else [[*arguments[i]] for i in row if i < len(arguments)]
        for row in reached
    ]
    return {name: [named[index] for index in positions] for name, positions in values.items()}


def positions_in(output: Any, values: Mapping[str, Any]) -> dict[str, list[int]]:
    """The positions of each value's tensors in an output.

    A value is the whole output, or an item of a dict.
    """
    found: dict[str, list[int]] = {}
    start = 0
    whole = {name: value for name, value in values.items() if value is output}
    for name, item in (whole or output).items():
        stop = start + len(flatten(item)[0])
        if name in values:
            found[name] = list(range(start, stop))
        start = 0 if whole else stop
    return found


def mark_optional(
    edges: Sequence[Edge], specs: Mapping[str, ValueSpec], links: Sequence[Links]
) -> dict[str, ValueSpec]:
    """Mark the tensors whose gradient may be missing.

    Args:
        edges: which stages give and use the values.
        specs: of the values.
        links: of each stage. The loss is made of at least one tensor of the last stage, it is not known
            which.
    """
    last = [set(map(tuple, row)) for rows in links[-1].values() for row in rows if row is not None]
    sure: set[tuple[str | int, ...]] = set.intersection(*last) if last else set()
    for of in reversed(links[:-1]):
        rows = {(name, i): row for name, found in of.items() for i, row in enumerate(found)}
        sure.update(tuple(t) for at, row in rows.items() if row and at in sure for t in row)
    used = {edge.value for edge in edges if edge.gradient}
    return {
        name: spec.marked({i for i in range(len(spec.tensors)) if (name, i) in sure})
        if name in used
        else spec
        for name, spec in specs.items()
    }


# ---- find the specs of all values that travel, before any does


T = TypeVar("T")
log = logging.getLogger("penstock")

OUTPUT = "output"
"""The name under which the last stage's output is agreed on."""

Describe = Callable[[ValueSpec, bool], tuple[Sequence[Edge], Mapping[str, ValueSpec]]]
"""How a partition itself tells what travels for a call, see ``penstock.partition.Describe``."""

Kin = Callable[[int, ValueSpec], Family[Inferred]]
"""Finds what a stage has given for arguments that differ from these in their sizes alone."""


def describe_whole(
    transport: Transport, describe: Describe, calls: Sequence[ValueSpec], *, trains: bool
) -> Task[list[tuple[tuple[Edge, ...], Specs]]]:
    """The edges and specs of calls as the partition tells them; every rank works them out for itself.

    Raises:
        StageError: the model's code failed; raised on every rank.
        AgreementError: ranks find different things.
    """
    attempt = _Attempt(transport.rank)
    found = attempt.made(lambda: _described(describe, calls, trains))
    ticket = transport.agree(attempt.told or {"digest": found.digest if found else ""})
    yield Wait(ticket, transport.rank, "waits to agree on what travels")
    answers = ticket.take()
    for rank, answer in enumerate(answers):
        if "error" in answer:
            everywhere = all(other.get("error") == answer["error"] for other in answers)
            raise attempt.refusal("" if everywhere else f"rank {rank}, ", rank, answer)
    if len({answer["digest"] for answer in answers}) > 1 or found is None:
        raise AgreementError(
            "ranks found different values between the stages; build the same model on every rank"
        )
    return found.calls


class _Described(NamedTuple):
    """The edges and specs of calls, and a text that differs if they do."""

    calls: list[tuple[tuple[Edge, ...], Specs]]
    digest: str


def _described(describe: Describe, calls: Sequence[ValueSpec], trains: bool) -> _Described:
    found = [_as_tuple(describe(call, trains)) for call in calls]
    for _, specs in found:
        _check_travel({n: spec for n, spec in specs.items() if n != OUTPUT}, "the model")
    text = json.dumps(
        [
            [str(edges), {name: [spec.to_json(), _missing(spec)] for name, spec in specs.items()}]
            for edges, specs in found
        ],
        sort_keys=True,
    )
    return _Described(found, hashlib.sha256(text.encode()).hexdigest())


def _missing(spec: ValueSpec) -> list[bool]:
    """Which gradients may be missing; the ranks must agree on that as well."""
    return [tensor.optional for tensor in spec.tensors]


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
        mine, attempt = None, _Attempt(transport.rank)
        if owner == transport.rank:
            specs_of = partial(_stage_specs, program, stages[index], inputs, family)
            mine = attempt.made(
                lambda of=specs_of: {"calls": [*map(of, calls, found)]}  # type: ignore[misc]
            )
        ticket = transport.agree(attempt.told or mine)
        yield Wait(ticket, transport.rank, f"waits for the shapes of stage {index}")
        answer: dict[str, Any] = ticket.take()[owner]
        if "error" in answer:
            raise attempt.refusal(f"rank {owner}, stage {index}, ", owner, answer)
        for specs, of, more in zip(found, links, answer["calls"], strict=True):
            specs |= {name: _read(spec, index) for name, spec in more["specs"].items()}
            of.append(more["links"])
    edges = program.schedule.edges
    return [mark_optional(edges, specs, of) for specs, of in zip(found, links, strict=True)]


def _read(spec: dict[str, Any], stage: int) -> ValueSpec:
    try:
        return ValueSpec.from_json(spec)
    except SpecError as error:
        # Another rank may know the class that is missing here, so not all ranks refuse the call.
        raise MessageError(
            f"what stage {stage} returns cannot be read on this rank: {error}"
        ) from error


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
        output, reached = infer(alone(stage.module), arguments, stage.device, inputs.aside, kin)
    except SpecError:
        if not stage.is_last:
            raise
        # The last stage's output need not be described: it stays here unless the caller asks for it.
        return {"specs": {}, "links": {}}
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
    """Check that all values can be sent, also those between stages of one rank: another placement sends them.

    Raises:
        SpecError: one cannot.
    """
    for name, spec in values.items():
        spec.check_travels(f"{source}, value {name!r}")


def why_not_without(
    function: Callable[[Any, Any], Any], specs: Specs, device: torch.device
) -> str | None:
    """Why a loss function needs a target, found by trying it on an output without data.

    None if it does not.
    """
    if OUTPUT not in specs:
        return "loss_fn could not be tried without one, as the model's output cannot be described"
    arguments = spec_of_arguments((specs[OUTPUT].without_data(), None), {})
    try:
        found = infer_output(_Called(function), arguments, device)
    except Exception as error:
        return f"loss_fn fails without one ({type(error).__name__}: {error})"
    if len(found.tensors) == 1 and math.prod(found.tensors[0].shape) == 1:
        return None
    return "loss_fn returns no scalar without one"


class _Called(nn.Module):
    """A function as a module.

    If the function is a module itself, it is a child, so that a copy includes it.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function if isinstance(function, nn.Module) else None
        # A lambda, since a deep copy shares functions but would copy the object of a bound method.
        self._call: Callable[..., Any] = lambda *args: function(*args)

    def forward(self, *args: Any) -> Any:
        """What the function gives."""
        return self._call(*args) if self.function is None else self.function(*args)


class _Attempt:
    """Runs code of the user's that may fail on one rank, so that every rank hears why.

    Args:
        rank: this rank.

    Attributes:
        told: what went wrong here, to be told to the other ranks; empty if nothing did.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._error: Exception | None = None
        self.told: dict[str, str] = {}

    def made(self, make: Callable[[], T]) -> T | None:
        """The result of a function, or None if it raises."""
        try:
            return make()
        except Exception as error:
            log.debug("the user's code raised before the first microbatch", exc_info=error)
            module = failing_module(error)
            self._error = error.with_traceback(without_own_frames(error))
            self.told = {
                "error": f"{type(error).__name__}: {error}",
                "module": f"module {module}, " if module else "",
            }
            return None

    def refusal(self, where: str, rank: int, answer: Mapping[str, str]) -> StageError:
        """The error that every rank raises; on the rank where it happened, it has its cause."""
        error = StageError(
            f"{where}{answer['module']}before the first microbatch: {answer['error']}"
        )
        error.rank = rank
        if rank == self._rank:
            error.__cause__ = self._error
        return error
