"""What goes wrong becomes an exit status and a line, or a traceback where it is the code's fault."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import typer

from penstock.cli.main import PATIENCE, guarded
from penstock.errors import InputFileError, NonFiniteError, PeerFailed, ScheduleError, UsageError
from tests.processes import script

Capture = pytest.CaptureFixture[str]


def raising(error: BaseException) -> Callable[[], None]:
    def run() -> None:
        raise error

    return run


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (UsageError("steps=0 must be\nat least 1"), 2, "steps=0 must be at least 1"),
        (ScheduleError("unknown"), 2, "unknown"),
        (InputFileError("text: empty"), 65, "text: empty"),
        (NonFiniteError("nan"), 76, "nan"),
        (PeerFailed("rank 1 died", status=75), 75, "rank 1 died"),
        (typer.BadParameter("wrong."), 2, "Invalid value: wrong; see --help"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (typer.Abort(), 130, "interrupted"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_a_mistake_is_one_line(
    error: BaseException, status: int, line: str, capsys: Capture
) -> None:
    assert guarded(raising(error)) == status
    assert capsys.readouterr().err == f"penstock: {line}\n"


def test_a_crash_keeps_its_traceback_and_a_command_its_own_status(capsys: Capture) -> None:
    assert guarded(raising(ZeroDivisionError("user code"))) == 70
    shown = capsys.readouterr().err
    assert shown.startswith("Traceback")
    assert "user code" in shown
    assert [guarded(lambda: None), guarded(lambda: 3)] == [0, 3]


def test_other_processes_let_the_first_one_speak(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    before: list[tuple[float, str]] = []
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(
        "penstock.cli.main.time.sleep",
        lambda seconds: before.append((seconds, capsys.readouterr().err)),
    )
    assert guarded(raising(UsageError("wrong"))) == 2
    assert before == [(PATIENCE, "")]
    assert capsys.readouterr().err == "penstock: wrong\n"
    assert guarded(raising(KeyboardInterrupt())) == 130
    assert capsys.readouterr().err == ""


WAITS = """
import sys, time
from penstock.cli import main as command
def wait():
    try:
        print("waits", flush=True)
        while True:
            time.sleep(0.05)  # a signal just before a sleep is handled after it
    finally:
        print("left", flush=True)
        if "twice" in sys.argv:
            time.sleep(100)
command.app = lambda *_, **__: wait()
sys.exit(command.main())
"""


@pytest.mark.parametrize(
    ("number", "twice", "status"),
    [(signal.SIGTERM, False, 143), (signal.SIGINT, False, 130), (signal.SIGTERM, True, -15)],
)
def test_a_signal_leaves_through_what_is_open_and_a_second_one_at_once(
    number: int, twice: bool, status: int, tmp_path: Path
) -> None:
    (tmp_path / "waits.py").write_text(WAITS)
    with script(str(tmp_path / "waits.py"), *["twice"][:twice]) as job:
        (process,) = job.pids
        job.until(lambda: job.ended[0].out == "waits\n")
        os.kill(process, number)
        job.until(lambda: "left" in job.ended[0].out)
        if twice:
            os.kill(process, number)
        (ended,) = job.wait()
    assert ended.status == status, ended
