"""A stage that runs its own part of the author's forward."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from penstock._engine.rng import Draws
from penstock.errors import PartitionError, PlanError
from penstock.partition.author import Author
from penstock.partition.forward import (
    Onlooker,
    StageForward,
    check_result,
    leaves_something,
    to_send,
)
from penstock.partition.lines import where
from penstock.partition.mutables import MISSING, is_equal, put
from penstock.partition.plan import CallPlan, Step
from penstock.partition.private import NotHere
from penstock.partition.run import has_data
from penstock.partition.seen import Seeded
from penstock.partition.trace import Trace, Value
from penstock.stage import StageCall, StageModule


class CutStage(StageModule):
    """One stage of a model.

    Args:
        author: the model that was cut.
        index: the index of the stage.
    """

    def __init__(self, author: Author, index: int) -> None:
        super().__init__()
        # No submodule: its parameters are not this stage's.
        self._author = author
        self.index = index
        self.training = author.model.training
        self._loose = _fill(self, author, index)
        self._chains: WeakKeyDictionary[CallPlan, _Chain | None] = WeakKeyDictionary()

    def plan(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        states: Mapping[int, Any] | None = None,
    ) -> CallPlan:
        """The plan of a call; see :meth:`Partition.plan`."""
        return self._author.plan(args, kwargs, states)

    def state(self) -> tuple[Any, ...]:
        """What plans depend on in this stage; see :meth:`StageModule.state`."""
        return self._author.state(self.index)

    @property
    def reads_numbers(self) -> bool:
        """Whether plans depend on numbers; see :meth:`StageModule.reads_numbers`."""
        return self._author.without_data.reads_numbers

    def fits(self, plan: CallPlan, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether a plan is one for a call; see :meth:`StageModule.fits`."""
        author = self._author
        if author.stages == 1 or not has_data((args, kwargs)):
            return True
        to_set = author.to_set
        try:
            with torch.random.fork_rng(devices=[]), _attributes_kept(author, plan.trace):
                Onlooker(author, plan).run(tuple(args), dict(kwargs))
        except Exception:
            return False
        finally:
            author.to_set = to_set
        return True

    def flops(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> float:
        """The floating-point operations of the whole model's forward; see :meth:`StageModule.flops`."""
        return self._author.flops(args, kwargs)

    @property
    def units(self) -> list[nn.Module]:
        """The modules that run as a whole in this stage."""
        mine = set(self.modules())
        return [door.module for door in self._author.doors if door.module in mine]

    @property
    def initialisers(self) -> dict[str, Callable[[nn.Module], Any]]:
        """The ``_init_weights`` of the models around the units, by their paths."""
        author = self._author
        inside = {id(part) for door in author.doors for part in door.module.modules()}
        return {
            path: _shell(module)._init_weights
            for path, module in author.model.named_modules()
            if id(module) not in inside and callable(getattr(module, "_init_weights", None))
        }

    @property
    def around(self) -> list[nn.Module]:
        """The author's modules outside of the units, which all stages call."""
        return self._author.outside

    def train(self, mode: bool = True) -> CutStage:
        """Set the mode here and on the author's modules around the units."""
        super().train(mode)
        for module in self.around:
            module.training = mode
        return self

    def forward(
        self, call: StageCall, values: Mapping[str, Any], *args: Any, **kwargs: Any
    ) -> tuple[Any, dict[str, Any]]:
        """Run this stage's part of the author's forward."""
        author = self._author
        if self._loose:
            self._follow()
        if author.stages == 1:
            return self._whole(author, call, args, kwargs), {}
        if call.plan not in self._chains:
            self._chains[call.plan] = _chain_of(call.plan, author, self.index)
        chain = self._chains[call.plan]
        try:
            if chain and not author.model._forward_pre_hooks and not author.model._forward_hooks:
                argument = args[0] if len(args) == 1 and not kwargs else None
                hidden = argument if chain.arrives is None else values[chain.arrives]
                if isinstance(hidden, Tensor) and not hidden.is_meta:
                    hidden = chain.run(hidden, call.draws)
                    sends = chain.edge is not None
                    return (None, chain.sent(hidden, self.index, call)) if sends else (hidden, {})
            with _attributes_kept(author, call.plan.trace):
                result = StageForward(self.index, author, call, values).run(args, kwargs)
            for _, table, name, mine in self._loose if call.plan.trace.tables else ():
                # A table that this call has made, for those that follow.
                mine[name] = table[name] if mine[name] is None else mine[name]
            return result
        except PlanError:
            author.refresh()
            raise

    def _whole(self, author: Author, call: StageCall, args: Any, kwargs: Any) -> Any:
        if call.draws is None and not author.recomputes:
            return author.forward(*args, **kwargs)
        # A unit that changes its arguments would change them again when it is recomputed.
        events = call.plan.trace.events
        changing = {event.what for event in events if leaves_something(event)}
        recomputes = author.recomputes - changing - call.plan.trace.outer
        seeded = Seeded(author.doors, call.draws, {}, recomputes=recomputes)
        return seeded.run(author.forward, args, kwargs)

    def _follow(self) -> None:
        """Make the author's modules use the tensors held here, which may have been moved or wrapped."""
        for path, table, name, mine in self._loose:
            if table.get(name) is not mine[name]:
                table[name] = mine[name]
                self._author.hold(path, table, name)

    def release(self, put: Callable[[str, Tensor], Tensor]) -> None:
        """Replace each parameter and buffer by what ``put`` makes of it and its name."""
        for path, module in list(self.named_modules(remove_duplicate=False)):
            tables: list[Any] = [module._parameters, module._buffers]
            places = [(table, name, x) for table in tables for name, x in table.items()]
            for table, name, tensor in places:
                if tensor is not None:
                    table[name] = put(f"{path}.{name}" if path else name, tensor)
        self._follow()


def _shell(module: nn.Module) -> Any:
    """The module without its contents: a stage must not keep other stages' tensors alive."""
    shell = copy.copy(module)
    vars(shell).update(_parameters={}, _buffers={}, _modules={})
    return shell


def _fill(stage: nn.Module, author: Author, index: int) -> list[Any]:
    """Put the stage's units, and its share of the tensors outside of them, under their paths."""
    units = {id(door.module): door.path for door in author.doors}
    loose: list[Any] = []
    inside: tuple[str, ...] = ()
    for path, module in author.model.named_modules(remove_duplicate=False):
        if inside and path.startswith(inside):
            continue
        if id(module) in units:
            inside = (*inside, f"{path}.")
            if index in author.homes[units[id(module)]]:
                holder, name = _holder(stage, path)
                holder._modules[name] = module
            continue
        prefix = f"{path}." if path else ""
        mine = [
            name
            for name, parameter in module._parameters.items()
            if parameter is not None and index in author.homes.get(prefix + name, ())
        ]
        named = [("_parameters", name) for name in mine]
        for kind, name in [*named, *(("_buffers", name) for name in module._buffers)]:
            holder, _ = _holder(stage, prefix + name)
            table, held = getattr(module, kind), getattr(holder, kind)
            held[name] = table[name]
            author.hold(prefix + name, table, name)
            loose.append((prefix + name, table, name, held))
            if name in module._non_persistent_buffers_set:
                holder._non_persistent_buffers_set.add(name)
        with contextlib.suppress(AttributeError):  # the stage has nothing of this module
            hooks = {name: vars(module)[name] for name in _STATE_HOOKS}
            vars(stage.get_submodule(path)).update(hooks)
    return loose


_STATE_HOOKS = ("_load_state_dict_pre_hooks", "_state_dict_hooks", "_state_dict_pre_hooks")
"""Hooks of a module on loading and saving. As of torch 2.13."""


def _holder(root: nn.Module, path: str) -> tuple[nn.Module, str]:
    """The module to hold what has this path, and the name there; makes missing modules on the way."""
    *way, name = path.split(".")
    holder = root
    for step in way:
        if step not in holder._modules:
            holder._modules[step] = nn.Module()
        inner = holder._modules[step]
        assert inner is not None
        holder = inner
    return holder, name


class _Chain(NamedTuple):
    """A stage of an ``nn.Sequential``: its units, one after the other, with nothing between them.

    Attributes:
        arrives: the edge of the first unit's input; None for the model's argument.
        steps: the calls of the units.
        units: the modules.
        edge: the edge of the last unit's result, if it travels.
        value: that result in the run without data.
    """

    arrives: str | None
    steps: list[Step]
    units: list[nn.Module]
    edge: str | None
    value: Value

    def run(self, hidden: Any, draws: Draws | None) -> Any:
        """Call the units."""
        for step, unit in zip(self.steps, self.units, strict=True):
            if draws is not None:
                draws.enter(step.what, step.event.number)
            hidden = unit(hidden)
        return hidden

    def sent(self, tensor: Any, stage: int, call: StageCall) -> dict[str, Tensor]:
        """The value that travels, after a check against the run without data."""
        assert self.edge is not None
        check_result(self.steps[-1], stage, tensor, self.value, call)
        return {self.edge: to_send(tensor, copies=self.value.belongs)}


def _chain_of(plan: CallPlan, author: Author, stage: int) -> _Chain | None:
    """What a stage does in one kind of call, if it is a chain."""
    doors, part = {door.path: door.module for door in plan.trace.doors}, plan.stages[stage]
    modules = [doors.get(step.what) for step in plan.steps if step.event.is_unit]
    mine = [at for at, step in enumerate(plan.steps) if step.owner == stage]
    if (
        type(author.model).forward is not nn.Sequential.forward
        or author.forward is not author.model
        or any(a is not b for a, b in zip_longest(modules, author.model._modules.values()))
        or len(modules) != len(plan.steps)
        or author.recomputes
        or plan.trace.direct
        or plan.trace.changed_arguments
        or part.lends
        or not mine
        or mine != list(range(mine[0], mine[-1] + 1))
        or any(leaves_something(plan.steps[at].event) for at in mine)
    ):
        return None
    before = plan.steps[mine[0] - 1] if mine[0] else None
    last = plan.steps[mine[-1]] if mine[-1] < len(plan.steps) - 1 else None
    for step, edges in ((before, part.arrives), (last, part.sends)):
        passes_on = (
            step and isinstance(step.event.result, Tensor) and step.event.slots == list(edges)
        )
        if not (passes_on or (step is None and not edges)):
            return None
    steps = [plan.steps[at] for at in mine]
    return _Chain(
        next(iter(part.arrives.values()), None),
        steps,
        [doors[step.what] for step in steps],
        next(iter(part.sends.values()), None),
        plan.trace.values[next(iter(part.sends), 0)],
    )


@contextlib.contextmanager
def _attributes_kept(author: Author, trace: Trace) -> Iterator[None]:
    """Restore the attributes of the modules around the units, except those that are set once.

    Those that are made from data in every call may not be read before they are made.
    """
    states = [(module, vars(module), dict(vars(module))) for module in author.around]
    objects = [getattr(thing, name, MISSING) for thing, name, _ in trace.set_in]
    author.to_set = trace.set_in
    ended = False
    for module, name in trace.written:
        vars(module)[name] = NotHere(functools.partial(_from_before, author, module, name))
    try:
        yield
        ended = True
    finally:
        _put_back_in_objects(trace, objects, check=ended)
        # A stage ends with its last event, and the code that resets these may come later.
        for module, name, value in trace.resets if ended else ():
            vars(module)[name] = value
        for module, name in trace.tables if ended else ():
            _check_table(author, module, name)
        for module, state, before in states:
            if len(state) != len(before) or any(state.get(n) is not v for n, v in before.items()):
                stay = {n: v for n, v in state.items() if (id(module), n) in trace.settled}
                state.clear()
                state.update({**before, **stay})
                _check_set_once(author, module, trace.settled, stay)


def _owner_of(author: Author, module: nn.Module) -> str:
    return author.paths[id(module)] or f"the {type(module).__name__}"


def _from_before(author: Author, module: nn.Module, name: str) -> PartitionError:
    return PartitionError(
        f"{where(author.paths)}: the model uses the attribute {name!r} of {_owner_of(author, module)} as an "
        "earlier call has left it, made from that call's data; keep it in a module that is in one stage"
    )


def _again_and_again(what: str) -> PlanError:
    """The error for what was set once in the run without data, and is set to something else now."""
    return PlanError(
        f"the model's forward changes {what} again and again, in code that every stage runs; move it into a "
        "module that is in one stage"
    )


def _check_set_once(
    author: Author, module: nn.Module, planned: Mapping[Any, Any], now: Mapping[str, Any]
) -> None:
    """Check that attributes around the units are set to what they were in the run without data."""
    for name, value in now.items():
        once = planned[id(module), name]
        if once is not MISSING and not is_equal(once, value):
            raise _again_and_again(f"the attribute {name!r} of {_owner_of(author, module)}")


def _check_table(author: Author, module: nn.Module, name: str) -> None:
    """Check that a buffer around the units stays what the first call has made it."""
    now = module._buffers.get(name)
    if now is None or now.is_inference():
        return
    known, version, copied = author.tables.get((id(module), name), (None, 0, now))
    if known is None or (known.dtype, known.device) != (now.dtype, now.device):
        author.tables[id(module), name] = now, now._version, now.detach().clone()
    elif (now is not known or now._version != version) and not torch.equal(copied, now):
        raise _again_and_again(f"the buffer {name!r} of {_owner_of(author, module)}")


def _put_back_in_objects(trace: Trace, before: Sequence[Any], *, check: bool) -> None:
    """Put back what the author's code has set in objects, such as a config, until the next call."""
    for (thing, name, once), old in zip(trace.set_in, before, strict=True):
        now = getattr(thing, name, MISSING)
        if old is not MISSING:
            put(thing, name, old)
        elif now is not MISSING:
            delattr(thing, name)
        if check and not is_equal(now, once) and not is_equal(now, old):
            raise _again_and_again(f"the attribute {name!r} of a {type(thing).__name__}")
