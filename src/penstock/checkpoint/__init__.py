"""A run saved whole, and resumed in any layout; see docs/saving-and-resuming.md.

Modules are imported when a name is first used, so that ``penstock --help`` does not wait for torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.lazily import lazily

if TYPE_CHECKING:
    from penstock.checkpoint.checkpoints import Checkpoints, Saved
    from penstock.checkpoint.report import describe, export

__all__ = ["Checkpoints", "Saved", "describe", "export"]

__getattr__ = lazily(
    __name__,
    {
        "checkpoints": "Checkpoints Saved",
        "report": "describe export",
    },
)
