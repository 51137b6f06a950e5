"""What goes wrong becomes an exit status and a line, or a traceback where it is the code's fault."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest
import typer

from penstock.cli.main import PATIENCE, guarded, leaving_on_signals
from penstock.errors import (
    InputFileError,
    NonFiniteError,
    PeerFailed,
    ScheduleError,
    StageError,
    UsageError,
)

Capture = pytest.CaptureFixture[str]


def raising(error: BaseException) -> Callable[[], None]:
    def run() -> None:
        raise error

    return run


@pytest.mark.parametrize(("result", "status"), [(None, 0), (3, 3)])
def test_a_command_s_own_status_is_kept(result: int | None, status: int) -> None:
    assert guarded(lambda: result) == status


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (UsageError("steps=0 must be\nat least 1"), 2, "penstock: steps=0 must be at least 1\n"),
        (ScheduleError("unknown"), 2, "penstock: unknown\n"),
        (InputFileError("text: empty"), 65, "penstock: text: empty\n"),
        (NonFiniteError("nan"), 76, "penstock: nan\n"),
        (PeerFailed("rank 1 died", status=75), 75, "penstock: rank 1 died\n"),
        (typer.BadParameter("wrong."), 2, "penstock: Invalid value: wrong; see --help\n"),
        (KeyboardInterrupt(), 130, "penstock: interrupted\n"),
        (typer.Abort(), 130, "penstock: interrupted\n"),
    ],
)
def test_a_mistake_is_one_line(
    error: BaseException, status: int, line: str, capsys: Capture
) -> None:
    assert guarded(raising(error)) == status
    assert capsys.readouterr().err == line


@pytest.mark.parametrize("error", [StageError("stage 1"), ZeroDivisionError("user code")])
def test_a_crash_keeps_its_traceback(error: Exception, capsys: Capture) -> None:
    assert guarded(raising(error)) == 70
    shown = capsys.readouterr().err
    assert shown.startswith("Traceback")
    assert str(error) in shown


def test_other_processes_let_the_first_one_speak(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    said_before: list[tuple[float, str]] = []
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(
        "penstock.cli.main.time.sleep",
        lambda seconds: said_before.append((seconds, capsys.readouterr().err)),
    )
    assert guarded(raising(UsageError("wrong"))) == 2
    assert said_before == [(PATIENCE, "")]
    assert capsys.readouterr().err == "penstock: wrong\n"
    assert guarded(raising(KeyboardInterrupt())) == 130
    assert capsys.readouterr().err == ""


def test_sigterm_leaves_through_what_is_open() -> None:
    left: list[str] = []

    def terminate() -> None:
        with leaving_on_signals():
            try:
                os.kill(os.getpid(), signal.SIGTERM)
            finally:
                left.append("left")

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit, match="143"):
        terminate()
    assert left
    assert signal.getsignal(signal.SIGTERM) == before
