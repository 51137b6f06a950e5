"""The parts of the watch, each alone."""

from __future__ import annotations

import json
import os
import pickle
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined] # public, but not marked so

from penstock.errors import NonFiniteError, StageError, UsageError, printable
from penstock.faults import Activity, Failure, FolderBoard, Meeting, Patience, StoreBoard
from penstock.faults.failure import of_exception, status_of
from penstock.faults.ledger import Ledger
from penstock.faults.processes import Process, this_process, words_of
from penstock.faults.report import stacks, story
from penstock.faults.silence import Place, find_silent
from penstock.faults.slate import Slate
from penstock.faults.stragglers import Stragglers
from penstock.schedule import parse_action
from penstock.transport import in_process

# ---- who is silent


def waits(rank: int, *peers: int, age: float = 9.0, **more: Any) -> Place:
    return Place(rank, waits="waits", peers=peers, age=age, limit=2.0, **more)


def waits_for_all(rank: int, age: float = 9.0) -> Place:
    return Place(rank, waits="waits for a sum", age=age, limit=2.0)


def works(rank: int, age: float = 9.0, **more: Any) -> Place:
    return Place(rank, action="1F2", age=age, limit=2.0, **more)


def found(*places: Place) -> tuple[int, ...] | None:
    verdict = find_silent({place.rank: place for place in places}, 0)
    return None if verdict is None else verdict.culprits


def test_the_end_of_the_chain_is_silent() -> None:
    assert found(waits(0, 1), waits(1, 2), works(2)) == (2,)


def test_who_still_makes_progress_is_not() -> None:
    assert found(waits(0, 1), waits(1, 2), works(2, age=0.5)) is None


def test_an_operation_of_all_waits_for_who_is_not_in_it() -> None:
    assert found(waits_for_all(0), waits_for_all(1), works(2)) == (2,)
    assert found(waits_for_all(0), waits(1, 2), works(2)) == (2,)


def test_who_is_stopped_waits_for_nobody_whatever_it_said() -> None:
    stopped = waits(1, 2, condition="stopped")
    assert found(waits(0, 1), stopped, waits(2, 1)) == (1,)
    held = waits(1, 2, stale=8.0)
    assert found(waits(0, 1), held, waits(2, 1)) == (1,)


def test_a_circle_is_nobody_s_fault_alone() -> None:
    assert found(waits(0, 1), waits(1, 0), works(2, age=0.1)) == (0, 1)


def test_who_is_outside_has_its_own_limit() -> None:
    outside = Place(1, inside=False, step=4, age=9.0, limit=300.0)
    assert found(waits(0, 1), outside) is None
    assert "outside of the pipeline, in its own code after step 4" in str(outside)


# ---- words and boards


@pytest.fixture(params=["folder", "store"])
def board(request: pytest.FixtureRequest, tmp_path: Path) -> FolderBoard | StoreBoard:
    return FolderBoard(tmp_path) if request.param == "folder" else StoreBoard(HashStore())


def test_words_are_replaced_and_reports_are_kept_in_order(board: Any) -> None:
    assert board.read("beat", 1) is None
    board.post("beat", 1, "one")
    board.post("beat", 1, "two")
    assert board.read("beat", 1) == "two"
    assert board.reports(0) == []
    for text in ("a", "b", "c"):
        board.report(text)
    assert board.reports(1) == ["b", "c"]


def test_a_folder_is_its_owner_s_alone_and_goes_away() -> None:
    board = FolderBoard.new()
    assert stat.S_IMODE(board.path.stat().st_mode) == 0o700
    board.remove()
    assert not board.path.exists()


def test_a_ledger_keeps_each_rank_s_first_failure(board: Any) -> None:
    ledger = Ledger(board, 0)
    for failure in (Failure("raised", 1, what="cause"), Failure("died", 1), Failure("raised", 2)):
        board.report(failure.to_json())
    ledger.refresh()
    assert [(f.rank, f.kind) for f in ledger.failures] == [(1, "raised"), (2, "raised")]
    ledger.post(Failure("raised", 1))
    assert len(board.reports(0)) == 3


@pytest.mark.parametrize("kind", ["lost", "silent", "died", "left"])
def test_what_is_found_from_outside_stops_a_rank_also_if_it_found_it_itself(
    board: Any, kind: Any
) -> None:
    ledger = Ledger(board, 0)
    ledger.post(Failure(kind, 0, what="the network is cut", by=0))
    assert [f.kind for f in ledger.of_others] == [kind]
    ledger.post(Failure("died", 1, by=0))
    assert [f.rank for f in ledger.of_others] == [0, 1]


@pytest.mark.parametrize("kind", ["raised", "interrupted"])
def test_what_a_rank_raised_itself_is_not_another_s(board: Any, kind: Any) -> None:
    ledger = Ledger(board, 0)
    ledger.post(Failure(kind, 0, by=0))
    assert ledger.failures
    assert ledger.of_others == ()


def test_ranks_of_one_machine_meet_in_a_folder_and_others_in_the_store() -> None:
    near = [Meeting(rank) for rank in range(2)]
    offers = [meeting.offer() for meeting in near]
    boards = [m.board([m.answer(offers) for m in near], HashStore()) for m in near]
    assert all(isinstance(board, FolderBoard) for board in boards)
    far = [Meeting(rank) for rank in range(2)]
    offers = [meeting.offer() for meeting in far]
    offers[0]["process"]["host"] = "elsewhere"
    answers = [meeting.answer(offers) for meeting in far]
    assert [type(m.board(answers, HashStore())) for m in far] == [StoreBoard] * 2
    boards[0].remove()  # type: ignore[union-attr]


