"""Drawings: what they show, and that no text in them is markup."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from penstock.schedule import (
    Action,
    Costs,
    Op,
    Span,
    Timeline,
    build,
    draw_svg,
    draw_text,
    names,
    simulate,
)
from penstock.schedule.library import find
from website.pictures import PAGE, drawn, kept

ONE_F_ONE_B = simulate(build("1F1B", ranks=2, microbatches=3)).timeline


def texts(svg: str) -> list[str]:
    return [
        found.text or ""
        for found in ElementTree.fromstring(svg).iter()
        if found.tag.endswith("text")
    ]


def test_the_svg_shows_ranks_ops_numbers_scale_and_idle_share() -> None:
    shown = texts(draw_svg(ONE_F_ONE_B, title="1F1B", note="simulated"))
    assert {"1F1B", "simulated", "rank 0", "rank 1", "F forward", "B full backward"} <= {*shown}
    assert "idle 25.0 %" in shown
    assert shown.count("2") >= 4
    assert "time; makespan 12" in shown


def test_text_is_escaped() -> None:
    svg = draw_svg(ONE_F_ONE_B, title="</text><script>alert(1)</script>", note='"&<')
    assert "<script" not in svg
    assert "</text><script>alert(1)</script>" in texts(svg)


def test_times_have_a_fitting_unit() -> None:
    spans = (Span(0, Action(0, Op.F, 0), 0, 0.002), Span(0, Action(0, Op.B, 0), 0.002, 0.025))
    shown = texts(draw_svg(Timeline(spans, 1)))
    assert "time in ms; makespan 25 ms" in shown
    assert {"0", "5", "10", "15", "20", "25"} <= {*shown}, "ticks are round"
    assert "time in us; makespan 25 us" in texts(draw_svg(Timeline(spans, 1, "ms")))
    assert "time; makespan 0" in texts(draw_svg(Timeline((), 1, "")))


@pytest.mark.parametrize("width", [40, 80, 200])
def test_the_text_is_at_most_as_wide_as_asked(width: int) -> None:
    lines = draw_text(ONE_F_ONE_B, width=width).splitlines()
    assert len({len(line) for line in lines[:2]}) == 1
    assert 0.6 * width < len(lines[0]) <= width


def test_the_text_shows_the_schedule() -> None:
    rows = draw_text(ONE_F_ONE_B, width=8 + 36 + 14).splitlines()
    assert rows[0].startswith("rank 0 |F0 F1 ......B0    F2 B1    ...B2")
    assert rows[1].startswith("rank 1 |...F0 B0    F1 B1")
    assert rows[1].endswith("25.0 % idle")


def test_every_action_is_in_the_text_also_where_two_overlap() -> None:
    made = build("DualPipeV", ranks=2, microbatches=4)
    line = simulate(made, Costs(overlap=1)).timeline
    rows = draw_text(line, width=200).splitlines()[:4]
    for row, stage in zip(rows, (0, 3, 1, 2), strict=True):
        shown = re.findall(r"[FIWB]\d", row.partition("|")[2])
        ran = [
            f"{s.action.op.value}{s.action.microbatch}"
            for s in line.spans
            if s.action.stage == stage
        ]
        assert sorted(shown) == sorted(ran)


def test_colours_change_nothing_but_the_colour() -> None:
    line = simulate(build("ZB-V", ranks=2, microbatches=4)).timeline
    plain, coloured = draw_text(line, width=100), draw_text(line, width=100, colour=True)
    rows = re.sub("\x1b\\[[0-9;]*m", "", coloured).splitlines()
    assert rows[:-1] == plain.splitlines()[:-1]
    assert "F forward, I input backward, W weight backward, . idle" in plain
    assert coloured.count("\x1b[30;48;5;") == len(line.spans) + 3


def test_the_svg_frames_what_overlaps() -> None:
    made = build("DualPipeV", ranks=2, microbatches=6)
    svg = draw_svg(simulate(made).timeline)
    assert len(made.pairs) > 4
    assert svg.count('class="pair"') == len(made.pairs)
    assert "framed: F and B that overlap" in svg
    assert "framed" not in draw_svg(ONE_F_ONE_B)


@pytest.mark.parametrize("file", [pytest.param(file, id=file.name) for file in kept()])
def test_what_the_repository_shows_is_current(file: Path) -> None:
    assert file.read_text() == kept()[file], "not current: run `python -m website.pictures`"


def test_every_schedule_has_a_picture_and_its_page_shows_it() -> None:
    for name in names():
        path = f"schedules/{name.lower()}.svg"
        assert path in drawn()
        assert not find(name)[1].trains or f"]({path})" in PAGE.read_text()
