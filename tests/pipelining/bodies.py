"""One body for two packages: what a user of torch's pipelining writes, run with either import."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

WIDTH = 4
SAMPLES = 8
MICROBATCHES = 4
X = torch.linspace(-1, 1, SAMPLES * WIDTH).reshape(SAMPLES, WIDTH)
Y = X.flip(0)
SCALE = torch.linspace(0.5, 1.5, SAMPLES).reshape(SAMPLES, 1)
SINGLE = ("GPipe", "1F1B")
MULTI = ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
IN_A_V = ("ZBVZeroBubble", "DualPipeV")
PACKAGES = {"torch": "torch.distributed.pipelining", "penstock": "penstock.pipelining"}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor, scale: Tensor | None = None) -> Tensor:
        made = torch.tanh(self.lin(hidden))
        return made if scale is None else made * scale


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        made = self.block(hidden)
        return made, made.mean()


def loss_fn(output: Any, target: Tensor, factor: float = 1.0) -> Tensor:
    first = output[0] if isinstance(output, tuple) else output
    return nn.functional.mse_loss(first, target) * factor


def indices(schedule: str, rank: int, ranks: int) -> list[int]:
    if schedule in SINGLE:
        return [rank]
    return [rank, 2 * ranks - 1 - rank] if schedule in IN_A_V else [rank, rank + ranks]


class Side:
    """One package's names, and this process's stages and schedule."""

    def __init__(self, package: str, group: Any, schedule: str, **options: Any) -> None:
        self.top = import_module(PACKAGES[package])
        self.schedules = import_module(f"{PACKAGES[package]}.schedules")
        self.microbatch = import_module(f"{PACKAGES[package]}.microbatch")
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        count = ranks if schedule in SINGLE else 2 * ranks
        torch.manual_seed(0)
        self.modules: list[nn.Module] = [Block() for _ in range(count - 1)]
        self.modules.append(Pair() if options.pop("pairs", False) else Block())
        self.mine = indices(schedule, rank, ranks)
        static = options.pop("static", False)
        self.stages = [
            self.top.PipelineStage(
                self.modules[i],
                i,
                count,
                torch.device("cpu"),
                group=group,
                **self.static(static, i),
            )
            for i in self.mine
        ]
        chosen = self.schedules.get_schedule_class(schedule)
        given = self.stages[0] if schedule in SINGLE else self.stages
        self.made = chosen(given, MICROBATCHES, **self.read(options))
        self.first = any(stage.is_first for stage in self.stages)
        self.last = any(stage.is_last for stage in self.stages)

    def static(self, wanted: bool, index: int) -> dict[str, Any]:
        part = torch.zeros(SAMPLES // MICROBATCHES, WIDTH, requires_grad=True)
        given = part if index else part.detach()
        return {"input_args": given, "output_args": part} if wanted else {}

    def read(self, options: dict[str, Any]) -> dict[str, Any]:
        made = {"loss_fn": loss_fn, **options}
        if made.pop("custom merge", False):
            spec = self.microbatch.TensorChunkSpec(0)
            made["output_merge_spec"] = (spec, self.microbatch.sum_reducer)
        return made

    def call(self, how: str, **more: Any) -> tuple[Any, list[Tensor]]:
        args = (X,) if self.first else ()
        losses: list[Tensor] = []
        if self.last and self.made._loss_fn is not None:
            more |= {"target": Y, "losses": losses}
        return getattr(self.made, how)(*args, **more), losses

    def gradients(self) -> list[Any]:
        parameters = [p for i in self.mine for p in self.modules[i].parameters()]
        return [None if p.grad is None else p.grad.tolist() for p in parameters]


def told(output: Any, losses: list[Tensor]) -> dict[str, Any]:
    parts = output if isinstance(output, tuple) else (output,)
    shown = [None if part is None else part.tolist() for part in parts]
    return {"output": shown, "losses": [float(loss) for loss in losses]}


def run_plain(group: Any, package: str, schedule: str) -> dict[str, Any]:
    side = Side(package, group, schedule)
    return {**told(*side.call("step")), "gradients": side.gradients()}


def run_static(group: Any, package: str, schedule: str) -> dict[str, Any]:
    side = Side(package, group, schedule, static=True)
    return {**told(*side.call("step")), "gradients": side.gradients()}


def run_kwargs(group: Any, package: str, schedule: str) -> dict[str, Any]:
    side = Side(package, group, schedule)
    found = side.call("step", scale=SCALE)
    return {**told(*found), "gradients": side.gradients()}


def run_sum(group: Any, package: str, schedule: str) -> dict[str, Any]:
    side = Side(package, group, schedule, scale_grads=False)
    found = side.call("step", return_outputs=False, loss_kwargs={"factor": 0.5})
    return {**told(*found), "gradients": side.gradients()}


def run_merge(group: Any, package: str, schedule: str) -> dict[str, Any]:
    side = Side(package, group, schedule, pairs=True, **{"custom merge": True})
    return {**told(*side.call("step")), "gradients": side.gradients()}


def run_eval(group: Any, package: str, schedule: str) -> dict[str, Any]:
    side = Side(package, group, schedule)
    with torch.no_grad():
        return {**told(*side.call("eval")), "gradients": side.gradients()}


def run_without_loss(group: Any, package: str, schedule: str) -> dict[str, Any]:
    side = Side(package, group, schedule, loss_fn=None)
    with torch.no_grad():
        return {**told(*side.call("step")), "gradients": side.gradients()}


def run_csv(group: Any, package: str, schedule: str, path: str, format: str) -> dict[str, Any]:
    """The schedule's own file, loaded into the class that takes any."""
    side = Side(package, group, schedule)
    file = f"{path}-{dist.get_rank(group)}.csv"
    side.made._dump_csv(file, format)
    side.made = side.schedules._PipelineScheduleRuntime(side.stages, MICROBATCHES, loss_fn=loss_fn)
    side.made._load_csv(file, format)
    return {**told(*side.call("step")), "gradients": side.gradients()}


def run_custom(group: Any, package: str, schedule: str, op: str) -> dict[str, Any]:
    """A custom function that does what the op would have done, and counts."""
    side = Side(package, group, schedule)
    seen: list[str] = []
    kind = getattr(side.schedules, op)
    side.made.register_custom_function(kind, lambda action, context: seen.append(str(action)))
    result = told(*side.call("step"))
    return {**result, "gradients": side.gradients(), "seen": seen}
