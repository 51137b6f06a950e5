"""A model that was cut: the forward that all stages run, and what a plan of it depends on."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import PartitionError, UsageError
from penstock.partition.base import Example
from penstock.partition.held import put
from penstock.partition.meter import Meter
from penstock.partition.plan import CallPlan, assign, empty_plan
from penstock.partition.seen import Door
from penstock.partition.settings import Settings
from penstock.partition.sizes import UnitSizes
from penstock.partition.trace import Homes, Trace, record
from penstock.values import tensors_in

_NOTHING = empty_plan()
"""The plan of a model in one stage, whose forward runs as it is."""


class Author:
    """The model whose forward all stages run.

    Args:
        model: the model.
        doors: the doors of its units.
        forward: runs the model.
        recomputes: the paths of the units to checkpoint.
        homes: the stages of each unit by path, and of each parameter outside of units by name.
        stages: the number of stages.
        example: arguments whose numbers the run without data uses for calls of the same kind.

    Raises:
        PartitionError: a module that is in several stages was compiled as a whole.
    """

    def __init__(  # noqa: PLR0913 - a model, where its parts are, and how it is run
        self,
        model: nn.Module,
        doors: Sequence[Door],
        forward: Callable[..., Any],
        recomputes: Collection[str],
        homes: Homes,
        stages: int,
        example: Example | None,
    ) -> None:
        self.model, self.doors, self.forward = model, doors, forward
        self.recomputes, self.homes, self.stages = frozenset(recomputes), homes, stages
        self._example = example
        self._held: dict[str, tuple[Any, str, Tensor | None]] = {}
        inside = {id(part) for door in doors for part in door.module.modules()}
        self.outside = [module for module in model.modules() if id(module) not in inside]
        # Modules of torch keep nothing in attributes.
        self.around = [
            module for module in self.outside if not type(module).__module__.startswith("torch.nn.")
        ]
        self.paths = {id(module): path for path, module in model.named_modules()}
        units = {id(door.module) for door in doors}
        self._opened = [m for m in self.outside if any(id(part) in units for part in m.modules())]
        self._loose = [m for m in self.outside if not any(m is other for other in self._opened)]
        self._form = _form_of(model)
        self._sizes = UnitSizes()
        self._around = Settings(self.outside)
        self.to_set: list[tuple[Any, str, Any]] = []
        self._settings = [self._settings_of(stage) for stage in range(stages)]
        if stages > 1:
            self._check_not_compiled()

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
        with ExitStack() as stack:
            for stage, (_, rows) in (states or {}).items():
                stack.enter_context(self._settings[int(stage)].taken_over(rows))
            self._check_hooks()
            doors = [*self.doors, *self._hooked()] if self.stages > 1 else self.doors
            trace = self._record(doors, (tuple(args), dict(kwargs)), self._sizes_now())
            return assign(trace, self.homes, self.stages)

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
        self._sizes.clear()
        for settings in (self._around, *self._settings):
            settings.refresh()

    def _sizes_now(self) -> UnitSizes:
        """What units gave at other sizes, with all settings as they are now."""
        settings = [one.look() for one in (self._around, *self._settings)]
        self._sizes.enter((torch.is_grad_enabled(), *settings))
        return self._sizes

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
        with Meter() as meter:
            self._record(self.doors, (tuple(args), dict(kwargs)))
        return float(meter.flops)

    def _record(
        self, doors: Sequence[Door], call: Example, sizes: UnitSizes | None = None
    ) -> Trace:
        fits = self._example is not None and _kind(self._example) == _kind(call)
        example = self._example if fits else None
        return record(self.model, self.forward, doors, call, example, self.homes, sizes)

    def _hooked(self) -> list[Door]:
        """Doors of the modules between units that have hooks: each call is in one stage, like a unit's."""
        paths = [
            self.paths[id(m)] for m in self._loose if any(_hooks_of(part) for part in m.modules())
        ]
        outer = [p for p in paths if not any(p.startswith(f"{other}.") for other in paths)]
        return [Door(self.model.get_submodule(path), path) for path in outer]

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

    def _check_not_compiled(self) -> None:
        for module in self.outside:
            if module._compiled_call_impl or has_compiled_forward(module):
                raise PartitionError(
                    f"{self.paths[id(module)] or 'the model'} (a {type(module).__name__}) was compiled as a "
                    "whole, and its parts are placed by themselves; compile these instead, or place it as a "
                    "whole by naming it in stages="
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


def _kind(call: Example) -> Any:
    """The kind of a call: its shapes, types and plain values."""
    tensors = tuple(
        (tuple(t.shape), t.stride(), t.dtype, t.requires_grad) for t in tensors_in(call)
    )
    return tensors, _plain((tuple(call[0]), dict(call[1])))


def _plain(value: Any) -> str:
    if isinstance(value, int | float | str | type(None) | torch.dtype | torch.device):
        return repr(value)
    if isinstance(value, Mapping):
        return f"{type(value).__name__}{[(name, _plain(child)) for name, child in value.items()]}"
    if isinstance(value, list | tuple):
        return f"{type(value).__name__}{[_plain(child) for child in value]}"
    return type(value).__name__
