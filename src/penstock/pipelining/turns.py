"""Orders of actions as torch works them out.

Interleaved rows, where messages go, and steps counted by turns.
"""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from penstock.pipelining._utils import PlacementError
from penstock.pipelining.rows import (
    ActionTuple,
    ComputationType,
    Order,
    Row,
    microbatches_of,
    schedule_on,
    to_entry,
    to_tuple,
)
from penstock.schedule import Action, Dependencies, Op, Schedule
from penstock.schedule.action import COMPUTE_OPS, RECV_OPS, SEND_OPS
from penstock.schedule.dependencies import counterpart

# ---- a rank's row of an interleaved schedule, for users who write their own schedules


FORWARD = ComputationType.FORWARD
INPUT = ComputationType.BACKWARD_INPUT
WEIGHT = ComputationType.BACKWARD_WEIGHT
FULL = ComputationType.FULL_BACKWARD


def interleaved_row(  # noqa: PLR0913 - torch's arguments
    n_local_stages: int,
    pp_group_size: int,
    warmup_ops: int,
    fwd_bwd_ops: int,
    cooldown_ops: int,
    rank: int,
    forward_stage_index: Callable[[int], int],
    backward_stage_index: Callable[[int], int],
    num_1f1b_microbatches: int = 0,
    enable_zero_bubble: bool = False,
) -> list[ActionTuple | None]:
    """Forwards, then pairs of a forward and a backward, then backwards; ``None`` where the rank idles.

    Args:
        n_local_stages: the number of stages on the rank.
        pp_group_size: the number of ranks.
        warmup_ops: how many forwards come first.
        fwd_bwd_ops: how many pairs follow.
        cooldown_ops: how many backwards come last.
        rank: whose row it is.
        forward_stage_index: gives the stage of the forward at a position.
        backward_stage_index: gives the stage of the backward at a position.
        num_1f1b_microbatches: with split backwards, how many inputs' halves precede the first weights' half.
        enable_zero_bubble: whether backwards are split in two halves.
    """
    row = _Row(rank)
    for place in range(warmup_ops):
        row.add(FORWARD, forward_stage_index(place))
    if warmup_ops:
        ahead = n_local_stages * pp_group_size + 2 * (pp_group_size - 1 - rank)
        until = pp_group_size - 1 if enable_zero_bubble else ahead - warmup_ops
        row.idle(until - rank)
    owed: deque[int] = deque()
    for place in range(warmup_ops, warmup_ops + fwd_bwd_ops + cooldown_ops):
        if place < warmup_ops + fwd_bwd_ops:
            row.add(FORWARD, forward_stage_index(place))
        elif not enable_zero_bubble:
            row.idle(1)
        stage = backward_stage_index(place)
        row.add(INPUT if enable_zero_bubble else FULL, stage)
        owed.append(stage)
        if enable_zero_bubble and place - warmup_ops >= num_1f1b_microbatches:
            row.add(WEIGHT, owed.popleft())
    for stage in owed if enable_zero_bubble else ():
        row.add(WEIGHT, stage)
    return row.actions


class _Row:
    """A row under construction; each kind of work of a stage takes its microbatches in order."""

    def __init__(self, idle: int) -> None:
        self.actions: list[ActionTuple | None] = [None] * idle
        self._next: Counter[tuple[ComputationType, int]] = Counter()

    def idle(self, count: int) -> None:
        self.actions += [None] * count

    def add(self, kind: ComputationType, stage: int) -> None:
        self.actions.append(ActionTuple(stage, kind, self._next[kind, stage]))
        self._next[kind, stage] += 1


def warm_up(
    rank: int,
    n_local_stages: int,
    microbatches_per_round: int,
    pp_group_size: int,
    n_microbatches: int,
    multiply_factor: int = 2,
) -> int:
    """How many forwards of a rank come before its first backward in an interleaved schedule."""
    least = (n_local_stages - 1) * microbatches_per_round
    ahead = least + multiply_factor * (pp_group_size - 1 - rank)
    return min(ahead, n_microbatches * n_local_stages)


# ---- ranks that take turns, one entry per turn: where torch puts receives, and how it counts steps


Rows = dict[int, list[ActionTuple | None]]
Waiting = dict[int, deque[ActionTuple | None]]


