"""Two replicas of two ranks are one job: whatever happens to one rank is told to all of them, by name."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.faults.jobs import SILENT, SLACK, Outcome, run_job

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

CULPRIT = "replica 1, rank 0, global rank 2"


def fault(how: str, action: str = "0F2", step: int = 2, **more: Any) -> dict[str, Any]:
    """A case of :func:`run_job`."""
    injected = {"rank": 0, "replica": 1, "step": step, "action": action, "how": how}
    return {"fault": injected, "shape": (2, 2), **more}


def silent(how: str, action: str = "0F2", step: int = 2, **more: Any) -> dict[str, Any]:
    """A case in which a rank falls silent."""
    frozen = 2 if how == "SIGSTOP" else -1
    return fault(how, action, step, timeout=SILENT, frozen=frozen, **more)


NEVER = fault("sleep", step=99)


@pytest.mark.parametrize(
    ("case", "says", "within"),
    [
        (fault("exception"), "step 2, stage 0, microbatch 2, action 0F2: InjectedError", 3.0),
        (fault("SIGKILL"), "its process died without reporting an error", 3.0),
        (fault("short iterator", step=3), "left after 2 training steps, while others go on", 3.0),
        (silent("sleep", "between", 3), "it is between steps, after step 2", SILENT + 5.0),
        # Rank 0 of the other replica waits in a collective of the wrapper's, which nobody notes.
        (silent("sleep", shards=True), "it is in 0F2 for", SILENT + 5.0),
    ],
    ids=lambda value: value["fault"]["how"] if isinstance(value, dict) else "",
)
def test_every_replica_names_the_culprit(
    case: dict[str, Any], says: str, within: float, job_of: Callable[[dict[str, Any]], Outcome]
) -> None:
    job = job_of(case)
    for process in (0, 1, 3):
        ended = job.ranks[process]
        name = f"replica {process // 2}, rank {process % 2}, global rank {process}"
        assert ended.error == "PeerFailed", ended.output
        assert ended.text.startswith(f"{name} stopped because {CULPRIT}")
        assert re.search(says, ended.text), ended.text
    assert job.heard(2) < within + SLACK
    assert job.report["failures"][0]["replica"] == 1


def test_an_error_of_the_user_s_is_no_broken_connection(tmp_path: Path) -> None:
    job = run_job(tmp_path, **NEVER, raises=[1, 0, 2])
    assert job.ranks[2].error == "TimeoutError"
    for process in (0, 1, 3):
        says = f"stopped because {CULPRIT}, step 2: TimeoutError: s3 read timed out"
        assert says in job.ranks[process].text


def test_a_refusal_on_one_replica_refuses_the_call_on_all(tmp_path: Path) -> None:
    """Otherwise the gradients of the next step would be averaged with the others' of this one."""
    job = run_job(tmp_path, **NEVER, refuses=[1, 0, 3], steps=6)
    assert [ended.status for ended in job.ranks] == [0, 0, 0, 0], job.ranks
    texts = [(tmp_path / f"refused-{process}").read_text() for process in range(4)]
    assert all("ranks were called with different shapes" in text for text in texts)
    assert all(text.startswith("rank 0 of replica 1: ") for text in texts), texts


def test_a_weight_that_one_replica_cannot_compute_refuses_the_call_on_all(tmp_path: Path) -> None:
    job = run_job(tmp_path, **NEVER, weightless=[1, 3], steps=5)
    assert [ended.status for ended in job.ranks] == [0, 0, 0, 0], job.ranks
    texts = [(tmp_path / f"refused-{process}").read_text() for process in range(4)]
    assert all("but the step was given no target=" in text for text in texts)
