"""One model, run in a plain loop over microbatches and as a pipeline of four ranks in this process."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from penstock import Loss, Microbatches, Pipeline, collect_losses, randomness
from penstock.errors import PenstockError

Call = tuple[Sequence[Any], Mapping[str, Any]]
"""The arguments of one microbatch."""
RANKS = 4
MICROBATCHES = 4
SAMPLES = 2
SEED = 11
CLOSE = {torch.float64: 1e-6, torch.float32: 2e-3}
"""The largest relative difference that counts as none. Some models compute in single precision inside."""
LARGEST = 1e4
"""Numbers of an output that are larger mask something, and are no part of the loss."""


@dataclass(frozen=True)
class Example:
    """A model with what one step runs it on."""

    model: nn.Module
    calls: Sequence[Call]


@dataclass
class Row:
    """What became of one model with one schedule.

    Attributes:
        name: of the model.
        schedule: of the pipeline.
        kind: ``right``, ``with example``, ``refused``, ``unclear``, ``silent``, ``void`` or ``lost``.
        gap: the largest relative difference of the loss, a gradient or a buffer.
        share: of the work of a step, what the busiest of the ranks' stages does.
        text: the sentence of the refusal, or what differs.
    """

    name: str
    schedule: str = ""
    kind: str = "lost"
    gap: float = 0.0
    share: float = 0.0
    text: str = ""


@dataclass
class Outcome:
    """What a step has given.

    Attributes:
        loss: of the step.
        tensors: the gradients by the names of the parameters, and the buffers.
        units: the modules that the pipeline places as a whole, by stage.
    """

    loss: float
    tensors: dict[str, Tensor | None]
    units: list[list[str]] = field(default_factory=list)


def judge(name: str, make: Callable[[], Example], schedules: Sequence[str]) -> Iterator[Row]:
    """Compare a model with itself; a row for each schedule."""
    try:
        example = make()
        example, dtype = _in_double(example)
    except Exception as error:
        yield Row(name, "", "void", text=_sentence(error))
        return
    for schedule in schedules:
        try:
            yield _judged(Row(name, schedule), example, dtype)
        except Exception as error:
            yield Row(name, schedule, "lost", text=_sentence(error))


def _judged(row: Row, example: Example, dtype: torch.dtype) -> Row:
    row = _tried(row, example, dtype, None)
    if row.kind in ("refused", "unclear"):
        again = _tried(dataclasses.replace(row), example, dtype, example.calls[0])
        if again.kind in ("right", "silent"):
            kind = "with example" if again.kind == "right" else "silent"
            return dataclasses.replace(again, kind=kind, text=f"{row.text} -> {again.text}")
    return row


def _tried(row: Row, example: Example, dtype: torch.dtype, shown: Call | None) -> Row:
    try:
        mine = piped(example, row.schedule, shown)
    except PenstockError as error:
        row.kind, row.text = "refused", _sentence(error)
        if type(error).__name__ == "StageError":
            # The author's code failed in a stage, where it would not have failed by itself.
            row.kind = "unclear"
        return row
    except Exception as error:
        row.kind, row.text = "unclear", _sentence(error)
        return row
    units = [path for stage in mine.units for path in stage]
    theirs = plain(example, units)
    row.gap, what = difference(mine, theirs)
    row.kind = "right" if row.gap <= CLOSE[dtype] else "silent"
    row.text = "" if row.kind == "right" else what
    # Counting cannot watch a gradient that is taken inside.
    with contextlib.suppress(RuntimeError):
        row.share = share_of(example, mine.units)
    return row


def _sentence(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _in_double(example: Example) -> tuple[Example, torch.dtype]:
    """The example in double precision, or as it is if its operations have none."""
    errors = []
    for dtype in CLOSE:
        model = copy.deepcopy(example.model).to(dtype)
        cast = Example(model, [_cast(call, dtype) for call in example.calls])
        try:
            with torch.random.fork_rng(devices=[]):
                output = model_call(copy.deepcopy(model), cast.calls[0])
                loss_of(output).backward()
            return cast, dtype
        except Exception as error:
            errors.append(error)
    raise errors[0]


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return mapped(value, lambda t: t.to(dtype) if t.is_floating_point() else t)


def mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A nested value with other tensors."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return type(value)({key: mapped(one, change) for key, one in value.items()})  # type: ignore[call-arg]
    if type(value) in (list, tuple):
        return type(value)(mapped(one, change) for one in value)
    return value


def model_call(model: nn.Module, call: Call) -> Any:
    args, kwargs = mapped(call, torch.clone)
    return model(*args, **kwargs)


# ---- the two runs


def loss_of(output: Any, _: Any = None) -> Tensor:
    """A number to which all numbers of an output contribute, each with another factor."""
    terms = [_term(t, place) for place, t in enumerate(_floats(output)) if t.requires_grad]
    if not terms:
        raise ValueError("the output has no tensor that requires a gradient")
    return torch.stack(terms).sum()


def _term(tensor: Tensor, place: int) -> Tensor:
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    flat = real.reshape(-1)
    factors = torch.cos(torch.arange(flat.numel(), dtype=flat.dtype) + place)
    counts = flat.detach().abs() < LARGEST
    return (
        torch.where(counts, flat * factors, 0.0).sum() / max(flat.numel(), 1)
        + torch.where(counts, flat, 0.0).square().mean()
    )


def _floats(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if value.is_floating_point() or value.is_complex():
            yield value
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from _floats(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _floats(one)
    elif dataclasses.is_dataclass(value):
        for one in vars(value).values():
            yield from _floats(one)
    elif type(value).__name__ == "DiagonalGaussianDistribution":
        yield from (value.mean, value.logvar)


def plain(example: Example, units: Sequence[str] | None = None) -> Outcome:
    """One step of the unsplit model, microbatch by microbatch."""
    model, total = copy.deepcopy(example.model), 0.0
    for index, call in enumerate(example.calls):
        drawn = randomness(model, seed=SEED, microbatch=index, units=units)
        with drawn, collect_losses() as added:
            output = model_call(model, call)
            loss = (loss_of(output) + added.total()) / len(example.calls)
        loss.backward()
        total += float(loss.detach())
    return Outcome(total, _tensors(model))


def piped(example: Example, schedule: str, shown: Call | None) -> Outcome:
    """One step of the model as a pipeline."""
    calls = mapped(list(example.calls), torch.clone)
    pipe = Pipeline(
        copy.deepcopy(example.model),
        schedule=schedule,
        ranks=RANKS,
        microbatches=len(calls),
        loss_fn=Loss(loss_of, over="microbatch", nonfinite="warn"),
        seed=SEED,
    )
    with pipe:
        if shown is not None:
            args, kwargs = mapped(shown, torch.clone)
            pipe.cut(*args, **kwargs)
        batch = Microbatches([_whole(*call) for call in calls], samples=[SAMPLES] * len(calls))
        result = pipe.step(batch)
        model: Any = pipe.model
        paths = {id(module): path for path, module in model.named_modules()}
        modules: list[Any] = [stage.module for stage in pipe.stages]
        units = [[paths[id(unit)] for unit in stage.units] for stage in modules]
        return Outcome(result.loss, _tensors(model), units)


def _whole(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    if kwargs and args:
        raise ValueError("give a microbatch's arguments by position or by name")
    return dict(kwargs) if kwargs else tuple(args)


def _tensors(model: nn.Module) -> dict[str, Tensor | None]:
    return {
        **{name: p.grad for name, p in model.named_parameters()},
        **{name: b.detach().clone() for name, b in model.named_buffers()},
    }


def difference(mine: Outcome, theirs: Outcome) -> tuple[float, str]:
    """The largest relative difference, and where it is."""
    largest = abs(mine.loss - theirs.loss) / max(abs(theirs.loss), 1e-6)
    what = f"loss {mine.loss:.6g} for {theirs.loss:.6g}"
    if mine.loss != mine.loss:
        return (0.0, "") if theirs.loss != theirs.loss else (float("inf"), what)
    present = [t for t in theirs.tensors.values() if t is not None and t.numel()]
    most = max([float(t.abs().max()) for t in present if t.is_floating_point()], default=1.0)
    if mine.tensors.keys() != theirs.tensors.keys():
        return float("inf"), f"names: {sorted(mine.tensors.keys() ^ theirs.tensors.keys())[:3]}"
    for name, there in theirs.tensors.items():
        gap, said = _gap(mine.tensors[name], there, most)
        if gap > largest:
            largest, what = gap, f"{name}: {said}"
    return largest, what


def _gap(here: Tensor | None, there: Tensor | None, most: float) -> tuple[float, str]:
    if here is None or there is None:
        other = here if there is None else there
        if other is None:
            return 0.0, ""
        # A gradient of zeros for one that is absent.
        said = "has a gradient" if there is None else "has no gradient"
        return float("inf"), said
    if here.shape != there.shape:
        return float("inf"), f"shape {list(here.shape)} for {list(there.shape)}"
    if not there.numel():
        return 0.0, ""
    here, there = (t.to_dense().to(torch.complex128) for t in (here, there))
    gap = float((here - there).abs().nan_to_num(0.0).max())
    return gap / max(
        float(there.abs().nan_to_num(0.0, 0.0).max()), 1e-6 * min(most, 1e6), 1e-12
    ), f"by {gap:.1e}"


# ---- the work


def share_of(example: Example, units: Sequence[Sequence[str]]) -> float:
    """The part of the forward's operations that the busiest stage has."""
    model = copy.deepcopy(example.model)
    stage_of = {path: stage for stage, paths in reversed(list(enumerate(units))) for path in paths}
    work = [0.0] * len(units)
    with FlopCounterMode(display=False) as counter:
        for path, stage in stage_of.items():
            _count(model.get_submodule(path), stage, work, counter)
        model_call(model, example.calls[0])
    ranks = [sum(work[place::RANKS]) for place in range(RANKS)]
    return max(ranks) / sum(ranks) if sum(ranks) else 0.0


def _count(module: nn.Module, stage: int, work: list[float], counter: Any) -> None:
    run = module.forward

    # Not by hooks, as some code calls a module's forward itself.
    def forward(*args: Any, **kwargs: Any) -> Any:
        before = counter.get_total_flops()
        output = run(*args, **kwargs)
        work[stage] += counter.get_total_flops() - before
        return output

    vars(module)["forward"] = forward
