"""One contract, and every transport is run through it. A new transport is tested by being listed."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from penstock.runtime import drive
from penstock.testing import WorkerPool
from penstock.transport import in_process
from tests.transport.cases import CASES, CHANNELS

Run = Callable[[WorkerPool, str], list[Any]]


def inside(workers: WorkerPool, name: str) -> list[Any]:
    ends = in_process(CASES[name].ranks)
    for end in ends:
        end.open(CHANNELS)
    found = drive([CASES[name].part(end) for end in ends])
    for end in ends:
        end.finish()
        end.close()
    return found


def over_gloo(workers: WorkerPool, name: str) -> list[Any]:
    return workers.run("tests.transport.cases:run_part", CASES[name].ranks, 30.0, name=name)


TRANSPORTS: dict[str, Run] = {"in process": inside, "gloo": over_gloo}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("transport", sorted(TRANSPORTS))
def test_contract(workers: WorkerPool, transport: str, name: str) -> None:
    found = TRANSPORTS[transport](workers, name)
    assert json.loads(json.dumps(found)) == list(CASES[name].gives)
