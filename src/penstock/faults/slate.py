"""The action a rank began last, in memory that others can read when the rank itself can no longer tell."""

from __future__ import annotations

import mmap
import re
import struct
from pathlib import Path
from time import monotonic
from typing import Any

_FORM = struct.Struct("=qqqd32s")
_SIZE = 128
_ACTION = re.compile(r"(\d+)[A-Z_]+(\d+)?")


class Slate:
    """A page of a file that the processes of one machine share; written at every action.

    Args:
        path: the file; it is made where it is not there.
    """

    def __init__(self, path: Path) -> None:
        with path.open("a+b") as file:
            file.truncate(_SIZE)
            self._page = mmap.mmap(file.fileno(), _SIZE)
        self._texts: dict[int, tuple[Any, bytes]] = {}

    def write(self, progress: int, calls: int, step: int, since: float, action: Any) -> None:
        """An action begins."""
        # Actions live as long as their schedule, so each is put into words once.
        known = self._texts.get(id(action))
        if known is None or known[0] is not action:
            known = self._texts[id(action)] = (action, str(action).encode()[:32])
        _FORM.pack_into(self._page, 0, progress, calls, step, since, known[1])

    def read(self) -> dict[str, Any]:
        """What stands there, in the words of a heartbeat; nothing where nothing was written."""
        progress, calls, step, since, text = _FORM.unpack_from(self._page, 0)
        found = _ACTION.match(text.rstrip(b"\0").decode(errors="replace"))
        if not progress or found is None:
            return {}
        stage, microbatch = found.groups()
        return {
            "progress": progress,
            "calls": calls,
            "step": step,
            "inside": True,
            "action": text.rstrip(b"\0").decode(errors="replace"),
            "stage": int(stage),
            "microbatch": None if microbatch is None else int(microbatch),
            "waits": None,
            "peers": None,
            "exact": True,
            "age": max(0.0, monotonic() - since),
        }
