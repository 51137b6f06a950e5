"""Observers of a running step: the user's hooks on actions, and a clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from penstock._engine.devices import wait_for
from penstock.errors import StageError, UsageError
from penstock.schedule import Action, Span, matching


@dataclass(frozen=True)
class ActionEvent:
    """An action that is about to run, or has run. A hook may read its values, but must not change them.

    Attributes:
        action: the action.
        rank: the rank that runs it.
        module: its stage's module.
        inputs: for F, ``(args, kwargs)``, where the first argument of a stage that ``Pipeline`` has cut holds
            the values that have arrived, by name; for B and I, the gradients of the stage's outputs, one or
            ``None`` for each tensor; for a send, its tensors; else ``None``.
        outputs: for F, the module's output (for a stage that ``Pipeline`` has cut, the model's output and
            the values sent, by name); for B and I, the gradients of the inputs; for a receive, the
            tensors that arrived. ``None`` before the action, and for all other actions.
    """

    action: Action
    rank: int
    module: nn.Module
    inputs: Any = None
    outputs: Any = None


ActionHook = Callable[[ActionEvent], object]
"""A function that is called before or after an action."""
Which = str | Callable[[Action], bool]
"""The actions to hook: a pattern, or a function of an Action."""


class _Hook(NamedTuple):
    which: Which
    matches: Callable[[Action], bool] | None
    before: Callable[[Any], object] | None
    after: Callable[[Any], object] | None


class HookHandle:
    """Removes the functions that one call of ``on`` or ``on_step`` added."""

    def __init__(self, hooks: dict[HookHandle, Any]) -> None:
        self._hooks = hooks

    def remove(self) -> None:
        """Remove them; a second call does nothing."""
        self._hooks.pop(self, None)

    def __enter__(self) -> HookHandle:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


class Hooks:
    """Functions that are called before and after actions, or steps, in the order in which they were added.

    Args:
        event: the type of the event that the functions take.
    """

    def __init__(self, event: type) -> None:
        self._event = event
        self._hooks: dict[HookHandle, _Hook] = {}

    def __len__(self) -> int:
        return len(self._hooks)

    def add(
        self,
        before: Callable[[Any], object] | None,
        after: Callable[[Any], object] | None,
        which: Which | None = None,
    ) -> HookHandle:
        """Call functions before and after steps, or the actions that ``which`` selects.

        Raises:
            UsageError: no function was passed, or one that cannot be called, or ``which`` does not fit.
            ScheduleError: ``which`` is a string, but not a valid pattern.
        """
        functions = [function for function in (before, after) if function is not None]
        if not functions or not all(map(callable, functions)):
            raise UsageError(
                f"a hook needs before= or after=, or both: functions that take one {self._event.__name__}"
            )
        if (isinstance(which, str) or callable(which)) != (self._event is ActionEvent):
            raise UsageError(
                f"{which!r}: actions are named by a pattern or by a function of an Action"
            )
        handle = HookHandle(self._hooks)
        matches = matching(which) if isinstance(which, str) else which
        self._hooks[handle] = _Hook(which or "", matches, before, after)
        return handle

    def call(self, when: Literal["before", "after"], event: Any) -> None:
        """Call the functions for an event that is about to happen, or has happened.

        Raises:
            StageError: a hook on an action raised.
        """
        for hook in tuple(self._hooks.values()):
            function = hook.before if when == "before" else hook.after
            if function is None:
                continue
            if hook.matches is None:
                function(event)
                continue
            try:
                if hook.matches(event.action):
                    function(event)
            except Exception as error:
                raise StageError(
                    f"the hook {when} {hook.which!r} raised {type(error).__name__}: {error}"
                ) from error


class WatchedAction:
    """An action under the user's hooks, which learn what it was given and what came of it.

    Args:
        hooks: the hooks, if any.
        action: the action.
        rank: the rank that runs it.
        module: its stage's module.

    Attributes:
        outputs: what has come of it, for the hooks after it.
    """

    def __init__(self, hooks: Hooks | None, action: Action, rank: int, module: nn.Module) -> None:
        self._hooks, self._place, self.rank = hooks, (action, rank, module), rank
        self._inputs: Any = None
        self.outputs: Any = None

    def begin(self, inputs: Any = None) -> None:
        """Call the hooks before the action."""
        if self._hooks is not None:
            self._inputs = inputs
            self._hooks.call("before", ActionEvent(*self._place, inputs))

    def end(self) -> None:
        """Call the hooks after it."""
        if self._hooks is not None:
            self._hooks.call("after", ActionEvent(*self._place, self._inputs, self.outputs))


class Recorder:
    """Records the start and end of actions, in seconds since it was made.

    On an accelerator the device is synchronised before each reading, so that a span measures the work
    itself and not its launch. This slows a recorded step down.

    Args:
        device: where the actions run.
    """

    def __init__(self, device: torch.device) -> None:
        self.spans: list[Span] = []
        self._device = device
        self._origin = self._now()
        self._start = 0.0

    def start(self) -> None:
        """Note the start of an action."""
        self._start = self._now() - self._origin

    def stop(self, rank: int, action: Action) -> None:
        """Note the end of the action."""
        self.spans.append(Span(rank, action, self._start, self._now() - self._origin))

    def _now(self) -> float:
        wait_for(self._device)
        return time.perf_counter()
