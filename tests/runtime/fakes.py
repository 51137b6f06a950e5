"""Fakes of the runtime's neighbours: tickets that become ready when told, transports that count."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import Tensor

from penstock.errors import MessageError
from penstock.runtime import Task, Wait
from penstock.transport import InProcessTransport, Ticket


class Bell(Ticket):
    """Ready once it was rung; a wait before is an error like that of a transport."""

    def __init__(self, value: Any = None, error: Exception | None = None) -> None:
        self.rung = False
        self.waited = 0
        self._value = value
        self._error = error or MessageError("nobody rings")

    def ring(self) -> None:
        self.rung = True

    def ready(self) -> bool:
        return self.rung

    def wait(self) -> None:
        self.waited += 1
        if not self.rung:
            raise self._error

    def take(self) -> Any:
        self.wait()
        return self._value


def waits_for(bell: Bell, rank: int = 0) -> Task[Any]:
    yield Wait(bell, rank, "waits for its bell")
    return bell.take()


def rings(bell: Bell, result: Any = None) -> Task[Any]:
    bell.ring()
    return result
    yield  # a generator that never waits


class CountingTransport(InProcessTransport):
    """Counts the control operations."""

    def __init__(self, end: InProcessTransport) -> None:
        vars(self).update(vars(end))
        self.calls: Counter[str] = Counter()

    def agree(self, value: Any) -> Ticket:
        self.calls["agree"] += 1
        return super().agree(value)

    def gather(self, values: Tensor) -> Ticket:
        self.calls["gather"] += 1
        return super().gather(values)

    def sum(self, values: Tensor) -> Ticket:
        self.calls["sum"] += 1
        return super().sum(values)
