"""Trains the model of a program in a plain loop and through its Pipeline, and compares what both report.

The plain loop takes from Penstock only what a user's would: random numbers, and the losses that a model adds.
"""

from __future__ import annotations

import linecache
import math
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

import penstock
from penstock.errors import (
    InternalError,
    NonFiniteError,
    PartitionError,
    PeerFailed,
    PenstockError,
    PlanError,
    StageError,
)
from penstock.partition import unit_paths
from penstock.partition.units import at_points, in_lists
from penstock.testing import WorkerError, WorkerPool

Report = dict[str, Any]
"""All that a run gave, by name: numbers, tensors, ``None``, and lists of what hooks have seen."""
OPTIMIZERS: dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
    "SGD": lambda weights: torch.optim.SGD(weights, lr=0.1),
    # With a large eps, so that noise around a gradient of zero does not become a step.
    "AdamW": lambda weights: torch.optim.AdamW(weights, lr=0.05, eps=0.1, weight_decay=0.1),
}


@dataclass(frozen=True)
class Outcome:
    """How a program went.

    Attributes:
        kind: ``"same"``, ``"refused"``, ``"failed"``, or ``"void"`` if the plain loop fails.
        reason: a few words that are the same for similar programs.
        detail: all that is known.
    """

    kind: str
    reason: str = ""
    detail: str = ""


# ---- the two sides


def run_plain(program: Any) -> Report:
    """Train in a plain loop over microbatches."""

    def side(model: nn.Module, swapped: bool) -> tuple[Any, Callable[..., Any]]:
        def run_batch(step: int, *, trains: bool) -> tuple[float, Any]:
            modes = [(module, module.training) for module in model.modules()]
            if not trains:
                model.eval()
            with torch.set_grad_enabled(trains):
                result = plain_pass(program, model, step, trains=trains)
            for module, mode in modes:
                module.training = mode
            return result

        return model, run_batch

    return train(program, side)


def run_piped(program: Any, group: Any = None) -> Report:
    """Train through the program's Pipeline, and from some step on through another one."""
    with ExitStack() as stack:

        def side(model: nn.Module, swapped: bool) -> tuple[Any, Callable[..., Any]]:
            stack.close()
            made = program.another_pipeline(model) if swapped else program.pipeline(model, group)
            pipe = stack.enter_context(made)

            def run_batch(step: int, *, trains: bool) -> tuple[float, Any]:
                args, kwargs, target = program.batch(step)
                call = pipe.step if trains else pipe.eval
                outputs = program.RUN["outputs"] or not trains
                with autocast(program.RUN):
                    result = call(*args, target=target, outputs=outputs, **kwargs)
                return result.loss, result.outputs

            return pipe, run_batch

        return train(program, side)


Side = Callable[[nn.Module, bool], tuple[Any, Callable[..., Any]]]
"""What runs a model: its weights' owner, and a function for a batch. ``True`` asks for the other Pipeline."""


def train(program: Any, side: Side) -> Report:
    """Train a model that is run as it is or by a Pipeline, and report all that comes of it."""
    run, report, model = program.RUN, Report(), program.make()
    owner, run_batch = side(model, False)
    optimizers: list[torch.optim.Optimizer] = []
    for step in range(run["steps"]):
        if run.get("swap") and step == 1:
            state = owner.state_dict()
            model = model if run["swap"] == "model" else program.make()
            owner, run_batch = side(model, True)
            if run["swap"] == "state":
                owner.load_state_dict(state)
        program.change(model, step)
        if run["load"] and step == 1:
            owner.load_state_dict(program.make().state_dict())
        loss, output = run_batch(step, trains=True)
        report[f"loss, step {step}"] = loss
        if run["outputs"]:
            report |= tensors_by_name(f"output, step {step}", output)
        update(run, owner, report, step, optimizers)
        if run["evaluate"]:
            loss, output = run_batch(step, trains=False)
            report[f"evaluation, step {step}"] = loss
            report |= tensors_by_name(f"evaluated, step {step}", output)
    report |= {f"state of {n}": value.detach().clone() for n, value in owner.state_dict().items()}
    seen = getattr(program, "seen", [])
    for name, values in seen:
        # A tensor without data counts as infinite.
        numbers = [math.inf if isinstance(value, FakeTensor) else float(value) for value in values]
        report.setdefault(f"hook {name}", []).append(numbers)
    seen.clear()
    return report


