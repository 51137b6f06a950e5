"""A small run, and what it leaves."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

from rich.console import Console

from penstock.train import Outcome, TrainConfig, train

SMALL: dict[str, Any] = {
    "ranks": 2, "layers": 2, "width": 16, "heads": 2, "sequence": 16, "batch": 4, "microbatches": 2,
    "steps": 6, "log_every": 4, "warmup": 2, "learning_rate": 0.01, "held_out_batches": 2, "seed": 3,
}  # fmt: skip


def config_for(text: Path, **changes: Any) -> TrainConfig:
    return TrainConfig.model_validate({**SMALL, "data": str(text), **changes})


def flags(text: Path, out: Path, **changes: Any) -> list[str]:
    """The same run as arguments of ``penstock``."""
    settings = {**SMALL, "data": text, "out": out, **changes}
    pairs = ((f"--{name.replace('_', '-')}", str(value)) for name, value in settings.items())
    return ["train", *(part for pair in pairs for part in pair)]


def run(config: TrainConfig) -> tuple[Outcome, str]:
    """Its outcome and what it printed."""
    out = io.StringIO()
    return train(config, Console(file=out, width=200)), out.getvalue()


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def losses(folder: Path) -> list[float]:
    return [record["loss"] for record in records(folder) if "loss" in record]