# ---- failures as data


def test_a_failure_survives_its_text() -> None:
    failure = Failure("silent", 1, 3, 1, 2, "1F2", "", "does nothing", story=("a", "b"), by=0)
    assert Failure.from_json(failure.to_json()) == failure


class Canary:
    """Sings if anybody un-pickles it."""

    def __reduce__(self) -> Any:
        return (os.putenv, ("PENSTOCK_CANARY", "sang"))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        "null",
        json.dumps({"kind": "raised"}),
        Failure("raised", 0).to_json().replace('"raised"', '"exploded"'),
        Failure("raised", 0).to_json().replace('"rank": 0', '"rank": "0"'),
        pickle.dumps(Canary()).decode("latin-1"),
        "x" * 300_000,
    ],
)
def test_what_is_no_failure_is_none(text: str) -> None:
    assert Failure.from_json(text) is None


def test_what_cannot_be_json_does_not_travel() -> None:
    ends = in_process(1)
    with pytest.raises(TypeError, match="not JSON serializable"):
        ends[0].agree(Canary())


def test_texts_cannot_steer_a_terminal() -> None:
    error = ValueError("\x1b[2Jgone\nsecond line")
    failure = of_exception(error, 1, Activity(1).snapshot())
    assert failure.what == "\\x1b[2Jgone"
    assert "\x1b" not in failure.trace
    assert printable("déjà vu\t…") == "déjà vu\t…"


def test_the_user_s_error_is_the_one_that_is_named() -> None:
    error = StageError("rank 1, stage 1: boom")
    error.__cause__ = KeyError("boom")
    activity = Activity(1)
    assert of_exception(error, 1, activity.snapshot()).error == "StageError", (
        "which alone says where"
    )
    activity.at(parse_action("1F0"))
    assert of_exception(error, 1, activity.snapshot()).error == "KeyError"


def test_exit_statuses() -> None:
    errors = [KeyboardInterrupt(), NonFiniteError(), UsageError(), ValueError(), SystemExit(143)]
    assert [status_of(error) for error in errors] == [130, 76, 2, 70, 143]


def test_a_story_shows_nothing_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "s3cret")
    told = story([Failure("died", 1)], {0: works(0)}, {0: stacks()}, 0)
    assert "s3cret" not in json.dumps(told)
    assert told["summary"].startswith("rank 1")


# ---- processes, slates, patience, stragglers


def test_a_process_is_told_from_a_later_one_of_its_number() -> None:
    assert this_process().condition() == "runs"
    other = Process(this_process().host, os.getpid(), "1")
    assert other.condition() == "ended"
    assert not other.kill()
    assert Process("elsewhere", 1, "1").condition() == "unknown"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_death_has_its_signal_as_long_as_nobody_has_asked() -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        fields = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()
        process = Process(this_process().host, child.pid, fields[19])
        assert process.kill()
        deadline = time.monotonic() + 10
        while process.condition() != "ended" and time.monotonic() < deadline:
            time.sleep(0.01)
        assert process.cause_of_end() == -9
    assert words_of(-9) == "killed by SIGKILL"
    assert words_of(None) == "without a word"


def test_a_slate_tells_the_last_action(tmp_path: Path) -> None:
    writing, reading = Slate(tmp_path / "slate"), Slate(tmp_path / "slate")
    assert reading.read() == {}
    activity = Activity(1)
    activity.slate = writing
    activity.begin(training=True)
    activity.at(parse_action("1SEND_F3"))
    seen = reading.read()
    assert (seen["step"], seen["action"], seen["stage"], seen["microbatch"]) == (
        1,
        "1SEND_F3",
        1,
        3,
    )


def test_patience_is_learned() -> None:
    patience = Patience()
    assert (patience.inside, patience.outside) == (300.0, 300.0)
    patience.learn(1.0)
    assert (patience.inside, patience.outside) == (30.0, 300.0)
    for _ in range(9):
        patience.learn(40.0)
    assert (patience.inside, patience.outside) == (400.0, 400.0)


def test_patience_may_be_fixed() -> None:
    patience = Patience((60.0, 5.0))
    assert patience.inside == 60.0
    patience.learn(1.0)
    assert (patience.inside, patience.outside) == (5.0, 5.0)
    with pytest.raises(UsageError, match="timeout=0"):
        Patience(0)


def beats(*seconds: float, count: int = 10) -> list[dict[str, Any]]:
    return [{"busy": {str(i): [count * each, count]}} for i, each in enumerate(seconds)]


def test_a_straggler_is_named_once() -> None:
    stragglers = Stragglers()
    (text,) = stragglers.find(beats(0.01, 0.1, 0.01))
    assert "stage 1 is a straggler: an action takes 100.0 ms there, planned are 10.0 ms" in text
    assert stragglers.find(beats(0.01, 0.1, 0.01, count=30)) == []


def test_short_actions_and_few_of_them_make_none() -> None:
    assert Stragglers().find(beats(0.0001, 0.001, 0.0001)) == []
    assert Stragglers().find(beats(0.01, 0.1, 0.01, count=3)) == []
