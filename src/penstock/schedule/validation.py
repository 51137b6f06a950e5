"""Proof that a schedule completes, or every reason why it does not.

It is proven for this meaning of the actions: SEND and RECV *post* and return. A message is complete when both
ends have posted it and the earlier ones on its channel are complete; there is one first-in first-out channel
per ordered pair of ranks and kind of message. A compute action waits for what it needs, WAIT_SEND for its
message. An overlapped pair starts when both its halves may.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ScheduleError
from penstock.schedule.action import (
    COMPUTE_OPS,
    GRADIENT_OPS,
    MESSAGE_OPS,
    SEND_OPS,
    Action,
    Op,
)
from penstock.schedule.base import Schedule, paused_collection
from penstock.schedule.dependencies import Half, Need, counterpart
from penstock.schedule.packed import NOWHERE, OPS, Block, Column, Packed, Wiring


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a schedule.

    Attributes:
        rank: the rank whose program is wrong; ``None`` where it is not a single one.
        position: the place in that program, from 0; ``None`` for what is missing.
        action: the action.
        what: what is wrong.
        remedy: what to change.
    """

    rank: int | None
    position: int | None
    action: Action | None
    what: str
    remedy: str

    def __str__(self) -> str:
        rank = None if self.rank is None else f"rank {self.rank}"
        position = None if self.position is None else f"position {self.position}"
        action = None if self.action is None else str(self.action)
        where = ", ".join(part for part in (rank, position, action) if part is not None)
        return f"{where}: {self.what}; {self.remedy}"


@dataclass(frozen=True)
class Report:
    """What :func:`validate` found.

    Attributes:
        schedule: the name of the schedule.
        problems: everything that is wrong; empty for a schedule that is proven to complete.
        survives_blocking_sends: whether it would also complete if each SEND waited for its RECV.
    """

    schedule: str
    problems: tuple[Problem, ...]
    survives_blocking_sends: bool

    @property
    def ok(self) -> bool:
        """Whether the schedule is proven to complete."""
        return not self.problems

    def raise_if_bad(self) -> None:
        """Refuse a schedule with problems.

        Raises:
            ScheduleError: there are problems; the message lists them all.
        """
        if self.problems:
            raise ScheduleError(str(self))

    def __str__(self) -> str:
        if self.ok:
            sends = "also" if self.survives_blocking_sends else "not"
            return f"{self.schedule}: valid; {sends} with blocking sends"
        head = f"{self.schedule}: {len(self.problems)} problem(s)"
        return "\n".join((head, *(f"  {problem}" for problem in self.problems)))


@paused_collection()
def validate(schedule: Schedule) -> Report:
    """Prove that a schedule completes, in time linear in its actions.

    Args:
        schedule: with its messages spelled out, or without; then values are simply there when needed.

    Returns:
        A report with every problem at once.
    """
    wiring = Wiring(schedule)
    packed = wiring.packed
    problems = [problem for check in CHECKS for problem in check(wiring)]
    progress = run(wiring)
    if not progress.complete:
        number, path = circle(packed, progress)
        what = f"a circle of waits, which never ends: {' -> '.join(path)}"
        remedy = "move one of these actions before the one it holds up"
        problems.append(_at(packed, number, what, remedy))
    blocking = not problems and run(wiring, blocking_sends=True).complete
    return Report(schedule.name, tuple(problems), blocking)


# ---- what can be wrong with a schedule: one function for each kind of problem


Check = Callable[[Wiring], Iterator[Problem]]


def missing(wiring: Wiring) -> Iterator[Problem]:
    """Each stage runs each microbatch forward, and where the schedule trains, backward once."""
    packed = wiring.packed
    schedule = packed.schedule
    for stage in range(schedule.stages):
        yield from _absent(packed, Need(stage, Op.F))
        if schedule.trains:
            yield from _absent(packed, Need(stage, Half.INPUT))
            yield from _absent(packed, Need(stage, Half.WEIGHT))


