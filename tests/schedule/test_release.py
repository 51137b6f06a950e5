"""Waits for sends: each where it holds nothing up, so that few messages are kept."""

from __future__ import annotations

import random
from collections import Counter, defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import ScheduleError, UsageError
from penstock.schedule import (
    Action,
    Edge,
    Op,
    Schedule,
    add_communication,
    build,
    names,
    release_sends,
    remove_wait_sends,
    validate,
)
from penstock.schedule.action import SEND_OPS, WAIT_SEND_OPS
from penstock.schedule.base import flat
from penstock.schedule.dependencies import counterpart
from tests.schedule.executor import Executor, Fault, fault
from tests.schedule.test_passes import rows
from tests.schedule.test_proof import mutated, valid

BOUNDLESS = 10**6


def lowered(name: str, ranks: int, microbatches: int) -> Schedule:
    return add_communication(build(name, ranks=ranks, microbatches=microbatches))


def random_schedule(pick: random.Random) -> Schedule:
    """A valid schedule with messages, often not quite one of the library."""
    while True:
        made = remove_wait_sends(add_communication(valid(pick)))
        changed = mutated(made, pick, pick.randint(0, 3))
        if validate(changed).ok:
            return changed
        if validate(made).ok:
            return made


def kept(schedule: Schedule) -> dict[tuple[int, int, str], int]:
    """For each channel the most messages that are sent and not waited for."""
    rank_of = schedule.placement.rank_of
    now: Counter[tuple[int, int, str]] = Counter()
    most: dict[tuple[int, int, str], int] = defaultdict(int)
    for rank in range(schedule.ranks):
        for action in schedule.actions(rank):
            if action.op in SEND_OPS | WAIT_SEND_OPS:
                channel = rank, rank_of[action.peer_stage], action.op.value[-1]
                now[channel] += 1 if action.op in SEND_OPS else -1
                most[channel] = max(most[channel], now[channel])
    return dict(most)


def test_what_came_back_says_what_was_taken() -> None:
    made = release_sends(lowered("1F1B", 2, 3))
    assert rows(made) == [
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0RECV_B1 0B0 0WAIT_SEND_F0 0WAIT_SEND_F1 "
        "0F2 0SEND_F2 0RECV_B2 0B1 0WAIT_SEND_F2 0B2",
        "1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1RECV_F2 1F1 1B1 1SEND_B1 "
        "1F2 1WAIT_SEND_B0 1WAIT_SEND_B1 1B2 1SEND_B2 1WAIT_SEND_B2",
    ]


def test_where_nothing_comes_back_a_window_bounds_it() -> None:
    made = release_sends(lowered("forward-only", 2, 4), window=2)
    assert rows(made) == [
        "0F0 0SEND_F0 0F1 0SEND_F1 0F2 0WAIT_SEND_F0 0SEND_F2 0F3 0WAIT_SEND_F1 0SEND_F3 "
        "0WAIT_SEND_F2 0WAIT_SEND_F3",
        "1RECV_F0 1RECV_F1 1F0 1RECV_F2 1F1 1RECV_F3 1F2 1F3",
    ]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    "name", [n for n in names() if n not in {"GPipe", "LoopedBFS", "DualPipeV"}]
)
def test_few_messages_are_kept_however_many_there_are(name: str, ranks: int) -> None:
    few, many = (kept(release_sends(lowered(name, ranks, m))) for m in (16, 64))
    assert few == many


@pytest.mark.parametrize("name", ["GPipe", "DualPipeV"])
def test_gradients_have_a_window_where_forwards_wait_for_them(name: str) -> None:
    """Not in LoopedBFS: it does a whole stage's backwards before it takes the next gradient."""
    found = kept(release_sends(lowered(name, 2, 32)))
    assert max(count for (_, _, kind), count in found.items() if kind == "B") <= 8


