"""One order for all ranks' actions, complete and right; what does not complete is in test_validation."""

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
