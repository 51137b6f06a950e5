"""A run saved whole, and resumed in any layout; see docs/saving-and-resuming.md.

Names are found when they are first used, so that ``penstock --help`` does not wait for torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.checkpoint.about import describe, export
    from penstock.checkpoint.checkpoints import Checkpoints, Saved

_HOMES = {
    "Checkpoints": "checkpoints",
    "Saved": "checkpoints",
    "describe": "about",
    "export": "about",
}

__all__ = ["Checkpoints", "Saved", "describe", "export"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
