"""The parts of the watch, each alone."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import NonFiniteError, StageError, UsageError, printable
from penstock.faults import Activity, Failure, Patience, Place, find_silent, status_of
from penstock.faults.failure import FILE, of_exception, stacks, write_report
from penstock.faults.processes import Process, this_process
from penstock.faults.silence import Stragglers, read_record
from penstock.schedule import parse_action

# ---- who is silent


def waits(rank: int, peer: int | None, age: float = 9.0, **more: Any) -> Place:
    return Place(rank, waits="a message", peer=peer, age=age, limit=2.0, **more)


def works(rank: int, age: float = 9.0, **more: Any) -> Place:
    return Place(rank, action="1F2", age=age, limit=2.0, **more)


STOPPED: dict[str, Any] = {"condition": "stopped", "stale": 9.0}


@pytest.mark.parametrize(
    ("places", "culprits"),
    [
        pytest.param([waits(0, 1), waits(1, 2), works(2)], (2,), id="the end of the chain"),
        pytest.param([waits(0, 1), waits(1, 2), works(2, age=0.5)], None, id="who makes progress"),
        pytest.param(
            [waits(0, None), waits(1, None), works(2)], (2,), id="not in the operation of all"
        ),
        pytest.param([waits(0, None), waits(1, 2), works(2)], (2,), id="and who waits for it"),
        pytest.param([waits(0, 1), waits(1, 2, **STOPPED), waits(2, 1)], (1,), id="stopped"),
        pytest.param([waits(0, 1), waits(1, 2, stale=8.0), waits(2, 1)], (1,), id="no threads"),
        pytest.param([waits(0, 1), works(1, 0.1, stale=2.3)], None, id="no heartbeat yet"),
        pytest.param([waits(0, 1), waits(1, 0), works(2, age=0.1)], (0, 1), id="a circle"),
        pytest.param([waits(0, 1), waits(1, 0, age=0.1, stale=2.0)], None, id="no circle yet"),
        pytest.param(
            [waits(0, 1), replace(works(1), limit=60.0)], None, id="who asked for more time"
        ),
    ],
)
def test_the_silent_rank_is_where_the_waits_end(
    places: list[Place], culprits: tuple[int, ...] | None
) -> None:
    verdict = find_silent({place.rank: place for place in places}, 0)
    assert (None if verdict is None else verdict.culprits) == culprits


def test_a_place_says_what_the_rank_does_and_what_to_do() -> None:
    outside = Place(1, inside=False, step=4, age=9.0)
    assert str(outside) == "rank 1 is between steps, after step 4, in its own code, for 9.0 s"
    assert "pipe.patient()" in outside.advice
    setting_up = Place(1, inside=False, setup="loads its weights", age=9.0)
    assert setting_up.words == "is making its pipeline (loads its weights) for 9.0 s"
    assert "rendezvous_timeout=" in setting_up.advice


def test_an_activity_is_where_its_rank_is() -> None:
    activity = Activity(1)
    activity.prepare("cuts the model")
    assert activity.place().setup == "cuts the model"
    activity.setup = None
    activity.begin(3)
    activity.act(parse_action("1F2"))
    place = activity.place()
    assert (place.step, place.stage, place.microbatch, place.action) == (3, 1, 2, "1F2")
    activity.wait("1RECV_B2", 2)
    assert (activity.place().waits, activity.place().peer) == ("1RECV_B2", 2)
    assert activity.place().busy["1"][1] == 1
    activity.rest()
    assert not activity.place().inside
    assert len(activity.durations) == 1
    activity.begin(3)
    activity.rest()
    assert len(activity.durations) == 1, "an evaluation is no step"
    assert read_record(Place, json.dumps(asdict(activity.place())).encode()) is not None


def test_patience_is_learned_or_fixed() -> None:
    assert Patience().limit([]) == 300.0
    assert Patience().limit([1.0, 5.0, 6.0]) == 50.0
    assert Patience().limit([0.1]) == 30.0
    assert Patience((7, None)).limit([]) == 7.0
    assert Patience(8).limit([1.0]) == Patience((None, 8)).limit([1.0]) == 8.0
    for wrong in (0, -1.0, "1", (1, 2, 3), (0, 1)):
        with pytest.raises(UsageError, match="timeout="):
            Patience(wrong)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="rendezvous_timeout="):
        Patience(rendezvous_timeout=0)


def test_a_slow_stage_is_named_once() -> None:
    stragglers = Stragglers()
    for looks in (1, 2):
        busy = [[0.01 * n * looks, 10 * looks] for n in (1, 1, 20)]
        names = stragglers.find(Place(s, busy={str(s): pair}) for s, pair in enumerate(busy))
        assert [name.partition(" is")[0] for name in names] == (["stage 2"] if looks == 1 else [])


# ---- failures as data


GOOD = asdict(Failure("raised", 1, 3, 1, 2, "1F2", "ValueError", "boom", "trace\nlines", by=0))


def test_a_failure_survives_its_text() -> None:
    assert asdict(read_record(Failure, json.dumps(GOOD).encode()) or Place(0)) == GOOD


@pytest.mark.parametrize(
    "record",
    [
        None,
        [],
        {},
        {"kind": "raised"},
        GOOD | {"rank": "0"},
        GOOD | {"step": 1e99},
        GOOD | {"trace": 1},
    ],
)
def test_what_is_no_failure_is_none(record: Any) -> None:
    assert read_record(Failure, json.dumps(record).encode()) is None


@pytest.mark.parametrize(
    "data", [b"", b"\xff", b"[" * 90_000, b" " * 10**6, b'{"rank": ' + b"9" * 9999]
)
def test_what_is_no_record_is_none(data: bytes) -> None:
    assert read_record(Failure, data) is None
    assert read_record(Place, data) is None


def test_texts_cannot_steer_a_terminal() -> None:
    failure = of_exception(ValueError("\x1b[2Jgone\nsecond line"), Activity(1).place())
    assert failure.what == "\\x1b[2Jgone"
    assert "\x1b" not in failure.trace
    foreign = read_record(Failure, json.dumps(GOOD | {"what": "\x1b[2J" * 1000}).encode())
    assert foreign is not None
    assert "\x1b" not in foreign.what
    assert len(foreign.what) < 1000
    assert printable("déjà vu\t…") == "déjà vu\t…"


def test_the_user_s_error_is_the_one_that_is_named() -> None:
    error = StageError("rank 1, stage 1: boom")
    error.__cause__ = KeyError("boom")
    activity = Activity(1)
    assert of_exception(error, activity.place()).error == "StageError", "which alone says where"
    activity.act(parse_action("1F0"))
    assert of_exception(error, activity.place()).error == "KeyError"


def test_exit_statuses() -> None:
    errors = [KeyboardInterrupt(), NonFiniteError(), UsageError(), ValueError(), SystemExit(143)]
    assert [status_of(error) for error in errors] == [130, 76, 2, 70, 143]


def test_a_report_shows_nothing_of_the_environment_and_stays(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "s3cret")
    for kind in ("died", "silent"):
        write_report(tmp_path / "new", Failure(kind, 1), [works(0)], {0: stacks()})
    text = (tmp_path / "new" / FILE).read_text()
    assert "s3cret" not in text
    assert json.loads(text)["failures"][0]["kind"] == "died", "the first report stays"
    (tmp_path / "file").touch()
    write_report(tmp_path / "file" / "gone", Failure("died", 1), [])
    assert "the report of the failure could not be written: " in caplog.text


# ---- processes


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_process_is_told_from_a_later_one_of_its_number() -> None:
    own = this_process()
    assert own.condition() == "runs"
    assert replace(own, started="1").condition() == "ended"
    assert Process("elsewhere", 1, "1").condition() == "unknown"


CODE = """
import signal, sys, time
from penstock.faults.processes import interrupt, terminate
signal.signal(signal.SIGTERM, terminate)
signal.signal(signal.SIGINT, interrupt)
try:
    print("ready", flush=True)
    time.sleep(60)
finally:
    print("cleaning up", flush=True)
    if sys.argv[1] == "slowly":
        time.sleep(60)
"""


@pytest.mark.parametrize(
    ("number", "how", "status"),
    [
        (signal.SIGTERM, "slowly", 143),
        (signal.SIGINT, "slowly", 130),
        (signal.SIGTERM, "fast", 143),
    ],
)
def test_a_second_signal_ends_at_once_what_cleans_up_slowly(
    number: int, how: str, status: int
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", CODE, how], stdout=subprocess.PIPE, text=True
    ) as process:
        for said in ("ready", "cleaning up"):
            assert process.stdout is not None
            assert process.stdout.readline().strip() == said
            if said == "ready" or how == "slowly":
                process.send_signal(number)
        assert process.wait(100.0) == status