def test_a_value_without_gradient_has_a_window() -> None:
    """A mask from stage 0 to stage 2: nothing comes back to stage 0 from there."""
    plain = build("1F1B", ranks=4, microbatches=64)
    mask = Edge("mask", 0, (2,), gradient=False)
    made = add_communication(plain.with_edges((*plain.edges, mask)))
    assert kept(release_sends(made))[0, 2, "F"] <= 6


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32), window=st.sampled_from([1, 2, 4, BOUNDLESS]))
def test_what_completes_still_completes(seed: int, window: int) -> None:
    made = random_schedule(random.Random(seed))
    released = release_sends(made, window=window)
    assert fault(released) is None
    assert validate(released).ok
    assert remove_wait_sends(released) == made


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_every_send_has_one_wait_behind_it(seed: int) -> None:
    made = release_sends(random_schedule(random.Random(seed)))
    for rank in range(made.ranks):
        actions = [a for a in made.actions(rank) if a.op in SEND_OPS | WAIT_SEND_OPS]
        sent = [a for a in actions if a.op in SEND_OPS]
        waits = [a for a in actions if a.op in WAIT_SEND_OPS]
        assert Counter(map(counterpart, waits)) == Counter(sent)
        assert all(actions.index(counterpart(wait)) < actions.index(wait) for wait in waits)


class Wayward(Executor):
    """Lets ranks run in any order, and none stand at a wait for a send that more follows."""

    def __init__(self, schedule: Schedule, pick: random.Random) -> None:
        super().__init__(schedule)
        self.pick = pick

    def run(self) -> None:
        while any(self.advance(rank) for rank in self.order()):
            self.look()
        assert [*self.at] == [len(program) for program in self.schedule.programs]

    def order(self) -> list[int]:
        """Some ranks run ahead as long as they can."""
        ranks = list(range(self.schedule.ranks))
        self.pick.shuffle(ranks)
        return ranks

    def look(self) -> None:
        for rank, program in enumerate(self.schedule.programs):
            rest = list(flat(program[self.at[rank] :]))
            stands = bool(rest) and rest[0].op in WAIT_SEND_OPS and not self.may(rank, rest[0])
            if stands and not all(action.op in WAIT_SEND_OPS for action in rest):
                raise Fault(f"rank {rank} stands at {rest[0]}")


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_a_wait_for_what_came_back_never_holds_a_rank_up(seed: int) -> None:
    pick = random.Random(seed)
    Wayward(release_sends(random_schedule(pick), window=BOUNDLESS), pick).run()


def test_the_test_above_finds_waits_that_come_too_early() -> None:
    """Right behind its SEND a wait does hold a rank up, where the other is late."""
    made = lowered("1F1B", 2, 3)
    early = made.with_programs(
        [e for entry in p for e in (entry, *wait_at_once(entry))] for p in made.programs
    )
    with pytest.raises(Fault, match="rank 0 stands at 0WAIT_SEND_F"):
        wander(early)


def wander(schedule: Schedule) -> None:
    """Run a schedule in twenty ways."""
    pick = random.Random(0)
    for _ in range(20):
        Wayward(schedule, pick).run()


def wait_at_once(entry: object) -> list[Action]:
    if isinstance(entry, Action) and entry.op is Op.SEND_F:
        return [entry._replace(op=Op.WAIT_SEND_F)]
    return []


def test_nothing_to_do_changes_nothing() -> None:
    plain = build("1F1B", ranks=2, microbatches=2)
    released = release_sends(add_communication(plain))
    assert release_sends(plain) is plain
    assert release_sends(released) is released
    alone = add_communication(build("1F1B", ranks=1, microbatches=2))
    assert release_sends(alone) is alone


def test_what_does_not_complete_is_refused() -> None:
    made = lowered("1F1B", 2, 2)
    with pytest.raises(ScheduleError, match="does not complete"):
        release_sends(made.with_programs([made.programs[0], made.programs[1][1:]]))
    with pytest.raises(UsageError, match="window=0: must be at least 1"):
        release_sends(made, window=0)
