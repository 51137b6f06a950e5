"""Functions of the user that are called before and after actions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from penstock.errors import StageError, UsageError
from penstock.schedule import Action, matching


@dataclass(frozen=True)
class ActionEvent:
    """An action that is about to run, or has run. What it shows is to be looked at, not changed.

    Attributes:
        action: which.
        rank: whose it is.
        module: the stage's.
        inputs: of F ``(args, kwargs)``; of B and I the gradients of the stage's outputs, one or ``None`` for
            each tensor; of a send its tensors; else ``None``.
        outputs: of F the module's output; of B and I the gradients of the inputs; of a receive the tensors
            that arrived. ``None`` before the action, and for all others.
    """

    action: Action
    rank: int
    module: nn.Module
    inputs: Any = None
    outputs: Any = None


ActionHook = Callable[[ActionEvent], object]
"""A function that is called before or after an action."""
Which = str | Callable[[Action], bool]
"""Which actions are meant: a pattern, or a function of an Action."""


@dataclass(frozen=True, eq=False)
class _Hook:
    which: Which
    matches: Callable[[Action], bool]
    before: ActionHook | None
    after: ActionHook | None

    def call(self, when: str, event: ActionEvent) -> None:
        """Call what it has for that time.

        Raises:
            StageError: it raised.
        """
        function = self.before if when == "before" else self.after
        if function is None:
            return
        try:
            if self.matches(event.action):
                function(event)
        except Exception as error:
            raise StageError(
                f"the hook {when} {self.which!r} raised {type(error).__name__}: {error}"
            ) from error


class HookHandle:
    """Takes away again what was added by one call, of functions around actions or around steps."""

    def __init__(self, hooks: dict[HookHandle, Any]) -> None:
        self._hooks = hooks

    def remove(self) -> None:
        """Take it away; a second time does nothing."""
        self._hooks.pop(self, None)

    def __enter__(self) -> HookHandle:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


class Hooks:
    """The hooks of a pipeline, in the order in which they were given."""

    def __init__(self) -> None:
        self._hooks: dict[HookHandle, _Hook] = {}

    def __len__(self) -> int:
        return len(self._hooks)

    def add(self, which: Which, before: ActionHook | None, after: ActionHook | None) -> HookHandle:
        """Call functions before and after some actions.

        Raises:
            UsageError: neither function was given, or what was given cannot be called.
            ScheduleError: ``which`` is a text and no pattern.
        """
        given = [function for function in (before, after) if function is not None]
        if not given or not all(map(callable, given)):
            raise UsageError("a hook needs before= or after=, or both: functions of an ActionEvent")
        if not isinstance(which, str) and not callable(which):
            raise UsageError(
                f"{which!r}: actions are named by a pattern or by a function of an Action"
            )
        handle = HookHandle(self._hooks)
        matches = matching(which) if isinstance(which, str) else which
        self._hooks[handle] = _Hook(which, matches, before, after)
        return handle

    def before(self, event: ActionEvent) -> None:
        """An action is about to run."""
        self._call("before", event)

    def after(self, event: ActionEvent) -> None:
        """An action has run."""
        self._call("after", event)

    def _call(self, when: str, event: ActionEvent) -> None:
        for hook in tuple(self._hooks.values()):
            hook.call(when, event)