def _absent(packed: Packed, need: Need) -> Iterator[Problem]:
    found = packed.find(need)
    if need.op is Half.WEIGHT:
        # A microbatch that has neither I nor B is reported for the input half already.
        found = np.where(packed.find(Need(need.stage, Half.INPUT)) == NOWHERE, 0, found)
    for microbatch in np.flatnonzero(found == NOWHERE).tolist():
        action = packed.rule.settle(need, microbatch)
        rank = packed.schedule.placement.rank_of[need.stage]
        remedy = f"add {action} to the program of rank {rank}"
        yield Problem(rank, None, action, "missing", remedy)


def duplicate(wiring: Wiring) -> Iterator[Problem]:
    """No action occurs twice but UNSHARD and RESHARD; no microbatch has both B and I or W."""
    packed = wiring.packed
    first = packed.first
    again = (first != np.arange(len(first))) & ~packed.having(frozenset({Op.UNSHARD, Op.RESHARD}))
    for number in np.flatnonzero(again).tolist():
        there = packed.position(int(first[number]))
        rank = packed.rank[first[number]]
        what = f"stands already at position {there} of rank {rank}"
        yield _at(packed, number, what, "remove one of the two")
    yield from _both_backwards(packed)


def _both_backwards(packed: Packed) -> Iterator[Problem]:
    if not {Op.B, Op.I} <= packed.schedule.ops and not {Op.B, Op.W} <= packed.schedule.ops:
        return
    for stage in range(packed.schedule.stages):
        full = packed.find(Need(stage, Op.B))
        for op in (Op.I, Op.W):
            half = packed.find(Need(stage, op))
            for number in half[(full != NOWHERE) & (half != NOWHERE)].tolist():
                what = f"the microbatch has a full backward as well ({Op.B.value} = I and W)"
                yield _at(packed, number, what, "keep either B, or I and W")


def wrong_rank(wiring: Wiring) -> Iterator[Problem]:
    """Every action stands on the rank that holds its stage."""
    packed = wiring.packed
    rank_of = np.array(packed.schedule.placement.rank_of, np.int32)
    for number in np.flatnonzero(rank_of[packed.stage] != packed.rank).tolist():
        home = int(rank_of[packed.stage[number]])
        what = f"stage {packed.stage[number]} is on rank {home}"
        yield _at(packed, number, what, f"move it to rank {home}")


def order(wiring: Wiring) -> Iterator[Problem]:
    """What an action needs stands before it on its own rank, which also posts the messages that it needs."""
    packed = wiring.packed
    for block in wiring.blocks:
        late = wiring.late(block)
        if late.any():
            for after, before in zip(
                block.after[late].tolist(), block.before[late].tolist(), strict=True
            ):
                needed = packed.action(before)
                what = f"needs {needed}, which stands later, at position {packed.position(before)}"
                yield _at(packed, after, what, f"move {needed} before it")
        yield from _unmet(packed, block)


def _unmet(packed: Packed, block: Block) -> Iterator[Problem]:
    """Needs that nothing meets, except for computing actions, which are reported as missing already."""
    lacking = np.flatnonzero(block.before == NOWHERE)
    computes = isinstance(block.need.op, Half) or block.need.op in COMPUTE_OPS
    if computes and (packed.schedule.trains or block.need.op is Op.F):
        return
    for i in lacking.tolist():
        action = packed.rule.settle(block.need, int(block.microbatch[i]))
        if block.lane.op in MESSAGE_OPS:
            what = f"no rank has the {action.op.value} at its other end"
        else:
            what = f"needs {action}, which is in no program"
        home = packed.schedule.placement.rank_of[action.stage]
        yield _at(packed, int(block.after[i]), what, f"add {action} to rank {home}")


def unreceived(wiring: Wiring) -> Iterator[Problem]:
    """Every SEND has its RECV."""
    packed = wiring.packed
    lonely = packed.having(SEND_OPS) & (wiring.partner == NOWHERE)
    for number in np.flatnonzero(lonely).tolist():
        receive = counterpart(packed.action(number))
        home = packed.schedule.placement.rank_of[receive.stage]
        what = f"no rank has the {receive.op.value} at its other end"
        yield _at(packed, number, what, f"add {receive} to rank {home}, or remove it")


