"""The two halves of a backward pass: Penstock, the peer and a plain backward pass, in turn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from time import thread_time
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import _backward as peer
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from benchmarks.pairs import Ratios, bytes_to_json
from penstock.backward import SplitBackward
from penstock.plan.meter import Meter

WIDTHS = {64: (1, 32), 256: (2, 128), 512: (2, 256)}
"""Widths, each with the samples of a microbatch and their length."""
BLOCKS = 4
MICROBATCHES = 6


class Block(nn.Module):
    """A transformer block: RMSNorm and SwiGLU, or LayerNorm, biases and GELU."""

    def __init__(self, width: int, *, gated: bool = True, rerun: bool = False) -> None:
        super().__init__()
        norm = nn.RMSNorm if gated else nn.LayerNorm
        linear = partial(nn.Linear, bias=not gated)
        self.heads, self.gated, self.rerun = max(1, width // 64), gated, rerun
        self.before, self.between = norm(width), norm(width)
        self.qkv, self.out = linear(width, 3 * width), linear(width, width)
        hidden = 8 * width // 3 // 8 * 8 if gated else 4 * width
        self.up, self.down = linear(width, (1 + gated) * hidden), linear(hidden, width)

    def forward(self, value: Tensor) -> Any:
        """Returns the block's output."""
        if self.rerun:
            return checkpoint(self.run, value, use_reentrant=False)
        return self.run(value)

    def run(self, value: Tensor) -> Tensor:
        """Is forward without a checkpoint."""
        value = value + self.out(self.attend(self.before(value)))
        hidden = self.up(self.between(value))
        if self.gated:
            gate, up = hidden.chunk(2, dim=-1)
            hidden = functional.silu(gate) * up
        else:
            hidden = functional.gelu(hidden)
        result: Tensor = value + self.down(hidden)
        return result

    def attend(self, value: Tensor) -> Tensor:
        """Mixes over the sequence."""
        batch, length, width = value.shape
        split = self.qkv(value).view(batch, length, 3, self.heads, -1)
        query, key, mixed = split.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, mixed, is_causal=True)
        return attended.transpose(1, 2).reshape(batch, length, width)


@dataclass
class Stage:
    """A stage, its input and the gradient of its output."""

    model: nn.Module
    value: Tensor
    grad: Tensor

    @property
    def weights(self) -> list[nn.Parameter]:
        """The parameters, in order."""
        return list(self.model.parameters())


def stage_of(width: int, sizes: tuple[int, int] | None = None, /, **options: bool) -> Stage:
    """A stage of four blocks on random input of so many samples of some length."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(width, **options) for _ in range(BLOCKS)))
    shape = (*(sizes or WIDTHS[width]), width)
    return Stage(model, torch.randn(shape, requires_grad=True), torch.randn(shape))


# ---- ways to go backward: forward, the inputs' half and the weights' half


class Ours:
    """Penstock's engine, in two halves."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.engine = SplitBackward(stage.model)

    def forward(self) -> Any:
        """Runs forward; returns what the inputs' half needs."""
        return self.stage.model(self.stage.value)

    def input_half(self, made: Any) -> Any:
        """Returns what the weights' half needs."""
        return self.engine.input_half([made], [self.stage.grad], [self.stage.value])[1]

    def weight_half(self, state: Any) -> None:
        """Adds the weights' gradients to their ``.grad``."""
        self.engine.weight_half(state)


class Plain(Ours):
    """Penstock's engine in one pass, which is a plain backward pass."""

    def input_half(self, made: Any) -> Any:
        """Does everything."""
        self.engine.full([made], [self.stage.grad], [self.stage.value])

    def weight_half(self, state: Any) -> None:
        """Has nothing to do."""


class Peers:
    """The functions of the peer."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage

    def forward(self) -> Any:
        """Runs forward; returns what the inputs' half needs."""
        return self.stage.model(self.stage.value)

    def input_half(self, made: Any) -> Any:
        """Returns what the weights' half needs."""
        weights = iter(self.stage.weights)
        return peer.stage_backward_input([made], [self.stage.grad], [self.stage.value], weights)[1]

    def weight_half(self, state: Any) -> None:
        """Adds the weights' gradients to their ``.grad``."""
        peer.stage_backward_weight(iter(self.stage.weights), state)


