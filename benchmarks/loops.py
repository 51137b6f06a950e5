"""An epoch of Lightning and of transformers' Trainer in one process, against the unmodified one.

Each model is a small Llama, trained on the same tokens. Ours are two ranks that take turns in the process,
with 1F1B and four microbatches, so that every layer computes on a quarter of the batch at a time: what is
paid is that, and what a pipeline does besides. Times are those of the processor.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from lightning.pytorch import LightningModule
from lightning.pytorch import Trainer as LightningTrainer
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from benchmarks.pairs import Ratios, take_turns
from penstock.integrations.lightning import PipelineStrategy
from penstock.integrations.transformers import PipelineTrainer

SIZES = {"small": (32, 16), "large": (256, 128)}
"""The width of the model, and the tokens of a sample."""
BATCHES, BATCH, WORDS = 16, 8, 101
OPTIONS: dict[str, Any] = {"schedule": "1F1B", "ranks": 2, "microbatches": 4}


def model_of(width: int) -> Any:
    """A Llama of four layers."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=width, intermediate_size=2 * width, num_hidden_layers=4, num_attention_heads=4,
            vocab_size=WORDS, use_cache=False,
        )
    )  # fmt: skip


def rows_of(length: int) -> list[dict[str, Tensor]]:
    """The samples of an epoch."""
    tokens = torch.randint(WORDS, (BATCHES * BATCH, length))
    return [{"input_ids": row, "labels": row} for row in tokens]


class Language(LightningModule):
    """A Llama that Lightning trains."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.model = model_of(width)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """The model's own loss."""
        loss = self.model(**batch).loss
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        """Steps of AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def by_lightning(width: int, length: int, strategy: Any) -> Callable[[], object]:
    """A call that trains one more epoch."""
    names = ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing")
    quiet: dict[str, Any] = dict.fromkeys(names, False)
    trainer = LightningTrainer(
        accelerator="cpu", devices=1, strategy=strategy, max_epochs=0, **quiet
    )  # fmt: skip
    rows: Any = rows_of(length)
    module, loader = Language(width), DataLoader(rows, batch_size=BATCH)

    def epoch() -> None:
        assert trainer.fit_loop.max_epochs is not None
        trainer.fit_loop.max_epochs += 1
        trainer.fit(module, loader)

    return epoch


def by_trainer(width: int, length: int, folder: Path, **options: Any) -> Callable[[], object]:
    """A call that trains one epoch."""
    arguments = TrainingArguments(
        str(folder), num_train_epochs=1, per_device_train_batch_size=BATCH, report_to=[], use_cpu=True,
        disable_tqdm=True, save_strategy="no", logging_steps=BATCHES, learning_rate=1e-3,
    )  # fmt: skip
    kind: Any = PipelineTrainer if options else Trainer
    trainer = kind(model=model_of(width), args=arguments, train_dataset=rows_of(length), **options)
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer.train  # type: ignore[no-any-return]


def compare(rounds: int) -> dict[str, Any]:
    """Time epochs in turn.

    Args:
        rounds: how many pairs of epochs to time, after one to warm up.
    """
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "transformers"):
        logging.getLogger(name).setLevel(logging.ERROR)
    figures: dict[str, Any] = {}
    for size, (width, length) in SIZES.items():
        with TemporaryDirectory() as folder:
            loops = {
                "Lightning": (
                    by_lightning(width, length, PipelineStrategy(**OPTIONS)),
                    by_lightning(width, length, "auto"),
                ),
                "transformers' Trainer": (
                    by_trainer(width, length, Path(folder), pipeline=OPTIONS),
                    by_trainer(width, length, Path(folder)),
                ),
            }
            for name, (ours, plain) in loops.items():
                ours()
                plain()
                times = take_turns({"ours": ours, "plain": plain}, rounds, 1)
                ratios = Ratios(times["ours"].cpu, times["plain"].cpu)
                print(f"{name}, {size}: {ratios.told('the unmodified loop')}", flush=True)
                figures[f"{name}, {size}"] = ratios.to_json()
    return figures
