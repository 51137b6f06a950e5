"""A model that was cut: the forward that all stages run, and what a plan of it depends on."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from penstock._engine.devices import autocast_types
from penstock.errors import PartitionError, UsageError
from penstock.partition.base import Example
from penstock.partition.mutables import put
from penstock.partition.plan import CallPlan, assign, empty_plan
from penstock.partition.run import WithoutData, kind_of
from penstock.partition.seen import Door
from penstock.partition.settings import Settings
from penstock.partition.trace import Homes, Trace

_NOTHING = empty_plan()
"""The plan of a model in one stage, whose forward runs as it is."""


class Author:
    """The model whose forward all stages run.

    Args:
        model: the model.
        doors: the doors of its units.
        run: runs the model without data.
        recomputes: the paths of the units to recompute.
        homes: the stages of each unit by path, and of each parameter outside of units by name.
        stages: the number of stages.

    Raises:
        PartitionError: a module that is in several stages was compiled as a whole.
    """

    def __init__(
        self,
        model: nn.Module,
        doors: Sequence[Door],
        run: WithoutData,
        recomputes: Collection[str],
        homes: Homes,
        stages: int,
    ) -> None:
        self.model, self.doors, self.forward = model, doors, run.forward
        self.recomputes, self.homes, self.stages = frozenset(recomputes), homes, stages
        self.without_data = run
        self._expected: tuple[Any, CallPlan] | None = None
        self.shares: tuple[float, ...] = ()
        self.heaviest = ("", 0.0)
        self._held: dict[str, tuple[Any, str, Tensor | None]] = {}
        inside = {id(part) for door in doors for part in door.module.modules()}
        self.outside = [module for module in model.modules() if id(module) not in inside]
        # Modules of torch keep nothing in attributes.
        self.around = [
            module for module in self.outside if not type(module).__module__.startswith("torch.nn.")
        ]
        self.paths = {id(module): path for path, module in model.named_modules()}
        self._opened = opened_in(self.outside, doors)
        self._form = _form_of(model)
        self._around = Settings(self.outside)
        self.to_set: list[tuple[Any, str, Any]] = []
        self.tables: dict[tuple[int, str], tuple[Any, int, Any]] = {}
        self._settings = [self._settings_of(stage) for stage in range(stages)]
        if stages > 1:
            check_not_compiled(model, self.outside)

    # ---- what happens in a call

    def plan(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        states: Mapping[int, Any] | None = None,
    ) -> CallPlan:
        """The plan of a call; see :meth:`Partition.plan`."""
        if self.stages == 1 and not self.recomputes:
            return _NOTHING
        call = tuple(args), dict(kwargs)
        with ExitStack() as stack:
            for stage, (_, rows) in (states or {}).items():
                stack.enter_context(self._settings[int(stage)].taken_over(rows))
            self._check_hooks()
            expected, self._expected = self._expected, None
            if expected is not None and expected[0] == self._key(call):
                return expected[1]
            return self._planned(self.without_data.record(self._all_doors(), call, self.homes))

    def expect(self, call: Example, trace: Trace | None) -> None:
        """Plan a call whose plan may be asked for next.

        Args:
            call: the model's arguments for a microbatch.
            trace: the run of this call by which the model was cut.
        """
        if self.stages == 1 and not self.recomputes:
            return
        self._check_hooks()
        doors = self._all_doors()
        known = trace is not None and [d.path for d in trace.doors] == [d.path for d in doors]
        if trace is None or not (known and trace.for_any_homes):
            trace = self.without_data.record(doors, call, self.homes)
        self._expected = self._key(call), self._planned(trace)

    def _planned(self, trace: Trace) -> CallPlan:
        plan = assign(trace, self.homes, self.stages)
        if not self.shares:
            self.shares, self.heaviest = plan.shares()
        return plan

    def _all_doors(self) -> Sequence[Door]:
        """The doors of units, and of the modules between units that have hooks."""
        more = hooked_in(self.model, self.outside, self.doors) if self.stages > 1 else []
        return [*self.doors, *more]

    def _key(self, call: Example) -> Any:
        """What the plan of a call depends on."""
        return kind_of(call), self._modes(), self._looks()

    def _modes(self) -> tuple[Any, ...]:
        """Torch's own settings on which the results of units depend."""
        return torch.is_grad_enabled(), torch.get_default_dtype(), *autocast_types()

    def _looks(self) -> list[Any]:
        """All settings, as they are now."""
        return [one.look() for one in (self._around, *self._settings)]

    def state(self, stage: int) -> tuple[Any, ...]:
        """The settings on which plans depend; see :meth:`penstock.stage.StageModule.state`."""
        # All stages come to have what only the last one's code sets, before the next call.
        for thing, name, value in self.to_set:
            put(thing, name, value)
        self.to_set = []
        around = self._around.look() if self.stages > 1 else ()
        return around, self._settings[stage].look()

    def refresh(self) -> None:
        """Let the next plan take counters as they are then."""
        self.without_data.memo.distrust()
        for settings in (self._around, *self._settings):
            settings.refresh()

    def _settings_of(self, stage: int) -> Settings:
        """The settings of a stage's units, and of its parameters outside of units."""
        units = [door.module for door in self.doors if stage in self.homes[door.path]]
        loose = {
            id(p): p
            for module in self.outside
            for p in module._parameters.values()
            if p is not None
        }
        homes = [(name, p) for name, p in self.model.named_parameters() if id(p) in loose]
        mine = [p for name, p in homes if stage in self.homes.get(name, ())]
        return Settings((part for unit in units for part in unit.modules()), mine)

    def flops(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> float:
        """The floating-point operations of the whole model's forward; see :meth:`StageModule.flops`."""
        return self.without_data.record(self.doors, (tuple(args), dict(kwargs)), self.homes).flops

    # ---- what cannot be split

    def _check_hooks(self) -> None:
        """Refuse backward hooks of a module that is in several stages: no stage has both of its ends."""
        for module in self._opened if self.stages > 1 else ():
            if module._backward_hooks or module._backward_pre_hooks:
                raise PartitionError(
                    f"{self.paths[id(module)] or 'the model'} has backward hooks, and its parts are placed "
                    "by themselves: no stage has its gradients on both ends. Set the hooks on its parts, or "
                    "place it as a whole by naming it in stages="
                )

    # ---- edits of the model

    def hold(self, path: str, table: Any, name: str) -> None:
        """Note the tensor that stages have for a parameter or buffer between the units."""
        self._held[path] = table, name, table[name]

    def check_unchanged(self) -> None:
        """See :meth:`Partition.check_unchanged`."""
        before, now = self._form, _form_of(self.model)
        edited = [name for name in {**before, **now} if before.get(name) != now.get(name)]
        edited += [p for p, (table, name, t) in self._held.items() if table.get(name) is not t]
        if edited:
            raise UsageError(
                f"{edited[0]!r} was replaced, added or taken away in the model after the Pipeline was made, "
                "and its stages have what was there before; change a tensor in place, as by copy_(), or make "
                "a new Pipeline"
            )


def opened_in(outside: Sequence[nn.Module], doors: Sequence[Door]) -> list[nn.Module]:
    """The modules outside of units that hold units."""
    units = {id(door.module) for door in doors}
    return [m for m in outside if any(id(part) in units for part in m.modules())]


def hooked_in(model: nn.Module, outside: Sequence[nn.Module], doors: Sequence[Door]) -> list[Door]:
    """Doors of the modules between units that have hooks: each call is in one stage, like a unit's."""
    opened = {id(module) for module in opened_in(outside, doors)}
    known = {id(module): path for path, module in model.named_modules()}
    loose = [module for module in outside if id(module) not in opened]
    paths = [known[id(m)] for m in loose if any(_hooks_of(part) for part in m.modules())]
    outer = [p for p in paths if not any(p.startswith(f"{other}.") for other in paths)]
    return [Door(model.get_submodule(path), path) for path in outer]


def check_not_compiled(model: nn.Module, outside: Sequence[nn.Module]) -> None:
    """Refuse modules outside of units that were compiled as a whole.

    Raises:
        PartitionError: the message names the first of them.
    """
    for module in outside:
        if module._compiled_call_impl or has_compiled_forward(module):
            paths = {id(part): path for path, part in model.named_modules()}
            raise PartitionError(
                f"{paths[id(module)] or 'the model'} (a {type(module).__name__}) was compiled as a "
                "whole, and its parts are placed by themselves; compile these instead, or place it as a "
                "whole by naming it in stages="
            )


def has_compiled_forward(module: nn.Module) -> bool:
    """Whether ``torch.compile`` was applied to a module's ``forward``."""
    return hasattr(vars(module).get("forward"), "_torchdynamo_orig_callable")


def _hooks_of(module: nn.Module) -> bool:
    return bool(
        module._forward_pre_hooks
        or module._forward_hooks
        or module._backward_pre_hooks
        or module._backward_hooks
    )


def _form_of(model: nn.Module) -> dict[str, Any]:
    modules = {path: id(module) for path, module in model.named_modules(remove_duplicate=False)}
    return modules | dict.fromkeys(
        [name for name, _ in model.named_parameters(remove_duplicate=False)], "parameter"
    )
