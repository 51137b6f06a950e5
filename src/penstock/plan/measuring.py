"""Measure what the units of a model cost on the device where it is."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import nn

from penstock.errors import UsageError
from penstock.partition import Partition, partition, untouched
from penstock.plan.costs import Profile, UnitCost, UnitCosts, ValueCost
from penstock.plan.devices import Meter
from penstock.plan.probing import (
    Bench,
    Holding,
    Known,
    Laps,
    LossFunction,
    Subject,
    Work,
    chain_edges,
    cost_of,
    flops_of,
    gradients_kept,
    holding_of,
    kind_of,
    work_of,
)
from penstock.stage import device_of
from penstock.values import MISSING, Rules, ValueSpec, flatten, unflatten

REPEATS = 5
"""How often times are measured by default, after a first run that does not count."""


def measure(  # noqa: PLR0913 - the arguments of a step, by name
    model: nn.Module,
    *args: Any,
    target: Any = MISSING,
    loss_fn: LossFunction | None = None,
    rules: Rules | None = None,
    stages: int = 1,
    repeats: int = REPEATS,
    memory: float = 0.0,
    latency: float = 0.0,
    bandwidth: float = float("inf"),
    handling: float = 0.0,
    tokens: int = 0,
    **kwargs: Any,
) -> Profile:
    """Measure what the units of a model cost on the device where it is.

    Nothing runs yet: each size of a microbatch is measured when it is first asked for. The model is left as
    it is, with its gradients, buffers and random states.

    Args:
        model: any module, with data.
        args: its arguments for a batch, from which microbatches are taken.
        target: what the loss compares with.
        loss_fn: ``(output, target) -> scalar``, as for a Pipeline.
        rules: how arguments are split, as for a Pipeline.
        stages: into how many stages the model may have to be cut: it is taken apart as far as that needs.
        repeats: how often each unit runs, after a first run that does not count.
        memory: bytes of the device; by default those of a GPU, and for a CPU unknown.
        latency: the latency of a message between ranks, in seconds.
        bandwidth: the bandwidth of a channel between ranks, in bytes per second.
        handling: how long a rank is busy with a message, at either end of it, in seconds.
        tokens: positions in a sample, by which tokens are counted.
        kwargs: the model's arguments by name.

    Raises:
        UsageError: the model has no data, or the batch cannot be split so.
    """
    if any(parameter.is_meta for parameter in model.parameters()):
        raise UsageError(
            "a model on the meta device cannot be measured; predict its costs for a device instead: "
            "penstock.plan.predict(model, ..., device='h100')"
        )
    work = work_of(model, args, kwargs, target, loss_fn, rules, stages)
    home = device_of(model)
    fine = partition(model, [[path] for path in work.units], example=(work.args, work.kwargs))
    found = Profile(
        "cpu" if home.type == "cpu" else torch.cuda.get_device_name(home),
        memory=memory or _memory_of(home),
        latency=latency,
        bandwidth=bandwidth,
        handling=handling,
        tokens=tokens,
        measured=True,
        model=type(model).__name__,
    )
    found.coster = lambda samples: _measured(work, fine, samples, repeats, home)
    return found


def _memory_of(home: torch.device) -> float:
    if home.type != "cuda":
        return 0.0
    return float(torch.cuda.get_device_properties(home).total_memory)


def _measured(
    work: Work, fine: Partition, samples: int, repeats: int, home: torch.device
) -> UnitCosts:
    args, kwargs, target = work.part(samples)
    args, kwargs = _on(home, (args, kwargs))
    clock = _clock(home)
    bench, known = Bench(clock), Known()
    with untouched(fine.modules, home), gradients_kept(work.model):
        subjects, values = _in_turn(work, fine, (args, kwargs), _on(home, target))
        modules = [work.model.get_submodule(subject.path) for subject in subjects]
        kinds = [kind_of(subject, m) for subject, m in zip(subjects, modules, strict=True)]
        # Of several units that are alike only the first runs.
        first = dict(zip(reversed(kinds), reversed(subjects), strict=True))
        runs = {kind: _Run(subject, bench) for kind, subject in first.items()}
        halves = [_Run(half, bench) for half in _halves(work, (args, kwargs), _on(home, target))]
        # In turns: the speed of a device varies, and what ran just before is still in its caches.
        for _ in range(repeats):
            for run in (*runs.values(), *halves):
                bench.run(run.subject, run.laps)
        for kind, subject, module in zip(kinds, subjects, modules, strict=True):
            known.add(subject, module, partial(runs[kind].cost, module))
    between = _between([runs[kind].laps for kind in kinds], [half.laps for half in halves])
    return UnitCosts(samples, tuple(known.units), known.with_keepers(values), between)


class _Run:
    """A unit that is measured repeatedly; it has run to warm up, and to find its memory."""

    def __init__(self, subject: Subject, bench: Bench) -> None:
        self.subject, self.laps, self._metered = subject, Laps(), Laps()
        bench.run(subject, Laps())
        with Meter() as meter:
            bench.run(subject, self._metered, meter)

    def cost(self, module: nn.Module) -> tuple[UnitCost, Holding]:
        """What was found."""
        self.laps.stash, self.laps.extra = self._metered.stash, self._metered.extra
        holding = holding_of(self.subject, module)
        return cost_of(self.subject, self.laps, holding, flops_of(self.subject)), holding


def _clock(home: torch.device) -> Callable[[], float]:
    """A function that tells the time once the device has done its work."""
    if home.type == "cpu":
        # If a single thread does all the work, the time of other programs need not count.
        return time.thread_time if torch.get_num_threads() == 1 else time.perf_counter

    def after_all() -> float:
        torch.accelerator.synchronize(home)
        return time.perf_counter()

    return after_all


def _on(home: torch.device, value: Any) -> Any:
    if value is MISSING:
        return value
    tensors, structure = flatten(value)
    return unflatten(structure, [tensor.to(home) for tensor in tensors])


def _in_turn(
    work: Work, made: Partition, call: tuple[Any, Any], target: Any
) -> tuple[list[Subject], list[ValueCost]]:
    """The stages of a partition, each with the arguments that it gets; and the values that they hand on."""
    described = made.describe(ValueSpec.of(call), True) if made.describe is not None else None
    edges = described.edges if described else chain_edges(len(made.modules))
    subjects, sizes = [], {}
    last: Any = None
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]
    names: list[str | None]
    store: dict[str, Any] = {}
    for index, module in enumerate(made.modules):
        given = tuple(edge.value for edge in edges if edge.source == index)
        wired = bool(getattr(module, "wired", False))
        if wired:
            uses = {e.value: store[e.value] for e in edges if index in e.targets}
            arguments, keywords = (uses, *call), {}
            names = [name for name, value in uses.items() for _ in flatten(value)[0]]
        elif index == 0:
            arguments, keywords, names = call[0], call[1], []
        else:
            spread = type(last) is tuple and getattr(module, "spreads", True)
            arguments, keywords = (last if spread else (last,)), {}
            names = [edges[index - 1].value] * len(flatten(last)[0])
        count = len(flatten((arguments, keywords))[0])
        final = index == len(made.modules) - 1
        subject = Subject(
            work.units[index] if len(work.units) == len(made.modules) else str(index),
            module,
            arguments,
            keywords,
            (*names, *[None] * (count - len(names))),
            given,
            (lambda output: work.root(output, target)) if final else None,
        )
        subjects.append(subject)
        args, kwargs, _ = subject.fresh(leaf=True)
        with torch.enable_grad():
            last = _detached(module(*args, **kwargs))
        if wired and type(last) is dict:
            store.update(last)
        for name in given:
            value = last[name] if wired else last
            sizes[name] = sum(tensor.nbytes for tensor in flatten(value)[0])
    values = [ValueCost(e.value, e.source, e.targets, sizes[e.value], e.gradient) for e in edges]
    return subjects, values


def _detached(value: Any) -> Any:
    """A value as another stage gets it."""
    try:
        tensors, structure = flatten(value)
    except Exception:  # a model's output may be anything, and goes to no other stage
        return value
    return unflatten(structure, [t.detach().requires_grad_(t.requires_grad) for t in tensors])


def _halves(work: Work, call: tuple[Any, Any], target: Any) -> list[Subject]:
    """Two stages with half of the units each; none where there are too few units to learn from that."""
    half = len(work.units) // 2
    if half < 2:
        return []
    placed = [list(work.units[:half]), list(work.units[half:])]
    coarse = partition(work.model, placed, example=(work.args, work.kwargs))
    return _in_turn(work, coarse, call, target)[0]


def _between(units: Sequence[Laps], halves: Sequence[Laps]) -> tuple[float, float]:
    """What each further unit of a stage saves: the units alone are compared with two stages of them."""
    if not halves:
        return 0.0, 0.0

    def saved(kind: str) -> float:
        alone = zip(*(getattr(laps, kind) for laps in units), strict=True)
        together = zip(*(getattr(laps, kind) for laps in halves), strict=True)
        # Always of the same turn: if that was slow, it was slow for both.
        found: float = median(sum(a) - sum(t) for a, t in zip(alone, together, strict=True))
        return max(found, 0.0) / (len(units) - len(halves))

    return saved("forward"), saved("backward")
