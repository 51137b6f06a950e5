"""Both halves of an overlapped pair in turns: one computes while a collective of the other is under way.

A model of experts waits for an exchange before and after each layer of them. While one half of a pair waits,
the other may as well compute. So the backward runs in a thread of its own, one of the two threads runs at a
time, and each passes the turn on when it has started a collective. The order in which a process starts
collectives then depends on nothing but the model, so that it is the same on all members of a group.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from contextvars import copy_context
from functools import lru_cache
from threading import Condition, get_ident
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from penstock._engine.faults import stand_in
from penstock._engine.rng import generator_states, set_generator_states
from penstock.stage import Gradients, PairBackward, PairForward, device_of

FORWARD, BACKWARD = range(2)


def overlap_collectives(forward: PairForward, backward: PairBackward) -> tuple[Any, Gradients]:
    """Run both halves of an overlapped pair in turns, so that one computes while the other communicates.

    For :meth:`Pipeline.on_overlap`, and models whose layers call collectives, such as experts spread over
    processes: ``pipe.on_overlap(penstock.overlap_collectives)``. The forward runs until it has started a
    collective, then the backward until it has started one, and so on. Collectives of
    ``torch.distributed`` and its functional ones are seen; those that DTensors start are not, and hide
    nothing. The numbers are those of F and then B. All members of a group must run the same pairs, as
    ranks of one pipeline stage do. Torch runs what ``torch.compile`` has compiled as it is written
    meanwhile.

    Args:
        forward: the forward.
        backward: the backward of another microbatch.

    Returns:
        The forward's output, and the gradients of the backward's inputs.
    """
    turns, context = _Turns(device_of(forward.module)), copy_context()

    def run_backward() -> Gradients:
        with turns.taken(BACKWARD):
            return backward.run()

    gradients = _helper(os.getpid()).submit(context.run, run_backward)
    try:
        with turns.taken(FORWARD):
            output = forward.run()
    finally:
        wait([gradients])
        turns.end()
    return output, gradients.result()


@lru_cache(1)
def _helper(process: int) -> ThreadPoolExecutor:
    """The thread for backwards. One serves all pairs, since libraries give each new thread new buffers."""
    return ThreadPoolExecutor(1, "penstock backward")


class _Turns:
    """Two threads that run in turns, each with its own state of torch's generators.

    Args:
        device: where both compute.
    """

    def __init__(self, device: torch.device) -> None:
        self._devices = [device]
        self._stream = None if device.type == "cpu" else torch.accelerator.current_stream()
        self._moved = Condition()
        self._turn, self._ended = FORWARD, {FORWARD: False, BACKWARD: False}
        self._states = dict.fromkeys((FORWARD, BACKWARD), generator_states(self._devices))
        self._caller = get_ident()

    @contextmanager
    def taken(self, mine: int) -> Iterator[None]:
        """Wait for the turn of a half, run it in this context, and pass the turn on for good."""
        if self._stream is not None:
            torch.accelerator.set_stream(self._stream)  # each thread has one of its own
        self._take(mine)
        try:
            with _PassingOn(self, mine):
                yield
        finally:
            self._ended[mine] = True
            self._leave(mine)

    def pass_on(self, mine: int) -> None:
        """Let the other half run until it passes the turn on, unless it has ended."""
        if not self._ended[1 - mine]:
            self._leave(mine)
            self._take(mine)

    def end(self) -> None:
        """Go on after both halves with the random numbers that follow the forward's."""
        stand_in(self._caller, None)
        set_generator_states(self._states[FORWARD], self._devices)

    def _leave(self, mine: int) -> None:
        self._states[mine] = generator_states(self._devices)
        with self._moved:
            self._turn = 1 - mine
            self._moved.notify_all()

    def _take(self, mine: int) -> None:
        with self._moved:
            self._moved.wait_for(lambda: self._turn == mine)
        set_generator_states(self._states[mine], self._devices)
        # The watch looks at the caller's thread.
        stand_in(self._caller, None if mine == FORWARD else get_ident())


class _PassingOn(TorchDispatchMode):
    """Passes the turn of a half on when it has started a collective, or is about to wait for one."""

    def __init__(self, turns: _Turns, mine: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._turns, self._mine = turns, mine

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Functional collectives return tensors that wait when they are used.
        if func is _WAIT or any(hasattr(kind, "trigger_wait") for kind in types):
            self._turns.pass_on(self._mine)
        result = func(*args, **(kwargs or {}))
        if func.namespace == "c10d":
            self._turns.pass_on(self._mine)
        return result


_WAIT = torch.ops._c10d_functional.wait_tensor.default
