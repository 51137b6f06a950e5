"""What goes wrong becomes an exit status and a line, or a traceback where it is the code's fault."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest
import typer

from penstock.cli.main import PATIENCE, guarded, leaving_on_sigterm
from penstock.errors import InputFileError, ScheduleError, StageError, UsageError

Capture = pytest.CaptureFixture[str]


def raising(error: BaseException) -> Callable[[], None]:
    def run() -> None:
        raise error

    return run


def test_done() -> None:
    assert guarded(lambda: None) == 0


def test_a_command_s_own_status_is_kept() -> None:
    assert guarded(lambda: 3) == 3


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (UsageError("steps=0 must be\nat least 1"), 2, "penstock: steps=0 must be at least 1\n"),
        (ScheduleError("unknown"), 2, "penstock: unknown\n"),
        (InputFileError("text: empty"), 65, "penstock: text: empty\n"),
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


def test_a_status_that_says_interrupted_is_told(capsys: Capture) -> None:
    assert guarded(lambda: 130) == 130
    assert capsys.readouterr().err == "penstock: interrupted\n"


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


def test_one_process_of_a_machine_tells_of_an_interrupt(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert guarded(raising(KeyboardInterrupt())) == 130
    assert capsys.readouterr().err == ""


def terminate_while_open(left: list[str]) -> None:
    with leaving_on_sigterm():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        finally:
            left.append("left")


def test_sigterm_leaves_through_what_is_open() -> None:
    left: list[str] = []
    with pytest.raises(SystemExit, match="143"):
        terminate_while_open(left)
    assert left


def test_the_handler_of_sigterm_is_put_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with leaving_on_sigterm():
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before
