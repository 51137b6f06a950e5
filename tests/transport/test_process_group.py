"""What the process-group transport does beyond the contract: where its group comes from."""

from __future__ import annotations

import socket
import threading
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from penstock.errors import PenstockError, UsageError
from penstock.testing import WorkerPool
from penstock.transport import connect, launched
from penstock.transport.messages import break_off, connect_all

CPU = torch.device("cpu")


@pytest.fixture
def torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment that torchrun makes for a single process."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    found = {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for name, value in found.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


@pytest.mark.parametrize(("size", "expected"), [(None, False), ("1", False), ("2", True)])
def test_a_launcher_says_how_many(
    monkeypatch: pytest.MonkeyPatch, size: str | None, expected: bool
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    if size is not None:
        monkeypatch.setenv("WORLD_SIZE", size)
    assert launched() is expected


@pytest.mark.usefixtures("torchrun")
def test_the_group_that_it_starts_it_ends() -> None:
    end = connect(CPU)
    assert (end.rank, end.ranks) == (0, 1)
    assert dist.is_initialized()
    assert not launched()
    for _ in range(2):
        end.close()
    assert not dist.is_initialized()


@pytest.mark.usefixtures("torchrun")
def test_the_group_that_it_finds_it_leaves() -> None:
    dist.init_process_group("gloo")
    connect(CPU).close()
    assert dist.is_initialized()
    dist.destroy_process_group()


def test_without_a_launcher_there_is_no_transport(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(UsageError, match=r"RANK is not set.*start with torchrun"):
        connect(CPU)


# ---- in workers


def join_a_group_of_others(group: Any) -> str:
    """The last process of the pool is in no group of the first two."""
    others = dist.new_group([0, 1])
    if dist.get_rank() < 2:
        end = connect(CPU, others)
        end.agree("connected").wait()
        end.close()
        return str(end.rank)
    with pytest.raises(UsageError, match="group=2: must be a process group or a DeviceMesh"):
        connect(CPU, cast("Any", 2))
    try:
        connect(CPU, others)
    except (PenstockError, ValueError) as error:
        return str(error)
    return "joined"


def take_part_as(group: Any) -> list[Any]:
    end = connect(CPU, group)
    # Who has connected may still be in the middle of it for another.
    end.agree("connected").wait()
    end.close()
    return [end.rank, end.ranks, launched()]


def test_ranks_are_positions_in_the_group(workers: WorkerPool) -> None:
    found = workers.run(f"{__name__}:take_part_as", 3, 30.0)
    assert found == [[rank, 3, True] for rank in range(3)]


def test_a_process_outside_the_group_is_told(workers: WorkerPool) -> None:
    found = workers.run(f"{__name__}:join_a_group_of_others", 4, 30.0)
    assert found[:2] == ["0", "1"]
    assert all("not in the group" in text for text in found[2:])


def wake(group: Any) -> str:
    """A worker's task: the first rank goes, the second is silent, the last breaks off its wait."""
    store = PrefixStore("wake", group.get_group_store())
    made = connect_all(store, group.rank(), group.size(), 30.0, 30.0)
    if group.rank() == 0:
        return "gone"
    if group.rank() == 2:
        with pytest.raises(RuntimeError):
            made.recv([torch.zeros(1)], 0, 1).wait()
        threading.Timer(0.2, break_off, [made]).start()
    with pytest.raises(RuntimeError):
        made.recv([torch.zeros(1)], 3 - group.rank(), 1).wait()
    return "woken"


def test_a_wait_is_broken_off_whoever_has_gone(workers: WorkerPool) -> None:
    assert workers.run(f"{__name__}:wake", 3, 20.0) == ["gone", "woken", "woken"]
