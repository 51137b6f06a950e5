"""One model, run in a plain loop over microbatches and as a pipeline of four ranks in this process."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from penstock import Pipeline
from penstock.errors import PenstockError
from penstock.testing import Case, oracle, plain_loop
from tests.catalogue.making import MICROBATCHES, Call, calls_of, case_of, mapped

RANKS = 4
SEED = 11
CLOSE = {torch.float64: 1e-6, torch.float32: 2e-3}
"""The largest relative difference that counts as none. Some models compute in single precision inside."""


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


def judge(name: str, make: Callable[[], Case], schedules: Sequence[str]) -> Iterator[Row]:
    """Compare a model with itself; a row for each schedule."""
    try:
        program, dtype = _in_double(make())
    except Exception as error:
        yield Row(name, "", "void", text=_sentence(error))
        return
    for schedule in schedules:
        try:
            yield _judged(Row(name, schedule), program, dtype)
        except Exception as error:
            yield Row(name, schedule, "lost", text=_sentence(error))


def _judged(row: Row, program: Case, dtype: torch.dtype) -> Row:
    row = _tried(row, program, dtype, None)
    if row.kind in ("refused", "unclear"):
        again = _tried(dataclasses.replace(row), program, dtype, calls_of(program)[0])
        if again.kind in ("right", "silent"):
            kind = "with example" if again.kind == "right" else "silent"
            return dataclasses.replace(again, kind=kind, text=f"{row.text} -> {again.text}")
    return row


def _tried(row: Row, program: Case, dtype: torch.dtype, shown: Call | None) -> Row:
    pipe = Pipeline(
        copy.deepcopy(program.model), schedule=row.schedule, ranks=RANKS, microbatches=MICROBATCHES,
        loss_fn=program.loss, seed=SEED,
    )  # fmt: skip
    try:
        if shown is not None:
            args, kwargs = copy.deepcopy(shown)
            pipe.cut(*args, **kwargs)
        gaps = oracle.judge(program, pipe, evaluate=False).differences()
    except PenstockError as error:
        row.kind, row.text = "refused", _sentence(error)
        if type(error).__name__ == "StageError":
            # The author's code failed in a stage, where it would not have failed by itself.
            row.kind = "unclear"
        return row
    except Exception as error:
        row.kind, row.text = "unclear", _sentence(error)
        return row
    finally:
        pipe.close()
    row.gap, what = max((gap, name) for name, gap in gaps.items())
    row.kind = "right" if row.gap <= CLOSE[dtype] else "silent"
    row.text = "" if row.kind == "right" else what
    paths = {id(module): path for path, module in pipe.model.named_modules()}  # type: ignore[union-attr]
    modules: list[Any] = [stage.module for stage in pipe.stages]
    units = [[paths[id(unit)] for unit in stage.units] for stage in modules]
    # Counting cannot watch a gradient that is taken inside.
    with contextlib.suppress(RuntimeError):
        row.share = share_of(program, units)
    return row


def _sentence(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _in_double(program: Case) -> tuple[Case, torch.dtype]:
    """The program in double precision, or as it is if its operations have none."""
    errors = []
    for dtype in CLOSE:
        model = copy.deepcopy(program.model).to(dtype)
        cast = case_of(model, [_cast(call, dtype) for call in calls_of(program)])
        try:
            with torch.random.fork_rng(devices=[]):
                plain_loop(cast)
            return cast, dtype
        except Exception as error:
            errors.append(error)
    raise errors[0]


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return mapped(value, lambda t: t.to(dtype) if t.is_floating_point() else t)


# ---- the work


def share_of(program: Case, units: Sequence[Sequence[str]]) -> float:
    """The part of the forward's operations that the busiest stage has."""
    model = copy.deepcopy(program.model)
    stage_of = {path: stage for stage, paths in reversed(list(enumerate(units))) for path in paths}
    work = [0.0] * len(units)
    with FlopCounterMode(display=False) as counter:
        for path, stage in stage_of.items():
            _count(model.get_submodule(path), stage, work, counter)
        args, kwargs = copy.deepcopy(calls_of(program)[0])
        model(*args, **kwargs)
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
