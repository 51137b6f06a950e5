"""A partition as a table: what each stage holds, computes and sends."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import nn

from penstock.partition.base import Partition
from penstock.partition.costs import StageCost, stage_costs
from penstock.values import ValueSpec, spec_of_arguments


@dataclass(frozen=True)
class Row:
    """A stage.

    Args:
        modules: the paths of the modules whose weights it holds; those of a list by their numbers.
        cost: what it costs for one microbatch.
        sent: the bytes of the values that it gives to other stages.
    """

    modules: tuple[str, ...]
    cost: StageCost
    sent: int


@dataclass(frozen=True)
class Table:
    """A row for each stage, which reads well as text."""

    rows: tuple[Row, ...]

    def __str__(self) -> str:
        head = ["stage", "modules", "parameters", "held", "flops", "saved", "sent"]
        timed = any(row.cost.seconds for row in self.rows)
        lines = [head + (["forward", "backward"] if timed else [])]
        lines += [_cells(index, row, timed) for index, row in enumerate(self.rows)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join(_line(line, widths) for line in lines)


def table(
    partition: Partition,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    repeats: int = 0,
) -> Table:
    """What each stage holds, computes and sends.

    Args:
        partition: of a model.
        args: the model's arguments for one microbatch.
        kwargs: those by name.
        repeats: how often time is measured; not at all with 0.
    """
    costs = stage_costs(partition, args, kwargs, repeats=repeats)
    sent = _sent(partition, spec_of_arguments(tuple(args), dict(kwargs or {})))
    rows = zip(partition.modules, costs, sent, strict=True)
    return Table(tuple(Row(tuple(module_paths(m)), cost, size) for m, cost, size in rows))


def _sent(partition: Partition, call: ValueSpec) -> list[int]:
    sizes = [0] * len(partition.modules)
    if partition.describe is not None:
        edges, specs = partition.describe(call, True)
        for edge in edges:
            sizes[edge.source] += sum(
                math.prod(spec.shape) * torch.empty(0, dtype=spec.torch_dtype).element_size()
                for spec in specs[edge.value].tensors
            )
    return sizes


def module_paths(module: nn.Module) -> list[str]:
    """Where the weights of a stage are: children of the model, and the items of lists among them."""
    names = [name for name, _ in (*module.named_parameters(), *module.named_buffers())]
    return spans(dict.fromkeys(_place(name) for name in names))


def _place(name: str) -> str:
    """The path up to the first number in it, else up to the model's grandchild."""
    numbered = re.match(r"(.*?\.|)\d+(?=\.)", name)
    return numbered.group() if numbered else ".".join(name.split(".")[:-1][:2] or [name])


def spans(paths: Iterable[str]) -> list[str]:
    """Paths in which those that differ in the last number alone are put together: ``blocks.0-3``."""
    runs = [list(run) for _, run in groupby(paths, lambda path: re.sub(r"\d+$", "", path))]
    return [r[0] if len(r) == 1 else f"{r[0]}-{re.sub('.*[^0-9]', '', r[-1])}" for r in runs]


def _cells(index: int, row: Row, timed: bool) -> list[str]:
    cost = row.cost
    numbers = [cost.held, cost.flops, cost.saved, row.sent]
    cells = [str(index), ", ".join(row.modules), _short(cost.parameters), *map(_short, numbers)]
    backward = cost.backward_input + cost.backward_weight
    return cells + ([f"{t * 1e3:.2f} ms" for t in (cost.forward, backward)] if timed else [])


def _short(number: float) -> str:
    for unit in ("", "k", "M", "G", "T"):
        if number < 1000:
            return f"{number:.3g}{unit}" if unit else str(number)
        number /= 1000
    return f"{number:.3g}P"


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    # The modules' names to the left, numbers to the right.
    return "  ".join(
        cell.ljust(width) if column == 1 else cell.rjust(width)
        for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ).rstrip()
