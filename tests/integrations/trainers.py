"""Small models of transformers, and runs of its Trainer on them; as a script, what tests launch.

``python -m tests.integrations.trainers FOLDER STEPS FAMILY/SCHEDULE/REPLICAS...`` trains, evaluates,
saves and generates under torchrun, and writes what came out into ``FOLDER/FAMILY/report.json``.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments, set_seed

from penstock.integrations.transformers import PipelineTrainer

WORDS = 50
TOKENS: dict[str, Any] = {
    "vocab_size": WORDS,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}


class Examples(Dataset[dict[str, Any]]):
    """Rows of a kind of data, the same for the same seed."""

    def __init__(self, kind: str, rows: int, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.kind = kind
        self.tokens = torch.randint(3, WORDS, (rows, 10), generator=draw)
        self.pixels = torch.randn(rows, 3, 8, 8, generator=draw)
        self.labels = self.tokens[:, 0] % 3

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Any]:
        tokens = self.tokens[index]
        if self.kind == "image":
            return {"pixel_values": self.pixels[index], "labels": self.labels[index]}
        if self.kind == "class":
            return {"input_ids": tokens, "labels": self.labels[index]}
        # As many labels as the row says, so that microbatches have different numbers of them.
        labels = tokens.masked_fill(torch.arange(10) < index % 7, -100)
        return {"input_ids": tokens, "labels": labels}


def gpt2() -> Any:
    sizes: dict[str, Any] = {"n_embd": 32, "n_layer": 4, "n_head": 2, "n_positions": 64}
    config = transformers.GPT2Config(
        **sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **TOKENS
    )
    return transformers.GPT2LMHeadModel(config)


SIZES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4}
STILL: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def llama() -> Any:
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **heads, **TOKENS))


def t5() -> Any:
    sizes: dict[str, Any] = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 3, "num_heads": 4}
    names: dict[str, Any] = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
    config = transformers.T5Config(**sizes, **names, vocab_size=WORDS, dropout_rate=0.0)
    return transformers.T5ForConditionalGeneration(config)


def bert() -> Any:
    more: dict[str, Any] = {"vocab_size": WORDS, "max_position_embeddings": 32, "num_labels": 3}
    config = transformers.BertConfig(**SIZES, **STILL, **more, num_attention_heads=2)
    return transformers.BertForSequenceClassification(config)


def vit() -> Any:
    # Enough modules for eight stages.
    more = {"image_size": 8, "patch_size": 4, "num_labels": 3, "num_hidden_layers": 6}
    config = transformers.ViTConfig(**(SIZES | more), **STILL, num_attention_heads=2)
    return transformers.ViTForImageClassification(config)


FAMILIES: dict[str, tuple[Callable[[], Any], str]] = {
    "gpt2": (gpt2, "text"),
    "llama": (llama, "text"),
    "t5": (t5, "text"),
    "bert": (bert, "class"),
    "vit": (vit, "image"),
}


def make_model(family: str, seed: int = 0) -> Any:
    set_seed(seed)
    return FAMILIES[family][0]()


def measure(prediction: Any) -> dict[str, float]:
    """Metrics of the logits and labels of the whole evaluation."""
    logits = prediction.predictions
    logits = logits[0] if isinstance(logits, tuple) else logits
    right = logits.argmax(-1) == prediction.label_ids
    return {"accuracy": float(right.mean()), "size": float(abs(logits).mean())}


def make(
    kind: type[Trainer], family: str, folder: Path, steps: int, batch: int = 8, **options: Any
) -> Any:
    """A trainer of a family; ``pipeline=`` and changed arguments are options."""
    data = FAMILIES[family][1]
    given: dict[str, Any] = {
        "max_steps": steps,
        "per_device_train_batch_size": batch,
        "per_device_eval_batch_size": batch,
        "gradient_accumulation_steps": 2,
        "learning_rate": 5e-3,
        "weight_decay": 0.1,
        "max_grad_norm": 0.5,
        "warmup_steps": 3,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
    }
    given |= options.pop("arguments", {})
    model = options.pop("model", None)
    measures = measure if options.pop("measures", True) else None
    return kind(
        model=make_model(family) if model is None else model,
        args=TrainingArguments(output_dir=str(folder), **given),
        train_dataset=Examples(data, 64, 1),
        eval_dataset=Examples(data, options.pop("evaluated", 16), 2),
        compute_metrics=options.pop("compute_metrics", measures),
        **options,
    )


def report(trainer: Any, folder: Path, resume: str | None = None) -> dict[str, Any]:
    """Train, evaluate and save; the curves and metrics."""
    trainer.train(resume_from_checkpoint=resume)
    metrics = trainer.evaluate()
    trainer.save_model(str(folder / "saved"))
    log = trainer.state.log_history
    return {
        "loss": [row["loss"] for row in log if "loss" in row],
        "norm": [row["grad_norm"] for row in log if "grad_norm" in row],
        "eval": {f"eval_{name}": metrics[f"eval_{name}"] for name in ("loss", "accuracy", "size")},
    }


def saved(family: str, folder: Path) -> Any:
    """The model that ``save_model`` wrote."""
    return type(make_model(family)).from_pretrained(folder / "saved")


def main(folder: Path, family: str, schedule: str, replicas: int, steps: int) -> None:
    world = int(os.environ["WORLD_SIZE"])
    trainer = make(
        PipelineTrainer,
        family,
        folder,
        steps,
        batch=8 // replicas,
        evaluated=20,
        pipeline={"schedule": schedule, "ranks": world // replicas, "microbatches": 4},
        arguments={"save_strategy": "steps", "save_steps": steps // 2},
    )
    result = report(trainer, folder)
    if FAMILIES[family][1] == "text":
        tokens = Examples("text", 4, 3).tokens
        torch.manual_seed(torch.distributed.get_rank())
        result["tokens"] = trainer.model.generate(tokens, max_new_tokens=8).tolist()
    if trainer.is_world_process_zero():
        (folder / "report.json").write_text(json.dumps(result))
    trainer.pipe.close()


if __name__ == "__main__":
    target, length, *cases = sys.argv[1:]
    for name, order, count in (case.split("/") for case in cases):
        main(Path(target, name), name, order, int(count), int(length))
