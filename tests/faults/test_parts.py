"""The parts of the watch, each alone."""

from __future__ import annotations

import ctypes
import errno
import gc
import json
import os
import pickle
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined] # public, but not marked so

from penstock.errors import NonFiniteError, StageError, UsageError, printable
from penstock.faults import Activity, Failure, Patience, Watch
from penstock.faults.board import Board, BoardLostError, SharedBoard, StoreBoard
from penstock.faults.failure import FILE, of_exception, stacks, status_of, story, write
from penstock.faults.monitor import Team
from penstock.faults.processes import DeadMan, Process, this_process, words_of
from penstock.faults.progress import Place, Stragglers, find_silent
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


def test_who_is_outside_of_a_step_has_the_same_time_and_is_told_what_to_do() -> None:
    outside = Place(1, inside=False, step=4, age=9.0, limit=2.0)
    assert found(waits(0, 1), outside) == (1,)
    assert outside.words == "is between steps, after step 4, in its own code, for 9.0 s"
    assert (
        outside.advice == ", and waits for nobody; if it needs that long, say so by pipe.patient()"
    )


def test_who_is_set_up_is_silent_too() -> None:
    setting_up = Place(1, inside=False, making="loads its weights", age=9.0, limit=2.0)
    assert found(waits_for_all(0), setting_up) == (1,)
    assert setting_up.words == "is making its pipeline (loads its weights) for 9.0 s"
    assert setting_up.advice.endswith("if it needs that long, raise rendezvous_timeout=")


# ---- words and boards


@pytest.fixture(params=["memory", "store"])
def boards(request: pytest.FixtureRequest) -> Iterator[list[Board]]:
    """Those of three ranks."""
    if request.param == "memory":
        path = SharedBoard.make(3)
        made: list[Board] = [SharedBoard.opened(rank, 3, path) for rank in range(3)]
        path.unlink()
    else:
        store = HashStore()
        for rank in range(3):
            StoreBoard.prepare(rank, store)
        made = [StoreBoard(rank, 3, store) for rank in range(3)]
    yield made
    for board in made:
        board.close()


def soon(look: Callable[[], Any], expected: Any) -> bool:
    """Whether that is seen within a time, as through a store it is."""
    deadline = time.monotonic() + 5.0
    while look() != expected and time.monotonic() < deadline:
        time.sleep(0.005)
    return bool(look() == expected)


def test_words_are_replaced_and_reports_are_kept_in_order(boards: list[Board]) -> None:
    assert boards[0].read("beat", 1) is None
    boards[1].post("beat", "one")
    boards[1].post("beat", {"two": 2})
    assert soon(lambda: boards[0].read("beat", 1), {"two": 2})
    for rank, report in enumerate("abc"):
        boards[rank].report(report)
    for board in boards:
        assert soon(board.reports, ["a", "b", "c"])


def test_shared_memory_needs_no_file_and_is_this_user_s_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = SharedBoard.make(2)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.unlink()
    monkeypatch.setattr("penstock.faults.board.os.write", _no_room)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(OSError, match="No space left"):
        SharedBoard.make(2)
    assert not list(tmp_path.iterdir())


def _no_room(file: int, data: bytes) -> int:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_the_longest_reports_fit_into_a_page(tmp_path: Path) -> None:
    path = SharedBoard.make(2)
    one, other = (SharedBoard.opened(rank, 2, path) for rank in range(2))
    path.unlink()
    text = "".join(chr(0x4E00 + i * 7919 % 20000) for i in range(20_000))
    one.post("stack", text)
    for rank in range(3):
        one.report(asdict(Failure("raised", rank, what=text[:500], trace=text)))
    assert [report["trace"] == text for report in other.reports()] == [True] * 3


class Mute:
    """A store that does not answer for a while."""

    def __init__(self) -> None:
        self.answers = threading.Event()

    def clone(self) -> Mute:
        return self

    def set(self, key: str, value: str) -> None:
        self.answers.wait(20.0)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [b""] * len(keys)

    def has_extended_api(self) -> bool:
        return True


