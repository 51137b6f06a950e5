"""Start one process per rank on this machine; when one fails, end the others.

torch is imported when a name is first used, so that ``penstock run --help`` does not wait for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.lazily import lazily

if TYPE_CHECKING:
    from penstock.launch.launcher import Launcher, Outcome, launch

__all__ = ["Launcher", "Outcome", "launch"]

__getattr__ = lazily(
    __name__,
    {
        "launcher": "Launcher Outcome launch",
    },
)