def purposeless(wiring: Wiring) -> Iterator[Problem]:
    """Every message carries a value of the edge table to another rank."""
    packed = wiring.packed
    known = _messages(packed)
    for lane, at in packed.lanes():
        if lane.op in SEND_OPS and (lane.stage, lane.op, lane.peer) not in known:
            for number in at[at != NOWHERE].tolist():
                what = "no edge carries such a message between these stages' ranks"
                yield _at(
                    packed, number, what, "remove it and its RECV, or give the schedule the edge"
                )


def _messages(packed: Packed) -> set[tuple[int, Op, int | None]]:
    sends = (
        send
        for stage in range(packed.schedule.stages)
        for op in (Op.F, *GRADIENT_OPS)
        for send in packed.rule.sends(Action(stage, op, 0))
    )
    return {(send.stage, send.op, send.peer) for send in sends}


def channels(wiring: Wiring) -> Iterator[Problem]:
    """Both ends of a channel have its messages in the same order."""
    packed = wiring.packed
    sends = np.flatnonzero(packed.having(SEND_OPS) & (wiring.partner != NOWHERE))
    received = wiring.partner[sends]
    key = (
        packed.rank[sends].astype(np.int64) * packed.schedule.ranks + packed.rank[received]
    ) * len(OPS)
    key += packed.op[sends]
    grouped = np.argsort(key, kind="stable")
    sends, received, key = sends[grouped], received[grouped], key[grouped]
    crossed = (key[1:] == key[:-1]) & (received[1:] < received[:-1])
    for i in np.flatnonzero(crossed).tolist():
        earlier, later = packed.action(int(received[i])), packed.action(int(received[i + 1]))
        rank = packed.rank[received[i]]
        what = (
            f"is sent after {packed.action(int(sends[i]))}, but rank {rank} posts {later} "
            f"(position {packed.position(int(received[i + 1]))}) before {earlier} "
            f"(position {packed.position(int(received[i]))})"
        )
        yield _at(packed, int(sends[i + 1]), what, "give both ends of the channel the same order")


def shards(wiring: Wiring) -> Iterator[Problem]:
    """Stages that are gathered and freed are gathered whenever they compute."""
    packed = wiring.packed
    if Op.UNSHARD not in packed.schedule.ops:
        return
    by_stage = np.argsort(packed.stage, kind="stable")
    ends = np.searchsorted(packed.stage[by_stage], np.arange(packed.schedule.stages + 1))
    for stage in range(packed.schedule.stages):
        if packed.rule.shards(stage):
            yield from _shard_states(packed, by_stage[ends[stage] : ends[stage + 1]])


def _shard_states(packed: Packed, numbers: NDArray[np.int64]) -> Iterator[Problem]:
    gathered = False
    for number in numbers.tolist():
        op = OPS[packed.op[number]]
        if op is Op.UNSHARD and gathered:
            yield _at(packed, number, "the stage is unsharded already", "remove it")
        needs = op in COMPUTE_OPS or op is Op.RESHARD
        if needs and not gathered:
            what = "runs while the stage is not unsharded"
            yield _at(packed, number, what, f"put {packed.stage[number]}UNSHARD before it")
        if op in (Op.UNSHARD, Op.RESHARD):
            gathered = op is Op.UNSHARD


CHECKS: tuple[Check, ...] = (
    missing,
    duplicate,
    wrong_rank,
    order,
    unreceived,
    purposeless,
    channels,
    shards,
)


def _at(packed: Packed, number: int, what: str, remedy: str) -> Problem:
    """A problem of the action with this number."""
    rank, position = int(packed.rank[number]), packed.position(number)
    return Problem(rank, position, packed.action(number), what, remedy)


# ---- run all programs as far as they get, and tell who waits for whom where they stop


@dataclass(frozen=True)
class Progress:
    """How far the ranks got.

    Attributes:
        reached: for each rank the number of the action at which it stopped, or one past its last.
        waits_for: for each rank that stopped early, the action it waits for.
        complete: whether all ranks got to their end.
    """

    reached: list[int]
    waits_for: dict[int, int]
    complete: bool