def test_a_store_that_does_not_answer_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.faults.board.PrefixStore", lambda name, store: store)
    store = Mute()
    board = StoreBoard(0, 2, store)
    board.post("beat", 1)
    assert board.read("beat", 1) is None
    assert soon(lambda: board.unanswered > 0.05, True)
    store.answers.set()
    assert soon(lambda: board.unanswered == 0.0, True)
    board.close()


def team(boards: Sequence[Board], rank: int = 0) -> Team:
    return Team(rank, dict.fromkeys(range(len(boards)), this_process()), boards[rank])


def test_each_rank_s_first_failure_counts(boards: list[Board]) -> None:
    found = team(boards)
    for failure in (Failure("raised", 1, what="cause"), Failure("died", 1), Failure("raised", 2)):
        boards[1].report(asdict(failure))

    def count() -> int:
        found.refresh()
        return len(found.failures)

    assert soon(count, 2)
    assert [(f.rank, f.kind) for f in found.failures] == [(1, "raised"), (2, "raised")]
    found.report(Failure("raised", 1))
    assert len(boards[0].reports()) == 3


@pytest.mark.parametrize("kind", ["lost", "silent", "died", "left", "raised", "interrupted"])
def test_what_is_found_from_outside_stops_a_rank_also_if_it_found_it_itself(kind: Any) -> None:
    path = SharedBoard.make(1)
    found = team([SharedBoard.opened(0, 1, path)])
    path.unlink()
    found.report(Failure(kind, 0, what="the network is cut", by=0))
    assert [f.kind for f in found.failures] == [kind]
    raised = kind in ("raised", "interrupted")
    assert [f.kind for f in found.of_others] == ([] if raised else [kind])


