"""The report stands alone, holds what was planned, and works in a browser."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from penstock.plan import Plans, report_of, search
from penstock.schedule import Timeline
from tests.plan.models import profile

NAMES = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next(filter(None, map(shutil.which, NAMES)), None)
QUIET = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--virtual-time-budget=3000", "--dump-dom"),
]


@pytest.fixture(scope="module")
def plans() -> Plans:
    costs = profile([1.0, 1.0, 2.0, 1.0, 3.0])
    free = search(costs, ranks=2, pipeline=2, batch=4, seconds=0, keep=1)
    memory = max(free[0].memory) * 0.9
    return search(costs, ranks=2, pipeline=2, batch=4, memory=memory, seconds=0, keep=3)


def data_of(page: str) -> Any:
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert data
    return json.loads(data[1])


def test_it_stands_alone(plans: Plans, tmp_path: Path) -> None:
    plans.report(tmp_path / "plans.html", title="</script><b>bold")
    page = (tmp_path / "plans.html").read_text()
    assert not re.search(r"(?:src|href)\s*=|https?://|@import|url\(", page)
    assert data_of(page)["title"] == "</script><b>bold"


def test_it_holds_what_was_simulated(plans: Plans) -> None:
    data = data_of(report_of(plans))
    assert [plan["row"][0] for plan in data["plans"]] == [plan.shape.schedule for plan in plans]
    best, line = plans[0], data["plans"][0]["timelines"][0]
    assert line["seconds"] == best.simulation.makespan
    assert sum(map(len, line["spans"])) == len(best.timeline.spans)
    for rank, gaps in enumerate(line["gaps"]):
        times = [time for start, end, *_ in gaps for time in (start, end)]
        known = [time for gap in best.simulation.gaps(rank) for time in (gap.start, gap.end)]
        assert times == pytest.approx(known, rel=1e-6)
        assert all(gap[3] for gap in gaps)
    for memory, most in zip(line["memory"], best.memory, strict=True):
        held = max(activations + stash for _, activations, stash in memory["steps"])
        extra = max(size for sizes in best.stage_costs.extra.values() for size in sizes)
        messages = memory["fixed"][-1]
        assert most - extra - 1 <= sum(memory["fixed"]) + held <= most + messages + 1
    units = [unit for stage in data["plans"][0]["cut"] for unit in stage["units"]]
    assert [unit["path"] for unit in units] == [f"unit{index}" for index in range(5)]
    assert {unit["path"] for unit in units if unit["again"]} == set(best.recompute)


def test_a_measured_step_stands_beside(plans: Plans) -> None:
    """A step like the simulated one, an hour later: its times count from its start."""
    best = plans[0]
    later = Timeline(
        tuple(s._replace(start=s.start + 3600, end=s.end + 3600) for s in best.timeline.spans),
        2,
        "s",
    )
    lines = data_of(report_of([best], measured=later))["plans"][0]["timelines"]
    assert [line["label"] for line in lines] == ["simulated", "measured"]
    for said, seen in zip(lines[0]["spans"], lines[1]["spans"], strict=True):
        assert [span[:3] for span in said] == [span[:3] for span in seen]
        assert [span[3] for span in said] == pytest.approx([span[3] for span in seen], abs=1e-3)


DRIVER = """
<script>
const say = (name, value) => { const e = document.createElement("output"); e.id = "said-" + name;
  e.textContent = value; document.body.append(e); };
const canvas = document.querySelector("#lines canvas");
const point = (where, x, y) => where.dispatchEvent(
  new PointerEvent("pointermove", { clientX: where.getBoundingClientRect().left + x,
    clientY: where.getBoundingClientRect().top + y, bubbles: true }));
say("rows", document.querySelectorAll("#plans tbody tr").length);
say("overflow", document.documentElement.scrollWidth - document.documentElement.clientWidth);
say("dark", matchMedia("(prefers-color-scheme: dark)").matches);
say("page", getComputedStyle(document.body).backgroundColor);
point(canvas, 60, 10); say("action", tip.textContent);
point(canvas, 42, 40); say("gap", tip.textContent);
const wheel = new WheelEvent("wheel", { deltaY: -400, clientX: canvas.getBoundingClientRect().left + 41,
  clientY: canvas.getBoundingClientRect().top + 5, cancelable: true });
canvas.dispatchEvent(wheel); say("zoomed", (to - from).toFixed(3));
document.getElementById("all").click(); say("whole", (to - from).toFixed(3));
point(document.querySelector("#memory canvas"), 60, 20); say("memory", tip.textContent);
document.querySelectorAll("#plans tbody tr")[1].click();
say("chosen", document.getElementById("what").textContent);
say("cut", document.querySelectorAll("#cut tbody tr").length);
const pixels = canvas => {
  const seen = new Set();
  const drawn = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
  for (let i = 0; i < drawn.length; i += 4) seen.add(drawn[i] << 16 | drawn[i + 1] << 8 | drawn[i + 2]);
  return seen;
};
say("blue", pixels(document.querySelector("#lines canvas")).has(0x56b4e9));
</script>
"""


@pytest.mark.skipif(BROWSER is None, reason="there is no Chromium here")
def test_it_works_in_a_browser(plans: Plans, tmp_path: Path) -> None:
    """On a narrow screen in the dark."""
    page = tmp_path / "plans.html"
    page.write_text(report_of(plans) + DRIVER, encoding="utf-8")
    assert BROWSER is not None
    run = [BROWSER, *QUIET, f"--user-data-dir={tmp_path / 'profile'}", "--window-size=420,800"]
    run.append("--blink-settings=preferredColorScheme=0")
    shown = subprocess.run(
        [*run, page.as_uri()], capture_output=True, text=True, timeout=120, check=True
    )
    said = dict(re.findall(r'<output id="said-(\w+)">(.*?)</output>', shown.stdout, re.DOTALL))
    assert said["rows"] == "3"
    assert int(said["overflow"]) <= 0
    assert said["dark"] == "true"
    assert said["page"] == "rgb(18, 22, 28)"
    assert "0F0: forward" in said["action"]
    assert "microbatch 0" in said["action"]
    assert "rank 1 is idle" in said["gap"]
    assert "which waits for what 0F0 sends" in said["gap"]
    assert float(said["zoomed"]) < 0.5
    assert float(said["whole"]) == 1.0
    assert "activations" in said["memory"]
    assert "weights" in said["memory"]
    assert said["chosen"].startswith("Plan 2")
    assert said["cut"] == "5"
    assert said["blue"] == "true"
