"""Cut a model into stages."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from typing import Any

from torch import nn

from penstock.errors import PartitionError, PenstockError, StageError, UsageError
from penstock.partition.author import Author, has_compiled_forward
from penstock.partition.balance import choose_cuts, use_up_to
from penstock.partition.base import Example, Partition, count_parameters, find_shared
from penstock.partition.meter import Meter
from penstock.partition.plan import first_uses
from penstock.partition.seen import Door, Seeded, opened
from penstock.partition.stage import CutStage
from penstock.partition.trace import Trace, record
from penstock.partition.units import (
    at_points,
    find_units,
    has_forward,
    in_lists,
    is_sequential,
    loose_parameters,
    once,
    sort_by,
)
from penstock.rng import LOSS, Draws, generators_kept
from penstock.schedule import Placement

Where = int | Sequence[str] | Sequence[Sequence[str]]
"""The number of stages; or the module paths to cut before; or for each stage the paths of its modules."""


def partition(
    model: nn.Module,
    stages: Where,
    *,
    example: Example | None = None,
    balance: str | Sequence[float] | None = None,
    placement: Placement | None = None,
    checkpoint: bool | Sequence[str] = False,
) -> Partition:
    """Cut a model into stages that together compute what it computes.

    Every stage runs the author's own forward, but only its own units in it.

    Args:
        model: any module; the stages hold its parameters, not copies of them.
        stages: the number of stages; or the paths of the modules before which to cut; or for each stage the
            paths of its modules.
        example: arguments for one microbatch, as ``(args, kwargs)``. They show the order in which the model
            calls its modules, if it differs from the order in which it holds them.
        balance: what to make equal, if you give the number of stages: ``"parameters"``, ``"flops"`` or
            ``"memory"``, of which the last two need the example; or a weight for each module that can be
            placed. By default parameters; the children of an ``nn.Sequential`` count alike. For times see
            ``penstock.plan.measure``.
        placement: which rank holds which stage, if you give the number: balances ranks instead of stages.
        checkpoint: recompute units in the backward instead of keeping their activations: all units, or
            those at or inside these paths.

    Raises:
        PartitionError: the model cannot be cut this way; the message says why, and what to do.
    """
    if not isinstance(stages, int) and (balance is not None or placement is not None):
        raise UsageError(
            "balance= and placement= say where to cut if the number of stages is given; stages= names the "
            "modules here: leave them out"
        )
    if stages != 1:
        _check_compiled(model)
    placed, shown = _placed(model, stages, example, balance, placement)
    return _assembled(model, placed, shown, example, checkpoint)


def unit_paths(model: nn.Module, stages: int, *, example: Example | None = None) -> list[str]:
    """The modules that can be placed for a number of stages, in the order of their calls.

    Args:
        model: any module.
        stages: the number of stages: the model is taken apart only as far as it requires.
        example: arguments for one microbatch, which show the order of the calls.

    Returns:
        Their paths; a run of them for each stage is a ``stages=`` of :func:`partition`.
    """
    units = find_units(model, stages)
    shown = _shown(model, units, example)
    return units if shown is None else sort_by(shown.calls(), units)


def trace(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], *, stages: int = 1
) -> Trace:
    """Run a model without data, and record the calls of its units.

    Args:
        model: any module; the run leaves it unchanged.
        args: positional arguments for one microbatch; only shapes and types count.
        kwargs: arguments by name.
        stages: the number of stages for which the model is taken apart into units.

    Returns:
        The trace: its ``events`` are in order; some are calls of units.
    """
    units = find_units(model, stages)
    return record(model, model, _doors(model, units), (args, kwargs))


def _doors(model: nn.Module, units: Sequence[str]) -> list[Door]:
    return [Door(model.get_submodule(path), path) for path in once(model, units)]


def _shown(model: nn.Module, units: Sequence[str], example: Example | None) -> Trace | None:
    """The trace of a call with the example, or with the arguments that a transformers model offers."""
    call = example
    if call is None:
        offered = getattr(model, "dummy_inputs", None) if hasattr(model, "config") else None
        call = ((), offered) if isinstance(offered, Mapping) and offered else None
    if call is None or not units:
        return None
    try:
        return record(model, model, _doors(model, units), call, call)
    except PenstockError:
        if example is not None:
            raise
    except Exception as error:
        if example is not None:
            raise StageError(
                f"the {type(model).__name__} failed in a run with example=, on tensors without data where it "
                f"is possible: {type(error).__name__}: {error}"
            ) from error
    return None


def _check_compiled(model: nn.Module) -> None:
    compiled = type(model).__name__ == "OptimizedModule" or model._compiled_call_impl
    if compiled or has_compiled_forward(model):
        name = type(getattr(model, "_orig_mod", model)).__name__
        raise PartitionError(
            f"the {name} was compiled as a whole, which cannot be cut. Give the model as it was before, and "
            "compile its blocks: for block in model.layers: block.compile()"
        )


# ---- the stages of the units


Placed = list[list[str]]


def _placed(
    model: nn.Module,
    stages: Where,
    example: Example | None,
    balance: str | Sequence[float] | None,
    placement: Placement | None,
) -> tuple[Placed, Trace | None]:
    """The units of each stage."""
    if isinstance(stages, int):
        return _by_count(model, stages, example, balance, placement)
    if stages and all(isinstance(path, str) for path in stages):
        points = [str(path) for path in stages]
        units = [unit for paths in at_points(model, points, ()) for unit in paths]
        shown = _shown(model, units, example)
        return at_points(model, points, shown.calls() if shown else ()), shown
    placed = in_lists(model, [list(paths) for paths in stages])
    return placed, None


def _by_count(
    model: nn.Module,
    stages: int,
    example: Example | None,
    balance: str | Sequence[float] | None,
    placement: Placement | None,
) -> tuple[Placed, Trace | None]:
    if stages == 1:
        choose_cuts([1.0], stages, placement)  # for its checks
        return [find_units(model, 1)], None
    if not has_forward(model):
        raise PartitionError(
            f"a {type(model).__name__} has no forward; name the modules of each stage in the order of their "
            "calls: stages=[[...], [...]]"
        )
    units = find_units(model, stages)
    calls = list(model._modules) if is_sequential(model) else units
    shown = None if is_sequential(model) else _shown(model, units, example)
    if shown is not None:
        units = sort_by(shown.calls(), units)
        calls = _calls_in_order(units, shown.calls())
    first = {id(model.get_submodule(path)): path for path in reversed(units)}
    calls = [first[id(model.get_submodule(path))] for path in calls]
    if not 1 <= stages <= len(calls):
        raise PartitionError(
            f"a {type(model).__name__} has {len(units)} modules that can be placed, too few for {stages} "
            f"stages; {use_up_to(len(units))}" + ("" if shown else _CALLED_AGAIN)
        )
    weights = _weights(model, calls, balance, example)
    starts = choose_cuts(weights, stages, placement)
    if is_sequential(model) and balance is None and placement is None:
        # Of several equally even cuts, the one whose first stages are the larger ones.
        size, rest = divmod(len(calls), stages)
        starts = tuple(index * size + min(index, rest) for index in range(stages))
    return [calls[a:b] for a, b in pairwise([*starts, len(calls)])], shown


_CALLED_AGAIN = (
    ". If the model calls some of them again and again, give example=(args, kwargs), with which a number of "
    "stages cuts between the calls"
)


def _calls_in_order(units: Sequence[str], calls: Sequence[str]) -> list[str]:
    """The calls to cut between, and the units that are never called.

    If a unit is called again after other units, like a norm that all layers share, only its first call
    counts; if it is ever called twice in a row, all its calls count.
    """
    counts = Counter(calls)
    if all(count == 1 for count in counts.values()):
        return list(units)
    runs = [path for path, after in pairwise([*calls, ""]) if path == after]
    again = set(runs)
    kept: list[str] = []
    for path in calls:
        if path in again or path not in kept:
            kept.append(path)
    missing = [unit for unit in units if unit not in counts]
    return [*kept, *missing]


def _weights(
    model: nn.Module,
    calls: Sequence[str],
    balance: str | Sequence[float] | None,
    example: Example | None,
) -> list[float]:
    if is_sequential(model) and balance is None:
        return [1.0] * len(calls)
    weights = _weigh(model, calls, balance, example)
    if balance in (None, "parameters"):
        # A module's weight counts once, however often the module is called.
        counts = Counter(calls)
        weights = [weight / counts[call] for weight, call in zip(weights, calls, strict=True)]
    return weights


def _weigh(
    model: nn.Module,
    paths: Sequence[str],
    balance: str | Sequence[float] | None,
    example: Example | None,
) -> list[float]:
    """The weights of units, by which stages are balanced."""
    if isinstance(balance, Sequence) and not isinstance(balance, str):
        if len(balance) != len(paths):
            raise PartitionError(
                f"balance= has {len(balance)} weights for {len(paths)} modules: {', '.join(paths)}"
            )
        return [float(weight) for weight in balance]
    units = [model.get_submodule(path) for path in paths]
    if balance is None or balance == "parameters":
        return [float(count_parameters(unit)) for unit in units]
    if balance not in ("flops", "memory"):
        hint = ", or cut by times: profile.at(samples).cut(stages) of penstock.plan.measure"
        raise UsageError(
            f"balance={balance!r}: must be parameters, flops, memory or a weight for each module{hint}"
        )
    if example is None:
        raise PartitionError(
            f"balance={balance!r} needs a call of the model to measure: give example=(args, kwargs)"
        )
    flops, made = _work_of(model, paths, example)
    if balance == "flops":
        return flops
    held = [
        sum(t.nbytes * (4 if t.requires_grad else 1) for t in unit.parameters()) for unit in units
    ]
    return [float(one + other) for one, other in zip(held, made, strict=True)]


def _work_of(
    model: nn.Module, paths: Sequence[str], example: Example
) -> tuple[list[float], list[float]]:
    """The operations of units' forwards, and the bytes that they make."""
    work = {path: [0.0, 0.0] for path in paths}
    with ExitStack() as stack:
        meter = stack.enter_context(Meter())
        for path in work:
            count, module = work[path], model.get_submodule(path)

            def add(sign: int, count: list[float] = count) -> None:
                count[0] += sign * meter.flops
                count[1] += sign * meter.live

            for hook in (
                module.register_forward_pre_hook(lambda *_, add=add: add(-1), prepend=True),
                module.register_forward_hook(lambda *_, add=add: add(1)),
            ):
                stack.callback(hook.remove)
        record(model, model, _doors(model, paths), example, example)
    return [work[path][0] for path in paths], [work[path][1] for path in paths]


