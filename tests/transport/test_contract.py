"""One contract, and every transport is run through it. A new transport is tested by being listed."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from penstock.runtime import drive
from penstock.testing import CountingTransport, WorkerPool
from penstock.transport import Relay, Transport, in_process
from tests.transport.cases import CASES, CHANNELS

Run = Callable[[WorkerPool, str], list[Any]]


def inside(workers: WorkerPool, name: str) -> list[Any]:
    return run(in_process(CASES[name].ranks), name)


def counted(workers: WorkerPool, name: str) -> list[Any]:
    return run([CountingTransport(end) for end in in_process(CASES[name].ranks)], name)


def run(ends: Sequence[Transport], name: str) -> list[Any]:
    for end in ends:
        end.open(CHANNELS)
    found = drive([CASES[name].part(end) for end in ends])
    for end in ends:
        end.finish()
        end.close()
    return found


def over_gloo(workers: WorkerPool, name: str) -> list[Any]:
    return workers.run("tests.transport.cases:run_part", CASES[name].ranks, 30.0, name=name)


TRANSPORTS: dict[str, Run] = {"in process": inside, "counted": counted, "gloo": over_gloo}


@pytest.mark.whole
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("transport", sorted(TRANSPORTS))
def test_contract(workers: WorkerPool, transport: str, name: str) -> None:
    found = TRANSPORTS[transport](workers, name)
    assert json.loads(json.dumps(found)) == list(CASES[name].gives)


def test_a_relay_hands_on_everything() -> None:
    """Also what has a default: a method that it left out would be that of no transport at all."""
    public = {
        name
        for name, found in vars(Transport).items()
        if callable(found) or isinstance(found, property)
    }
    assert {name for name in public if not name.startswith("_")} <= vars(Relay).keys()
