"""Wait for each send where that holds nothing up, so that what was sent is not kept for long.

Two ways to know that a message has been taken, tried in this order:

*By what came back.* A rank that has waited for a message knows that its sender had come at least as far as
that SEND. A receive which the sender posts earlier in its program is therefore posted, and the message that
it takes needs nothing more: waiting for it costs no more than the transfer.

*By one possible run.* Where too little comes back, as in a schedule without backward, a rank waits for its
oldest message once a window of them is under way: only at a place that it reaches, on simulated clocks,
later than the peer posts the receive. That run with its waits is a run of the new schedule. Since whatever
may run now may run later too, a schedule of which one run completes has none that stops.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator

from penstock.errors import UsageError
from penstock.schedule.action import SEND_OPS, WAIT_SEND_OPS, Action, Entry, Op, Overlap
from penstock.schedule.base import Schedule, paused_collection
from penstock.schedule.packed import NOWHERE, Wiring
from penstock.schedule.passes.wait_sends import wait_of
from penstock.schedule.simulation import Costs
from penstock.schedule.simulation.clock import run_clocks
from penstock.schedule.simulation.prices import prices

WINDOW = 4
"""How many messages of a channel may be under way before a rank waits for the oldest."""


@paused_collection()
def release_sends(schedule: Schedule, *, window: int = WINDOW) -> Schedule:
    """Add a WAIT_SEND for each SEND, at the first place where its message has certainly been taken.

    So a rank keeps few messages, whatever the number of microbatches. The new schedule completes where the
    given one does. A message for which a gradient comes back is released when it has come: until then the
    stage that made it holds it anyway. A schedule that has some WAIT_SEND already is returned as it is.

    Args:
        schedule: with its messages spelled out; one without is returned as it is.
        window: how many other messages of a channel may be under way at a time.

    Raises:
        ScheduleError: the schedule does not complete.
        UsageError: a window below 1.
    """
    if window < 1:
        raise UsageError(f"window={window}: must be at least 1")
    if not schedule.communicates or not schedule.ops.isdisjoint(WAIT_SEND_OPS):
        return schedule
    places = _Places(Wiring(schedule))
    return schedule.with_programs(
        _Rank(places, rank, window).program() for rank in range(schedule.ranks)
    )


class _Places:
    """Where both ends of each message stand, and when they are posted in one possible run."""

    def __init__(self, wiring: Wiring) -> None:
        self.packed = wiring.packed
        self.partner: list[int] = wiring.partner.tolist()
        self.rank: list[int] = self.packed.rank.tolist()
        self.waits: list[list[int]] = [column.tolist() for column in wiring.waits]
        self.times: list[float] = run_clocks(wiring, prices(wiring, Costs())).start.tolist()
        """When each action starts if all F, I and W take equally long."""

    def answered(self, send: Action) -> bool:
        """Whether a gradient comes back for a message."""
        if send.op is not Op.SEND_F or not self.packed.schedule.trains:
            return False
        back = self.packed.rule.receives(Action(send.stage, Op.B, send.microbatch))
        rank_of = self.packed.schedule.placement.rank_of
        return rank_of[send.peer_stage] in {rank_of[receive.peer_stage] for receive in back}


class _Rank:
    """One rank's program, read from its start to its end."""

    def __init__(self, places: _Places, rank: int, window: int) -> None:
        self._places = places
        self._rank = rank
        self._window = window
        self._known: dict[int, int] = defaultdict(lambda: NOWHERE)
        """For each other rank the last action that it is known to have passed."""
        self._kept: dict[tuple[int, Op, bool], deque[tuple[int, Action]]] = defaultdict(deque)
        """Sends that nothing was waited for, by the peer, the op, and whether gradients come back."""
        self._answered: dict[tuple[int, int], bool] = {}

    def program(self) -> Iterator[Entry]:
        """The program with its waits."""
        schedule = self._places.packed.schedule
        number = int(self._places.packed.starts[self._rank])
        for entry in schedule.programs[self._rank]:
            if isinstance(entry, Overlap) or entry.op not in SEND_OPS:
                yield entry
                yield from self._learn(number)
            else:
                kept = self._kept[self._lane(number, entry)]
                if not self._returns(entry):
                    yield from self._make_room(kept, number)
                kept.append((number, entry))
                yield entry
            number += 2 if isinstance(entry, Overlap) else 1
        for kept in self._kept.values():
            yield from (wait_of(send) for _, send in kept)

    def _lane(self, number: int, send: Action) -> tuple[int, Op, bool]:
        peer = self._places.rank[self._places.partner[number]]
        return peer, send.op, self._returns(send)

    def _returns(self, send: Action) -> bool:
        key = send.stage, send.peer_stage
        if send.op is Op.SEND_B:
            return False
        if key not in self._answered:
            self._answered[key] = self._places.answered(send)
        return self._answered[key]

    def _learn(self, number: int) -> Iterator[Action]:
        """The waits that may follow an action, given what it waited for itself."""
        partner, rank = self._places.partner, self._places.rank
        for column in self._places.waits:
            sent = partner[column[number]] if column[number] != NOWHERE else NOWHERE
            if sent != NOWHERE:
                peer = rank[sent]
                self._known[peer] = max(self._known[peer], sent)
                yield from self._taken_by(peer)

    def _taken_by(self, peer: int) -> Iterator[Action]:
        known, partner = self._known[peer], self._places.partner
        for (to, _, _), kept in self._kept.items():
            while to == peer and kept and partner[kept[0][0]] < known:
                yield wait_of(kept.popleft()[1])

    def _make_room(self, kept: deque[tuple[int, Action]], number: int) -> Iterator[Action]:
        """The waits ahead of a send whose window is full."""
        while len(kept) >= self._window and self._posted_before(kept[0][0], number):
            yield wait_of(kept.popleft()[1])

    def _posted_before(self, send: int, number: int) -> bool:
        times, partner = self._places.times, self._places.partner
        return times[partner[send]] < times[number]
