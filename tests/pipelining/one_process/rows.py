"""Schedules as rows of actions, as tests of torch's passes are written."""

from __future__ import annotations

import random
from typing import Any

from tests.pipelining.either import Names, refused, texts


def line(row: list[Any]) -> str:
    return " ".join(texts(row))


def body_classes(p: Names) -> None:
    s = p.schedules
    for name in ("1f1b", "INTERLEAVED1F1B", "gpipe", "LoopedBFS", "PipelineScheduleSingle"):
        assert issubclass(s.get_schedule_class(name), s._PipelineSchedule)
    for chosen in (p.ScheduleGPipe, p.Schedule1F1B, s._ScheduleForwardOnly):
        assert issubclass(chosen, s.PipelineScheduleSingle)
    for chosen in (p.ScheduleInterleaved1F1B, p.ScheduleDualPipeV, p.ScheduleLoopedBFS):
        assert issubclass(chosen, s._PipelineScheduleRuntime)
        assert issubclass(chosen, s.PipelineScheduleMulti)


SIZES = [(2, 2, 2), (2, 8, 4), (4, 8, 4), (4, 4, 4), (3, 12, 4), (4, 6, 3), (4, 10, 5), (2, 3, 4)]
"""Stages a rank, microbatches, ranks."""


def body_messages_of_every_size(p: Names) -> None:
    s = p.schedules
    for name in ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble"):
        for each, microbatches, ranks in SIZES:
            made = p.scheduled(name, ranks, each, microbatches)
            if name != "LoopedBFS":
                rounds = made.number_of_rounds * made.microbatches_per_round
                assert (made.n_local_stages, rounds) == (each, microbatches)
            s._format_pipeline_order(made.pipeline_order)
            place, count = (lambda stage, ranks=ranks: stage % ranks), each * ranks
            found = s._add_send_recv(made.pipeline_order, stage_to_rank=place, num_stages=count)
            for rank, row in made.pipeline_order.items():
                assert [a for a in found[rank] if a and a.is_compute_op] == [a for a in row if a]
            sends = [str(a) for row in found.values() for a in row if "SEND" in str(a)]
            receives = [str(a) for row in found.values() for a in row if "RECV" in str(a)]
            assert len(sends) == len(set(sends)) == len(set(receives)) == len(receives)


def body_schedules_in_a_v(p: Names) -> None:
    s = p.schedules
    for name in ("ZBVZeroBubble", "DualPipeV"):
        for each, microbatches, ranks in [(2, 8, 4), (2, 10, 4), (2, 8, 2), (2, 15, 4)]:
            made = p.scheduled(name, ranks, each, microbatches)
            found = s._validate_schedule(made.pipeline_order, ranks, each * ranks, microbatches)
            assert found == p._utils.generate_stage_to_rank_mapping(ranks, each * ranks, style="v")


def body_the_order_of_dualpipe(p: Names) -> list[list[str]]:
    order = p.scheduled("DualPipeV", 4, 2, 10).pipeline_order
    return [[text for text in texts(order[rank]) if text] for rank in range(4)]


def body_actions_from_text(p: Names) -> None:
    s = p.schedules
    known = {
        "1F0": (1, s.F, 0),
        "2I1": (2, s.I, 1),
        "0W3": (0, s.W, 3),
        "0B3": (0, s.B, 3),
        "1UNSHARD": (1, s.UNSHARD, None),
        "3RESHARD": (3, s.RESHARD, None),
        "0REDUCE_GRAD": (0, s.REDUCE_GRAD, None),
        "2SEND_B2": (2, s.SEND_B, 2),
        "1RECV_F1": (1, s.RECV_F, 1),
    }
    for text, parts in known.items():
        found = s._Action.from_str(text)
        assert found == s._Action(*parts)
        assert repr(found) == str(found) == text
    pair = s._Action.from_str("(2F1;3B0)OVERLAP_F_B")
    assert pair.computation_type == s.OVERLAP_F_B
    assert list(map(str, pair.sub_actions)) == ["2F1", "3B0"]
    assert str(pair) == "(2F1;3B0)OVERLAP_F_B"
    assert pair.is_compute_op
    assert not s._Action.from_str("2SEND_B2").is_compute_op
    assert s._Action.from_str("  ") is None


def body_sharding_is_put_in(p: Names) -> None:
    add = p.schedules._add_unshard_reshard
    assert line(add(p.row("0F0,0F1,   ,0B0,0B1"))) == "0UNSHARD 0F0 0F1 0B0 0B1 0RESHARD"
    assert line(add(p.row("0F0,0F1,1F0,1F1,1B0,1B1,0B0,0B1"))) == (
        "0UNSHARD 1UNSHARD 0F0 0F1 1F0 1F1 1B0 1B1 1RESHARD 0B0 0B1 0RESHARD"
    )


def body_reductions_are_put_in(p: Names) -> None:
    add = p.schedules._add_reduce_grad
    found = add(p.row("0F0,0F1,1F0,1F1,1B0,1B1,0B0,0B1"), 2)
    assert line(found) == "0F0 0F1 1F0 1F1 1B0 1B1 1REDUCE_GRAD 0B0 0B1 0REDUCE_GRAD"


