"""One order for all ranks' actions: complete, right, and with a deadlock named."""

from time import process_time

import pytest

from penstock.errors import ScheduleError
from penstock.schedule import (
    Action,
    Dependencies,
    Placement,
    Schedule,
    add_communication,
    build,
    compute_only,
    merged,
    names,
    parse_action,
    prefetch,
    reduce_gradients,
    simulate,
    validate,
)


@pytest.mark.parametrize("name", names())
def test_every_action_comes_once_and_after_what_it_needs(name: str) -> None:
    schedule = reduce_gradients(prefetch(build(name, ranks=4, microbatches=9)))
    order = merged(schedule)
    rule = Dependencies(schedule)
    done: set[Action] = set()
    for action in order:
        assert done.issuperset(rule.before(action)), action
        done.add(action)
    for rank in range(schedule.ranks):
        stages = schedule.placement.stages_on(rank)
        assert [a for a in order if a.stage in stages] == list(schedule.actions(rank))


@pytest.mark.timeout(120)
def test_large_schedules_take_seconds_linear_in_their_actions() -> None:
    """Build, add messages, prove, simulate: 1.3 s of a processor where torch's own functions take 5.

    The limits leave room for a machine that others keep busy.
    """
    figures = []
    for microbatches in (64, 256):
        start = process_time()
        made = build("Interleaved1F1B", ranks=64, microbatches=microbatches, stages_per_rank=2)
        made = add_communication(made)
        assert validate(made).ok
        assert simulate(made).makespan == 3 * (2 * microbatches + 63)
        figures.append((process_time() - start) / sum(map(len, made.programs)))
        start = process_time()
        assert len(merged(made)) == 2 * 128 * microbatches
        assert process_time() - start < 10
    assert figures[1] * sum(map(len, made.programs)) < 13
    assert figures[1] < 3 * figures[0]


def test_messages_are_left_out_and_pairs_stay_together() -> None:
    schedule = build("DualPipeV", ranks=2, microbatches=4)
    order = merged(add_communication(schedule))
    assert order == merged(schedule)
    assert set(order) == {a for rank in range(2) for a in compute_only(schedule).actions(rank)}
    for pair in schedule.pairs:
        assert order.index(pair.backward) == order.index(pair.forward) + 1


def rows(*programs: str) -> Schedule:
    entries = tuple(tuple(map(parse_action, program.split())) for program in programs)
    return Schedule("mine", Placement((0, 1)), 2, entries)


@pytest.mark.parametrize(
    ("programs", "gist"),
    [
        (("0B0 0F0", "1F0 1B0"), "rank 0, position 0, 0B0: needs 0F0, which stands later"),
        (("0F0 0B0", "1F0"), "0B0: needs 1B0, which is in no program"),
        (("0F0 0B0 1F0", "1B0"), "1F0: stage 1 is on rank 1"),
        (
            ("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"),
            "deadlock: rank 0 at 0B0 waits for 1B0 of rank 1 -> rank 1 at 1F1 waits for 0F1 of",
        ),
    ],
)
def test_what_does_not_complete_is_refused_and_a_deadlock_names_who_waits_for_whom(
    programs: tuple[str, ...], gist: str
) -> None:
    with pytest.raises(ScheduleError, match=gist):
        merged(rows(*programs))