def plain_pass(program: Any, model: nn.Module, step: int, *, trains: bool) -> tuple[float, Any]:
    """The loss and the output of a batch, microbatch by microbatch, with gradients if it trains."""
    run, outputs, total = program.RUN, [], 0.0
    batch = program.batch(step)
    count = min(len(tensors(batch)[0]), run["microbatches"])
    parts = list(zip(*(split(value, count) for value in batch), strict=True))
    divisor = run["accumulate"] if run["reduction"] == "mean" else 1
    seed = run["seed"]
    units = None if seed is None else units_of(model, run["cut"])
    for index, (part, share) in enumerate(zip(parts, shares(program, parts), strict=True)):
        drawn = penstock.randomness(model, seed=seed or 0, step=step, microbatch=index, units=units)
        with nullcontext() if seed is None else drawn:
            output, loss = forward(program, model, *part)
            if trains:
                (loss * share / divisor).backward()
        outputs.append(output)
        total += float(loss.detach()) * share
    return total, joined(outputs)


def units_of(model: nn.Module, cut: Any) -> list[str]:
    """What a pipeline with these ``stages=`` seeds one by one."""
    if isinstance(cut, int):
        return unit_paths(model, cut)
    stages = at_points(model, cut, ()) if isinstance(cut[0], str) else in_lists(model, cut)
    return [path for paths in stages for path in paths]


def shares(program: Any, parts: Sequence[Any]) -> list[float]:
    """How much the loss of each microbatch counts in that of the batch."""
    run = program.RUN
    sizes = [float(len(tensors(part)[0])) for part in parts]
    if run["loss_weight"]:
        sizes = [float(program.weight_of(target)) for _, _, target in parts]
    if run["reduction"] == "mean":
        return [size / sum(sizes) for size in sizes]
    return [1 / sum(sizes) if run["loss_weight"] else 1.0] * len(sizes)


def forward(program: Any, model: nn.Module, args: Any, kwargs: Any, target: Any) -> Any:
    """The output and the loss of a microbatch."""
    with autocast(program.RUN), penstock.collect_losses() as added:
        output = model(*args, **kwargs)
        return output, program.loss_fn(output, target) + added.total()


def autocast(run: Mapping[str, Any]) -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16, enabled=run["autocast"])


def update(
    run: Mapping[str, Any], owner: Any, report: Report, step: int, optimizers: list[Any]
) -> None:
    """Report the gradients, and take a step with them; with the same optimizer for another Pipeline."""
    for name, weight in getattr(owner, "held_weights", owner).named_parameters():
        grad = None if weight.grad is None else weight.grad.detach().to_dense().clone()
        report[f"gradient of {name}, step {step}"] = grad
    if step % run["accumulate"] < run["accumulate"] - 1:
        return
    weights = list(owner.parameters())
    if run["clip"]:
        clip = getattr(owner, "clip_grad_norm_", None) or partial(nn.utils.clip_grad_norm_, weights)
        report[f"norm, step {step}"] = float(clip(run["clip"]))
    if weights:
        if not optimizers or run.get("swap") != "model":
            optimizers[:] = [OPTIMIZERS[run["optimizer"]](weights)]
        optimizers[0].step()
    owner.zero_grad()


# ---- values


