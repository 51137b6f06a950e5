"""A fault on one rank of three: every other rank raises a named error, in time, and no process is killed."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined] # public, but not marked so

from penstock._engine.faults import Failure, Place
from penstock.testing.faults import How
from tests.faults.jobs import RANKS, SILENT, SLACK, Outcome, run_job

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

JobOf = Callable[[dict[str, Any]], Outcome]
PROMPT = 3.0 * SLACK
"""Seconds until every other rank has raised, after an exception or a death."""
EARLY = 10.0
"""Seconds without progress before the second step, where the test is about that time."""
LATE = SILENT + 3.0 * SLACK
"""The same after silence."""


def fault(how: How, action: str = "1F2", rank: int = 1, step: int = 2) -> dict[str, Any]:
    """A case of :func:`run_job`."""
    return {"fault": {"rank": rank, "step": step, "action": action, "how": how}}


def silent(how: How, action: str = "1F2", rank: int = 1, step: int = 2) -> dict[str, Any]:
    """A case in which a rank falls silent."""
    return fault(how, action, rank, step) | {
        "frozen": -1 if how == "sleep" else rank,
        "timeout": SILENT,
        "meeting": 60.0 if step else EARLY,
        "first": EARLY if step == 1 else 60.0,
    }


def name(value: Any) -> str:
    """What a case is called."""
    if not isinstance(value, dict):
        return ""
    return f"{value['fault']['how']} {value['fault']['action']}"


def check(
    job: Outcome, culprit: int, says: str, status: int, within: float, *, reported: bool = True
) -> None:
    """That all other ranks name the culprit, in time, and that the report does, where it has a folder."""
    for rank, ended in enumerate(job.ranks):
        if rank != culprit:
            assert ended.error == "PeerFailed", ended.output
            assert f"rank {rank} stopped because rank {culprit}" in ended.text
            assert re.search(says, ended.text), ended.text
            assert ended.status == status
    assert 0 < job.heard(culprit) < within
    if reported:
        assert job.report["failures"][0]["rank"] == culprit
        # Where the store has ended with its host, only the place of who reports is known.
        places = [place["rank"] for place in job.report["ranks"]]
        assert places == ([job.report["failures"][0]["by"]] if "store" in says else [0, 1, 2])


@pytest.mark.parametrize(
    ("case", "says", "status"),
    [
        (
            fault("exception", "0F1", 0),
            "step 2, stage 0, microbatch 1, action 0F1: InjectedError: ",
            70,
        ),
        (fault("exception", "cuts", step=0), "rank 1: InjectedError: ", 70),
        (fault("exception", "between", step=3), "rank 1, step 2: InjectedError: ", 70),
        (fault("SIGINT"), r"action 1F2: was interrupted by Ctrl-C \(SIGINT\)", 130),
    ],
    ids=name,
)
def test_an_exception_is_told_once_and_named_everywhere(
    case: dict[str, Any], says: str, status: int, job_of: JobOf
) -> None:
    job, injected = job_of(case), case["fault"]
    reported = injected["step"] > 0
    check(job, injected["rank"], says, status, PROMPT, reported=reported)
    culprit = job.ranks[injected["rank"]]
    assert culprit.status == status
    assert culprit.error in ("StageError", "InjectedError", "KeyboardInterrupt")
    assert not reported or "Traceback" in job.report["failures"][0]["trace"]


@pytest.mark.parametrize(
    "case",
    [
        fault("SIGKILL"),
        fault("SIGKILL", "0F2", 0),
        fault("SIGKILL", "cuts", step=0),
        fault("exit", "between", step=3),
    ],
    ids=name,
)
def test_a_death_is_named(case: dict[str, Any], job_of: JobOf) -> None:
    job, injected = job_of(case), case["fault"]
    rank, reported = injected["rank"], injected["step"] > 0
    says = "its process died without reporting an error" if rank else "the control store, "
    check(job, rank, says, 75, PROMPT, reported=reported)
    assert not reported or job.report["failures"][0]["kind"] == ("died" if rank else "lost")


MUTE = "its process has ended or is stopped by a signal, its interpreter is held by code"
HOST = "the control store, .* the process that hosts it, usually that of rank 0"


@pytest.mark.parametrize(
    ("case", "says"),
    [
        (silent("sleep"), "it is in 1F2 for "),
        (silent("SIGSTOP", "0F2", 0), HOST),
        (silent("hold the GIL"), MUTE),
        (silent("SIGSTOP", "cuts", step=0), MUTE),
    ],
    ids=name,
)
def test_who_is_silent_is_named(case: dict[str, Any], says: str, job_of: JobOf) -> None:
    """A rank that can, ends itself and prints its stack; one that runs no threads is left to its launcher."""
    job, injected = job_of(case), case["fault"]
    rank, sleeps = injected["rank"], injected["how"] == "sleep"
    reported = injected["step"] > 0
    check(job, rank, says, 75, LATE + EARLY, reported=reported)
    kind = "silent" if rank else "lost"
    assert not reported or job.report["failures"][0]["kind"] == kind
    if sleeps:
        assert job.ranks[rank].status == 75
        assert "testing/faults.py" in job.ranks[rank].output


def test_a_rank_that_is_told_to_end_and_does_is_named(tmp_path: Path) -> None:
    """Its own handler of the signal ends it, by an exit status that is not 0."""
    job = run_job(tmp_path, **fault("sleep", rank=9), terminates=1)
    check(job, 1, r"rank 1, step 2: was told to end \(SIGTERM\)", 143, PROMPT)
    assert job.ranks[1].error == "SystemExit"


def test_a_loop_that_ends_early_is_named(tmp_path: Path) -> None:
    job = run_job(tmp_path, **fault("short iterator", step=3))
    check(job, 1, "rank 1, step 2: left after 2 training steps, while others go on", 75, PROMPT)
    assert job.ranks[1].status == 0


def test_a_process_that_a_stage_forks_is_no_rank(tmp_path: Path) -> None:
    job = run_job(tmp_path, **fault("sleep", rank=9), forks="1F2")
    assert [ended.status for ended in job.ranks] == [0, 0, 0]
    assert (tmp_path / "forked").read_text() == "2"
    assert "this process was forked from that of rank 1" in job.ranks[1].output
    # Nothing else happens without a fault.
    assert not (tmp_path / "failure.json").exists()
    assert not any(job.ranks[rank].output for rank in (0, 2)), job.ranks


GARBAGE = [
    b"\xff\x00",
    b"[" * 90_000,
    b"x" * 1_000_000,
    b'{"rank": "\\u001b[2J"}',
    b'{"rank": 1, "status": "stops"}',
    json.dumps({"kind": "\x1b[2J", "rank": 1, "what": "\x1b]0;gone\x07"}).encode(),
    json.dumps(asdict(Place(1, 1)) | {"arrived": f"0-2/1={'9' * 5000}"}).encode(),
    *(
        json.dumps(asdict(Failure(1, 1, kind="raised")) | {"status": status}).encode()
        for status in (0, 256, 2**40)
    ),
]


def test_garbage_in_the_store_kills_nobody_and_is_not_printed(tmp_path: Path) -> None:
    """Another process of the machine overwrites all that the ranks tell each other."""

    def write() -> None:
        store = TCPStore("127.0.0.1", int((tmp_path / "port").read_text()), wait_for_workers=False)
        places = [key for key in store.list_keys() if "/place/" in key]
        assert len(places) == RANKS
        keys = [*places, f"{places[0].rpartition('/place/')[0]}/failure"]
        numbers: dict[str, set[int]] = {key: set() for key in places}
        # Until each rank has written, and has read what another wrote, several times.
        while min(map(len, numbers.values())) < 3:
            time.sleep(0.2)  # They write once a second, and that must be there to be read.
            for key in places:
                with suppress(ValueError, TypeError, KeyError):
                    numbers[key].add(json.loads(store.get(key))["number"])
            for garbage, key in product(GARBAGE, keys):
                store.set(key, garbage)  # type: ignore[arg-type] # torch takes bytes too
        (tmp_path / "fired").write_text(str(time.monotonic()))
        os.kill(int((tmp_path / "pid-1").read_text()), signal.SIGINT)

    never = fault("sleep", rank=9)
    job = run_job(tmp_path, **never, steps=10**9, timeout=60.0, meddle=write)
    check(job, 1, "was interrupted by Ctrl-C", 130, PROMPT, reported=False)
    assert job.report["failures"][0]["rank"] == 1
    # Of the others' places there is garbage, unless they have written since.
    assert {1} <= {place["rank"] for place in job.report["ranks"]} <= {0, 1, 2}
    assert not any("\x1b" in ended.output for ended in job.ranks)


def test_a_value_that_changed_is_not_sent(tmp_path: Path) -> None:
    """What a stage gives is held against the plan before it is sent."""
    job = run_job(tmp_path, **fault("dtype"))
    check(job, 1, "stage 1, microbatch 2, action 1F2: PlanError: ", 2, PROMPT)
    assert (job.ranks[1].error, job.ranks[1].status) == ("PlanError", 2)


def test_what_is_not_finite_stops_all_ranks_alike(tmp_path: Path) -> None:
    job = run_job(tmp_path, **fault("nan"))
    assert {ended.error for ended in job.ranks} == {"NonFiniteError"}
    assert {ended.status for ended in job.ranks} == {76}
