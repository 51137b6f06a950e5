"""What stages hand to each other: run with either import."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.pipelining.either import CHUNKS, CPU, WIDTH, Names, X, Y
from tests.pipelining.peers.loops import LOOPS


class Stage(nn.Module):
    """One stage of three; what it hands on is made by ``give`` of what came and its own product."""

    def __init__(self, give: Callable[..., Any], take: Callable[..., Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.give, self.take = give, take

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.give(torch.tanh(self.linear(self.take(*args, **kwargs))), *args)


class Nothing(nn.Module):
    def forward(self, hidden: Tensor) -> Tensor:
        return hidden


def the_first(hidden: Tensor, *_: Any, **__: Any) -> Tensor:
    return hidden


def plain(made: Tensor, *_: Any) -> Tensor:
    return made


def with_mask(made: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return made, (made.detach() > 0)


def masked(hidden: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, hidden, hidden * 0.5)


def with_rest(made: Tensor, *_: Any) -> list[Tensor]:
    return [made, made * 2, made.sum()]


def of_rest(hidden: Tensor, *_: Tensor) -> Tensor:
    return hidden


def turned(made: Tensor, *_: Any) -> Tensor:
    return made.repeat(1, 2)[:, ::2].t()


def turned_back(hidden: Tensor) -> Tensor:
    return hidden.t()


def spread(made: Tensor, *_: Any) -> Tensor:
    return made.unsqueeze(1).expand(-1, 3, -1)


def narrowed(hidden: Tensor) -> Tensor:
    return hidden.mean(1)


def as_dict(made: Tensor, *_: Any) -> dict[str, Any]:
    return {"logits": made, "rest": (made * 3, made + 1)}


def halved(made: Tensor, *_: Any) -> Tensor:
    return made.double()


def restored(hidden: Tensor) -> Tensor:
    return hidden.float()


GIVES: dict[str, tuple[Callable[..., Any], Callable[..., Tensor]]] = {
    "a mask": (with_mask, masked),
    "unused values": (with_rest, of_rest),
    "a turned view": (turned, turned_back),
    "an expanded view": (spread, narrowed),
    "another type": (halved, restored),
}


def modules(kind: str) -> list[nn.Module]:
    torch.manual_seed(0)
    give, take = GIVES.get(kind, (plain, the_first))
    last = as_dict if kind == "a dict" else plain
    made: list[nn.Module] = [Stage(give, the_first), Stage(give, take), Stage(last, take)]
    if kind == "a frozen stage":
        made[0].requires_grad_(False)
    if kind == "no parameters":
        made[1] = Nothing()
    return made


def loss_of(output: Any, target: Tensor) -> Tensor:
    found = output["logits"] if isinstance(output, dict) else output
    return nn.functional.mse_loss(found, target, reduction="sum")


def handed(group: Any, package: str, schedule: str, kind: str) -> dict[str, Any]:
    """Three ranks, or as many stages in a loop of one's own."""
    names = Names(package)
    rank = dist.get_rank(group)
    made = modules(kind)
    reference = copy.deepcopy(made)
    stage = names.PipelineStage(made[rank], rank, 3, CPU, group=group)
    loop = LOOPS.get(schedule)
    chosen = names.get_schedule_class(schedule) if loop is None else loop(names)
    ran = chosen(stage, CHUNKS, loss_fn=loss_of, scale_grads=False)
    x, target = X, Y
    losses: list[Tensor] = []
    output = None
    for _ in range(2):
        made[rank].zero_grad()
        if rank == 0:
            ran.step(x)
        elif rank == 2:
            output = ran.step(target=target, losses=losses)
        else:
            ran.step()
    total, expected = torch.tensor(0.0), []
    for part, goal in zip(x.chunk(CHUNKS), target.chunk(CHUNKS), strict=True):
        value: Any = (part,)
        for module in reference:
            value = module(*value) if isinstance(value, tuple | list) else module(value)
        expected.append(value)
        total = total + loss_of(value, goal)
    total.backward()
    if rank == 2:
        torch.testing.assert_close(sum(losses), total)
        torch.testing.assert_close(output, _merged(expected))
    for mine, theirs in zip(made[rank].parameters(), reference[rank].parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
    return {"kind": kind}


def _merged(parts: list[Any]) -> Any:
    if isinstance(parts[0], Tensor):
        return torch.cat(parts)
    if isinstance(parts[0], dict):
        return {key: _merged([part[key] for part in parts]) for key in parts[0]}
    return tuple(_merged(list(column)) for column in zip(*parts, strict=True))


KINDS = (*GIVES, "a dict", "a frozen stage", "no parameters")