def tensors(value: Any) -> list[Tensor]:
    """The tensors in a value."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def tensors_by_name(name: str, value: Any) -> Report:
    return {f"{name}: {i}": tensor.detach().clone() for i, tensor in enumerate(tensors(value))}


def split(value: Any, count: int) -> list[Any]:
    """A part of a value for each microbatch, where the first ones get what does not divide."""

    def part(index: int) -> Any:
        return tree_map_only(Tensor, lambda tensor: tensor.tensor_split(count)[index], value)

    return [part(index) for index in range(count)]


def joined(outputs: Sequence[Any]) -> Any:
    return tree_map(lambda *rows: torch.cat(rows), *outputs)


# ---- the comparison


def tolerance(run: Mapping[str, Any]) -> float:
    """By how much the sides may differ, since they add up in different orders."""
    return 2e-2 if run["half"] else 1e-10 if run["dtype"] == "float64" else 1e-4


def differences(expected: Report, found: Report, limit: float) -> list[str]:
    """The differences between two reports, one per line, which begins with the name of what differs."""
    lines = [f"{name}: not there" for name in expected if name not in found]
    lines += [f"{name}: should not be there" for name in found if name not in expected]
    for name in expected.keys() & found.keys():
        said = difference(expected[name], found[name], limit)
        lines += [f"{name}: {said}"] if said else []
    return sorted(lines)


def difference(expected: Any, found: Any, limit: float) -> str:
    if expected is None or found is None:
        return "" if expected is found else f"{word(found)} instead of {word(expected)}"
    if isinstance(expected, list):
        if len(expected) != len(found):
            return f"called {len(found)} times instead of {len(expected)}"
        expected, found = ([*chain(*sorted(calls))] for calls in (expected, found))
        if math.inf in found:
            return "called without data"
    # Python's numbers are of double precision, whatever the default is here.
    one, other = (
        value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
        for value in (expected, found)
    )
    if one.shape != other.shape or one.is_floating_point() != other.is_floating_point():
        return f"{other.dtype} {list(other.shape)} instead of {one.dtype} {list(one.shape)}"
    one, other = one.double(), other.double()
    if not one.numel():
        return ""
    gap = float((one - other).abs().max() / one.abs().max().clamp(min=1.0))
    return "" if gap <= limit else f"differs by {gap:.2g}"


def word(value: Any) -> str:
    return "None" if value is None else "numbers" if torch.as_tensor(value).any() else "zeros"


def compare(expected: Report, found: Report, limit: float) -> Outcome:
    """The outcome of two sides that both came to their end."""
    lines = differences(expected, found, limit)
    if not lines:
        return Outcome("same")
    kinds = {
        f"{re.split('[ ,:]', line)[0]} {line.rpartition(': ')[2].split(' by ')[0]}"
        for line in lines
    }
    return Outcome(
        "failed", f"difference: {re.sub('[0-9]+', 'n', min(kinds))}", "\n".join(lines[:20])
    )


# ---- errors


def outcome_of(error: Exception) -> Outcome:
    """What an error of the Pipeline means: a refusal in good words, or a failure."""
    detail = "".join(traceback.format_exception(error))
    root: BaseException = error
    while isinstance(root, StageError) and root.__cause__ is not None:
        root = root.__cause__
    refuses = isinstance(root, PlanError) or (
        isinstance(root, PenstockError)
        and not isinstance(root, (InternalError, NonFiniteError, StageError))
    )
    message = re.sub(r"\d+(\.\d+)?", "n", str(root).strip().split("\n")[0])[:150]
    reason = f"{type(root).__name__}: {message}"
    if refuses and isinstance(root, PeerFailed):
        return Outcome("failed", reason, detail)
    if refuses and (fault := fault_of(f"{error}: {root}", isinstance(root, PartitionError))):
        return Outcome("failed", f"message {fault}: {reason}", detail)
    return Outcome("refused" if refuses else "failed", reason, detail)


def fault_of(message: str, of_model: bool) -> str:
    """What is wrong with the message of a refusal, or nothing."""
    if len(message.split()) < 5 or re.search(
        r"<[\w.]+ object|0x[0-9a-f]{6}|Traceback|tensor\(", message
    ):
        return "is no sentence"
    if of_model and not re.search(r"\b(m\d+|Model|Sequential|Block\d+)\b", message):
        return "names no module"
    return ""


# ---- judging


@contextmanager
def loaded(source: str) -> Iterator[Any]:
    """The program as a module, whose lines can be found as if they were in a file."""
    name = "penstock_fuzzed"
    file = f"<{name}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    module = sys.modules[name] = ModuleType(name)
    dtype = torch.get_default_dtype()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exec(compile(source, file, "exec"), vars(module))
            yield module
    finally:
        torch.set_default_dtype(dtype)
        torch.set_grad_enabled(True)
        torch.set_autocast_enabled("cpu", False)
        del sys.modules[name]


def reports(program: Any, group: Any = None) -> tuple[Report, Report] | Outcome:
    """What the plain loop and the Pipeline report, or how it ended before."""
    try:
        expected = run_plain(program)
    except Exception as error:
        return Outcome("void", f"{type(error).__name__}: {str(error)[:80]}")
    values = [torch.as_tensor(v) for v in expected.values() if not isinstance(v, list | None)]
    if not all(value.isfinite().all() for value in values):
        return Outcome("void", "not finite")
    try:
        found = run_piped(program, group)
    except Exception as error:
        return outcome_of(error)
    if not torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
        return Outcome("failed", "left behind: a mode of torch")
    return expected, found


def judge(source: str) -> Outcome:
    """Run both sides of a program in this process, and compare."""
    with loaded(source) as program:
        both = reports(program)
        return both if isinstance(both, Outcome) else compare(*both, tolerance(program.RUN))


def judge_in(pool: WorkerPool, source: str, processes: int) -> Outcome:
    """Judge a program in workers, where a crash or a hang is a failure of the program.

    A pool for programs of one process has one worker: others would count as ranks that are missing.
    """
    try:
        answers = pool.run(f"{__name__}:work", processes, source=source)
    except WorkerError as error:
        lines = str(error).strip().splitlines()
        kind = "void" if processes == 1 and crashes_alone(pool, source) else "failed"
        return Outcome(kind, f"crash: {lines[0]} {lines[-1]}"[:150], str(error))
    outcomes = [Outcome(**answer["outcome"]) for answer in answers]
    # The rank with the cause, rather than those that stopped because of it.
    worst = min(outcomes, key=lambda outcome: (outcome.kind == "same", "Peer" in outcome.reason))
    if processes == 1:
        return worst
    if worst.kind != "same":
        pool.close()  # messages between the ranks may still be under way
        return worst
    expected, together = answers[0]["expected"], Report()
    for found in (answer["found"] for answer in answers):
        hooks = {n: together.get(n, []) + calls for n, calls in found.items() if calls}
        together |= found | hooks
    return compare(expected, together, answers[0]["limit"])


def work(group: Any, source: str) -> dict[str, Any]:
    """A worker's task: compare its share; what hooks saw and what is missing is for all ranks together."""
    if group.size() == 1:
        return {"outcome": asdict(judge(source))}
    with loaded(source) as program:
        both = reports(program, group)
        if isinstance(both, Outcome):
            return {"outcome": asdict(both)}
        expected, found = both
        limit = tolerance(program.RUN)
    hooks = {name: calls for name, calls in found.items() if isinstance(calls, list)}
    share = {name: value for name, value in found.items() if name not in hooks}
    outcome = compare({name: v for name, v in expected.items() if name in share}, share, limit)
    return {
        "outcome": asdict(outcome),
        "expected": {n: v if isinstance(v, list) else None for n, v in expected.items()},
        "found": dict.fromkeys(share) | hooks,
        "limit": limit,
    }


def work_plain(group: Any, source: str) -> None:
    """A worker's task: the plain loop alone, which may crash the worker."""
    with loaded(source) as program:
        run_plain(program)


def crashes_alone(pool: WorkerPool, source: str) -> bool:
    """Whether the plain loop crashes too; some faults of torch end the process."""
    try:
        pool.run(f"{__name__}:work_plain", 1, source=source)
    except WorkerError:
        return True
    return False


def main(program: Mapping[str, Any]) -> None:
    """Run a program that was saved to a file, all ranks in one process."""
    outcome = judge(Path(program["__file__"]).read_text())
    print(outcome.kind, outcome.reason, outcome.detail, sep="\n")  # noqa: T201 - this is a command
