"""The ready-made trainer: a byte-level GPT over real text, through pipeline stages.

torch is imported when a name is first used, so that ``penstock --help`` does not wait for it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.train.config import TrainConfig
    from penstock.train.model import GPT
    from penstock.train.plan import ranks_of
    from penstock.train.planned import profile_of
    from penstock.train.sources import processes_needed, resolve
    from penstock.train.trainer import Outcome, train

_HOME = {
    "GPT": "model",
    "Outcome": "trainer",
    "TrainConfig": "config",
    "processes_needed": "sources",
    "profile_of": "planned",
    "ranks_of": "plan",
    "resolve": "sources",
    "train": "trainer",
}

__all__ = [
    "GPT",
    "Outcome",
    "TrainConfig",
    "processes_needed",
    "profile_of",
    "ranks_of",
    "resolve",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
