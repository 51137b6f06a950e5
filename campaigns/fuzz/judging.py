"""Trains the model of a program in a plain loop and through its Pipeline, and compares what both report.

The plain loop takes from Penstock only what a user's would: random numbers, and the losses that a model adds.
"""

from __future__ import annotations

import linecache
import math
import re
import sys
import tempfile
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
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import init_device_mesh
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
from penstock.partition import Cutting
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


def run_plain(program: Any, replica: int = 0) -> Report:
    """Train in a plain loop over microbatches; of several replicas, report what one of them would."""

    def side(model: nn.Module, swapped: bool) -> tuple[Any, Callable[..., Any]]:
        count = program.RUN["replicas"]
        replicas = [model if index == replica else program.make() for index in range(count)]
        others = [other for other in replicas if other is not model]

        def run_batch(step: int, *, trains: bool) -> tuple[float, Any]:
            modes = [(module, module.training) for module in model.modules()]
            for other in others:
                if trains:
                    program.change(other, step)
                    if program.RUN["load"] and step == 1:  # each replica loads its buffers
                        other.load_state_dict(program.make().state_dict())
                other.load_state_dict({**other.state_dict(), **dict(model.named_parameters())})
            for one in replicas if not trains else ():
                one.eval()
            with torch.set_grad_enabled(trains):
                result = plain_pass(program, replicas, replica, step, trains=trains)
            for module, mode in modes:
                module.training = mode
            for other in others:
                for here, there in zip(model.modules(), other.modules(), strict=True):
                    there.training = here.training
            return result

        return model, run_batch

    return train(program, side)


def run_piped(program: Any, group: Any = None, replica: int = 0) -> Report:
    """Train through the program's Pipeline, and from some step on through another one."""
    with ExitStack() as stack:

        def side(model: nn.Module, swapped: bool) -> tuple[Any, Callable[..., Any]]:
            stack.close()
            pipeline = (
                program.another_pipeline(model) if swapped else program.pipeline(model, group)
            )
            pipe = stack.enter_context(pipeline)
            module = penstock.PipelineModule(pipe) if program.RUN["as_module"] else None

            def run_batch(step: int, *, trains: bool) -> tuple[float, Any]:
                args, kwargs, target = program.batch(step, replica)
                if module is not None:
                    with autocast(program.RUN):
                        loss = module(*args, target=target, **kwargs)
                    loss.backward()
                    return float(loss.detach()), None
                call = pipe.step if trains else pipe.evaluate
                more = {"accumulate": program.RUN["accumulate"]} if trains else {}
                outputs = program.RUN["outputs"] or not trains
                inference = not trains and program.RUN["inference"]
                with autocast(program.RUN), torch.inference_mode(inference):
                    result = call(*args, target=target, outputs=outputs, **more, **kwargs)
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
            state = weights_of(owner).state_dict()
            model = model if run["swap"] == "model" else program.make()
            owner, run_batch = side(model, True)
            if run["swap"] == "state":
                weights_of(owner).load_state_dict(state)
        program.change(model, step)
        if run["load"] and step == 1:
            weights_of(owner).load_state_dict(program.make().state_dict())
        loss, output = run_batch(step, trains=True)
        report[f"loss, step {step}"] = loss
        if run["outputs"]:
            report |= tensors_by_name(f"output, step {step}", output)
        update(run, owner, report, step, optimizers)
        if run["evaluate"]:
            loss, output = run_batch(step, trains=False)
            report[f"evaluation, step {step}"] = loss
            report |= tensors_by_name(f"evaluated, step {step}", output)
    state = weights_of(owner).state_dict()
    report |= {f"state of {name}": value.detach().clone() for name, value in state.items()}
    seen = getattr(program, "seen", [])
    for name, values in seen:
        # A tensor without data counts as infinite.
        numbers = [math.inf if isinstance(value, FakeTensor) else float(value) for value in values]
        report.setdefault(f"hook {name}", []).append(numbers)
    seen.clear()
    return report


