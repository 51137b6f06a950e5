"""What ranks agree on before data moves: that they run the same plan, and what the model is called with."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import torch

from penstock.errors import AgreementError
from penstock.runtime.calls import Brought, ModelCall, merge_calls
from penstock.runtime.driver import Task, Wait
from penstock.runtime.exchange import Specs
from penstock.schedule import Schedule
from penstock.transport import Transport


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


@dataclass(frozen=True)
class Page:
    """All that was agreed on for a call.

    Args:
        call: what the model is called with.
        specs: for each microbatch, of its values.
        schedule: the one that carries it out.
    """

    call: ModelCall
    specs: tuple[Specs, ...]
    schedule: Schedule


_REMEMBERED = 1024
"""So many calls; the oldest go first, on every rank alike."""


class Book:
    """What was agreed on: whole calls by what the ranks brought, and the specs of single microbatches."""

    def __init__(self) -> None:
        self.pages: dict[tuple[int, ...], Page] = {}
        self.described: dict[str, tuple[Any, Specs]] = {}
        self._traits: Any = None

    def write(self, key: tuple[int, ...], page: Page) -> None:
        """Enter a page; of calls that always differ only the last ones are remembered."""
        self.pages[key] = page
        for memory in (self.pages, self.described):
            while len(memory) > _REMEMBERED:
                del memory[next(iter(memory))]  # type: ignore[arg-type] # of its own keys

    def outdated(self, traits: Any) -> bool:
        """Whether parameters were frozen, thawed or cast since the last call."""
        last, self._traits = self._traits, traits
        return last not in (None, traits)

    def clear(self) -> None:
        """Forget everything."""
        self.pages.clear()
        self.described.clear()


def look_up(
    transport: Transport, brought: Brought, book: Book, traits: Any
) -> Task[tuple[tuple[int, ...], Page | None]]:
    """Find the page of what the ranks bring, by one control word of each.

    Every rank has the same pages, since all write them together.

    Returns:
        The key of the page, and the page where there is one.
    """
    word = torch.tensor([book.outdated(traits), brought.number], dtype=torch.int64)
    ticket = transport.gather(word)
    yield Wait(ticket, transport.rank, "waits to hear whether shapes changed")
    rows = [(int(changed), int(number)) for changed, number in ticket.take()]
    if any(changed for changed, _ in rows):
        book.clear()
    key = tuple(number for _, number in rows)
    return key, book.pages.get(key)


def agree_call(transport: Transport, brought: Brought) -> Task[ModelCall]:
    """Put together what the model is called with.

    Raises:
        AgreementError: ranks were called with different shapes.
        UsageError: something was given to no rank.
    """
    ticket = transport.agree(brought.to_json())
    yield Wait(ticket, transport.rank, "waits for the shapes of the batch")
    return merge_calls(ticket.take())
