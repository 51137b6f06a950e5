"""Predict what the units of a model cost on a device that need not be there, from shapes alone."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from penstock.errors import UsageError
from penstock.partition import partition
from penstock.plan.costs import Profile, UnitCost, UnitCosts, ValueCost
from penstock.plan.devices import Device, device_named
from penstock.plan.metering import FusedAttention, Meter, shapes, storage_key
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
    holding_of,
    parts_of,
    work_of,
)
from penstock.schedule import Edge
from penstock.values import (
    MISSING,
    Rules,
    ValueSpec,
    flatten,
    isolate_hooks,
    randomness_kept,
    unflatten,
)


def predict(  # noqa: PLR0913 - the arguments of a step, by name
    model: nn.Module,
    *args: Any,
    device: Device | str,
    target: Any = MISSING,
    loss_fn: LossFunction | None = None,
    rules: Rules | None = None,
    stages: int = 1,
    tokens: int = 0,
    **kwargs: Any,
) -> Profile:
    """Predict what the units of a model cost on a device that need not be there.

    Args:
        model: any module; on the meta device it takes no memory.
        args: its arguments for a batch, of which shapes and types count; they may be on the meta device.
        device: a name of :data:`penstock.plan.DEVICES`, or a :class:`penstock.plan.Device`.
        target: what the loss compares with.
        loss_fn: ``(output, target) -> scalar``, as for a Pipeline.
        rules: how arguments are split, as for a Pipeline.
        stages: into how many stages the model may have to be cut.
        tokens: positions in a sample, by which tokens are counted.
        kwargs: the model's arguments by name.

    Raises:
        UsageError: an unknown device, or the batch has no such parts.
    """
    of = device_named(device)
    work = work_of(model, args, kwargs, target, loss_fn, rules, stages)
    latency, bandwidth = of.wire(1)
    found = Profile(
        of.name,
        memory=of.memory,
        latency=latency,
        bandwidth=bandwidth,
        node=of.node,
        network=of.wire(of.node + 1),
        tokens=tokens,
        model=type(model).__name__,
    )
    found.coster = lambda samples: _predicted(work, samples, of)
    return found


@dataclass
class _Seen:
    """What a unit was called with, and what it gave."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    output: Any = None
    calls: int = 0
    between: float = 0.0


def _predicted(work: Work, samples: int, device: Device) -> UnitCosts:
    args, kwargs, target = work.part(samples)
    call, target = _meta((args, kwargs)), target if target is MISSING else _meta(target)
    known = Known()
    with randomness_kept(torch.device("cpu")), FusedAttention():
        seen, output = _watched(work, call, device)
        edges, sizes = _handed_on(work, seen) or _analysed(work, seen, call)
        twin = _twin(work.model, torch.device("meta"))
        for index, path in enumerate(work.units):
            module, last = twin.get_submodule(path), index == len(work.units) - 1
            loss = _loss_after(work, seen[path].output, output, target) if last else None
            subject = _subject(path, module, seen[path], edges, index, loss)
            cost = partial(_predicted_unit, subject, module, device, seen[path].between)
            known.add(subject, module, cost)
    values = [ValueCost(e.value, e.source, e.targets, sizes[e.value], e.gradient) for e in edges]
    return UnitCosts(samples, tuple(known.units), known.with_keepers(values))