Way = Ours | Peers
WAYS: dict[str, Callable[[Stage], Way]] = {"split": Ours, "peer": Peers, "plain": Plain}

# ---- time


def time_once(way: Way, now: Callable[[], float]) -> dict[str, float]:
    """Seconds of one microbatch's parts, by a clock."""
    start = now()
    made = way.forward()
    forward = now()
    state = way.input_half(made)
    del made
    first = now()
    way.weight_half(state)
    second = now()
    return {
        "F": forward - start,
        "I": first - forward,
        "W": second - first,
        "I+W": second - forward,
    }


def times(
    stage: Stage, rounds: int, now: Callable[[], float] = thread_time
) -> dict[str, list[dict[str, float]]]:
    """The parts' times of all ways, in turn, whose order changes from round to round."""
    ways = {name: make(stage) for name, make in WAYS.items()}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    for index in range(rounds + 2):
        names = list(ways) if index % 2 else list(reversed(ways))
        for name in names:
            found[name].append(time_once(ways[name], now))
    return {name: measured[2:] for name, measured in found.items()}


def compare_times(width: int, rerun: bool, rounds: int) -> dict[str, Any]:
    """Times and ratios of one width."""
    found = times(stage_of(width, rerun=rerun), rounds)

    def ratios(name: str, part: str, base: str = "plain") -> Ratios:
        return Ratios([one[part] for one in found[name]], [one[part] for one in found[base]])

    figures = {
        "F against a plain forward": ratios("split", "F"),
        "I + W against a plain backward": ratios("split", "I+W"),
        "I + W against torch's package": ratios("split", "I+W", "peer"),
    }
    title = f"backward, width {width:4}{', recomputed' if rerun else ''}"
    for name, of in figures.items():
        print(f"{title}: {name} {of.told('of its time')}")
    return {name: of.to_json() for name, of in figures.items()}


# ---- memory


def live_bytes(name: str, stage: Stage) -> dict[str, int]:
    """Bytes alive after all forwards, after all inputs' halves, after all weights' halves."""
    way = WAYS[name](stage)
    finish(way)
    found = {}
    with Meter() as meter:
        made = [way.forward() for _ in range(MICROBATCHES)]
        found["F"] = meter.live
        states = [way.input_half(made.pop(0)) for _ in range(MICROBATCHES)]
        found["I"] = meter.live
        while states:
            way.weight_half(states.pop(0))
        found["W"] = meter.live
    return found


def finish(way: Way) -> None:
    """Runs a microbatch: the first explores, and leaves gradients."""
    way.weight_half(way.input_half(way.forward()))


def compare_bytes(width: int, **options: bool) -> dict[str, Any]:
    """Bytes of all ways for one kind of block."""
    found = {name: live_bytes(name, stage_of(width, **options)) for name in WAYS}
    ours, others = found["split"], found["peer"]
    between = ours["I"] / others["I"]
    figures = {
        "bytes": found,
        "I of F": ours["I"] / ours["F"],
        "between the halves, against torch's package": bytes_to_json(ours["I"], others["I"]),
    }
    kind = "SwiGLU, RMSNorm" if options.get("gated", True) else "GELU, LayerNorm"
    kind += ", recomputed" if options.get("rerun") else ""
    mib = {name: [round(b / 2**20) for b in parts.values()] for name, parts in found.items()}
    print(
        f"backward, {kind}, MiB after F, I, W: {mib}; "
        f"I of F {figures['I of F']:.2f}, I of the peer's {between:.2f}"
    )
    return figures


def compare(rounds: int) -> dict[str, Any]:
    """All figures, printed, and as JSON data."""
    found: dict[str, Any] = {"time": {}, "memory": {}}
    for width in WIDTHS:
        for rerun in False, True:
            several = rounds * 3 if width == 64 else rounds
            name = f"width {width}{', recomputed' if rerun else ''}"
            found["time"][name] = compare_times(width, rerun, several)
    for gated in True, False:
        for rerun in False, True:
            kind = "SwiGLU and RMSNorm" if gated else "GELU and LayerNorm"
            name = f"{kind}{', recomputed' if rerun else ''}"
            found["memory"][name] = compare_bytes(512, gated=gated, rerun=rerun)
    return found