def add_messages(
    compute_actions: Order, stage_to_rank: Callable[[int], int], num_stages: int
) -> Rows:
    """Add every send and receive.

    The ranks take turns. In its turn a rank does its next entry if it can; idle entries are skipped. A send
    follows the action that makes its value, and the receiver posts its receive at the same moment.

    Args:
        compute_actions: each rank's actions, by rank.
        stage_to_rank: the rank of a stage.
        num_stages: how many stages there are.

    Raises:
        PlacementError: no action makes the values that another one needs.
    """
    found = _schedule(compute_actions, stage_to_rank, num_stages)
    if found.communicates:
        return {rank: [action for action in row if action] for rank, row in compute_actions.items()}
    posting = _Posting(compute_actions, found)
    waiting: Waiting = {rank: deque(row) for rank, row in sorted(compute_actions.items()) if row}
    while waiting:
        moved = [rank for rank, row in waiting.items() if posting.takes(rank, row[0])]
        if not moved:
            raise PlacementError(f"no rank can go on; {_next_of(waiting)}")
        for rank in moved:
            waiting[rank].popleft()
        waiting = {rank: row for rank, row in waiting.items() if row}
    return posting.rows


def _schedule(order: Order, stage_to_rank: Callable[[int], int], stages: int) -> Schedule:
    rank_of = [stage_to_rank(stage) for stage in range(stages)]
    return schedule_on(order, rank_of, microbatches_of(order))


def _next_of(waiting: Mapping[int, Row]) -> str:
    heads = ", ".join(f"rank {rank} is at {row[0]}" for rank, row in waiting.items())
    return (
        f"{heads}: check that each value is made before it is used, and each send has its receive"
    )


def _parts(entry: ActionTuple) -> list[Action]:
    found = to_entry(entry)
    return [found] if isinstance(found, Action) else [found.forward, found.backward]


class _Posting:
    """Rows under construction, with sends after their actions and receives on the other ranks."""

    def __init__(self, order: Order, schedule: Schedule) -> None:
        self.rows: Rows = {rank: [] for rank in order}
        self._rule = Dependencies(schedule)
        self._rank_of = schedule.placement.rank_of
        self._done: set[Action] = set()

    def takes(self, rank: int, entry: ActionTuple | None) -> bool:
        """Add an entry, if everything that it needs is there; returns whether it was."""
        if entry is None:
            return True
        parts = _parts(entry)
        if not all(needed in self._done for part in parts for needed in self._before(part)):
            return False
        self.rows[rank].append(entry)
        for part in parts:
            self._done.add(part)
            for send in self._rule.sends(part):
                self._post(rank, send)
        return True

    def _before(self, action: Action) -> Iterator[Action]:
        """What an action needs of other stages: values made on this rank, and receives of others."""
        if action.op not in COMPUTE_OPS:
            return
        home = self._rank_of[action.stage]
        for needed in self._rule.before(action):
            if needed.stage != action.stage and self._rank_of[needed.stage] == home:
                yield needed
        yield from self._rule.receives(action)

    def _post(self, rank: int, send: Action) -> None:
        receive = counterpart(send)
        self.rows[rank].append(to_tuple(send))
        self.rows[self._rank_of[receive.stage]].append(to_tuple(receive))
        self._done |= {send, receive}


def defer_receives(actions: Order, stage_to_rank: Callable[[int], int]) -> Rows:
    """Move each receive to just before the action that needs it.

    Of two ranks, the lower one posts its receives from the other one before it sends to it.

    Args:
        actions: each rank's actions with their messages, by rank.
        stage_to_rank: the rank of a stage.

    Raises:
        PlacementError: nothing needs a receive.
    """
    return {rank: list(_deferred(rank, row, stage_to_rank)) for rank, row in actions.items()}


def _deferred(rank: int, row: Row, rank_of: Callable[[int], int]) -> Iterator[ActionTuple | None]:
    held: dict[Action, ActionTuple] = {}
    for entry in row:
        parts = _parts(entry) if entry else []
        if entry and parts[0].op in RECV_OPS:
            held[parts[0]] = entry
            continue
        for part in parts:
            due = [wait for wait in held if _is_due(wait, part, rank, rank_of)]
            yield from [held.pop(wait) for wait in due]
        yield entry
    if held:
        raise PlacementError(
            f"rank {rank} receives {list(map(str, held))}, which nothing after it needs"
        )