def _twin(model: nn.Module, device: torch.device) -> nn.Module:
    """A copy of a model that has shapes and no data."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        data = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
        memo[id(parameter)] = nn.Parameter(data, parameter.requires_grad)
    others = [value for module in model.modules() for value in vars(module).values()]
    for tensor in (*model.buffers(), *others):
        if isinstance(tensor, Tensor) and id(tensor) not in memo:
            memo[id(tensor)] = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    copied = copy.deepcopy(model, memo)
    isolate_hooks(copied, memo)
    return copied


Place = tuple[Any, ...]


def _meta(value: Any, device: str = "meta", memo: dict[Place, Tensor] | None = None) -> Any:
    """The same with tensors that have shapes and no data.

    Args:
        value: any.
        device: that they say they are on.
        memo: what was made for which: tensors that show the same memory alike stay one tensor.
    """
    memo = {} if memo is None else memo
    tensors, structure = flatten(value)
    places = [_place(tensor) for tensor in tensors]
    for tensor, place in zip(tensors, places, strict=True):
        if place not in memo:
            made = torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device
            )
            memo[place] = made.requires_grad_(tensor.requires_grad)
    return unflatten(structure, [memo[place] for place in places])


def _place(tensor: Tensor) -> Place:
    shape, stride = tuple(tensor.shape), tensor.stride()
    return storage_key(tensor), tensor.storage_offset(), shape, stride, tensor.dtype


def _watched(work: Work, call: tuple[Any, Any], device: Device) -> tuple[dict[str, _Seen], Any]:
    """Run the model once without data and note what each unit is given.

    It runs among torch's fake tensors, which unlike those on the meta device let code between the units ask
    for a device, or for numbers of what it makes itself. What runs between two units is counted with the
    first.

    Returns:
        For each unit what was seen, and the model's output; their tensors are on the meta device.
    """
    seen = {path: _Seen() for path in work.units}
    meter = Meter(device)
    since, latest = 0.0, seen[work.units[0]]

    def before(note: _Seen, args: Any, kwargs: Any) -> None:
        latest.between += meter.seconds - since
        note.args, note.kwargs = (note.args, note.kwargs) if note.calls else (args, kwargs)
        note.calls += 1

    def after(note: _Seen, output: Any) -> None:
        nonlocal since, latest
        note.output = output
        since, latest = meter.seconds, note

    with FakeTensorMode(allow_non_fake_inputs=True), ExitStack() as stack:
        twin = _twin(work.model, torch.device("cpu"))
        once: dict[Any, Any] = {}
        for path, note in seen.items():
            module = twin.get_submodule(path)
            _listen(stack, module, partial(before, note), partial(after, note))
            _run_once(module, once)
        args, kwargs = _meta(call, "cpu")
        with meter, torch.enable_grad():
            output = twin(*args, **kwargs)
    latest.between += meter.seconds - since
    idle = [path for path, note in seen.items() if not note.calls]
    if idle:
        raise UsageError(
            f"these modules are not called by this batch, so that they have no costs: {', '.join(idle[:5])}; "
            "give a batch that uses them"
        )
    memo: dict[Place, Tensor] = {}
    for note in seen.values():
        note.args, note.kwargs = _meta((note.args, note.kwargs), memo=memo)
        note.output = _meta(note.output, memo=memo)
    return seen, _meta(output, memo=memo)


def _run_once(module: nn.Module, known: dict[Any, Any]) -> None:
    """Let a module of a copy answer with shapes alone where one like it was called like that before."""
    run, parts = module.forward, parts_of(module)

    def forward(*args: Any, **kwargs: Any) -> Any:
        kind = parts, shapes(flatten((args, kwargs))[0])
        if kind not in known:
            known[kind] = run(*args, **kwargs)
            return known[kind]
        return _meta(known[kind], "cpu")

    module.forward = forward


def _handed_on(work: Work, seen: Mapping[str, _Seen]) -> tuple[list[Edge], dict[str, float]] | None:
    """The values between the units, and their sizes, where units get what others gave as it is.

    Returns:
        None where something happens on the way.
    """
    maker: dict[int, int] = {}
    users: dict[int, list[int]] = {}
    for index, note in enumerate(seen.values()):
        for tensor in flatten((note.args, note.kwargs))[0]:
            if id(tensor) in maker:
                users.setdefault(maker[id(tensor)], []).append(index)
            elif tensor.requires_grad:
                return None
        if note.calls > 1:
            return None
        for tensor in flatten(note.output)[0]:
            maker.setdefault(id(tensor), index)
    edges = [
        Edge(work.units[source], source, tuple(sorted(set(targets))))
        for source, targets in sorted(users.items())
    ]
    outputs = {path: flatten(note.output)[0] for path, note in seen.items()}
    return edges, {path: float(sum(t.nbytes for t in made)) for path, made in outputs.items()}


def _analysed(
    work: Work, seen: Mapping[str, _Seen], call: tuple[Any, Any]
) -> tuple[Sequence[Edge], dict[str, float]]:
    """The values between the units as the analysis of the finest partition finds them."""
    fine = partition(work.model, [[path] for path in work.units])
    if fine.describe is None:
        edges: Sequence[Edge] = chain_edges(len(work.units))
        outputs = [flatten(note.output)[0] for note in seen.values()]
        return edges, {e.value: float(sum(t.nbytes for t in outputs[e.source])) for e in edges}
    edges, specs = fine.describe(ValueSpec.of(call), True)
    return edges, {e.value: _size(specs[e.value]) for e in edges}


def _listen(
    stack: ExitStack,
    module: nn.Module,
    before: Callable[[Any, Any], None],
    after: Callable[[Any], None],
) -> None:
    hooks = (
        module.register_forward_pre_hook(
            lambda _, args, kwargs: before(args, kwargs), with_kwargs=True
        ),
        module.register_forward_hook(lambda _, args, output: after(output)),
    )
    for hook in hooks:
        stack.callback(hook.remove)


def _subject(
    path: str,
    module: nn.Module,
    seen: _Seen,
    edges: Sequence[Edge],
    index: int,
    loss: Callable[[Any], Any] | None,
) -> Subject:
    """A unit alone; the values that it is given are told by their order and their need of a gradient."""
    given = tuple(edge.value for edge in edges if edge.source == index)
    uses = [edge.value for edge in edges if index in edge.targets and edge.gradient]
    tensors = flatten((seen.args, seen.kwargs))[0]
    names: list[str | None] = []
    for tensor in tensors:
        names.append(uses.pop(0) if uses and tensor.requires_grad else None)
    return Subject(path, module, seen.args, seen.kwargs, tuple(names), given, loss, seen.calls)


def _predicted_unit(
    subject: Subject, module: nn.Module, device: Device, between: float
) -> tuple[UnitCost, Holding]:
    holding = holding_of(subject, module)
    with Meter(device) as meter:
        bench = Bench(lambda: meter.seconds)
        # Once to have gradients that are there already, as in all steps but the first.
        bench.run(subject, Laps(), meter)
        bench.run(subject, laps := Laps(), meter)
    cost = cost_of(subject, laps, holding, flops_of(subject))
    for parameter in subject.module.parameters():
        parameter.grad = None
    often = {kind: getattr(cost, kind) * subject.calls for kind in _OF_A_CALL}
    often["forward"] += between
    return replace(cost, **often), holding


_OF_A_CALL = ("forward", "input", "weight", "backward", "held", "around", "stash", "flops")


def _loss_after(work: Work, own: Any, output: Any, target: Any) -> Callable[[Any], Any]:
    """The loss of what the last unit gives: of the model's output, in which that stands."""
    mine = flatten(own)[0]
    tensors, structure = flatten(output)
    at = {i: j for i, t in enumerate(tensors) for j, m in enumerate(mine) if t is m}

    def loss(made: Any) -> Any:
        new = flatten(made)[0]
        placed = [new[at[i]] if i in at else t.detach() for i, t in enumerate(tensors)]
        if not at:
            # What the model makes of it is not known; it is counted as if it were the output.
            placed = [*new, *placed[len(new) :]]
        return work.root(unflatten(structure, placed), target)

    return loss


def _size(spec: ValueSpec) -> float:
    return float(sum(math.prod(t.shape) * t.torch_dtype.itemsize for t in spec.tensors))
