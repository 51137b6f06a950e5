"""Predict what the units of a model cost on a device that need not be present, from shapes alone."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from penstock.errors import InputFileError, UsageError
from penstock.partition import partition
from penstock.partition.calls.inference import memory_of
from penstock.plan.costs import Profile, UnitCost, UnitCosts, ValueCost
from penstock.plan.devices import Device, FusedAttention, Meter, device_named, shapes
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
    """Predict what the units of a model cost on a device that need not be present.

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
        UsageError: the device is unknown, or the batch cannot be split so.
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
    """What a unit was called with, and what it returned."""

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
    """A copy of a model that has shapes but no data."""
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
    """The same value with tensors that have shapes but no data.

    Args:
        value: any value.
        device: the device that the tensors claim to be on.
        memo: the tensors made so far: equal views of the same memory stay one tensor.
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
    return memory_of(tensor), tensor.storage_offset(), shape, stride, tensor.dtype


def _watched(work: Work, call: tuple[Any, Any], device: Device) -> tuple[dict[str, _Seen], Any]:
    """Run the model once without data and note what each unit is given.

    It runs with torch's fake tensors: unlike tensors on the meta device these let code between the units ask
    for a device, or for numbers in tensors that it makes itself. What runs between two units is counted with
    the first.

    Returns:
        What was seen of each unit, and the model's output; their tensors are on the meta device.
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
            f"these modules are not called with this batch, so their costs are unknown: "
            f"{', '.join(idle[:5])}; give a batch that uses them"
        )
    memo: dict[Place, Tensor] = {}
    for note in seen.values():
        note.args, note.kwargs = _meta((note.args, note.kwargs), memo=memo)
        note.output = _meta(note.output, memo=memo)
    return seen, _meta(output, memo=memo)


def _run_once(module: nn.Module, known: dict[Any, Any]) -> None:
    """Let a module answer with shapes alone if one like it was called in the same way before."""
    run, parts = module.forward, parts_of(module)

    def forward(*args: Any, **kwargs: Any) -> Any:
        kind = parts, shapes(flatten((args, kwargs))[0])
        if kind not in known:
            known[kind] = run(*args, **kwargs)
            return known[kind]
        return _meta(known[kind], "cpu")

    module.forward = forward


def _handed_on(work: Work, seen: Mapping[str, _Seen]) -> tuple[list[Edge], dict[str, float]] | None:
    """The values between the units, and their sizes, where units get unchanged what others return.

    Returns:
        None where something happens between the units.
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
    """The values between the units, as found by the analysis of the finest partition."""
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
    """A unit by itself; its arguments are matched with edges by their order and their need of a gradient."""
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
        # The first run makes the gradients, which are there already in all steps but the first.
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
    """A loss for the output of the last unit: that of the model's output, of which it is a part."""
    mine = flatten(own)[0]
    tensors, structure = flatten(output)
    at = {i: j for i, t in enumerate(tensors) for j, m in enumerate(mine) if t is m}

    def loss(made: Any) -> Any:
        new = flatten(made)[0]
        placed = [new[at[i]] if i in at else t.detach() for i, t in enumerate(tensors)]
        if not at:
            # The model makes something else of it; it is counted as if it were the output itself.
            placed = [*new, *placed[len(new) :]]
        return work.root(unflatten(structure, placed), target)

    return loss


def _size(spec: ValueSpec) -> float:
    return float(sum(math.prod(t.shape) * t.torch_dtype.itemsize for t in spec.tensors))


# ---- a model of transformers, from its config file alone: neither weights nor a network are needed


DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
LONGEST = 4096
"""Tokens of a sample by default, if the model takes as many."""


def next_token_loss(output: Any, target: Tensor) -> Tensor:
    """Mean cross-entropy of a language model, in float32; targets are in the places of their tokens."""
    logits = output.logits.float()
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), target[:, 1:].flatten())


def predict_hf(
    config: str | Path,
    *,
    batch: int,
    device: Device | str,
    sequence: int | None = None,
    dtype: str = "bfloat16",
    stages: int = 1,
) -> Profile:
    """Predict what the units of a causal language model cost.

    Args:
        config: a file such as ``config.json``, or its folder.
        batch: samples of a step.
        device: a name of :data:`penstock.plan.DEVICES`, or a :class:`penstock.plan.Device`.
        sequence: tokens of a sample; by default as many as the model takes, at most 4096.
        dtype: the type of its weights: ``bfloat16``, ``float16`` or ``float32``.
        stages: into how many stages the model may have to be cut.

    Raises:
        UsageError: there is no such file or dtype, or transformers is not installed.
        InputFileError: the file is not a config of a causal language model.
    """
    if dtype not in DTYPES:
        raise UsageError(f"dtype={dtype!r}: must be one of {', '.join(DTYPES)}")
    found = _config(Path(config))
    sequence = sequence or min(LONGEST, getattr(found, "max_position_embeddings", LONGEST))
    model = _model(found, Path(config)).to(DTYPES[dtype])
    tokens = torch.zeros(batch, sequence, dtype=torch.long, device="meta")
    profile = predict(
        model,
        input_ids=tokens,
        target=tokens,
        loss_fn=next_token_loss,
        device=device,
        stages=stages,
        tokens=sequence,
    )
    profile.model = f"{profile.model} of {Path(config).name}"
    return profile


def _transformers() -> Any:
    try:
        return import_module("transformers")
    except ImportError:
        raise UsageError("hf= needs transformers: pip install 'penstock[hf]'") from None


def _config(path: Path) -> Any:
    if not path.exists():
        raise UsageError(
            f"hf={str(path)!r}: there is no such file; give a config.json of transformers"
        )
    try:
        found = _transformers().AutoConfig.from_pretrained(str(path), local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputFileError(
            f"{path}: not a config of a model that transformers knows: {error}"
        ) from error
    found.use_cache = False
    return found


def _model(config: Any, path: Path) -> torch.nn.Module:
    try:
        with torch.device("meta"):
            model: torch.nn.Module = _transformers().AutoModelForCausalLM.from_config(config)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputFileError(
            f"{path}: not a causal language model of transformers: {error}"
        ) from error
    return model.train()