def test_a_board_that_is_lost_hides_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the interpreter that ends for it does not search for cycles first, which takes seconds."""
    monkeypatch.setattr("penstock.faults.watch.LINGER", 0.05)
    at_exit: list[Any] = []
    monkeypatch.setattr("penstock.faults.watch.atexit.register", at_exit.append)
    path = SharedBoard.make(2)
    board = SharedBoard.opened(0, 2, path)
    path.unlink()
    watch = Watch(Activity(0), Team(0, dict.fromkeys(range(2), this_process()), board), Patience())
    cut: list[int] = []
    watch.over(lambda: cut.append(1))

    def refuse(self: SharedBoard) -> None:
        raise BoardLostError("No space left on device")

    monkeypatch.setattr(SharedBoard, "_publish", refuse)
    error = ValueError("the user's own")
    assert watch.failed(error) is error
    assert cut
    assert at_exit[-1] is gc.freeze
    watch.close()


def test_who_asks_for_more_time_has_it_at_once_and_no_longer() -> None:
    path = SharedBoard.make(2)
    near, other = (SharedBoard.opened(rank, 2, path) for rank in range(2))
    path.unlink()
    processes = dict.fromkeys(range(2), this_process())
    watch = Watch(Activity(0), Team(0, processes, near), Patience())
    seen = Team(1, processes, other)

    def limit() -> float:
        return seen.places(Activity(1).snapshot(), 30.0)[0].limit

    with watch.patient(600.0):
        assert limit() == 600.0
        with watch.patient(100.0):
            assert limit() == 600.0
    assert limit() == 30.0
    watch.close()


# ---- failures as data


def test_a_failure_survives_its_text() -> None:
    failure = Failure("silent", 1, 3, 1, 2, "1F2", "", "does nothing", story=("a", "b"), by=0)
    assert Failure.from_data(json.loads(json.dumps(asdict(failure)))) == failure


class Canary:
    """Sings if anybody un-pickles it."""

    def __reduce__(self) -> Any:
        return (os.putenv, ("PENSTOCK_CANARY", "sang"))


@pytest.mark.parametrize(
    "found",
    [
        None,
        [],
        {},
        {"kind": "raised"},
        asdict(Failure("raised", 0)) | {"kind": "exploded"},
        asdict(Failure("raised", 0)) | {"rank": "0"},
        pickle.dumps(Canary()).decode("latin-1"),
    ],
)
def test_what_is_no_failure_is_none(found: Any) -> None:
    assert Failure.from_data(found) is None


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


def test_a_story_that_cannot_be_written_is_told_and_hides_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    write(tmp_path / "file" / "gone", {})
    assert "the story of the failure could not be written: " in caplog.text
    write(tmp_path / "new" / "folder", {"told": 1})
    assert json.loads((tmp_path / "new" / "folder" / FILE).read_text()) == {"told": 1}
    write(tmp_path / "new" / "folder", {"told": 2})
    assert json.loads((tmp_path / "new" / "folder" / FILE).read_text()) == {"told": 1}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a file that is always full")
def test_a_story_for_which_there_is_no_room_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    removed: list[Path] = []
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr(Path, "open", lambda *_, **__: full)
        monkeypatch.setattr(Path, "unlink", lambda path: removed.append(path))
        write(tmp_path, {"told": 3})
    assert "No space left" in caplog.text
    assert removed == [tmp_path / FILE]


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


@pytest.mark.skipif(sys.platform != "linux", reason="a timer of Linux")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("how", ["stopped", "holds the GIL", "lives"])
def test_who_does_not_put_its_end_off_is_ended(how: str) -> None:
    child = os.fork()
    if child == 0:
        switch = DeadMan()
        switch.put_off(0.2)
        if how == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        if how == "holds the GIL":
            ctypes.PyDLL(None).sleep(20)
        switch.put_off(20.0)
        switch.retire()
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == (7 if how == "lives" else -9)


def test_a_slate_tells_the_last_action_and_whether_it_is_over() -> None:
    path = SharedBoard.make(2)
    writing, reading = (SharedBoard.opened(rank, 2, path) for rank in range(2))
    path.unlink()
    seen = reading.slate(1)
    assert seen is not None
    assert seen.read() == {}
    activity = Activity(1)
    activity.slate = writing.slate(1)
    activity.begin(training=True)
    activity.at(parse_action("1SEND_F3"))
    told = seen.read()
    names = ("step", "action", "stage", "microbatch", "inside")
    assert [told[name] for name in names] == [1, "1SEND_F3", 1, 3, True]
    activity.end()
    assert [seen.read()[name] for name in names] == [1, None, None, None, False]


def test_patience_is_learned() -> None:
    patience = Patience(meeting=20.0)
    assert patience.limit == 20.0
    patience.made = True
    assert patience.limit == 300.0
    patience.learn(1.0)
    assert patience.limit == 30.0
    for _ in range(9):
        patience.learn(40.0)
    assert patience.limit == 400.0


def test_patience_may_be_fixed() -> None:
    patience = Patience((60.0, 5.0))
    patience.made = True
    assert patience.limit == 60.0
    patience.learn(1.0)
    assert patience.limit == 5.0
    with pytest.raises(UsageError, match="timeout=0"):
        Patience(0)
    with pytest.raises(UsageError, match="rendezvous_timeout=0"):
        Patience(meeting=0)


def beats(*seconds: float, count: int = 10) -> list[dict[str, Any]]:
    return [{"busy": {str(i): [count * each, count]}} for i, each in enumerate(seconds)]


def test_a_straggler_is_named_once() -> None:
    stragglers = Stragglers()
    (text,) = stragglers.find(beats(0.01, 0.1, 0.01))
    assert "stage 1 is a straggler: an action takes 100.0 ms there, and 10.0 ms" in text
    assert stragglers.find(beats(0.01, 0.1, 0.01, count=30)) == []


def test_short_actions_and_few_of_them_make_none() -> None:
    assert Stragglers().find(beats(0.0001, 0.001, 0.0001)) == []
    assert Stragglers().find(beats(0.01, 0.1, 0.01, count=3)) == []
