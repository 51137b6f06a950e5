"""Penstock inside the training loops of other libraries."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock._engine.lazily import lazily

if TYPE_CHECKING:
    from penstock.integrations import accelerate as accelerate
    from penstock.integrations import lightning as lightning
    from penstock.integrations import transformers as transformers
    from penstock.integrations.module import PipelineModel as PipelineModel
    from penstock.integrations.module import PipelineModule as PipelineModule
    from penstock.pipeline import own_loss as own_loss

__all__, __getattr__, __dir__ = lazily(__name__)
