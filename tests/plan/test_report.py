"""The report stands alone, and holds what was planned."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from penstock._engine.values import bytes_as_text
from penstock.plan import Plan, Plans, report_of, search
from penstock.schedule import Timeline
from tests.plan.models import profile


@pytest.fixture(scope="module")
def plans() -> Plans:
    costs = profile([1.0, 1.0, 2.0, 1.0, 3.0])
    free = search(costs, ranks=2, pipeline=2, batch=4, seconds=0, keep=1)
    memory = max(free[0].memory) * 0.9
    return search(costs, ranks=2, pipeline=2, batch=4, memory=memory, seconds=0, keep=3)


def boxes_of(page: str, plan: Plan) -> list[str]:
    """The tooltips of the actions in its pictures."""
    actions = {str(span.action) for span in plan.timeline.spans}
    tips = re.findall(r"<title>([^<]*)</title>", page)
    return [tip for tip in tips if tip.partition(":")[0] in actions]


def test_it_stands_alone(plans: Plans, tmp_path: Path) -> None:
    plans.report(tmp_path / "plans.html", title="</script><b>bold")
    page = (tmp_path / "plans.html").read_text().replace('xmlns="http://www.w3.org/2000/svg"', "")
    assert not re.search(r"(?:src|href)\s*=|https?://|@import|url\(|<script", page)
    assert "&lt;/script&gt;&lt;b&gt;bold" in page


def test_it_holds_what_was_simulated(plans: Plans) -> None:
    page, best = report_of(plans, profile=plans.profile), plans[0]
    assert re.findall(r"<summary>Plan \d+: ([^<]*)<", page) == [p.shape.schedule for p in plans]
    page = report_of([best], profile=plans.profile)
    assert len(boxes_of(page, best)) == len(best.simulation.timeline.of_rank(0)) * 2
    gaps = [gap for rank in range(2) for gap in best.simulation.gaps(rank)]
    assert page.count("is idle for") == len(gaps) > 0
    assert "which waits for what 0F0 sends" in page
    for rank, most in enumerate(best.memory):
        assert f"rank {rank}: at most {bytes_as_text(most)}" in page
    for index in range(5):
        again = "yes" if f"unit{index}" in best.recompute else ""
        assert f"<td>unit{index}</td><td>{again}</td>" in page
    assert "<th>forward</th>" in page
    assert "<th>forward</th>" not in report_of([best])


def test_a_measured_step_stands_beside(plans: Plans) -> None:
    """A step like the simulated one, an hour later: its times count from its start."""
    best = plans[0]
    later = Timeline(
        tuple(s._replace(start=s.start + 3600, end=s.end + 3600) for s in best.timeline.spans),
        2,
        "s",
    )
    page = report_of([best], measured=later)
    assert ">simulated</text>" in page
    assert ">measured</text>" in page
    said = boxes_of(page, best)
    half = len(said) // 2
    assert [tip.partition(":")[0] for tip in said[:half]] == [
        t.partition(":")[0] for t in said[half:]
    ]
    assert "3600" not in page


def test_only_as_many_plans_as_a_browser_can_show_have_pictures(
    plans: Plans, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.plan.report.MOST_BOXES", 1)
    page = report_of(plans)
    assert page.count(">simulated</text>") == 1
    assert page.count("The cut") == len(plans)
