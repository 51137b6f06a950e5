"""A fault on one rank of three: every rank raises a named error, in time, and no process is left."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.faults.jobs import RANKS, SILENT, SLACK, Job, run_job

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

PEERS = 2.0 * SLACK
"""Seconds until every other rank has raised."""
GONE = 3.0 * SLACK
"""Seconds until no process is left."""


def check(job: Job, culprit: int, says: str, status: int, *, within: float = PEERS) -> None:
    """That all other ranks name the culprit, in time."""
    for rank, ended in enumerate(job.ranks):
        if rank != culprit:
            assert ended.error == "PeerFailed", ended.output
            assert f"rank {rank} stopped because rank {culprit}, step 2" in ended.text
            assert says in ended.text
            assert ended.status == status
    assert 0 < job.heard(culprit) < within
    assert job.gone - job.fired < within - PEERS + GONE


def fault(how: str, action: str = "1F2", rank: int = 1) -> dict[str, Any]:
    return {"rank": rank, "step": 2, "action": action, "how": how}


RAISED = {
    "forward, first": fault("exception", "0F3", 0),
    "forward, middle": fault("exception", "1F2"),
    "loss, last": fault("exception", "2F0", 2),
    "backward": fault("exception", "1B1"),
    "memory": fault("out of memory", "1F1"),
    "a split backward": fault("exception", "2W1", 2),
}


@pytest.mark.parametrize("name", sorted(RAISED))
def test_an_exception_is_told_once_and_named_everywhere(name: str, tmp_path: Path) -> None:
    found = RAISED[name]
    schedule = "ZB-H1" if "W" in found["action"] else "1F1B"
    job = run_job(tmp_path, fault=found, schedule=schedule)
    rank, action = found["rank"], found["action"]
    kind = "OutOfMemoryError" if name == "memory" else "InjectedError"
    place = f"stage {rank}, microbatch {action[-1]}, action {action}: {kind}: injected by fail_at"
    check(job, rank, place, 70)
    culprit = job.ranks[rank]
    assert culprit.error == "StageError"
    assert culprit.status == 70
    assert culprit.output.count(f"{kind}: injected") == 2, (
        "the user's, and the StageError around it"
    )
    assert all(f"{kind}(" not in e.output for r, e in enumerate(job.ranks) if r != rank)
    told = json.loads((tmp_path / "failure.json").read_text())
    assert told["failures"][0]["action"] == action
    assert "fail_at" in told["failures"][0]["trace"]


def test_a_mistake_in_the_first_step_is_told_once_by_its_cause(tmp_path: Path) -> None:
    job = run_job(tmp_path, fault=fault("sleep", rank=9), job="mistake")
    assert {ended.error for ended in job.ranks} == {"StageError"}
    assert len({ended.text for ended in job.ranks}) == 1
    where = "rank 1, stage 1, module '1' (Mistaken), before the first microbatch: RuntimeError: The size"
    assert job.ranks[1].text.startswith(where)
    assert ["direct cause" in ended.output for ended in job.ranks] == [False, True, False]
    assert max(ended.output.count("\n") for ended in job.ranks) < 40
    told = [json.loads((tmp_path / f"torchrun-{rank}").read_text()) for rank in range(RANKS)]
    assert [one["message"]["extraInfo"]["own"] for one in told] == [False, True, False]
    times = [int(one["message"]["extraInfo"]["timestamp"]) for one in told]
    assert min(times) == times[1] < min(times[0], times[2]), "the launcher names the earliest"


@pytest.mark.parametrize(
    ("how", "rank", "says"),
    [
        ("SIGKILL", 1, "its process ended"),
        ("SIGKILL", 0, "its process ended"),
        ("exit", 1, "its process ended"),
    ],
)
def test_a_death_is_named(how: str, rank: int, says: str, tmp_path: Path) -> None:
    job = run_job(tmp_path, fault=fault(how, f"{rank}F2", rank))
    check(job, rank, says, 75)
    assert json.loads((tmp_path / "failure.json").read_text())["failures"][0]["kind"] == "died"


BETWEEN = "it is between steps, after step 2, in its own code, for "


@pytest.mark.parametrize(
    ("how", "action", "says", "status"),
    [
        ("sleep", "1F2", "it is in 1F2 for ", 75),
        ("SIGSTOP", "1F2", "its process is stopped by a signal", -9),
        ("hold the GIL", "1F2", "its interpreter is held", -9),
        ("sleep", "between", BETWEEN, 75),
        ("SIGSTOP", "between", BETWEEN, -9),
        ("hold the GIL", "between", BETWEEN, -9),
    ],
)
def test_who_is_silent_is_named(
    how: str, action: str, says: str, status: int, tmp_path: Path
) -> None:
    step = 3 if action == "between" else 2
    job = run_job(tmp_path, fault={"rank": 1, "step": step, "action": action, "how": how})
    check(job, 1, says, 75, within=SILENT + 5.0 * SLACK)
    assert job.ranks[1].status == status
    told = json.loads((tmp_path / "failure.json").read_text())
    assert {int(rank) for rank in told["stacks"]} >= {0, 2}
    assert [place["rank"] for place in told["ranks"]] == list(range(RANKS))
    if how == "sleep":
        assert "time.sleep" in told["stacks"]["1"]


MEETING = 4.0


@pytest.mark.parametrize(
    ("how", "action", "says", "bound"),
    [
        (
            "sleep",
            "cuts",
            "makes no progress: it is making its pipeline (cuts the model) for ",
            MEETING,
        ),
        ("SIGSTOP", "connects", "its process is stopped by a signal", MEETING),
        ("SIGKILL", "makes", "its process ended", 0.0),
        ("exception", "cuts", "InjectedError: injected by fail_at", 0.0),
    ],
)
def test_who_holds_up_the_set_up_is_named(
    how: str, action: str, says: str, bound: float, tmp_path: Path
) -> None:
    injected = {"rank": 1, "step": 0, "action": action, "how": how}
    job = run_job(tmp_path, fault=injected, meeting=MEETING)
    for rank in (0, 2):
        assert job.ranks[rank].error == "PeerFailed", job.ranks[rank].output
        assert f"rank {rank} stopped because rank 1: " in job.ranks[rank].text
        assert says in job.ranks[rank].text
    assert job.ranks[1].status == {"sleep": 75, "exception": 70}.get(how, -9)
    assert job.heard(1) < bound + PEERS
    assert job.gone - job.fired < bound + (5.0 * SLACK if bound else GONE)


def test_what_a_stage_forks_is_no_rank(tmp_path: Path) -> None:
    job = run_job(tmp_path, fault=fault("sleep", rank=9), job="fork")
    assert [ended.status for ended in job.ranks] == [0, 0, 0], job.ranks[1].output
    raised, refused = sorted((tmp_path / "children").read_text().splitlines(), reverse=True)
    assert refused.startswith("StageError: rank 1, stage 1, microbatch ")
    assert refused.endswith("ValueError: the child's own")
    assert raised.startswith(
        "UsageError: this process was forked from that of rank 1, and is not a rank"
    )


def test_where_there_is_room_for_no_word_the_cause_is_named_all_the_same(tmp_path: Path) -> None:
    story = str(tmp_path / "out-1" / "no folder")
    job = run_job(tmp_path, fault=fault("exception"), story=story, **{"no room": True})
    check(job, 1, "microbatch 2, action 1F2: InjectedError: injected by fail_at", 70)
    assert "the story of the failure could not be written: " in job.ranks[1].output


@pytest.mark.parametrize("how", ["dtype", "shape", "layout", "detach"])
def test_a_value_that_changed_is_not_sent(how: str, tmp_path: Path) -> None:
    job = run_job(tmp_path, fault=fault(how))
    check(job, 1, "stage 1, microbatch 2, action 1F2: SpecError: ", 70)
    assert job.ranks[1].error == "SpecError"


def test_what_is_not_finite_stops_all_ranks_alike(tmp_path: Path) -> None:
    job = run_job(tmp_path, fault=fault("nan"))
    assert {ended.error for ended in job.ranks} == {"NonFiniteError"}
    assert {ended.status for ended in job.ranks} == {76}
    assert len({ended.text for ended in job.ranks}) == 1
    assert "microbatch 2 in stage 1, rank 1, action 1F2" in job.ranks[0].text


@pytest.mark.parametrize("close", [True, False])
def test_a_loop_that_ends_early_is_named(close: bool, tmp_path: Path) -> None:
    job = run_job(tmp_path, fault=fault("short iterator"), close=close)
    for rank in (0, 2):
        assert job.ranks[rank].error == "PeerFailed", job.ranks[rank].output
        assert "because rank 1, step 1: left after 1 training step, while" in job.ranks[rank].text
    assert job.ranks[1].status == 0
    assert job.heard(1) < PEERS


def test_an_error_between_two_steps_is_named(tmp_path: Path) -> None:
    job = run_job(tmp_path, fault=fault("sleep", rank=9), job="fail outside")
    check(job, 1, "InjectedError: the optimizer", 70)


def test_an_interrupt_is_named(tmp_path: Path) -> None:
    job = run_job(tmp_path, fault=fault("SIGINT"))
    check(job, 1, "was interrupted by Ctrl-C (SIGINT)", 130)
    assert job.ranks[1].status == 130


def test_a_failed_pipeline_does_not_go_on(tmp_path: Path) -> None:
    job = run_job(tmp_path, fault=fault("exception", "1F2") | {"step": 1}, job="try again")
    assert {ended.error for ended in job.ranks} == {"PoisonedError"}
    assert all("build a new Pipeline" in ended.text for ended in job.ranks)


def test_a_straggler_is_told_and_not_stopped(tmp_path: Path) -> None:
    job = run_job(tmp_path, fault=fault("sleep", rank=9), job="straggle")
    assert [ended.status for ended in job.ranks] == [0] * RANKS
    assert "stage 1 is a straggler" in job.ranks[0].output


def test_ranks_with_other_models_are_listed(tmp_path: Path) -> None:
    job = run_job(tmp_path, fault=fault("sleep", rank=9), job="differ")
    for ended in job.ranks:
        assert ended.error == "AgreementError", ended.output
        assert "ranks differ in stage 1: " in ended.text
        assert "on ranks 0, 1, 1 tensors" in ended.text
        assert ended.time - job.fired < 2.0 * SLACK


# ---- as if on several machines: word travels through the store


def test_an_exception_is_named_across_machines(tmp_path: Path) -> None:
    job = run_job(tmp_path, fault=fault("exception"), apart=True)
    check(job, 1, "microbatch 2, action 1F2: InjectedError: injected by fail_at", 70)


FROM_AFAR = 6.0
"""Seconds until a rank of another machine is known to be dead, by its heartbeats."""


@pytest.mark.parametrize("how", ["SIGKILL", "exit"])
def test_a_death_is_named_across_machines(how: str, tmp_path: Path) -> None:
    job = run_job(tmp_path, fault=fault(how), apart=True)
    for rank in (0, 2):
        assert job.ranks[rank].error == "PeerFailed", job.ranks[rank].output
        # Where it was is known from its last heartbeat, and it may have died before the first.
        assert f"rank {rank} stopped because rank 1" in job.ranks[rank].text
        assert "its process ended without a word, its machine is down, or" in job.ranks[rank].text
        assert job.ranks[rank].status == 75
    assert 0 < job.heard(1) < FROM_AFAR * SLACK


def test_who_sleeps_is_named_across_machines_and_gives_its_stack(tmp_path: Path) -> None:
    job = run_job(tmp_path, fault=fault("sleep"), apart=True)
    check(job, 1, "makes no progress: it is in 1F2 for", 75, within=SILENT + FROM_AFAR * SLACK)
    assert job.ranks[1].status == 75
    told = json.loads((tmp_path / "failure.json").read_text())
    assert "time.sleep" in told["stacks"]["1"]


def test_who_is_stopped_is_named_across_machines_and_does_not_stay(tmp_path: Path) -> None:
    job = run_job(tmp_path, fault=fault("SIGSTOP") | {"step": 20}, steps=30, apart=True)
    for rank in (0, 2):
        assert job.ranks[rank].error == "PeerFailed", job.ranks[rank].output
        assert f"rank {rank} stopped because rank 1" in job.ranks[rank].text
        assert "makes no progress: it has not been heard of for" in job.ranks[rank].text
    assert job.heard(1) < SILENT + FROM_AFAR * SLACK
    assert job.ranks[1].status == -9
    assert job.gone - job.fired < SILENT + 5.0 * SLACK


@pytest.mark.parametrize(
    ("how", "says", "bound"),
    [
        ("SIGKILL", "[Cc]onnection|Broken pipe", 3.0),
        ("SIGSTOP", "it has not answered for", SILENT + 5.0),
    ],
)
def test_a_store_that_is_lost_is_named(how: str, says: str, bound: float, tmp_path: Path) -> None:
    injected = {"rank": 0, "step": 20, "action": "0F2", "how": how}
    job = run_job(tmp_path, fault=injected, steps=30, apart=True)
    for rank in (1, 2):
        assert job.ranks[rank].error == "PeerFailed", job.ranks[rank].output
        assert "the control store, through which ranks leave word, is lost" in job.ranks[rank].text
        assert re.search(says, job.ranks[rank].text), job.ranks[rank].text
        assert "; this rank waits" in job.ranks[rank].text
    assert job.ranks[0].status == -9
    assert job.gone - job.fired < bound * SLACK
