"""What it costs that a model is cut by its calls: in each step, and in the first step of a new length."""

from __future__ import annotations

import random
from collections.abc import Callable
from time import process_time
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.pairs import Ratios, take_turns
from benchmarks.work import DEPTH, RANKS, gpt, ours
from penstock import Pipeline, PipelineStage
from penstock.schedule import Edge
from penstock.train.model import GPT, next_byte_loss

MICROBATCHES = 8
FUNCTIONS = 24
"""Function calls between two units of the U-Net: about 100 in all."""
SHORTEST, LONGEST = 64, 200
"""Lengths of sequences, in tokens."""
KNOWN = 10
"""Lengths that have come before those that are measured."""


class WayDown(nn.Module):
    """The first stage of the U-Net, made by hand."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.enter = _block(3, width)
        self.down = _block(width, 2 * width)

    def forward(self, image: Tensor) -> dict[str, Tensor]:
        """The values that the way up uses, by name."""
        first = _bend(self.enter(image))
        second = _bend(self.down(functional.max_pool2d(first, 2)))
        return {"first": first, "second": second}


class WayUp(nn.Module):
    """The second stage of the U-Net, made by hand."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.middle = _block(2 * width, 2 * width)
        self.up = _block(4 * width, width)
        self.leave = nn.Conv2d(2 * width, 3, 1)

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        """An image."""
        hidden = _bend(self.middle(second))
        hidden = _bend(self.up(torch.cat([hidden, second], 1)))
        hidden = functional.interpolate(hidden, scale_factor=2.0)
        result: Tensor = self.leave(torch.cat([hidden, first], 1))
        return result


class UNet(nn.Module):
    """Values that skip stages, and many functions between the units."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = WayDown(), WayUp()

    def forward(self, image: Tensor) -> Tensor:
        """An image to one of its size."""
        result: Tensor = self.up(**self.down(image))
        return result


def _block(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(4, outputs), nn.SiLU()
    )


def _bend(image: Tensor) -> Tensor:
    for _ in range(FUNCTIONS // 2):
        image = torch.mul(functional.silu(image), 1.1)
    return image


def _pipeline(model: nn.Module, loss: Callable[..., Tensor], stages: Any = None) -> Pipeline:
    """The model cut, by default by count; both ranks run in this process."""
    return Pipeline(
        model,
        schedule="1F1B",
        ranks=RANKS,
        stages=stages,
        microbatches=MICROBATCHES,
        loss_fn=loss,
    )


def gpt_steps(rounds: int) -> Ratios:
    """CPU seconds of a step of a GPT of width 256, beside the same stages made by hand."""
    work = gpt(RANKS, MICROBATCHES)
    model = GPT(layers=DEPTH, width=256, heads=4, sequence=128)
    cut, hand = _pipeline(model, work.loss), ours(work, "1F1B", None)
    return _compare_steps(cut, hand, work.batch, work.target, rounds)


def unet_steps(rounds: int) -> Ratios:
    """CPU seconds of a step of the U-Net, beside the same stages made by hand."""
    torch.manual_seed(0)
    images = torch.rand(2 * MICROBATCHES, 3, 32, 32)
    units = ["down.enter", "down.down", "up.middle", "up.up", "up.leave"]
    halves = [units[:2], units[2:]]
    cut = _pipeline(UNet(), functional.mse_loss, stages=halves)
    hand = Pipeline.from_stages(
        [PipelineStage(WayDown(), 0, 2), PipelineStage(WayUp(), 1, 2)],
        schedule="1F1B",
        microbatches=MICROBATCHES,
        loss_fn=functional.mse_loss,
        edges=[Edge("first", 0, (1,)), Edge("second", 0, (1,))],
    )
    return _compare_steps(cut, hand, images, images, rounds)


def _compare_steps(
    cut: Pipeline, hand: Pipeline, batch: Tensor, target: Tensor, rounds: int
) -> Ratios:
    ways: dict[str, Callable[[], object]] = {
        "cut": lambda: cut.step(batch, target=target),
        "hand": lambda: hand.step(batch, target=target),
    }
    for way in ways.values():
        way()
    times = take_turns(ways, rounds, 1)
    return Ratios(times["cut"].cpu, times["hand"].cpu)


# ---- a new length


def small_gpt() -> Pipeline:
    """A GPT of width 64."""
    return _pipeline(GPT(layers=DEPTH, width=64, heads=4, sequence=256), next_byte_loss)


def small_llama() -> Pipeline:
    """A Llama of transformers, with the cache that it makes by default."""
    return _llama(cache=True)


def llama_in_training() -> Pipeline:
    """The same without the cache, as transformers' Trainer trains it."""
    return _llama(cache=False)


def _llama(*, cache: bool) -> Pipeline:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=DEPTH,
        num_attention_heads=4,
        use_cache=cache,
    )
    model: nn.Module = LlamaForCausalLM(config)
    return _pipeline(model, lambda output, target: next_byte_loss(output.logits, target))


MODELS: dict[str, Callable[[], Pipeline]] = {
    "GPT": small_gpt,
    "Llama": llama_in_training,
    "Llama with its cache": small_llama,
}


def new_lengths(make: Callable[[], Pipeline], rounds: int) -> Ratios:
    """CPU seconds of the first step with a length, beside those of the next one with the same.

    Ten other lengths come before, the shortest and the longest among them.
    """
    torch.manual_seed(0)
    pipe = make()
    between = range(SHORTEST + 1, LONGEST)
    lengths = [SHORTEST, LONGEST, *random.Random(0).sample(between, KNOWN - 2 + rounds)]
    pairs = [(_time_step(pipe, length), _time_step(pipe, length)) for length in lengths][KNOWN:]
    return Ratios([first for first, _ in pairs], [second for _, second in pairs])


def _time_step(pipe: Pipeline, length: int) -> float:
    tokens = torch.randint(0, 256, (2 * MICROBATCHES, length + 1))
    start = process_time()
    pipe.step(tokens[:, :-1], target=tokens[:, 1:])
    return process_time() - start


def compare(rounds: int) -> dict[str, Any]:
    """All figures, printed, and as JSON data."""
    figures: dict[str, Any] = {}
    hand, known = "the same stages by hand", "a known one"
    for name, base, aim, ratios in (
        ("GPT, width 256", hand, 1.03, gpt_steps(rounds)),
        ("U-Net, 100 functions", hand, 1.05, unet_steps(rounds)),
        *((f"{m}, a new length", known, 1.5, new_lengths(MODELS[m], rounds)) for m in MODELS),
    ):
        print(f"cut, {name}: CPU {ratios.told(base)}; aim {aim}")
        figures[name] = {"aim": aim, **ratios.to_json()}
    return figures
