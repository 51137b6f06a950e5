"""One order for all ranks' actions, complete and right; what does not complete is in test_validation."""

from time import process_time

import pytest

from penstock.schedule import (
    Action,
    Dependencies,
    add_communication,
    build,
    compute_only,
    merged,
    names,
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


def test_messages_are_left_out_and_pairs_stay_together() -> None:
    schedule = build("DualPipeV", ranks=2, microbatches=4)
    order = merged(add_communication(schedule))
    assert order == merged(schedule)
    assert set(order) == {a for rank in range(2) for a in compute_only(schedule).actions(rank)}
    for pair in schedule.pairs:
        assert order.index(pair.backward) == order.index(pair.forward) + 1


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
