"""One forward of one stage: it runs its own events of the author's forward, and answers the others."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.autograd import Function
from torch.overrides import TorchFunctionMode

from penstock._engine.values import (
    PLAIN,
    Place,
    leaves_in,
    located,
    map_tensors,
    plain_in,
    tensors_in,
    without,
)
from penstock.errors import PartitionError, PlanError, StageError
from penstock.partition.author import Author
from penstock.partition.functions import REWRITTEN, is_ours, may_draw, rewritten
from penstock.partition.lines import where
from penstock.partition.memory import storage_of, takes_gradient
from penstock.partition.mutables import Mutables, at, change_to, look_at_call
from penstock.partition.plan import CallPlan, Quick, Step
from penstock.partition.recomputing import checkpointed
from penstock.partition.seen import (
    BETWEEN,
    Context,
    Door,
    Run,
    is_checkpoint,
    left,
    opened,
    others_seen,
    recomputed,
    uncheckpointed,
)
from penstock.partition.trace import DIRECT, OVERWRITTEN, READ, Event, Value
from penstock.stage import StageCall


class _StageDone(BaseException):
    """The stage has nothing more to do in this forward."""


class StageForward(TorchFunctionMode):
    """One forward of one stage: runs its own events, and answers the others with placeholders."""

    def __init__(
        self, stage: int, author: Author, call: StageCall, values: Mapping[str, Any]
    ) -> None:
        super().__init__()
        plan: CallPlan = call.plan
        self._part = part = plan.stages[stage]
        self._stage, self._author, self._plan, self._values = stage, author, plan, values
        self._call, self._draws = call, call.draws
        self._at, self._last = -1, part.last
        self._sends, self._arrives = part.sends, part.arrives
        self._quick, self._metadata = plan.quick(stage), plan.trace.metadata
        self._mark = object()
        self._followed: dict[int, tuple[Tensor, int | None]] = {}
        self._foreign = plan.trace.foreign
        self._lent: dict[int, Tensor] = {}
        self._claimed: set[int] = set()
        self._busy = self._lacks = False
        self._outgoing: dict[int, Tensor] = {}
        self._drawn = self._region = 0
        self._recomputes: Mapping[str, Any] | None = None
        self._region_runs = False
        self._context = Context() if plan.trace.has_context else None

    def run(self, args: Any, kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """The model's output in the last stage, and the values that travel from this one."""
        plan, author = self._plan, self._author
        is_last = self._stage == author.stages - 1
        if self._last < 0 and not is_last:
            return None, self._sent()
        self._lacks = any(t.is_meta for t in tensors_in((args, kwargs)))
        if plan.trace.changed_arguments or self._lacks:
            args, kwargs = self._arguments(args, kwargs)
        for name in plan.buffers:
            self._follow(_tensor(author.model, name))
        for name, edge in self._part.borrows.items():
            self._lent[id(_tensor(author.model, name))] = self._values[edge]
        trace, output = plan.trace, None
        others = trace.has_custom or plan.regions
        seen = others_seen(self) if others else contextlib.nullcontext()
        with (
            contextlib.suppress(_StageDone),
            opened(trace.doors, self._unit, trace.direct),
            self,
            seen,
        ):
            output = author.forward(*args, **kwargs)
            if self._at < len(plan.steps) - 1:
                raise self._diverged("ended", self._at + 1)
        return (self._output(output) if is_last else None), self._sent()

    def _arguments(self, args: Any, kwargs: Any) -> Any:
        """The arguments: copies of those that are changed, stand-ins for those this process did not get."""
        trace = self._plan.trace
        places = {id(t): i for i, t in enumerate(tensors_in((args, kwargs)))}

        def put(tensor: Tensor) -> Tensor:
            if tensor.is_meta and not isinstance(tensor, FakeTensor):
                with trace.mode:
                    return torch.empty_strided(
                        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=trace.device
                    )
            return tensor.clone() if places[id(tensor)] in trace.changed_arguments else tensor

        return map_tensors((args, kwargs), put)

    def _sent(self) -> dict[str, Any]:
        """The values that travel, as the stage's last event leaves them.

        What belongs to a module is copied, since the next microbatch may change it before this one's value
        has arrived.
        """
        copied = self._plan.copied
        sent = {}
        for name, edge in self._part.lends.items():
            tensor = _tensor(self._author.model, name)
            sent[edge] = tensor.clone() if name in copied else tensor.view_as(tensor)
        for number, edge in self._sends.items():
            sent[edge] = to_send(self._outgoing[number], copies=number in copied)
        return sent

    def _output(self, output: Any) -> Any:
        plan = self._plan
        slots = plan.trace.returned
        tensors = tensors_in(output)
        model = f"the {type(self._author.model).__name__}"
        self._check_memory(tensors, f"in the output of {model}")
        if len(tensors) != len(slots) or not all(map(self._is_value, tensors, slots)):
            raise PartitionError(
                f"the output of {model} has other tensors in the last stage than in the run without data. "
                "Values that hooks collect inside of units, such as hidden states, are not available here; "
                "return them from the units, or leave out the option that asks for them. If numbers decide "
                "what the model returns, put that code into a module that is placed as a whole"
            )
        output = map_tensors(output, self._stand_in) if self._lent else output
        return without(output, plan.lost) if plan.lost else output

    def _is_value(self, tensor: Tensor, root: int | None) -> bool:
        is_parameter = root is not None and self._plan.trace.values[root].event is None
        return is_parameter or self._number(tensor) == root

    def _number(self, tensor: Tensor) -> int | None:
        """The trace's value that it is or stands for; ``None`` if it depends on the arguments alone."""
        if id(tensor) in self._followed:
            return self._followed[id(tensor)][1]
        if isinstance(tensor, FakeTensor):
            return self._plan.trace.placeholders.get(id(tensor))
        return None

    def _check_memory(self, tensors: Sequence[Tensor], at: str = "") -> None:
        """Check that no tensor shares memory of the arguments that another stage has written into."""
        for tensor in tensors if self._claimed else ():
            if self._number(tensor) is None and storage_of(tensor) in self._claimed:
                raise PartitionError(f"{at or where(self._author.paths)}: {OVERWRITTEN}")

    def _check_inputs(self, step: Step, args: Any, kwargs: Any) -> None:
        """Check that the author's code has not, led by numbers, given an event other values."""
        placed = located((args, kwargs))
        self._check_memory(list(placed.values()))
        numbers = {place: n for place, t in placed.items() if (n := self._number(t)) is not None}
        if step.event.mutable:
            # What units have put into a list among the arguments is no input.
            numbers = {p: n for p, n in numbers.items() if p in step.inputs or len(p) <= DIRECT}
        planned = {p: n for p, n in step.inputs.items() if n is not None and p[0] != READ}
        if numbers != planned:
            raise self._diverged(step.what, self._at, " with other values")

    # ---- events

    def _next(self, what: Any) -> Step:
        self._at = at = self._at + 1
        if at > self._last:
            raise _StageDone
        if at >= len(self._plan.steps):
            raise self._diverged(what, at)
        step = self._plan.steps[at]
        if step.what is not what and step.what != what:
            raise self._diverged(what, at)
        return step

    def _unit(self, door: Door, run: Run, args: Any, kwargs: Any) -> Any:
        if self._busy:
            return run(*args, **kwargs)
        step = self._next(door.path)
        if self._context is not None:
            run, kwargs = self._context.beside(run, kwargs)
        if step.owner != self._stage:
            return self._answer(step, args, kwargs)
        if self._draws is not None:
            self._draws.enter(door.path, step.event.number)
        recomputes = door.path in self._author.recomputes or self._recomputes is not None
        # A region that is recomputed as a whole is not recomputed in parts. A unit that changes its
        # arguments would change them again.
        moves = leaves_something(step.event) or door.path in self._plan.trace.outer
        if recomputes and not self._region_runs and not moves:
            options = {**(self._recomputes or {}), "use_reentrant": False}
            # A checkpoint of the author's own moves the unit's state as it does without a pipeline.
            run = checkpointed(run, options, None if self._recomputes else door.module, door.path)
        self._busy = True
        try:
            # Functions inside units are not events.
            with left(self):
                return self._done(step, run, args, kwargs)
        finally:
            self._busy = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._busy or func in self._metadata:
            return func(*args, **kwargs)
        at = self._at + 1
        quick = self._quick[at] if at < len(self._quick) else None
        if (
            quick is not None
            and quick.what is func
            and self._is_event(args)
            and not (quick.is_own and self._lacks)
        ):
            return self._quickly(quick, at, args, kwargs)
        if func in REWRITTEN and self._is_event(args):
            call = rewritten(func, args, lambda tensor: self._is_event((tensor,)))
            if call is not None:
                return call.result(self.__torch_function__(call.function, types, call.args))
        draws = self._draws is not None and may_draw(func)
        if not is_ours(func) and not self._is_event(args) and not self._is_event(kwargs.values()):
            if draws:
                self._draw()
            if self._claimed:
                self._check_memory(tensors_in((args, kwargs)))
            return func(*args, **kwargs)
        step = self._next(func)
        if draws:
            self._draw()
        if step.owner != self._stage:
            return self._answer(step, args, kwargs)
        return self._done(step, func, args, kwargs)

    def _quickly(self, quick: Quick, at: int, args: Any, kwargs: Any) -> Any:
        """Follow the result of a function by a mark on it, so that it lives no longer than needed."""
        self._at = at
        if not quick.is_own:
            return quick.placeholder
        output = quick.what(*args, **kwargs)
        if type(output) is not Tensor or output.shape != quick.placeholder.shape:
            return self._checked(self._plan.steps[at], output)
        output._followed_in = self._mark  # type: ignore[attr-defined]
        return output

    def _draw(self) -> None:
        assert self._draws is not None
        self._draws.enter(BETWEEN, self._drawn)
        self._drawn += 1

    def _is_event(self, values: Any) -> bool:
        """Whether some arguments include a tensor that comes from units or parameters."""
        followed = self._followed
        for value in values:
            if isinstance(value, Tensor):
                # The test for a parameter is slow.
                if (
                    id(value) in followed
                    or getattr(value, "_followed_in", None) is self._mark
                    or _is_placeholder(value)
                    or (isinstance(value, nn.Parameter) and id(value) not in self._foreign)
                ):
                    return True
            elif isinstance(value, list | tuple | dict):
                inner = value.values() if isinstance(value, dict) else value
                if self._is_event(inner):
                    return True
        return False

    def _done(self, step: Step, run: Run, args: Any, kwargs: Any) -> Any:
        """Run an event of this stage."""
        event = step.event
        if self._plan.trace.decides or self._claimed:
            self._check_inputs(step, args, kwargs)
        if step.copies:
            # What a backward keeps of it is as it was, whatever the next microbatch's forward writes there.
            placed = located((args, kwargs))
            moving = {id(placed[place]) for place in step.copies} - self._lent.keys()
            args, kwargs = map_tensors(
                (args, kwargs), lambda t: t.clone() if id(t) in moving else t
            )
        if step.borrows:
            args, kwargs = map_tensors((args, kwargs), self._stand_in)
        if self._lacks and any(map(_is_placeholder, tensors_in((args, kwargs)))):
            raise self._absent(step)
        output, remains = (
            self._watched(step, run, args, kwargs) if event.is_unit else (run(*args, **kwargs), ())
        )
        placed = located((args, kwargs)) if step.claims else {}
        for place, number in step.claims.items():
            self._follow(placed[place], number)
        return self._checked(step, output, remains)

    def _stand_in(self, tensor: Tensor) -> Tensor:
        return self._lent.get(id(tensor), tensor)

    def _checked(self, step: Step, output: Any, remains: Sequence[Any] = ()) -> Any:
        """Check that the result of an event looks like that in the run without data."""
        event = step.event
        results, slots = (
            tensors_in((output, remains)) if remains else tensors_in(output),
            event.slots,
        )
        if event.left and not remains:
            # In the last stage, nobody needs what it has left.
            slots = slots[: len(tensors_in(event.result))]
        if len(results) != len(slots):
            raise _different(
                step, self._stage, f"gave {len(results)} tensors", f"gave {len(slots)}"
            )
        if not isinstance(output, Tensor) and self._stage < self._author.stages - 1:
            self._check_plain(step, output)
        values = self._plan.trace.values
        for tensor, slot in zip(results, slots, strict=True):
            if not isinstance(slot, int):
                if slot in step.inputs:
                    # The argument itself, or what a checkpoint has made of it.
                    self._follow(tensor, step.inputs[slot])
            elif values[slot].parameter is None:
                self._keep(step, tensor, slot)
            else:
                self._follow(tensor)
        return output

    def _watched(self, step: Step, run: Run, args: Any, kwargs: Any) -> tuple[Any, Sequence[Any]]:
        """Run a unit, and check what it does with its arguments.

        Returns:
            What it gives, and what it has left in lists, dictionaries and objects among its arguments.
        """
        event = step.event
        mine = tensors_in((args, kwargs))
        # Tensors of inference mode have no versions.
        has_versions = not torch.is_inference_mode_enabled()
        versions = [tensor._version for tensor in mine] if has_versions else []
        mutables = None
        if event.mutable and (self._stage < self._author.stages - 1 or step.tells):
            mutables = look_at_call(args, kwargs)
        output = run(*args, **kwargs)
        if has_versions and (event.changes or [t._version for t in mine] != versions):
            self._check_changes(step, mine, versions, args, kwargs)
        self._check_is_new(step, output, mine)
        return output, () if mutables is None else self._left_in(step, mutables)

    def _check_changes(
        self, step: Step, mine: Sequence[Tensor], versions: Sequence[int], args: Any, kwargs: Any
    ) -> None:
        """Refuse a unit that changes other arguments than planned, if anything else uses them."""
        changed = {
            id(t) for t, version in zip(mine, versions, strict=True) if t._version != version
        }
        planned = {change.argument for change in step.event.changes if change.argument is not None}
        for place, tensor in located((args, kwargs)).items():
            if (id(tensor) in changed) != (place in planned):
                did = "changed" if id(tensor) in changed else "did not change"
                name = f"its argument {place[-1]!r}"
                raise _different(step, self._stage, f"{did} {name}", f"{_OPPOSITE[did]} it")

    def _check_is_new(self, step: Step, output: Any, mine: Sequence[Tensor]) -> None:
        """Refuse a unit that gives an argument itself where it made something new, or the reverse."""
        slots = step.event.slots
        results = [output] if isinstance(output, Tensor) else tensors_in(output)
        arguments = {id(tensor) for tensor in mine}
        for tensor, slot in zip(results, slots, strict=False):
            is_argument = id(tensor) in arguments
            if is_argument is isinstance(slot, int) and not (
                is_argument and self._plan.trace.values[slot].parameter is not None  # type: ignore[index]
            ):
                what = ("something new", "an argument itself")
                did, planned = what[is_argument], what[not is_argument]
                if is_argument or self._recomputes is None:
                    raise _different(step, self._stage, f"gave {did}", f"gave {planned}")
        if self._plan.writes and not step.event.shares:
            memory = {storage_of(tensor) for tensor in mine}
            if any(storage_of(t) in memory for t in results if id(t) not in arguments):
                did = "gave a tensor that shares memory with an argument"
                raise _different(step, self._stage, did, "gave one with memory of its own")

    def _left_in(self, step: Step, mutables: Mutables) -> list[Any]:
        """What a unit has left in its arguments, in the order of the plan."""
        changes = {mutable.place: mutable.change() for mutable in mutables.changed()}
        planned = {
            place: change
            for place, change in step.event.left.items()
            if not isinstance(change, int)
        }
        if changes.keys() != planned.keys():
            place = next(iter(changes.keys() ^ planned.keys()))
            did = "changed" if place in changes else "did not change"
            raise _different(
                step, self._stage, f"{did} its argument {place[1]!r}", f"{_OPPOSITE[did]} it"
            )
        for place, change in planned.items():
            if plain_in(changes[place]) != plain_in(change):
                raise _different(
                    step,
                    self._stage,
                    f"left {plain_in(changes[place])} in its argument {place[1]!r}",
                    f"left {plain_in(change)}",
                )
        return [changes[place] for place in planned]

    def _check_plain(self, step: Step, output: Any) -> None:
        """Check that plain values equal those of the run without data, which other stages have."""
        for value, planned in zip(plain_in(output), plain_in(step.event.result), strict=False):
            if value != planned:
                raise _different(step, self._stage, f"gave {value!r}", f"gave {planned!r}")

    def _keep(self, step: Step, tensor: Tensor, number: int) -> None:
        """Follow a result, and send it if others use it."""
        value = self._plan.trace.values[number]
        if isinstance(tensor, FakeTensor):
            raise self._absent(step)
        if self._stage < self._author.stages - 1 or not step.event.varies:
            # A reentrant checkpoint runs its function without gradients at first.
            learns = not self._region_runs
            check_result(step, self._stage, tensor, value, self._call, learns=learns)
        self._follow(tensor, number)

    def _follow(self, tensor: Tensor, number: int | None = None) -> None:
        """Remember a tensor, and send it in the end if others use it."""
        self._followed[id(tensor)] = tensor, number
        if number in self._sends:
            self._outgoing[number] = tensor

    def _answer(self, step: Step, args: Any, kwargs: Any) -> Any:
        """The stand-in for the result of another stage's event."""
        event = step.event
        values = self._plan.trace.values
        placed: dict[Place, Tensor] = {}
        if self._plan.trace.decides or self._claimed:
            self._check_inputs(step, args, kwargs)
        if step.claims or not all(isinstance(slot, int) for slot in event.slots):
            placed = located((args, kwargs))
        for place, number in step.claims.items():
            self._claim(placed[place], number)
        slots = iter(event.slots)

        def put(_: Tensor) -> Any:
            slot = next(slots)
            if not isinstance(slot, int):
                # An argument that the run without data had may be missing here, such as a mask.
                return placed.get(slot)
            parameter = values[values[slot].root].parameter
            if parameter is not None:
                tensor = _tensor(self._author.model, parameter)
                self._follow(tensor)
                return tensor
            name = self._arrives.get(slot)
            if name is None:
                return values[slot].tensor
            tensor = self._values[name]
            self._follow(tensor, slot)
            return tensor

        result = map_tensors(event.result, put)
        for place, change in event.left.items():
            change_to(at((args, kwargs), place), map_tensors(change, put))
        return result

    def _claim(self, tensor: Tensor, number: int) -> None:
        """Copy what has arrived into a tensor that this stage made and another stage writes into."""
        self._claimed.add(storage_of(tensor))
        self._follow(tensor, number)
        if number in self._arrives:
            arrived, self._busy = self._values[self._arrives[number]], True
            with torch.set_grad_enabled(arrived.requires_grad):
                tensor.copy_(arrived)
            self._busy = False

    # ---- custom functions and checkpoints

    def applied(self, function: type[Function], run: Run, args: Any, kwargs: Any) -> Any:
        """Answer for a custom function, which is an event like any other."""
        if self._busy or is_checkpoint(function):
            return run(*args, **kwargs)
        if not self._is_event(args):
            return run(*args, **kwargs)
        step = self._next(function)
        if step.owner != self._stage:
            return self._answer(step, args, kwargs)
        self._busy = True
        try:
            return self._done(step, run, args, kwargs)
        finally:
            self._busy = False

    def checkpointed(self, run: Run, args: Any, kwargs: Any, options: Mapping[str, Any]) -> Any:
        """Run a checkpoint as a whole if all its events are this stage's; else its units by themselves."""
        if self._busy:
            return run(*args, **kwargs, **options)
        number, self._region = self._region, self._region + 1
        if number >= len(self._plan.regions):
            return run(*args, **kwargs, **options)
        stages = self._plan.regions[number]
        function, *rest = args
        before = self._recomputes, self._region_runs
        is_own = stages == {self._stage}
        self._recomputes = options if self._stage in stages else before[0]
        self._region_runs = is_own
        try:
            if not is_own:
                with uncheckpointed(tuple(rest), options):
                    return function(*rest, **kwargs)
            steps = self._plan.steps[: self._at + 1]
            calls = Counter(step.what for step in steps if step.event.is_unit)
            again = recomputed(function, self._author.doors, self._draws, calls, self._drawn)
            output = run(again, *rest, **kwargs, **options)
            self._after_checkpoint(output, number)
            return output
        finally:
            self._recomputes, self._region_runs = before

    def _after_checkpoint(self, output: Any, number: int) -> None:
        """Follow a checkpoint's results: they may be other tensors than those made inside it."""
        for tensor, slot in zip(
            tensors_in(output), self._plan.trace.regions[number].slots, strict=False
        ):
            if slot is not None:  # not one of the model's arguments, which is given back as it is
                self._follow(tensor, slot)

    # ---- errors

    def _diverged(self, what: Any, at: int, how: str = "") -> PlanError:
        steps = self._plan.steps
        name = what if isinstance(what, str) else getattr(what, "__name__", str(what))
        event = steps[at].event if at < len(steps) else None
        planned = f"{event.name} {event.where}" if event is not None else "its end"
        return PlanError(
            f"{where(self._author.paths)}: the model's forward went another way in stage {self._stage} "
            f"({name}{how}) than in the run without data ({planned}): what it does "
            "between its units depends on numbers, on chance or on something that has changed since; it is "
            "planned anew at the next step. If that does not help, put that code into a module that is "
            "placed as a whole, or cut the model by a typical batch, pipe.cut(...)"
        )

    def _absent(self, step: Step) -> StageError:
        return StageError(
            f"{step.event.where}: {step.event.name} in stage {self._stage} needs an argument of the model "
            "that this process was not given; give the same arguments on every rank"
        )


