"""A process that is killed at any moment of saving leaves a whole checkpoint.

``campaigns/kills.py`` kills ranks of a pipeline and their launcher, at random moments.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from penstock import Checkpoints
from penstock._engine.weights import storage
from penstock.checkpoint import describe
from tests.processes import in_child

MOST = 200
"""Moments of one saving; there are about fifty."""


def kill_at(moment: int) -> None:
    """Have this process killed once it has done so many things with files."""
    left = moment

    def count(*_: Any) -> None:
        nonlocal left
        left -= 1
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def inner(*args: Any) -> Any:
            count()
            result = function(*args)
            count()
            return result

        return inner

    # In the middle of a file: each block that was written, and each time the disk is waited for.
    storage.crc32 = counted(storage.crc32)  # type: ignore[attr-defined]
    os.fsync = counted(os.fsync)

    def audit(event: str, args: Any) -> None:
        changes = ("os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate")
        if event in changes or (event == "open" and not str(args[0]).startswith("/proc/")):
            count()

    sys.addaudithook(audit)


def model_at(step: int) -> nn.Module:
    torch.manual_seed(step)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


@pytest.mark.parametrize("asynchronous", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_a_kill_at_each_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asynchronous: bool
) -> None:
    monkeypatch.setattr("penstock._engine.weights.lease.RENEWAL", 0.05)
    monkeypatch.setattr("penstock._engine.weights.lease.PATIENCE", 0.2)

    def save(step: int, moment: int) -> None:
        checkpoints = Checkpoints(tmp_path, keep=1, asynchronous=asynchronous)
        if moment:
            kill_at(moment)
        checkpoints.save(step, model=model_at(step))
        checkpoints.wait()

    assert in_child(lambda: save(1, 0)).status == 0
    last, statuses, steps = 1, [], set()
    for moment in range(1, MOST, 3):
        step = moment + 1
        status = in_child(partial(save, step, moment)).status
        statuses.append(status)
        latest = Checkpoints(tmp_path).steps()[0]
        assert "DAMAGED" not in describe(tmp_path, check=True)
        # The last whole one, or the new one where the kill came late.
        assert latest in (last, step)
        steps.add(latest == step)
        loaded = model_at(0)
        assert Checkpoints(tmp_path).load(model=loaded) == latest
        expected = model_at(latest).state_dict()
        assert all(torch.equal(expected[n], t) for n, t in loaded.state_dict().items())
        last = latest
        if not status:
            break
    assert statuses[-1] == 0
    assert set(statuses[:-1]) == {-signal.SIGKILL}
    assert len(statuses) > 12
    assert steps == {True, False}
    # What the killed ones have left is gone with the next one.
    assert [path.name for path in tmp_path.iterdir()] == [f"step-{last:08d}"]
