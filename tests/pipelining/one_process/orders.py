"""Schedules in files, and rows that others ask for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.pipelining.either import Names, refused, texts


def body_messages_come_back_from_files(p: Names, folder: Path) -> None:
    def fresh() -> Any:
        return p.schedules._PipelineScheduleRuntime([p.mock(2, 4), p.mock(2, 4)], 4)

    for name in (
        "Interleaved1F1B",
        "LoopedBFS",
        "InterleavedZeroBubble",
        "ZBVZeroBubble",
        "DualPipeV",
    ):
        first, second, third = fresh(), fresh(), fresh()
        first._prepare_schedule_with_comms(p.scheduled(name, 2, 2, 4).pipeline_order)
        first._dump_csv(str(folder / name))
        second._load_csv(str(folder / name), format="compute_comms")
        third._prepare_schedule_with_comms(second.pipeline_order_with_comms, format="compute_comms")
        assert first.pipeline_order_with_comms == second.pipeline_order_with_comms
        assert second.pipeline_order_with_comms == third.pipeline_order_with_comms


def body_files_that_hold_no_schedule(p: Names, folder: Path) -> None:
    file = folder / "rows.csv"
    file.write_text("0F0,zz,0B0")
    runtime = p.schedules._PipelineScheduleRuntime([p.mock(1, 1)], 1)
    assert "zz" in refused(RuntimeError, lambda: runtime._load_csv(str(file)))


def body_pairs_in_either_order(p: Names) -> None:
    s = p.schedules
    first, last = (s._Action.from_str(text) for text in ("1F1", "0B0"))
    for pair in ((first, last), (last, first)):
        both = s._Action(-1, s.OVERLAP_F_B, None, pair)
        order = {0: [*p.row("0F0,1F0,1B0,0F1"), both, *p.row("1B1,0B1")]}
        assert s._validate_schedule(order, 1, 2, 2) == {0: 0, 1: 0}


def body_single_schedules_have_an_order(p: Names) -> list[list[str]]:
    # Not 1F1B: what torch 2.13 gives for its last rank begins at microbatch 1.
    order = p.ScheduleGPipe(p.mock(4, 4), 4)._get_pipeline_order()
    rows = [[a for a in order[rank] if a is not None and a.is_compute_op] for rank in range(4)]
    return [texts(row) for row in rows]


def body_rows_of_schedules(p: Names) -> list[list[str]]:
    v, shown = p._schedule_visualizer, []
    for name in ("Interleaved1F1B", "InterleavedZeroBubble", "DualPipeV"):
        rows = v.get_schedule_ops(name, 2, 8)
        shown += [[text for text in texts(row) if text] for row in rows]
        for late in (False, True):
            full = v.get_schedule_ops(name, 2, 8, with_comms=True, defer_pp_recv=late)
            work = [[str(a) for a in row if a and a.is_compute_op] for row in full]
            assert work == [[text for text in texts(row) if text] for row in rows]
    rows = v.get_schedule_ops(p.ScheduleGPipe, 2, 4)
    assert [str(a) for a in rows[1] if a][:4] == ["1F0", "1F1", "1F2", "1F3"]
    refused(ValueError, lambda: v.get_schedule_ops("GPipe", 2, 4, None, True, True))
    refused(AssertionError, lambda: v.get_schedule_ops("GPipe", 2, 4, 2))
    refused(AssertionError, lambda: v.get_schedule_ops("LoopedBFS", 2, 4, 1))
    return shown


def body_idle_steps_are_put_in(p: Names) -> list[list[str]]:
    spaced = p._schedule_visualizer.add_schedule_op_spacing
    rows = spaced([p.row("0F0,0F1,0B0,0B1"), p.row("1F0,1B0,1F1,1B1")])
    wanted = ["0F0,0F1,,,0B0,,0B1", ",1F0,1B0,1F1,1B1"]
    assert [",".join(texts(row)).rstrip(",") for row in rows] == wanted
    halves = spaced([p.row("0F0,0I0,0W0"), p.row("1F0,1I0,1W0")])
    assert [",".join(texts(row)).rstrip(",") for row in halves] == ["0F0,,,0I0,0W0", ",1F0,1I0,1W0"]
    # torch 2.13 finds no such rows for GPipe and 1F1B, and loses count of ranks that end first in a V.
    names = ("Interleaved1F1B", "InterleavedZeroBubble", "DualPipeV")
    made = [p._schedule_visualizer.get_schedule_ops(n, 4, 8, add_spacing=True) for n in names]
    return [[",".join(texts(row)).rstrip(",") for row in rows] for rows in made]