class Onlooker(StageForward):
    """A forward beyond the last stage, which runs no event: does the author's code follow a plan?

    It computes what depends on the model's arguments alone. Where events are given the same plain values and
    shapes, led by whatever numbers, they give what they gave in the run without data.
    """

    def __init__(self, author: Author, plan: CallPlan) -> None:
        super().__init__(author.stages, author, StageCall(plan.beyond, 0), {})
        self._quick = []

    def _answer(self, step: Step, args: Any, kwargs: Any) -> Any:
        if _looks(args, kwargs) != _looks(*step.event.call):
            raise self._diverged(step.what, self._at, " with other sizes")
        return super()._answer(step, args, kwargs)


def _looks(args: Any, kwargs: Any) -> list[Any]:
    """The shapes and plain values in a call, by place."""
    return [
        (place, tuple(leaf.shape) if isinstance(leaf, Tensor) else leaf)
        for place, leaf in leaves_in((tuple(args), kwargs))
        if isinstance(leaf, Tensor) or type(leaf) in PLAIN or type(leaf) is slice
    ]


def _different(step: Step, stage: int, did: str, planned: str) -> PlanError:
    return PlanError(
        f"{step.event.where}: {step.event.name} in stage {stage} {did} where the run without data "
        f"{planned}: what it does depends on the numbers in its tensors, or on something that has changed "
        "since; it is planned anew at the next step. If that does not help, place what uses it in the same "
        "module, or cut the model by a typical batch, pipe.cut(...)"
    )