_NEEDS = {Op.F: Op.RECV_F, Op.I: Op.RECV_B, Op.B: Op.RECV_B}


def _is_due(held: Action, part: Action, rank: int, rank_of: Callable[[int], int]) -> bool:
    """Whether a receive must stand before an action: its user, or a send to the rank it comes from."""
    if part.op in SEND_OPS:
        peer = rank_of(part.peer_stage)
        return rank < peer == rank_of(held.peer_stage)
    return (held.stage, held.op, held.microbatch) == (
        part.stage,
        _NEEDS.get(part.op),
        part.microbatch,
    )


def count_steps(
    pipeline_order: Order, stage_to_rank: Callable[[int], int], num_stages: int
) -> Rows:
    """Each rank's actions by step, ``None`` where it idles: a dry run in which every action takes one step.

    An action may run in the same step as what it needs, if that rank's turn came first; ranks that found
    nothing to do have a second turn. For realistic times use ``penstock.schedule.simulate``.

    Args:
        pipeline_order: each rank's actions with their messages, by rank.
        stage_to_rank: the rank of a stage.
        num_stages: how many stages there are.

    Raises:
        PlacementError: it never ends.
    """
    steps = _Steps(pipeline_order, _schedule(pipeline_order, stage_to_rank, num_stages))
    while steps.waiting:
        steps.take()
    return steps.rows


class _Steps:
    """A dry run, step by step."""

    def __init__(self, order: Order, schedule: Schedule) -> None:
        self.rows: Rows = {rank: [] for rank in sorted(order)}
        rows = {rank: deque(a for a in order[rank] if a) for rank in sorted(order)}
        self.waiting = {rank: row for rank, row in rows.items() if row}
        self._rule = Dependencies(schedule)
        self._done: set[Action] = set()
        self._missing = {rank: self._needs(rank) for rank in self.waiting}

    def take(self) -> None:
        """Do one step of all ranks that have something left."""
        for rank in self.waiting:
            self.rows[rank].append(self._turn(rank))
        if all(self.rows[rank][-1] is None for rank in self.waiting):
            raise PlacementError(f"the schedule never ends; {_next_of(self.waiting)}")
        self._drop_finished()
        for rank in self.waiting:
            if self.rows[rank][-1] is None:
                self.rows[rank][-1] = self._turn(rank)
        self._drop_finished()

    def _turn(self, rank: int) -> ActionTuple | None:
        missing = self._missing[rank]
        while missing and missing[-1] in self._done:
            missing.pop()
        if missing:
            return None
        entry = self.waiting[rank].popleft()
        self._done.update(_parts(entry))
        self._missing[rank] = self._needs(rank)
        return entry

    def _needs(self, rank: int) -> list[Action]:
        """What must be done before a rank's next entry."""
        ahead = _parts(self.waiting[rank][0]) if self.waiting[rank] else []
        return [needed for part in ahead for needed in self._rule.before(part)]

    def _drop_finished(self) -> None:
        self.waiting = {rank: row for rank, row in self.waiting.items() if row}


def write_trace(schedule: Order, filename: str | Path) -> None:
    """Write actions by step as a Chrome trace, with one process per rank and one microsecond per step."""
    events = [
        _event(rank, step, action)
        for rank in sorted(schedule)
        for step, action in enumerate(schedule[rank])
        if action is not None
    ]
    Path(filename).write_text(json.dumps({"traceEvents": events}), encoding="utf-8")


def _event(rank: int, step: int, action: ActionTuple) -> dict[str, object]:
    kind = "computation" if action.is_compute_op else "communication"
    place = {"pid": rank, "tid": rank, "ts": step, "dur": 1}
    return {"name": str(action), "cat": kind, "ph": "X", **place}


def span_name(action: ActionTuple) -> str:
    """The name of an action in a profile."""
    return f"PP:{action}"


def completes_weights(action_type: ComputationType) -> bool:
    """Whether a kind of work computes gradients of weights."""
    return action_type in (ComputationType.BACKWARD_WEIGHT, ComputationType.FULL_BACKWARD)
