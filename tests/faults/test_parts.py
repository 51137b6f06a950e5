"""The parts of the watch, each alone."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import NonFiniteError, StageError, UsageError, printable
from penstock.faults import Activity, Failure, Patience, Place, find_silent, status_of
from penstock.faults.failure import FILE, of_exception, write_report
from penstock.faults.places import read_record
from penstock.schedule import parse_action


def waits(rank: int, peer: int | None, age: float = 9.0, **more: Any) -> Place:
    return Place(rank, waits="a message", peer=peer, age=age, **more)


def works(rank: int, age: float = 9.0, **more: Any) -> Place:
    return Place(rank, action="1F2", age=age, **more)


@pytest.mark.parametrize(
    ("places", "culprits"),
    [
        pytest.param([waits(0, 1), waits(1, 2), works(2)], (2,), id="the end of the chain"),
        pytest.param([waits(0, 1), waits(1, 2), works(2, age=0.5)], (), id="who makes progress"),
        pytest.param(
            [waits(0, None), waits(1, None), works(2)], (2,), id="not in the operation of all"
        ),
        pytest.param([waits(0, None), waits(1, 2), works(2)], (2,), id="and who waits for it"),
        pytest.param([waits(0, 1), waits(1, 2, stale=8.0), waits(2, 1)], (1,), id="no threads"),
        pytest.param([waits(0, 1), works(1, 0.1, stale=2.3)], (), id="no heartbeat yet"),
        pytest.param([waits(0, 1), waits(1, 0), works(2, age=0.1)], (0, 1), id="a circle"),
        pytest.param([waits(0, 1), waits(1, 0, age=0.1, stale=2.0)], (), id="no circle yet"),
        pytest.param([waits(0, 1), works(1, slack=60.0)], (), id="who asked for more time"),
    ],
)
def test_the_silent_rank_is_where_the_waits_end(
    places: list[Place], culprits: tuple[int, ...]
) -> None:
    assert find_silent({place.rank: place for place in places}, 0, 2.0) == culprits


def test_a_place_says_what_the_rank_does_and_what_to_do() -> None:
    outside = Place(1, inside=False, step=4, age=9.0)
    assert str(outside) == "rank 1 is between steps, after step 4, in its own code for 9.0 s"
    assert "pipe.patient()" in outside.advice
    setting_up = replace(outside, setup="loads its weights")
    assert setting_up.words == "is making its pipeline (loads its weights) for 9.0 s"
    assert "rendezvous_timeout=" in setting_up.advice
    waiting = Place(1, waits="1RECV_B2", peer=2, global_rank=3)
    assert str(waiting) == "rank 1 (global rank 3) waits for 1RECV_B2 from rank 2 for 0.0 s"


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


# ---- what travels, and what is written down


GOOD = asdict(Failure("raised", 1, 3, 1, 2, "1F2", "ValueError", "boom", "trace\nlines", by=0))


def data_of(change: dict[str, Any]) -> bytes:
    return json.dumps(GOOD | change).encode()


@pytest.mark.parametrize(
    "data",
    [
        *(b"", b"\xff", b"[" * 90_000, b" " * 10**6, b'{"rank": ' + b"9" * 9999, b"null", b"{}"),
        *(data_of({"rank": "0"}), data_of({"step": 1e99}), data_of({"trace": 1})),
    ],
)
def test_what_is_no_record_is_none(data: bytes) -> None:
    assert read_record(Failure, data) is None
    assert read_record(Place, data) is None


def test_texts_cannot_steer_a_terminal() -> None:
    assert asdict(read_record(Failure, data_of({})) or Place(0)) == GOOD
    failure = of_exception(ValueError("\x1b[2Jgone\nsecond line"), Activity(1).place())
    assert failure.what == "\\x1b[2Jgone"
    assert "\x1b" not in failure.trace
    foreign = read_record(Failure, data_of({"what": "\x1b[2J" * 1000}))
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
        write_report(tmp_path / "new", Failure(kind, 1), [works(0)])
    text = (tmp_path / "new" / FILE).read_text()
    assert "s3cret" not in text
    assert json.loads(text)["failures"][0]["kind"] == "died", "the first report stays"
    (tmp_path / "file").touch()
    write_report(tmp_path / "file" / "gone", Failure("died", 1), [])
    assert "the report of the failure could not be written: " in caplog.text
