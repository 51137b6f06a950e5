"""The folder in which a run leaves its settings, metrics, timeline and weights."""

from __future__ import annotations

import json
import os
from datetime import datetime
from pathlib import Path
from typing import Any

from penstock.errors import UsageError
from penstock.schedule import Timeline, draw_svg

METRICS = "metrics.jsonl"


class RunFolder:
    """A new folder; only one process of a run writes to it.

    Args:
        path: where it is.
        writes: whether this process is the one that writes; the methods of the others do nothing.
    """

    def __init__(self, path: Path, *, writes: bool) -> None:
        self.path = path
        self._writes = writes

    @property
    def weights(self) -> Path:
        """Where the weights go."""
        return self.path / "weights"

    def write_config(self, toml: str) -> None:
        """Keep the settings, so that ``--config`` can repeat the run."""
        self._write("config.toml", toml)

    def log(self, record: dict[str, Any]) -> None:
        """Append a line to the metrics at once, so that a run that is stopped keeps what it measured."""
        if self._writes:
            with (self.path / METRICS).open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")

    def rewind(self, step: int) -> None:
        """Drop what was measured after a step, at which the run goes on."""
        if not self._writes:
            return
        path = self.path / METRICS
        kept = [line for line in path.read_text("utf-8").splitlines() if _until(line, step)]
        partial = path.with_suffix(".partial")
        partial.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
        os.replace(partial, path)

    def write_timeline(self, timeline: Timeline, *, title: str, note: str) -> None:
        """Keep a step's timeline as Chrome trace and as a drawing."""
        self._write("timeline.json", timeline.to_chrome_trace())
        self._write("timeline.svg", draw_svg(timeline, title=title, note=note))

    def write_report(self, html: str) -> None:
        """Keep the report of a measured step beside the predicted one."""
        self._write("report.html", html)

    def _write(self, name: str, text: str) -> None:
        if self._writes:
            (self.path / name).write_text(text, encoding="utf-8")


def _until(line: str, step: int) -> bool:
    """Whether a line of the metrics is of a step up to this one; the last may be cut off by a kill."""
    try:
        return int(json.loads(line)["step"]) <= step
    except (ValueError, KeyError, TypeError):
        return False


def create(out: str | None, *, resumes: bool = False) -> Path:
    """Make the folder of a run.

    Args:
        out: its path; None makes one below ``runs`` that is named after the time.
        resumes: whether a run that is in it may go on there.

    Raises:
        UsageError: it cannot be made, or holds a run already.
    """
    path = Path("runs", datetime.now().strftime("%Y%m%d-%H%M%S")) if out is None else Path(out)
    try:
        path.mkdir(parents=True, exist_ok=True)
        (path / METRICS).touch(exist_ok=resumes)
    except FileExistsError as error:
        raise UsageError(_taken(path)) from error
    except OSError as error:
        raise UsageError(
            f"out={str(path)!r}: {error.strerror}; choose a folder to write to"
        ) from error
    return path


def _taken(path: Path) -> str:
    if path.is_dir():
        return (
            f"out={str(path)!r} holds a run already; choose another folder, or go on with it by "
            "resume='auto'"
        )
    return f"out={str(path)!r} is a file; choose a folder"
