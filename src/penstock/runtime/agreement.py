"""What ranks agree on before data moves: that they run the same plan, and what the model is called with."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from penstock.errors import (
    AgreementError,
    MessageError,
    SpecError,
    error_named,
    public_name,
)
from penstock.faults import versions
from penstock.runtime.calls import REFUSED, Brought, ModelCall, merge_calls
from penstock.runtime.driver import Task, Wait
from penstock.runtime.exchange import Specs
from penstock.schedule import Schedule
from penstock.transport import Transport
from penstock.values import Family, Inferred, ValueSpec, autocast_types, new_family


def agree_plan(
    transport: Transport, schedule: Schedule, told: Mapping[str, str] | None = None
) -> Task[None]:
    """Check that all ranks run the same schedule of the same model with the same versions.

    Args:
        transport: the rank's end.
        schedule: of a training step.
        told: what else must be the same on every rank, by what it is called.

    Raises:
        AgreementError: they do not; the message lists who has what.
    """
    mine = {
        "schedule": f"{schedule.name} {_digest(str(schedule))}",
        "microbatches": str(schedule.microbatches),
        **versions(),
        "precision": " ".join([str(torch.get_default_dtype()), *autocast_types()]),
        **(told or {}),
    }
    ticket = transport.agree(mine)
    yield Wait(ticket, transport.rank, "waits to agree on the plan")
    differing = differences(ticket.take())
    if differing:
        raise AgreementError(
            f"ranks differ in {'; in '.join(differing)}; give every rank the same code, settings and versions"
        )


def differences(plans: Sequence[Mapping[str, str]]) -> list[str]:
    """In what the ranks' plans differ, and which ranks have what."""
    names = dict.fromkeys(name for plan in plans for name in plan)
    return [text for name in names if (text := _difference(name, plans))]


def _difference(name: str, plans: Sequence[Mapping[str, str]]) -> str:
    holders: dict[str, list[int]] = {}
    for rank, plan in enumerate(plans):
        holders.setdefault(plan.get(name, "none"), []).append(rank)
    if len(holders) == 1:
        return ""
    told = (
        f"{value} on rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
        for value, ranks in holders.items()
    )
    return f"{name}: {', '.join(told)}"


def describe_stages(modules: Sequence[nn.Module]) -> dict[str, str]:
    """For each stage a text that is the same exactly if its tensors have the same names, shapes and types."""
    return {f"stage {index}": _described(module) for index, module in enumerate(modules)}


def _described(module: nn.Module) -> str:
    tensors = [*module.named_parameters(), *module.named_buffers()]
    lines = [f"{name} {tuple(tensor.shape)} {tensor.dtype}" for name, tensor in tensors]
    return f"{len(lines)} tensors {_digest(chr(10).join(lines))}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


@dataclass(frozen=True)
class Agreement:
    """All that was agreed on for a call.

    Args:
        model_call: what the model is called with.
        specs: for each microbatch, of its values.
        schedule: the one that carries it out.
        bound: the rank's program for it, by what else calls want.
    """

    model_call: ModelCall
    specs: tuple[Specs, ...]
    schedule: Schedule
    bound: dict[Any, Any] = field(default_factory=dict, compare=False)


_REMEMBERED = 1024
"""So many calls; the oldest go first, on every rank alike."""


class Agreements:
    """What was agreed on: whole calls by what the ranks brought, and the specs of single microbatches."""

    def __init__(self) -> None:
        self.of_calls: dict[tuple[int, ...], Agreement] = {}
        self.described: dict[str, tuple[Any, Specs]] = {}
        self._families: dict[Any, Family[Inferred]] = {}
        self._traits: Any = None

    def write(self, key: tuple[int, ...], agreement: Agreement) -> None:
        """Remember what was agreed; of calls that always differ only the last ones are remembered."""
        self.of_calls[key] = agreement
        for memory in (self.of_calls, self.described):
            while len(memory) > _REMEMBERED:
                del memory[next(iter(memory))]  # type: ignore[arg-type] # of its own keys

    def outdated(self, traits: Any) -> bool:
        """Whether parameters were frozen, thawed or cast since the last call."""
        last, self._traits = self._traits, traits
        return last not in (None, traits)

    def clear(self) -> None:
        """Forget everything."""
        self.of_calls.clear()
        self.described.clear()
        self._families.clear()

    def families(self, mode: str) -> Callable[[int, ValueSpec], Family[Inferred]]:
        """What a stage here has given for arguments that differ from some in sizes alone."""
        return lambda stage, arguments: self._families.setdefault(
            (mode, stage, arguments.kind()), new_family()
        )


def look_up(
    transport: Transport, brought: Brought, agreements: Agreements, traits: Any
) -> Task[tuple[tuple[int, ...], Agreement | None]]:
    """Find what was agreed on for what the ranks bring, by one control word of each.

    Every rank remembers the same, since all write it together.

    Args:
        transport: the rank's end.
        brought: what this rank brings.
        agreements: all that was agreed on.
        traits: of this rank's parameters.

    Returns:
        Its key, and what was agreed on where this call was made before.

    Raises:
        PenstockError: what is wrong with what some rank was given; raised on every rank.
    """
    word = torch.tensor([agreements.outdated(traits), brought.number], dtype=torch.int64)
    ticket = transport.gather(word)
    yield Wait(ticket, transport.rank, "waits to hear whether shapes changed")
    rows = [(int(changed), int(number)) for changed, number in ticket.take()]
    if any(changed for changed, _ in rows):
        agreements.clear()
    key = tuple(number for _, number in rows)
    if REFUSED in key:
        yield from _tell_refusals(transport, brought)
    return key, agreements.of_calls.get(key)


def _tell_refusals(transport: Transport, brought: Brought) -> Task[None]:
    """Raise on every rank what is wrong on the first one of those where something is."""
    own = brought.refused
    mine = None if own is None else [public_name(type(own)), str(own)]
    ticket = transport.agree(mine)
    yield Wait(ticket, transport.rank, "waits to hear why a call was refused")
    told = ticket.take()
    if own is not None and all(found == mine for found in told):
        raise own
    first = next(rank for rank, found in enumerate(told) if found is not None)
    kind, text = told[first]
    own = own if first == transport.rank else None
    error = (error_named(kind) if own is None else type(own))(f"rank {first}: {text}")
    error.rank = first
    raise error from (None if own is None else own.__cause__)


def agree_model_call(transport: Transport, brought: Brought) -> Task[ModelCall]:
    """Put together what the model is called with.

    Raises:
        AgreementError: ranks were called with different shapes.
        UsageError: something was given to no rank.
    """
    ticket = transport.agree(brought.to_json())
    yield Wait(ticket, transport.rank, "waits for the shapes of the batch")
    try:
        return merge_calls(ticket.take())
    except SpecError as error:
        # Others may have the class that is not known here, so this is no refusal of all.
        raise MessageError(
            f"rank {transport.rank}: what another rank was given: {error}"
        ) from error