def plain_pass(
    program: Any, replicas: Sequence[nn.Module], mine: int, step: int, *, trains: bool
) -> tuple[float, Any]:
    """The loss of a batch and the output of one replica's part, with gradients if it trains."""
    batches = [microbatches_of(program, step, replica) for replica in range(len(replicas))]
    weights = iter(shares(program, [part for parts in batches for part in parts]))
    seen = getattr(program, "seen", [])
    earlier = [weight.grad for weight in replicas[mine].parameters()]
    if trains and len(replicas) > 1:
        replicas[mine].zero_grad()
    total, output = 0.0, None
    for replica, (model, parts) in enumerate(zip(replicas, batches, strict=True)):
        heard = len(seen)
        weighted = [(part, next(weights)) for part in parts]
        losses, outputs = microbatches(program, model, weighted, step, trains, len(replicas))
        total += losses
        if replica == mine:
            output = outputs
        else:
            del seen[heard:]
    if trains and len(replicas) > 1:
        average(replicas, mine, earlier)
    return total, output


def microbatches(
    program: Any, model: nn.Module, parts: Any, step: int, trains: bool, replicas: int
) -> tuple[float, Any]:
    """The same of the microbatches of one replica, each with its weight, one after the other."""
    run, seed, outputs = program.RUN, program.RUN["seed"], []
    units = None if seed is None else units_of(program, model, step)
    total, whole = 0.0, torch.zeros(())
    # The replicas' gradients are averaged at the end, as those of DistributedDataParallel.
    factor = replicas / (run["accumulate"] if run["reduction"] == "mean" else 1)
    for index, (part, share) in enumerate(parts):
        drawn = penstock.randomness(model, seed=seed or 0, step=step, microbatch=index, units=units)
        with nullcontext() if seed is None else drawn:
            output, loss = forward(program, model, *part)
            if trains and not run["as_module"]:
                (loss * share * factor).backward()
        whole = whole + loss * share * factor if run["as_module"] else whole
        outputs.append(output)
        total += float(loss.detach()) * share
    if trains and run["as_module"]:
        # The hooks of weights see the whole gradient, once.
        whole.backward()
    return total, joined(outputs)


def microbatches_of(program: Any, step: int, replica: int) -> list[Any]:
    """The arguments and target of each microbatch of a replica."""
    batch = program.batch(step, replica)
    count = min(len(tensors(batch)[0]), program.RUN["microbatches"])
    return list(zip(*(split(value, count) for value in batch), strict=True))


def average(replicas: Sequence[nn.Module], mine: int, earlier: Sequence[Tensor | None]) -> None:
    """Add the average of all gradients to those of earlier steps, and copy the buffers of the first."""
    model = replicas[mine]
    pairs = [
        (weight, there)
        for other in replicas
        if other is not model
        for weight, there in zip(model.parameters(), other.parameters(), strict=True)
        if there.grad is not None
    ]
    for weight, there in pairs:
        assert there.grad is not None
        weight.grad = there.grad if weight.grad is None else weight.grad + there.grad
        there.grad = None
    for weight, before in zip(model.parameters(), earlier, strict=True):
        mean = None if weight.grad is None else weight.grad / len(replicas)
        weight.grad = before if mean is None else mean if before is None else mean + before
    with torch.no_grad():
        for other in replicas[1:]:
            for buffer, first in zip(other.buffers(), replicas[0].buffers(), strict=True):
                buffer.copy_(first)


def units_of(program: Any, model: nn.Module, step: int) -> list[str]:
    """What a pipeline seeds one by one that was cut by its first batch."""
    cutting = Cutting(model, program.RUN["cut"])
    first = min(step, 1 if program.RUN.get("swap") else 0)
    args, kwargs, _ = microbatches_of(program, first, 0)[0]
    paths = {path for path, _ in model.named_modules()}
    homes = cutting.decide((args, kwargs) if cutting.needs_call else None)
    return [path for path in homes if path in paths]


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


def weights_of(owner: Any) -> Any:
    """What has the state dict of a pipeline or of a module."""
    return owner.weights if isinstance(owner, penstock.Pipeline) else owner


def update(
    run: Mapping[str, Any], owner: Any, report: Report, step: int, optimizers: list[Any]
) -> None:
    """Report the gradients, and take a step with them; with the same optimizer for another Pipeline."""
    held = owner.weights.here if isinstance(owner, penstock.Pipeline) else owner
    for name, weight in held.named_parameters():
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


def differences(expected: Report, actual: Report, limit: float) -> list[str]:
    """The differences between two reports, one per line, which begins with the name of what differs."""
    lines = [f"{name}: not there" for name in expected if name not in actual]
    lines += [f"{name}: should not be there" for name in actual if name not in expected]
    for name in expected.keys() & actual.keys():
        said = difference(expected[name], actual[name], limit)
        lines += [f"{name}: {said}"] if said else []
    return sorted(lines)


