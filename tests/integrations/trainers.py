"""Small models of transformers, and runs of its Trainer on them; as a script, what tests launch.

``python -m tests.integrations.trainers FOLDER STEPS`` trains, evaluates, saves and generates under torchrun,
and writes what came out into ``FOLDER/report.json``.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from torch.nn.functional import cross_entropy, kl_div
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerFast, Trainer, TrainingArguments, set_seed

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
    """A trainer of a family; ``pipeline=`` and changed arguments are options.

    ``model=`` takes the place of the family's, and ``rows=`` that of its data for training and evaluation.
    """
    data = FAMILIES[family][1]
    arguments: dict[str, Any] = {
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
    arguments |= options.pop("arguments", {})
    model, evaluated = options.pop("model", None), options.pop("evaluated", 16)
    measures = measure if options.pop("measures", True) else None
    examples = Examples(data, 64, 1), Examples(data, evaluated, 2)
    train_dataset, eval_dataset = options.pop("rows", examples)
    return kind(
        model=make_model(family) if model is None else model,
        args=TrainingArguments(output_dir=str(folder), **arguments),
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        compute_metrics=options.pop("compute_metrics", measures),
        **options,
    )


def answering() -> Any:
    """A model that answers questions."""
    sizes: dict[str, Any] = {**SIZES, **STILL, "vocab_size": WORDS, "num_attention_heads": 2}
    set_seed(0)
    return transformers.BertForQuestionAnswering(transformers.BertConfig(**sizes))


def questions(count: int) -> list[dict[str, Any]]:
    """Texts, and where their answers begin and end."""
    return [
        {"input_ids": row, "start_positions": row[0] % 10, "end_positions": row[1] % 10}
        for row in Examples("text", count, 1).tokens
    ]


# ---- losses of the user's own


def squared(output: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    """A ``compute_loss_func``."""
    logits = output.logits[:, :-1].flatten(0, 1)
    losses = cross_entropy(logits, labels[:, 1:].flatten(), reduction="none")
    return losses.square().sum() / num_items_in_batch


class Weighted(Trainer):
    """Of the documentation of transformers: no mean over samples."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        weight = torch.tensor([1.0, 2.0, 3.0]).to(outputs.logits.dtype)
        loss = cross_entropy(outputs.logits, labels, weight=weight)
        return (loss, outputs) if return_outputs else loss


class Distilled(Trainer):
    """A teacher, and the model's own loss."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        if not hasattr(self, "teacher"):
            with torch.random.fork_rng():
                self.teacher = make_model("llama", seed=5)
        with torch.no_grad():
            hints = self.teacher(input_ids=inputs["input_ids"]).logits.softmax(-1)
        loss = loss + kl_div(outputs.logits.log_softmax(-1), hints, reduction="batchmean")
        return (loss, outputs) if return_outputs else loss


# ---- texts for trainers of TRL


def texts(rows: Any) -> list[str]:
    return [" ".join(f"w{token}" for token in row) for row in rows.tolist()]


SENTENCES = Examples("text", 32, 1).tokens
PAIRS = {
    "prompt": texts(SENTENCES[:, :4]),
    "chosen": texts(SENTENCES[:, 4:7]),
    "rejected": texts(SENTENCES[:, 7:]),
}


def words() -> Any:
    """A tokenizer of a few words."""
    tokens = {f"w{number}": number for number in range(50)}
    model = tokenizers.models.WordLevel(tokens, unk_token="w3")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(model), pad_token="w2", eos_token="w1", bos_token="w0"
    )


# ---- runs


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


def main(folder: Path, steps: int) -> None:
    """Two pipelines of half of the processes each, which also generate."""
    trainer = make(
        PipelineTrainer,
        "gpt2",
        folder,
        steps,
        batch=4,
        evaluated=20,
        pipeline={
            "schedule": "ZB-V",
            "ranks": int(os.environ["WORLD_SIZE"]) // 2,
            "microbatches": 4,
        },
        arguments={"save_strategy": "steps", "save_steps": steps // 2},
    )
    result = report(trainer, folder)
    tokens = Examples("text", 4, 3).tokens
    torch.manual_seed(torch.distributed.get_rank())
    result["tokens"] = trainer.model.generate(tokens, max_new_tokens=8).tolist()
    if trainer.is_world_process_zero():
        (folder / "report.json").write_text(json.dumps(result))
    trainer.pipe.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