def check_result(
    step: Step, stage: int, tensor: Any, value: Value, call: StageCall, *, learns: bool = True
) -> None:
    """Check that a tensor looks like that of the run without data."""
    planned = value.tensor
    if not isinstance(tensor, Tensor):
        raise _different(step, stage, f"gave a {type(tensor).__name__}", "gave a tensor")
    if tensor.shape != planned.shape:
        did = f"gave a tensor of shape {tuple(tensor.shape)}"
        raise _different(step, stage, did, f"gave one of shape {tuple(planned.shape)}")
    floats = tensor.dtype.is_floating_point and planned.dtype.is_floating_point
    if tensor.dtype != planned.dtype and not (floats and call.may_cast()):
        raise _different(step, stage, f"gave a tensor of {tensor.dtype}", f"gave {planned.dtype}")
    if (
        learns
        and tensor.requires_grad is not value.requires_grad
        and takes_gradient(tensor) is not (value.requires_grad)
    ):
        what = ("requires no gradient", "requires a gradient")
        did, other = what[not value.requires_grad], what[value.requires_grad]
        raise _different(step, stage, f"gave a tensor that {did}", f"gave one that {other}")


_OPPOSITE = {"changed": "did not change", "did not change": "changed"}


def to_send(tensor: Tensor, *, copies: bool = False) -> Tensor:
    """The tensor, detached if no gradient can come back to it, and copied if something else owns it."""
    if tensor.requires_grad and not takes_gradient(tensor):
        tensor = tensor.detach()
    return tensor.clone() if copies else tensor


def _tensor(model: nn.Module, name: str) -> Tensor:
    path, _, last = name.rpartition(".")
    tensor: Tensor = getattr(model.get_submodule(path), last)
    return tensor


def _is_placeholder(tensor: Tensor) -> bool:
    return isinstance(tensor, FakeTensor)


def leaves_something(event: Event) -> bool:
    """Whether an event changes its arguments: tensors, lists, dictionaries or objects."""
    return event.changes_arguments or bool(event.left)
