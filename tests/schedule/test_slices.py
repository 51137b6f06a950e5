"""Schedules that cut the sequences of microbatches into slices."""

from __future__ import annotations

from itertools import product

import pytest

from penstock.errors import ScheduleError, UsageError
from penstock.schedule import (
    Action,
    Costs,
    Op,
    Schedule,
    Slice,
    add_communication,
    build,
    draw_svg,
    draw_text,
    from_csv,
    from_json,
    looped,
    matching,
    merged,
    names,
    offload,
    parse_action,
    simulate,
    to_csv,
    to_json,
    validate,
)
from penstock.schedule.action import Program


def program(text: str) -> Program:
    return tuple(map(parse_action, text.split()))


def one_rank(text: str, microbatches: int = 1, slices: int = 2) -> Schedule:
    return Schedule("test", looped(1), microbatches, (program(text),), slices=slices)


def test_a_slice_follows_its_microbatch_in_text() -> None:
    for text, microbatch in {"2F0.1": Slice(0, 1), "0SEND_F3.0@5": Slice(3, 0)}.items():
        action = parse_action(text)
        assert (str(action), action.microbatch) == (text, microbatch)  # type: ignore[union-attr]
    for text in ("2F0.", "2F.1", "2F0.01", "0UNSHARD0.1", "2F0.1.2"):
        with pytest.raises(ScheduleError):
            parse_action(text)


def test_a_pattern_matches_all_slices_or_one() -> None:
    first, second, other = (Action(3, Op.F, Slice(*which)) for which in ((0, 0), (0, 1), (1, 1)))
    for pattern, matched in {
        "3F0": [first, second],
        "3F0.1": [second],
        "3F*": [first, second, other],
    }.items():
        assert [*filter(matching(pattern), (first, second, other))] == matched


@pytest.mark.parametrize(
    ("text", "slices", "says"),
    [
        ("0F0.0", 1, "0F0.0: the schedule has no slices; give it slices="),
        ("0F0", 2, "0F0: it names no slice, and the schedule has 2; write 0F0.0 for the first"),
        ("0F0.2", 2, "there is no slice 2; slices go from 0 to 1"),
        ("0F1.0", 2, "there is no microbatch 1"),
    ],
)
def test_every_action_of_a_microbatch_names_a_slice_that_exists(
    text: str, slices: int, says: str
) -> None:
    with pytest.raises(ScheduleError, match=says):
        one_rank(text, slices=slices)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("0F0.1 0F0.0 0B0.1 0B0.0", "0F0.1: needs 0F0.0, which comes later"),
        ("0F0.0 0F0.1 0B0.0 0B0.1", "0B0.0: needs 0B0.1, which comes later"),
        ("0F0.0 0F0.1 0I0.0 0B0.1 0W0.0", "0I0.0: needs 0B0.1, which comes later"),
        ("0F0.0 0B0.0", "0F0.1: missing"),
    ],
)
def test_slices_run_forward_from_the_first_and_backward_from_the_last(text: str, says: str) -> None:
    assert says in str(validate(one_rank(text)))
    in_order = one_rank("0F0.0 0F0.1 0I0.1 0I0.0 0W0.0 0W0.1")
    assert validate(in_order).ok


SIZES = [*product((1, 2, 4, 8), (2, 3, 8, 16), (1, 2, 4))]


@pytest.mark.parametrize(("ranks", "microbatches", "slices"), SIZES)
def test_seq_1f1b_has_the_bubble_and_the_memory_of_the_paper(
    ranks: int, microbatches: int, slices: int
) -> None:
    made = build("Seq1F1B", ranks=ranks, microbatches=microbatches, slices=slices)
    assert validate(made).ok
    lowered = add_communication(made)
    assert validate(lowered).ok
    ran = simulate(lowered)
    assert ran.makespan == pytest.approx(3 * (microbatches + (ranks - 1) / slices))
    held = [min(microbatches * slices, ranks - r + slices - 1) / slices for r in range(ranks)]
    assert ran.peak_memory == pytest.approx(held)
    if slices == 1:
        assert made == build("1F1B", ranks=ranks, microbatches=microbatches)


def test_slices_may_differ_in_time_and_size() -> None:
    made = one_rank("0F0.0 0F0.1 0B0.1 0B0.0")
    costs = Costs(forward=4, backward=8, slice_times=[0.25, 0.75], slice_sizes=[0.6, 0.4])
    ran = simulate(made, costs)
    assert [span.duration for span in ran.spans] == [1, 3, 6, 2]
    assert [held for _, held in ran.memory(0)] == pytest.approx([0.6, 1.0, 0.6, 0])
    with pytest.raises(UsageError, match="slice_times has 1 numbers for 2 slices"):
        simulate(made, Costs(slice_times=[1]))
    # A message carries a slice's share of the bytes, spelled out or not.
    pair = build("Seq1F1B", ranks=2, microbatches=1, slices=2)
    slow = Costs(message=4, bandwidth=1, slice_sizes=[0.75, 0.25])
    for schedule in (pair, add_communication(pair)):
        started = {str(span.action): span.start for span in simulate(schedule, slow).spans}
        assert started["1F0.0"] == 0.5 + 3


def test_attention_makes_the_last_slices_the_longest() -> None:
    """The paper's remedy, slices of equal work, has the bubble of equal slices again."""
    made = build("Seq1F1B", ranks=4, microbatches=8, slices=4)
    alike, uneven = (
        simulate(made, Costs(slice_times=times)).bubble
        for times in ([0.25] * 4, [0.1, 0.2, 0.3, 0.4])
    )
    assert alike < uneven


def test_files_and_pictures_show_slices() -> None:
    made = add_communication(build("Seq1F1B", ranks=2, microbatches=3, slices=2))
    assert from_csv(to_csv(made)) == made
    assert from_json(to_json(made)) == made
    assert "3 microbatches of 2 slices" in str(made)
    line = simulate(made).timeline
    assert "F2.1" in draw_text(line, width=200)
    assert ">2.1</text>" in draw_svg(line)
    assert '"slice": 1' in line.to_chrome_trace()


def test_passes_and_orders_take_slices() -> None:
    made = build("Seq1F1B", ranks=2, microbatches=4, slices=4)
    away = offload(made, keep=2)
    assert validate(away).ok
    host = simulate(away).host_memory
    assert max(host) > 0
    assert [str(action) for action in merged(made)][:2] == ["0F0.0", "0F0.1"]


def test_only_schedules_that_cut_sequences_take_slices() -> None:
    assert "Seq1F1B" not in names()  # those run any stages
    with pytest.raises(ScheduleError, match="1F1B cuts no sequences, but slices=2; Seq1F1B does"):
        build("1F1B", ranks=2, microbatches=4, slices=2)
    with pytest.raises(ScheduleError, match="slices=0: must be at least 1"):
        build("Seq1F1B", ranks=2, microbatches=4, slices=0)
