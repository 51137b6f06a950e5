"""One worker's answers, without a process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from penstock.testing import workers
from penstock.transport.process_group import Groups

TASKS = "tests.testing.tasks"


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Groups:
    """A group of this process alone."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    return Groups(0, 1, str(tmp_path / "store"))


def answer(groups: Groups, function: str, **arguments: Any) -> dict[str, Any]:
    with groups:
        line = workers.serve({"function": function, "ranks": 1, "arguments": arguments}, groups)
    found: dict[str, Any] = json.loads(line)
    return found


def test_a_result(alone: Groups) -> None:
    assert answer(alone, f"{TASKS}:add", first=4) == {"result": [5, 0, 1]}
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (f"{TASKS}:missing", "no attribute 'missing'"),
        ("no.such:module", "No module named 'no'"),
        (f"{TASKS}:add", "missing 1 required positional argument: 'first'"),
        (f"{TASKS}:answer_oddly", "set is not JSON serializable"),
    ],
)
def test_an_error_is_its_traceback(alone: Groups, function: str, says: str) -> None:
    (error,) = answer(alone, function).values()
    assert error.startswith("Traceback")
    assert says in error
