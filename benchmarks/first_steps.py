"""``python -m benchmarks.first_steps``: what the first step costs, which cuts the model.

Times are CPU seconds of ten models of transformers: to make the pipeline and take a step, beside a plain
loop's first step. Memory is that of two processes of a chain of blocks, before and after the first step, with
the model on the meta device and without.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from time import process_time
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.pairs import Ratios
from penstock import Pipeline, init_weights
from penstock.testing import WorkerPool

RANKS, SAMPLES, MICROBATCHES, LENGTH, WORDS = 4, 8, 4, 64, 512
WIDTH, LAYERS, HEADS = 128, 8, 4
_TEXT = {
    "vocab_size": WORDS,
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
}
_DECODER = {**_TEXT, "intermediate_size": 2 * WIDTH, "num_key_value_heads": 2, "use_cache": False}
_VISION = {"image_size": 32, "patch_size": 4}
_PAIR = {"vocab_size": WORDS, "d_model": WIDTH, "use_cache": False}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Bert": ("BertForMaskedLM", {**_TEXT, "intermediate_size": 2 * WIDTH}),
    "DebertaV2": ("DebertaV2ForMaskedLM", {**_TEXT, "intermediate_size": 2 * WIDTH}),
    "Llama": ("LlamaForCausalLM", _DECODER),
    "Qwen3": ("Qwen3ForCausalLM", {**_DECODER, "head_dim": 32}),
    "Mixtral": ("MixtralForCausalLM", {**_DECODER, "num_local_experts": 4}),
    "Mamba": (
        "MambaForCausalLM",
        {"vocab_size": WORDS, "hidden_size": WIDTH, "num_hidden_layers": LAYERS},
    ),
    "T5": (
        "T5ForConditionalGeneration",
        {
            **_PAIR,
            "num_layers": 4,
            "num_heads": HEADS,
            "d_kv": 32,
            "d_ff": 256,
            "decoder_start_token_id": 0,
        },
    ),
    "ViT": ("ViTForImageClassification", {**_TEXT, **_VISION, "intermediate_size": 2 * WIDTH}),
    "Swin": (
        "SwinForImageClassification",
        {**_VISION, "embed_dim": 32, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4},
    ),
    "ResNet": (
        "ResNetForImageClassification",
        {"embedding_size": 16, "hidden_sizes": [32, 64, 128, 256]},
    ),
}
"""The class of each model, and what its configuration says besides the usual."""


def model_of(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """A model of transformers with the arguments of a batch."""
    import transformers

    torch.manual_seed(0)
    model_class, sizes = MODELS[name]
    made: Any = getattr(transformers, model_class)
    model: nn.Module = made(made.config_class(**sizes)).train()
    if getattr(model, "main_input_name", "") == "pixel_values":
        return model, {"pixel_values": torch.randn(SAMPLES, 3, 32, 32)}
    ids = torch.randint(3, WORDS, (SAMPLES, LENGTH))
    return model, {"input_ids": ids, **({"labels": ids} if name == "T5" else {})}


def _loss(output: Any, _: Any = None) -> Tensor:
    loss: Tensor = output.logits.square().mean()
    return loss


def first_steps(name: str, rounds: int) -> tuple[Ratios, Ratios]:
    """CPU seconds of a pipeline's first step, and of its second, beside those of a plain loop."""
    model, batch = model_of(name)
    ours, peers = _pipe_steps, _plain_steps
    pairs = [
        (ours(copy.deepcopy(model), batch), peers(copy.deepcopy(model), batch))
        for _ in range(rounds)
    ]
    return tuple(Ratios([a[n] for a, _ in pairs], [b[n] for _, b in pairs]) for n in range(2))  # type: ignore[return-value]


def _timed(steps: Iterator[Callable[[], object]]) -> list[float]:
    times, before = [], process_time()
    for step in steps:
        step()
        times.append(process_time() - before)
        before = process_time()
    return times


def _pipe_steps(model: nn.Module, batch: dict[str, Any]) -> list[float]:
    def steps() -> Iterator[Callable[[], object]]:
        pipe = Pipeline(
            model, schedule="1F1B", ranks=RANKS, microbatches=MICROBATCHES, loss_fn=_loss
        )
        for _ in range(2):
            yield lambda: pipe.step(**batch)

    return _timed(steps())


def _plain_steps(model: nn.Module, batch: dict[str, Tensor]) -> list[float]:
    def step() -> None:
        parts = {name: tensor.chunk(MICROBATCHES) for name, tensor in batch.items()}
        for index in range(MICROBATCHES):
            loss = _loss(model(**{name: part[index] for name, part in parts.items()}))
            (loss / MICROBATCHES).backward()

    return _timed(iter([step, step]))


# ---- memory


class Blocks(nn.Module):
    """Residual blocks of two products each."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(width),
                nn.Linear(width, 4 * width),
                nn.GELU(),
                nn.Linear(4 * width, width),
            )
            for _ in range(LAYERS)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        """Hidden states to hidden states."""
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return hidden


def memory_of(group: Any, meta: bool, width: int) -> list[int]:
    """Bytes that this process holds: without a model, with it, with the pipeline, after the first step."""
    torch.manual_seed(0)
    held = [_resident()]
    with torch.device("meta" if meta else "cpu"):
        model = Blocks(width)
    held.append(_resident())
    pipe = Pipeline(
        model,
        schedule="1F1B",
        microbatches=MICROBATCHES,
        loss_fn=nn.functional.mse_loss,
        mesh=group,
        device="cpu",
    )
    if meta:
        init_weights(pipe, 0)
    held.append(_resident())
    hidden = torch.randn(SAMPLES, width)
    pipe.step(hidden, target=hidden)
    del model
    held.append(_resident())
    pipe.close()
    return held


def _resident() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS")).split()[1]) * 1024


def main() -> None:
    """Print the table of times, and that of memory."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    parser.add_argument(
        "--width", type=int, default=1024, help="of the blocks whose memory is measured; 0 for none"
    )
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    for name in chosen.models:
        first, second = first_steps(name, chosen.rounds)
        sys.stdout.write(
            f"{name}: made and first step {first.told('a plain first step')}; once in a new process "
        )
        sys.stdout.write(
            f"{first.each[0]:.1f} x; second step {second.told('a plain second step')}\n"
        )
        sys.stdout.flush()
    for meta in (False, True) if chosen.width else ():
        with WorkerPool(2) as workers:
            task = "benchmarks.first_steps:memory_of"
            for rank, held in enumerate(
                workers.run(task, 2, timeout=300, meta=meta, width=chosen.width)
            ):
                steps = ", ".join(f"{(one - held[0]) / 1e6:.0f}" for one in held[1:])
                sys.stdout.write(
                    f"{'meta' if meta else 'cpu'}, rank {rank}: MB with model, pipeline, step: {steps}\n"
                )


if __name__ == "__main__":
    main()
