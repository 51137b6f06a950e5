"""Training programs over several processes as people write them: run with either import."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from tests.pipelining.either import IN_A_V, Names

VOCABULARY, WIDTH, LENGTH = 11, 6, 5


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        made: Tensor = hidden + torch.tanh(self.mix(self.norm(hidden)))
        return made


class Decoder(nn.Module):
    """A language model whose ends may be missing, as those that are cut by deleting layers."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embeddings: nn.Module | None = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleDict({str(i): Block() for i in range(layers)})
        self.norm: nn.Module | None = nn.LayerNorm(WIDTH)
        self.output: nn.Module | None = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, input_batch: Tensor | None = None) -> Tensor:
        hidden = tokens if self.embeddings is None else self.embeddings(tokens)
        for layer in self.layers.values():
            hidden = layer(hidden)
        hidden = hidden if self.norm is None else self.norm(hidden)
        return hidden if self.output is None else self.output(hidden)

    def fill(self) -> None:
        """Give every parameter values that depend on its name alone."""
        for name, parameter in self.named_parameters():
            seed = sum(map(ord, name))
            generator = torch.Generator().manual_seed(seed)
            values = torch.randn(parameter.shape, generator=generator) / 3
            with torch.no_grad():
                local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
                if local.shape == values.shape:
                    local.copy_(values)
                else:
                    assert isinstance(parameter, DTensor)
                    rank = parameter.device_mesh.get_local_rank()
                    local.copy_(values.chunk(2)[rank])


def cut(whole: Decoder, stage: int, stages: int) -> Decoder:
    """A copy with one stage's layers alone."""
    part = copy.deepcopy(whole)
    per = len(whole.layers) // stages
    for name in list(part.layers):
        if int(name) // per != stage:
            del part.layers[name]
    if stage > 0:
        part.embeddings = None
    if stage < stages - 1:
        part.norm = part.output = None
    return part


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def data(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    tokens = torch.randint(VOCABULARY, (8, LENGTH + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def ready(part: Decoder, how: str, mesh: Any) -> nn.Module:
    """A stage made without data, wrapped and then filled."""
    if how == "ddp":
        # It compares the replicas' values, so there must be some.
        part.to_empty(device="cpu").fill()
        return DistributedDataParallel(part, process_group=mesh.get_group())
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    options: dict[str, Any] = {"mp_policy": policy} if how == "mixed" else {}
    if how == "replicate":
        replicate(part, mesh=mesh)
    for module in (*part.layers.values(), part) if how != "replicate" else ():
        fully_shard(module, mesh=mesh, reshard_after_forward=False, **options)
    part.to_empty(device="cpu").fill()
    return part


class Program:
    """One process of two replicas of two ranks: made without data, cut, wrapped, and then filled."""

    def __init__(self, package: str, schedule: str, how: str) -> None:
        names = Names(package)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
        rank, self.replica = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()
        chosen = names.get_schedule_class(schedule)
        looped = issubclass(chosen, names.PipelineScheduleMulti)
        count = 4 if looped else 2
        mine = [rank, count - 1 - rank] if schedule in IN_A_V else list(range(rank, count, 2))
        with torch.device("meta"):
            whole = Decoder(4)
        parts = [cut(whole, i, count) for i in mine]
        group, device = mesh["pp"].get_group("pp"), torch.device("cpu")
        stages = [
            names.PipelineStage(part, i, count, device, group=group)
            for i, part in zip(mine, parts, strict=True)
        ]
        self.schedule = chosen(
            stages if looped else stages[0],
            n_microbatches=4,
            loss_fn=cross_entropy,
            scale_grads=True,
        )
        models = [ready(part, how, mesh["dp"]) for part in parts]
        for stage, model in zip(stages, models, strict=True):
            stage.submod = model
        self.optimizers = [torch.optim.AdamW(model.parameters(), 0.01) for model in models]
        self.first, self.last = 0 in mine, count - 1 in mine

    def batch(self, step: int) -> tuple[tuple[Tensor, ...], Tensor, dict[str, Any]]:
        half = slice(4 * self.replica, 4 * self.replica + 4)
        tokens, labels = (part[half] for part in data(step))
        given = {"target": labels, "losses": []} if self.last else {"target": None, "losses": None}
        return (tokens,) if self.first else (), tokens, given

    def run(self, call: str, step: int) -> list[float]:
        """A step or an evaluation; the mean loss on the last rank."""
        args, tokens, given = self.batch(step)
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        more = {"input_batch": tokens, "return_outputs": False} if call == "step" else {}
        with torch.set_grad_enabled(call == "step"):
            getattr(self.schedule, call)(*args, **given, **more)
        for optimizer in self.optimizers if call == "step" else ():
            optimizer.step()
        losses = given["losses"]
        return [] if losses is None else [float(torch.mean(torch.stack(losses)))]


def trained(group: Any, package: str, schedule: str, how: str) -> dict[str, Any]:
    """Three steps and a validation; the mean losses of each."""
    program = Program(package, schedule, how)
    seen = [loss for step in range(3) for loss in program.run("step", step)]
    if schedule not in IN_A_V:
        seen += program.run("eval", 9)
    dist.barrier(group=group)
    return {"losses": seen}


def plainly() -> list[list[float]]:
    """The losses of each half of the batch, in one process."""
    model = Decoder(4)
    model.fill()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    seen: list[list[float]] = [[], []]
    for step in (0, 1, 2, 9):
        tokens, labels = data(step)
        halves = [
            cross_entropy(model(t), y)
            for t, y in zip(tokens.chunk(2), labels.chunk(2), strict=True)
        ]
        for half, loss in zip(seen, halves, strict=True):
            half.append(float(loss.detach()))
        optimizer.zero_grad()
        torch.stack(halves).mean().backward()
        optimizer.step()
    return seen
