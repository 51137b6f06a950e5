"""How processes meet: what their launcher told them, and clear words where that is wrong."""

from __future__ import annotations

import socket
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined] # public, but not marked so

from penstock.errors import AgreementError, UsageError
from penstock.faults.rendezvous import Call, call_roll, read_call, start_world, stay_local

GOOD = {"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}


def test_the_environment_is_read() -> None:
    call = read_call(GOOD)
    assert (call.rank, call.world, call.port, call.one_host) == (1, 3, 29511, True)
    assert not read_call(GOOD | {"MASTER_ADDR": "node7"}).one_host
    assert read_call(GOOD | {"MASTER_ADDR": "node7", "LOCAL_WORLD_SIZE": "3"}).one_host


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"RANK": ""}, "RANK is not set"),
        ({"RANK": "x"}, "RANK='x' is no number"),
        ({"RANK": "3"}, "RANK=3 must be below WORLD_SIZE=3"),
        ({"MASTER_PORT": "0"}, "MASTER_PORT=0 is no port"),
        ({"MASTER_ADDR": "", "WORLD_SIZE": "many"}, "MASTER_ADDR is not set; WORLD_SIZE='many'"),
    ],
)
def test_a_wrong_environment_is_refused(change: dict[str, str], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        read_call(GOOD | change)


# ---- the roll


def roll(*calls: Call, patience: float = 2.0) -> list[str]:
    """What each process says that comes with such a call, all to one store."""
    store, told = HashStore(), [""] * len(calls)
    store.set_timeout(timedelta(seconds=5))

    def come(index: int) -> None:
        try:
            call_roll(store, calls[index], patience, time.monotonic() + patience)
        except AgreementError as error:
            told[index] = str(error)

    threads = [threading.Thread(target=come, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return told


def call(rank: int, world: int = 3, **more: Any) -> Call:
    return Call(rank, world, "127.0.0.1", 29511, hosted=True, **more)


def test_all_come() -> None:
    assert roll(call(0), call(1), call(2)) == ["", "", ""]


def test_one_rank_twice_is_told_to_all() -> None:
    assert all("two processes have RANK=1" in said for said in roll(call(0), call(1), call(1)))


def test_other_worlds_are_told_to_all() -> None:
    told = roll(call(0), call(1, 4), call(2))
    assert all("ranks differ in WORLD_SIZE: " in said for said in told)
    assert all("rank 1 has 4" in said for said in told)


def test_a_missing_rank_is_named_after_a_short_time() -> None:
    told = roll(call(0), call(2), patience=0.3)
    assert all("after 0.3 s ranks [1] of WORLD_SIZE=3 have not come" in said for said in told)


# ---- ports


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> socket.socket:
    """A socket that listens on the port that the launcher names."""
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    listening.listen(1)
    for name, value in GOOD.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", str(listening.getsockname()[1]))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    return listening


def test_a_port_in_use_is_told(launched: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    with (
        launched,
        pytest.raises(UsageError, match=r"rank 0 cannot listen at .* the port is in use"),
    ):
        start_world("gloo", 10.0, 1.0)


def test_nobody_there_is_told(launched: socket.socket) -> None:
    launched.close()
    with pytest.raises(AgreementError, match="rank 1 found nobody at 127"):
        start_world("gloo", 10.0, 0.3)


def test_a_patience_of_nothing_is_refused() -> None:
    with pytest.raises(UsageError, match="rendezvous_timeout=0"):
        start_world("gloo", 10.0, 0)


def test_gloo_stays_on_the_loopback_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    set_: dict[str, str] = {}
    monkeypatch.setattr("penstock.faults.rendezvous.os.environ", set_)
    stay_local(call(0, one_host=False))
    assert set_ == {}
    stay_local(call(0, one_host=True))
    assert set_["GLOO_SOCKET_IFNAME"] in ("lo", "lo0")
    set_["GLOO_SOCKET_IFNAME"] = "eth0"
    stay_local(call(0, one_host=True))
    assert set_["GLOO_SOCKET_IFNAME"] == "eth0"
