"""Injected faults, with which a test checks that a training run stops as it should."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, TypeVar, get_args

import torch
from torch import Tensor
from torch.nn.modules.module import register_module_forward_hook

from penstock._engine.faults import Activity, add_probe
from penstock._engine.values import map_tensors
from penstock.errors import UsageError
from penstock.schedule import Action, Op, matching

How = Literal[
    "exception",
    "out of memory",
    "SIGKILL",
    "SIGSTOP",
    "SIGTERM",
    "SIGINT",
    "SIGSEGV",
    "exit",
    "sleep",
    "hold the GIL",
    "dtype",
    "shape",
    "layout",
    "detach",
    "nan",
    "short iterator",
]
T = TypeVar("T")

BETWEEN = "between"
LONG = 3600
"""The seconds that ``"sleep"`` and ``"hold the GIL"`` last."""


class InjectedError(RuntimeError):
    """The error that ``"exception"`` raises."""


def fail_at(
    rank: int,
    step: int,
    action: str = "*",
    how: How = "exception",
    *,
    replica: int | None = None,
    before: Callable[[], object] | None = None,
) -> Fault:
    """Make a rank fail once, at a given point of its program.

    Use it in the same way on every rank, around or before the training; only the given rank fails::

        with fail_at(rank=1, step=3, action="1F2", how="SIGKILL"):
            train()

    Args:
        rank: the rank that fails, by its position in the pipeline.
        step: the training step of the pipeline, counted from 1; 0 while the Pipeline is being made, where
            ``action`` may be the beginning of ``"connects"``, ``"cuts the model"`` or ``"loads"``.
        action: the action, such as ``"1F2"``, or a pattern of :func:`penstock.schedule.matching`; by default
            the rank's first action of the step. ``"between"``: in your own code before the step, where
            ``fault.over(batches)`` yields its batch.
        how: ``"exception"``, ``"out of memory"``: raise. ``"SIGKILL"``, ``"SIGSTOP"``, ``"SIGTERM"``,
            ``"SIGINT"``, ``"SIGSEGV"``: send the process that signal. ``"exit"``: end it silently, with
            status 0. ``"sleep"``: make no progress. ``"hold the GIL"``: likewise, and stop all other threads.
            ``"dtype"``, ``"shape"``, ``"layout"``, ``"detach"``, ``"nan"``: change the tensors that the
            first module of a stage returns from a forward. ``"short iterator"``: ``fault.over(batches)`` ends
            before the step.
        replica: the number of the pipeline in which the rank fails, where a job has several; by default all.
        before: called just before the fault, for instance to note the time.

    Returns:
        The fault. It is armed until its ``with`` block ends, or ``remove()`` is called.

    Raises:
        UsageError: the kind of fault is unknown, or it needs an action and was given none.
    """
    if how not in get_args(How):
        raise UsageError(f"how={how!r}: must be one of {', '.join(map(repr, get_args(How)))}")
    if how in _CHANGES and (step == 0 or action == BETWEEN):
        raise UsageError(
            f"how={how!r}: changes what a stage returns, so it needs an action of a step"
        )
    return Fault((rank, replica), step, action, how, before or _nothing)


class Fault:
    """An armed fault; made by :func:`fail_at`."""

    def __init__(
        self,
        where: tuple[int, int | None],
        step: int,
        action: str,
        how: How,
        before: Callable[[], object],
    ) -> None:
        self.rank, self.replica = where
        self.step = step
        self.how = how
        self.fired = False
        self._between = action == BETWEEN
        self._matches: Callable[[Any], bool] = (
            _beginning(action) if step == 0 or self._between else matching(action)
        )
        self._before = before
        self._disarm = add_probe(self._probe)

    def over(
        self, batches: Iterable[T], rank: int | None = None, replica: int | None = None
    ) -> Iterator[T]:
        """The batches; for a ``"short iterator"``, on the rank of the fault, only those before its step.

        Args:
            batches: the batches of all steps.
            rank: the rank of this process; by default from ``RANK``.
            replica: the number of its pipeline, where a job has several.
        """
        here = int(os.environ.get("RANK", "0")) if rank is None else rank
        is_here = here == self.rank and self.replica in (None, replica)
        for number, batch in enumerate(batches, start=1):
            if is_here and number == self.step:
                if self.how == "short iterator":
                    self._fire()
                    return
                if self._between:
                    self._fire()
                    _FAULTS[self.how]()
            yield batch

    def remove(self) -> None:
        """Disarm the fault."""
        self._disarm()

    def __enter__(self) -> Fault:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def _fire(self) -> None:
        self.fired = True
        self._before()

    def _probe(self, activity: Activity, action: Action | str) -> None:
        if self.fired or activity.rank != self.rank or activity.step != self.step:
            return
        if self.replica not in (None, activity.replica):
            return
        if self.how == "short iterator" or self._between:
            return
        if isinstance(action, str) != (self.step == 0) or not self._matches(action):
            return
        if self.how in _CHANGES:
            if isinstance(action, Action) and action.op is Op.F:
                self._fire()
                _change_output(_CHANGES[self.how])
            return
        self._fire()
        _FAULTS[self.how]()


def _nothing() -> None:
    """The default of ``before``: do nothing."""


def _beginning(text: str) -> Callable[[str], bool]:
    """Match what a rank does while its Pipeline is made, by the beginning of the text."""
    return lambda doing: doing.startswith(text.rstrip("*"))


def _raise() -> None:
    raise InjectedError("injected by fail_at")


def _run_out_of_memory() -> None:
    raise torch.OutOfMemoryError("injected by fail_at: tried to allocate 1.00 TiB")


def _send(number: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


def _hold_the_gil() -> None:
    # Unlike those of a CDLL, functions of a PyDLL are called without releasing the GIL.
    ctypes.PyDLL(None).sleep(LONG)


_FAULTS: dict[str, Callable[[], None]] = {
    "exception": _raise,
    "out of memory": _run_out_of_memory,
    **{
        name: _send(signal.Signals[name])
        for name in ("SIGKILL", "SIGSTOP", "SIGTERM", "SIGINT", "SIGSEGV")
        if hasattr(signal, name)
    },
    "exit": lambda: os._exit(0),
    "sleep": lambda: time.sleep(LONG),
    "hold the GIL": _hold_the_gil,
}

_CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "dtype": lambda tensor: tensor.half(),
    "shape": lambda tensor: tensor[..., :-1],
    "layout": lambda tensor: tensor.to_sparse(),
    "detach": lambda tensor: tensor.detach(),
    "nan": lambda tensor: tensor * float("nan"),
}


def _change_output(change: Callable[[Tensor], Tensor]) -> None:
    """Change the output of the next module that returns, the first one of the stage to do so."""

    def leave(module: Any, args: Any, output: Any) -> Any:
        handle.remove()
        return map_tensors(output, lambda t: change(t) if t.is_floating_point() else t)

    handle = register_module_forward_hook(leave)