def _homes(
    model: nn.Module, placed: Placed, shown: Trace | None, example: Example | None
) -> dict[str, list[int]]:
    """The stages of each unit by path, and of each parameter and each unit's buffer by name."""
    homes: dict[str, list[int]] = {}
    first = {
        id(model.get_submodule(path)): path for of in reversed(placed) for path in reversed(of)
    }
    for stage, paths in enumerate(placed):
        for path in paths:
            homes.setdefault(first[id(model.get_submodule(path))], []).append(stage)
    units = list(homes)
    tensors: dict[int, set[int]] = {}
    for path in units:
        module = model.get_submodule(path)
        for tensor in (*module.parameters(), *module.buffers()):
            tensors.setdefault(id(tensor), set()).update(homes[path])
    named = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    for name, tensor in named:
        if id(tensor) in tensors:
            homes[name] = sorted(tensors[id(tensor)])
    loose = loose_parameters(model, units)
    if loose and shown is None:
        shown = _shown(model, units, example)
    uses: dict[str, int] = {}
    if shown is not None and {*shown.calls()} <= set(homes):
        uses = first_uses(shown, homes)
    by_tensor = {
        id(tensor): uses[name] for name, tensor in model.named_parameters() if name in uses
    }
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, near in loose.items():
        # Where the first use is unknown, the earliest possible stage: values go to later stages only.
        known = min((stage for path in near for stage in homes[path]), default=0)
        homes[name] = [by_tensor.setdefault(id(parameters[name]), known)]
    return homes


