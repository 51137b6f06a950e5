"""Drawings: what they show, and that no text in them is markup."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from penstock.schedule import (
    Action,
    Op,
    Span,
    Timeline,
    build,
    draw_svg,
    draw_text,
    names,
    simulate,
)
from penstock.schedule.drawing.axis import short, ticks, unit_for

ONE_F_ONE_B = simulate(build("1F1B", ranks=2, microbatches=3)).timeline


def texts(svg: str) -> list[str]:
    return [
        found.text or ""
        for found in ElementTree.fromstring(svg).iter()
        if found.tag.endswith("text")
    ]


@pytest.mark.parametrize("name", names())
def test_every_schedule_is_drawn_as_well_formed_svg(name: str) -> None:
    ElementTree.fromstring(draw_svg(simulate(build(name, ranks=3, microbatches=6)).timeline))


def test_the_svg_shows_ranks_ops_numbers_scale_and_idle_share() -> None:
    shown = texts(draw_svg(ONE_F_ONE_B, title="1F1B", note="simulated"))
    for expected in (
        "1F1B",
        "simulated",
        "rank 0",
        "rank 1",
        "F forward",
        "B full backward",
        "idle 25.0 %",
    ):
        assert expected in shown
    assert shown.count("2") >= 4
    assert "time; makespan 12" in shown


def test_text_is_escaped() -> None:
    svg = draw_svg(ONE_F_ONE_B, title="</text><script>alert(1)</script>", note='"&<')
    assert "<script" not in svg
    assert "</text><script>alert(1)</script>" in texts(svg)


def test_times_have_a_fitting_unit() -> None:
    spans = (Span(0, Action(0, Op.F, 0), 0, 0.002), Span(0, Action(0, Op.B, 0), 0.002, 0.025))
    assert "time in ms; makespan 25 ms" in texts(draw_svg(Timeline(spans, 1)))
    assert unit_for(Timeline(spans, 1, "ms")).name == "us"


def test_spans_at_the_same_time_share_the_row() -> None:
    spans = (Span(0, Action(0, Op.F, 1), 0, 4), Span(0, Action(0, Op.B, 0), 1, 4))
    boxes = [
        found
        for found in ElementTree.fromstring(draw_svg(Timeline(spans, 1))).iter()
        if found.tag.endswith("rect") and found.get("height") == "11"
    ]
    assert len(boxes) == 2
    assert boxes[0].get("y") != boxes[1].get("y")


def test_the_text_is_as_wide_as_asked() -> None:
    for width in (40, 80, 200):
        lines = draw_text(ONE_F_ONE_B, width=width).splitlines()
        assert {len(line) for line in lines[:2]} == {width}


def test_the_text_shows_the_schedule() -> None:
    rows = draw_text(ONE_F_ONE_B, width=8 + 36 + 14).splitlines()
    assert rows[0].startswith("rank 0 |F0 F1 ......B0    F2 B1    ...B2")
    assert rows[1].startswith("rank 1 |...F0 B0    F1 B1")
    assert rows[1].endswith("25.0 % idle")


def test_ticks_are_round() -> None:
    assert ticks(12, 5) == [0, 5, 10]
    assert ticks(0.7, 7)[1] == pytest.approx(0.1)
    assert ticks(0, 3) == [0]
    assert short(0.1 + 0.2) == "0.3"


def test_the_text_names_stages_where_most_boxes_have_room() -> None:
    line = simulate(build("ZB-V", ranks=2, microbatches=2)).timeline
    assert "3F0 " in draw_text(line, width=120)
    narrow = draw_text(line, width=60)
    assert "3F0" not in narrow
    assert " F0 " in narrow
