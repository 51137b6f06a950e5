"""The proof against its meaning: validate agrees with an executor on thousands of programs."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from penstock.schedule import (
    Edge,
    Schedule,
    add_communication,
    build,
    compose,
    merge_backward,
    names,
    offload,
    parse_action,
    prefetch,
    reduce_gradients,
    simulate,
    validate,
    wait_for_sends,
)
from penstock.schedule.action import Entry
from tests.schedule.executor import fault

Programs = list[list[Entry]]
PASSES = (
    merge_backward,
    add_communication,
    wait_for_sends,
    prefetch,
    reduce_gradients,
    offload,
)


def swap(programs: Programs, pick: random.Random) -> None:
    """Two entries of a rank change places; next to each other as often as not."""
    program = pick.choice(programs)
    if len(program) > 1:
        i = pick.randrange(len(program) - 1)
        j = i + 1 if pick.random() < 0.5 else pick.randrange(len(program))
        program[i], program[j] = program[j], program[i]


def move(programs: Programs, pick: random.Random) -> None:
    """An entry goes elsewhere in its program."""
    program = pick.choice(programs)
    if program:
        entry = program.pop(pick.randrange(len(program)))
        program.insert(pick.randint(0, len(program)), entry)


def drop(programs: Programs, pick: random.Random) -> None:
    program = pick.choice(programs)
    if program:
        program.pop(pick.randrange(len(program)))


def duplicate(programs: Programs, pick: random.Random) -> None:
    program = pick.choice(programs)
    if program:
        program.insert(pick.randint(0, len(program)), pick.choice(program))


def migrate(programs: Programs, pick: random.Random) -> None:
    """An entry goes to another rank."""
    source, target = pick.choice(programs), pick.choice(programs)
    if source:
        entry = source.pop(pick.randrange(len(source)))
        target.insert(pick.randint(0, len(target)), entry)


MUTATIONS = (swap, move, drop, duplicate, migrate)


def valid(pick: random.Random) -> Schedule:
    """A valid schedule of a random kind, size, edge table and lowering."""
    kinds = (*names(), "Seq1F1B")
    name = pick.choice([n for n in kinds if n != "DualPipeV" or pick.random() < 0.5])
    p = pick.randint(1, 3)
    m = pick.randint(2 * p, 2 * p + 1) if name == "DualPipeV" else pick.randint(1, 4)
    slices = pick.randint(1, 3) if name == "Seq1F1B" else None
    made = build(name, ranks=p, microbatches=m, slices=slices)
    if made.stages > 2 and pick.random() < 0.3:
        skips = Edge("skip", 0, tuple(sorted(pick.sample(range(1, made.stages), 2))))
        made = made.with_edges((*made.edges, skips))
    return compose(*pick.sample(PASSES, pick.randint(0, len(PASSES))))(made)


def mutated(schedule: Schedule, pick: random.Random, times: int) -> Schedule:
    programs = [list(program) for program in schedule.programs]
    for _ in range(times):
        pick.choice(MUTATIONS)(programs, pick)
    return schedule.with_programs(programs)


def check_agreement(schedule: Schedule) -> bool:
    report, found = validate(schedule), fault(schedule)
    assert report.ok == (found is None), f"{schedule}\n{report}\nexecutor: {found}"
    assert all(problem.what and problem.remedy for problem in report.problems)
    if report.ok:
        assert simulate(schedule).makespan > 0
        blocking = validate(schedule, blocking_sends=True)
        assert (
            blocking.ok
            == report.survives_blocking_sends
            == (fault(schedule, blocking=True) is None)
        )
    return report.ok


@pytest.mark.slow
@pytest.mark.parametrize("count", [400, pytest.param(4000, marks=pytest.mark.nightly)])
def test_the_proof_agrees_with_the_executor_on_many_programs(count: int) -> None:
    pick = random.Random(20)
    verdicts = Counter(
        check_agreement(mutated(valid(pick), pick, pick.randint(0, 4))) for _ in range(count)
    )
    assert min(verdicts.values()) > count / 10


def test_shuffled_programs_agree_too() -> None:
    """Random orders that keep each rank's own dependencies mostly: most of these wait in circles."""
    pick = random.Random(7)
    for _ in range(60):
        made = valid(pick)
        rows = [sorted(p, key=lambda e: pick.random() * 3 + p.index(e)) for p in made.programs]
        check_agreement(made.with_programs(rows))


def test_gradients_that_nobody_makes_are_reported_without_a_backward_too() -> None:
    """Found by the test above: a reduction, or a gradient message, in a schedule that does not train."""
    plain = build("forward-only", ranks=2, microbatches=1)
    first, second = plain.programs
    for extra in ("0REDUCE_GRAD", "0SEND_F0 0RECV_B0"):
        made = plain.with_programs([(*first, *map(parse_action, extra.split())), second])
        assert not check_agreement(made)