# ---- the stages


def _assembled(
    model: nn.Module,
    placed: Placed,
    shown: Trace | None,
    example: Example | None,
    checkpoint: bool | Sequence[str],
) -> Partition:
    homes = _homes(model, placed, shown, example)
    paths = [path for of in placed for path in of]
    doors = [Door(model.get_submodule(path), path) for path in homes if path in set(paths)]
    forward = model if has_forward(model) else _chain(model, paths)
    recomputes = _recomputed(model, [door.path for door in doors], checkpoint)
    author = Author(model, doors, forward, recomputes, homes, len(placed), example)
    modules = tuple(CutStage(author, index) for index in range(len(placed)))
    result = Partition(modules, find_shared(model, modules), author)
    result.check_covers(model)
    return result


def _recomputed(
    model: nn.Module, units: Sequence[str], checkpoint: bool | Sequence[str]
) -> list[str]:
    if isinstance(checkpoint, bool):
        return list(units) if checkpoint else []
    recomputes = []
    for path in checkpoint:
        inside = [u for u in units if u == path or u.startswith(f"{path}.")]
        if not inside:
            raise PartitionError(
                f"checkpoint={path!r}: must name a module that is placed as a whole, or one that holds such: "
                f"{', '.join(units[:5])}{' and more' if len(units) > 5 else ''}"
            )
        recomputes += inside
    return recomputes


