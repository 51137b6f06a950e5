"""The ready-made trainer: a byte-level GPT over real text, through pipeline stages.

Modules are imported when a name is first used, so that ``penstock --help`` does not wait for torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.lazily import lazily

if TYPE_CHECKING:
    from penstock.train.config import TrainConfig
    from penstock.train.model import GPT
    from penstock.train.settings import processes_needed, ranks_of, resolve
    from penstock.train.trainer import Outcome, profile_of, train

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

__getattr__ = lazily(
    __name__,
    {
        "model": "GPT",
        "trainer": "Outcome profile_of train",
        "config": "TrainConfig",
        "settings": "processes_needed ranks_of resolve",
    },
)