def body_halves_are_merged(p: Names) -> None:
    found = p.schedules._merge_bw(p.row("0F0,0F1,0F2,0I0,0I1,0W0,0I2,0W2,0W1"))
    assert line(found) == "0F0 0F1 0F2 0I0 0I1 0W0 0B2 0W1"


def body_what_a_schedule_is_checked_for(p: Names) -> None:
    check = p.schedules._validate_schedule
    good = {0: p.row("0F0,0I0,0W0"), 1: p.row("1F0,1B0")}
    assert check(good, 2, 2, 1) == {0: 0, 1: 1}
    wrong = [
        {0: good[0]},
        {**good, 1: p.row("1F0")},
        {**good, 0: p.row("0I0,0F0,0W0")},
        {**good, 0: p.row("0F0,0W0,0I0")},
        {**good, 0: p.row("0F0,0I0")},
        {0: good[0], 1: p.row("1F0,1B0,0F0")},
    ]
    for order in wrong:
        refused(AssertionError, lambda order=order: check(order, 2, 2, 1))
    said = refused(AssertionError, lambda: check(wrong[2], 2, 2, 1))
    assert "0I0" in said or "stage 0" in said


def body_tables(p: Names) -> list[str]:
    made = p.scheduled("DualPipeV", 4, 2, 8).pipeline_order
    rows = {rank: [action for action in row if action is not None] for rank, row in made.items()}
    return [p.schedules._format_pipeline_order(rows, error_step_number=step) for step in (None, 3)]


def body_random_rows(p: Names) -> list[Any]:
    """What each pass makes of valid rows in no particular order."""
    s, shown = p.schedules, []
    for seed in range(20):
        rank_of, microbatches, rows = random_rows(seed)

        def made(rows: list[list[str]] = rows) -> dict[int, list[Any]]:
            return {
                rank: [s._Action.from_str(text) for text in row] for rank, row in enumerate(rows)
            }

        ranks = len(rows)
        shown.append(s._validate_schedule(made(), ranks, len(rank_of), microbatches))
        for rank in range(ranks):
            shown.append(texts(s._merge_bw(made()[rank])))
            shown.append(texts(s._add_unshard_reshard(made()[rank], 2)))
            shown.append(texts(s._add_reduce_grad(made()[rank], microbatches)))
    return shown


def random_rows(seed: int) -> tuple[list[int], int, list[list[str]]]:
    """Stages on ranks, a number of microbatches, and rows that can run, idle steps among them."""
    draw = random.Random(seed)
    ranks, microbatches = draw.randint(1, 4), draw.randint(1, 4)
    stages = ranks * draw.randint(1, 3)
    rank_of = [*range(ranks), *(draw.randrange(ranks) for _ in range(stages - ranks))]
    pending = [(stage, "F", m) for stage in range(stages) for m in range(microbatches)]
    for stage, _, m in list(pending):
        pending += [(stage, op, m) for op in draw.choice(["B", "IW"])]
    done: set[tuple[int, str, int]] = set()
    rows: list[list[str]] = [[] for _ in range(ranks)]

    def can_run(stage: int, op: str, m: int) -> bool:
        if op == "F":
            return stage == 0 or (stage - 1, "F", m) in done
        if op == "W":
            return (stage, "I", m) in done
        after = stage == stages - 1 or bool({(stage + 1, "I", m), (stage + 1, "B", m)} & done)
        return (stage, "F", m) in done and after

    while pending:
        stage, op, m = action = draw.choice([each for each in pending if can_run(*each)])
        pending.remove(action)
        done.add(action)
        rows[rank_of[stage]].append(f"{stage}{op}{m}")
        rows[draw.randrange(ranks)] += [""] * (draw.random() < 0.15)
    return rank_of, microbatches, rows


def body_steps_with_messages(p: Names) -> None:
    """Every action in a step in which it can run; a weight backward after a full one too."""
    s = p.schedules
    for name, ranks, microbatches in [("Interleaved1F1B", 2, 4), ("InterleavedZeroBubble", 3, 6)]:
        place, count = (lambda stage, ranks=ranks: stage % ranks), 2 * ranks
        order = p.scheduled(name, ranks, 2, microbatches).pipeline_order
        whole = s._add_send_recv(order, stage_to_rank=place, num_stages=count)
        steps = s._simulate_comms_compute(whole, stage_to_rank=place, num_stages=count)
        assert {rank: [a for a in row if a] for rank, row in steps.items()} == whole
    rows = {0: p.row("0F0,0SEND_F0,0RECV_B0,0B0,0W0"), 1: p.row("1RECV_F0,1F0,1B0,1SEND_B0,1W0")}
    steps = s._simulate_comms_compute(rows, stage_to_rank=lambda stage: stage, num_stages=2)
    assert {rank: [a for a in row if a] for rank, row in steps.items()} == rows
    at = {str(action): step for row in steps.values() for step, action in enumerate(row)}
    assert at["0SEND_F0"] <= at["1F0"] < at["1SEND_B0"] <= at["0B0"] < at["0W0"]
    stuck = {0: p.row("0F0,0SEND_F0"), 1: p.row("1F0")}
    refused(ValueError, lambda: s._simulate_comms_compute(stuck, lambda stage: stage, 2))