def _chain(model: nn.Module, paths: Sequence[str]) -> Callable[..., Any]:
    """A forward that calls modules in a chain. It unpacks a tuple into the next one's arguments."""
    names = {path: _takes(model.get_submodule(path)) for path in paths}

    def forward(*args: Any, **kwargs: Any) -> Any:
        first, *rest = paths
        value = model.get_submodule(first)(
            *args, **{n: v for n, v in kwargs.items() if n in names[first]}
        )
        for path in rest:
            passed = value if type(value) is tuple else (value,)
            more = {name: kwargs[name] for name in names[path][len(passed) :] if name in kwargs}
            value = model.get_submodule(path)(*passed, **more)
        return value

    return forward


def _takes(module: nn.Module) -> tuple[str, ...]:
    """The names of a module's arguments."""
    parameters = inspect.signature(module.forward).parameters.values()
    return tuple(p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))


@contextmanager
def randomness(
    model: nn.Module,
    *,
    seed: int,
    step: int = 0,
    microbatch: int = 0,
    units: Sequence[str] | None = None,
) -> Iterator[None]:
    """Draw what a pipeline would draw for a microbatch: the same dropout masks, bit for bit.

    Run the forward and the loss of the microbatch once each in the context. It restores the states of
    torch's generators.

    Args:
        model: the whole model.
        seed: the seed of the training, as given to :class:`penstock.Pipeline`.
        step: the number of the step, from 0.
        microbatch: the index of the microbatch.
        units: the paths of the modules that the pipeline places as a whole; by default those of a pipeline
            with few stages.
    """
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    device = next((d for d in devices if d.type not in {"cpu", "meta"}), None)
    draws = Draws(seed, step, microbatch, device)
    seeded = Seeded(_doors(model, find_units(model, 2) if units is None else units), draws, {})
    root = Door(model, "")

    def call(_: Door, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        output = seeded.run(run, args, kwargs)
        draws.enter(LOSS, 0)
        return output

    with generators_kept(devices), opened([root], call):
        yield