def difference(expected: Any, actual: Any, limit: float) -> str:
    if expected is None or actual is None:
        return "" if expected is actual else f"{word(actual)} instead of {word(expected)}"
    if isinstance(expected, list):
        if len(expected) != len(actual):
            return f"called {len(actual)} times instead of {len(expected)}"
        expected, actual = ([*chain(*sorted(calls))] for calls in (expected, actual))
        if math.inf in actual:
            return "called without data"
    # Python's numbers are of double precision, whatever the default is here.
    one, other = (
        value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
        for value in (expected, actual)
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


def compare(expected: Report, actual: Report, limit: float) -> Outcome:
    """The outcome of two sides that both came to their end."""
    lines = differences(expected, actual, limit)
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


def reports(program: Any, group: Any = None, replica: int = 0) -> tuple[Report, Report] | Outcome:
    """What the plain loop and the Pipeline report, or how it ended before."""
    try:
        expected = run_plain(program, replica)
    except Exception as error:
        return Outcome("void", f"{type(error).__name__}: {str(error)[:80]}")
    values = [torch.as_tensor(v) for v in expected.values() if not isinstance(v, list | None)]
    if not all(value.isfinite().all() for value in values):
        return Outcome("void", "not finite")
    try:
        actual = run_piped(program, group, replica)
    except Exception as error:
        return outcome_of(error)
    if not torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
        return Outcome("failed", "left behind: a mode of torch")
    return expected, actual


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
        with tempfile.TemporaryDirectory(prefix="penstock-fuzz-") as folder:
            store = str(Path(folder, "store"))
            answers = pool.run(f"{__name__}:work", processes, source=source, store=store)
    except WorkerError as error:
        lines = str(error).strip().splitlines()
        kind = "void" if processes == 1 and crashes_alone(pool, source) else "failed"
        return Outcome(kind, f"crash: {lines[0]} {lines[-1]}"[:150], str(error))
    outcomes = [Outcome(**answer["outcome"]) for answer in answers]
    # The rank with the cause, rather than those that stopped because of it.
    worst = min(outcomes, key=lambda outcome: (outcome.kind == "same", "Peer" in outcome.reason))
    if processes == 1 or worst.kind != "same":
        return worst
    for replica in {answer["replica"] for answer in answers}:
        mine = [answer for answer in answers if answer["replica"] == replica]
        together = Report()
        for actual in (answer["actual"] for answer in mine):
            hooks = {n: together.get(n, []) + calls for n, calls in actual.items() if calls}
            together |= actual | hooks
        worst = compare(mine[0]["expected"], together, mine[0]["limit"])
        if worst.kind != "same":
            break
    return worst


@contextmanager
def fresh_world(size: int, replicas: int, store: str) -> Iterator[tuple[Any, int]]:
    """Groups in which no message of an earlier program is under way, and the number of this replica.

    A program that is refused in the middle of a step leaves some. New groups cost milliseconds, new processes
    seconds.
    """
    rank = dist.get_rank()
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    if replicas == 1:
        yield dist.group.WORLD, 0
    else:
        mesh = init_device_mesh("cpu", (replicas, size // replicas), mesh_dim_names=("dp", "pp"))
        yield mesh, mesh.get_local_rank("dp")


def work(group: Any, source: str, store: str) -> dict[str, Any]:
    """A worker's task: compare its share; what hooks saw and what is missing is for all ranks together."""
    size = group.size()
    if size == 1:
        return {"outcome": asdict(judge(source))}
    with loaded(source) as program:
        with fresh_world(size, program.RUN["replicas"], store) as (place, replica):
            both = reports(program, place, replica)
        if isinstance(both, Outcome):
            return {"outcome": asdict(both)}
        expected, actual = both
        limit = tolerance(program.RUN)
    hooks = {name: calls for name, calls in actual.items() if isinstance(calls, list)}
    share = {name: value for name, value in actual.items() if name not in hooks}
    outcome = compare({name: v for name, v in expected.items() if name in share}, share, limit)
    return {
        "outcome": asdict(outcome),
        "expected": {n: v if isinstance(v, list) else None for n, v in expected.items()},
        "actual": dict.fromkeys(share) | hooks,
        "replica": replica,
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
    print(outcome.kind, outcome.reason, outcome.detail, sep="\n")