@dataclass(frozen=True)
class _Waits:
    """All waits, one per line, by rank and place: ``after[i]`` may start once ``before[i]`` is done."""

    after: list[int]
    before: list[int]
    holder: list[int]
    """The rank of ``before[i]``."""
    first: list[int]
    """For each rank its first line, and after these one past the last line of all."""


def run(wiring: Wiring, *, blocking_sends: bool = False) -> Progress:
    """Run all programs, with sends that return at once or with sends that wait for their RECV.

    A need that nothing meets counts as met: it is reported by itself, and others can still be found.
    """
    packed = wiring.packed
    waits = _waits(wiring, blocking_sends)
    lines = waits.first[:-1]
    ends = waits.first[1:]
    reached = packed.starts[:-1].tolist()
    last = packed.starts[1:].tolist()
    sleepers: list[list[tuple[int, int]]] = [[] for _ in reached]
    stands: dict[int, int] = {}
    ready = deque(range(len(reached)))
    while ready:
        rank = ready.popleft()
        stands.pop(rank, None)
        line = _advance(rank, waits, lines[rank], ends[rank], reached)
        lines[rank] = line
        reached[rank] = last[rank] if line == ends[rank] else waits.after[line]
        if line < ends[rank]:
            stands[rank] = waits.before[line]
            heappush(sleepers[waits.holder[line]], (waits.before[line], rank))
        asleep = sleepers[rank]
        while asleep and asleep[0][0] < reached[rank]:
            ready.append(heappop(asleep)[1])
    return Progress(reached, stands, not stands)


def _advance(rank: int, waits: _Waits, line: int, end: int, reached: list[int]) -> int:
    """The first wait of a rank, from ``line`` on, that is not over yet."""
    before, holder = waits.before, waits.holder
    while line < end:
        holds = holder[line]
        if before[line] >= reached[holds] and (holds != rank or before[line] >= waits.after[line]):
            break
        line += 1
    return line


def _waits(wiring: Wiring, blocking_sends: bool) -> _Waits:
    packed = wiring.packed
    columns = [*wiring.waits, *([_blocking(packed)] if blocking_sends else [])]
    after = [np.flatnonzero(column != NOWHERE) for column in columns]
    before = [column[at] for column, at in zip(columns, after, strict=True)]
    ends = [_other_end(wiring, numbers) for numbers in before]
    afters, befores = _concatenate(after), _concatenate(ends)
    met = befores != NOWHERE
    afters, befores = afters[met], befores[met]
    if len(columns) > 1:
        order = np.argsort(afters, kind="stable")
        afters, befores = afters[order], befores[order]
    return _Waits(
        afters.tolist(),
        befores.tolist(),
        packed.rank[befores].tolist(),
        np.searchsorted(afters, packed.starts).tolist(),
    )


def _concatenate(parts: list[Column] | list[NDArray[np.int64]]) -> NDArray[np.int64]:
    return np.concatenate([*parts, np.empty(0, np.int64)]).astype(np.int64)


def _blocking(packed: Packed) -> Column:
    sends = packed.having(SEND_OPS)
    return np.where(sends, np.arange(len(packed), dtype=np.int32), np.int32(NOWHERE))


def _other_end(wiring: Wiring, numbers: Column) -> Column:
    """What a wait is for: the other end of a message, or else the action itself."""
    return np.where(wiring.packed.messages[numbers], wiring.partner[numbers], numbers)


def circle(packed: Packed, progress: Progress) -> tuple[int, list[str]]:
    """A circle of ranks that wait for each other: where the first one stopped, and all of it in words."""
    rank = next(iter(progress.waits_for))
    seen: list[int] = []
    while rank not in seen:
        seen.append(rank)
        rank = int(packed.rank[progress.waits_for[rank]])
    around = seen[seen.index(rank) :]
    return progress.reached[rank], list(_tell(packed, progress, around))


def _tell(packed: Packed, progress: Progress, ranks: list[int]) -> Iterator[str]:
    for rank in ranks:
        stands = packed.action(progress.reached[rank])
        awaited = progress.waits_for[rank]
        yield f"rank {rank} at {stands} waits for {packed.action(awaited)} of rank {packed.rank[awaited]}"
