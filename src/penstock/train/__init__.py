"""The ready-made trainer: a byte-level GPT over real text, through pipeline stages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock._engine.lazily import lazily

if TYPE_CHECKING:
    from penstock.train.config import TrainConfig as TrainConfig
    from penstock.train.config import ranks_of as ranks_of
    from penstock.train.config import resolve as resolve
    from penstock.train.model import GPT as GPT
    from penstock.train.trainer import Outcome as Outcome
    from penstock.train.trainer import profile_of as profile_of
    from penstock.train.trainer import train as train

__all__, __getattr__, __dir__ = lazily(__name__)
