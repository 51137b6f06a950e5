"""How processes meet: what their launcher told them, and clear words where that is wrong."""

from __future__ import annotations

import errno
import itertools
import json
import signal
import socket
import subprocess
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined] # public, but not marked so

from penstock.errors import AgreementError, UsageError
from penstock.faults.board import SharedBoard, StoreBoard
from penstock.faults.monitor import Team
from penstock.faults.processes import Process, this_process
from penstock.faults.rendezvous import Call, Rendezvous, read_call, stay_local

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


# ---- how they meet


def meet(*ranks: int, sizes: tuple[int, ...] = (3, 3, 3), seconds: float = 5.0) -> list[Any]:
    """The team, or what it is told, of each process that comes with such a rank, all to one store."""
    store = HashStore()
    found: list[Any] = [None] * len(ranks)
    store.set_timeout(timedelta(seconds=5))

    def come(index: int) -> None:
        rank = ranks[index]
        call = Call(rank, sizes[rank], "there", 1, hosted=True)
        coming = Rendezvous(rank, sizes[rank], lambda _: store, seconds, call)
        try:
            found[index] = coming.meet()
        except AgreementError as error:
            found[index] = str(error)

    threads = [threading.Thread(target=come, args=(index,)) for index in range(len(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.fixture
def strangers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every process that comes has a machine of its own."""
    numbers = itertools.count()
    monkeypatch.setattr(
        "penstock.faults.rendezvous.this_process", lambda: Process(f"host{next(numbers)}", 1, "1")
    )


def talk(teams: list[Team]) -> None:
    """See that the last rank's word reaches the first one, and end."""
    teams[-1].say("beat", 7)
    deadline = time.monotonic() + 5.0
    while teams[0].board.read("beat", len(teams) - 1) != 7:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    for team in teams:
        team.board.close()


def test_those_of_one_machine_meet_and_share_memory() -> None:
    before = set(Path("/dev/shm").glob("penstock-*"))
    teams = meet(0, 1, 2)
    assert [type(team.board) for team in teams] == [SharedBoard] * 3
    assert set(Path("/dev/shm").glob("penstock-*")) <= before
    talk(teams)


@pytest.mark.usefixtures("strangers")
def test_those_of_several_machines_meet_and_share_the_store() -> None:
    teams = meet(0, 1, 2)
    assert [type(team.board) for team in teams] == [StoreBoard] * 3
    assert [process.host for process in teams[0].processes.values()] != ["host0"] * 3
    talk(teams)


def test_where_no_memory_can_be_shared_the_store_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Path:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("penstock.faults.board._allocated", refuse)
    teams = meet(0, 1, 2)
    assert [type(team.board) for team in teams] == [StoreBoard] * 3
    talk(teams)


@pytest.mark.usefixtures("strangers")
def test_one_rank_twice_is_told_to_all() -> None:
    assert all("two processes have RANK=1" in said for said in meet(0, 1, 1, seconds=1.0))


def test_other_worlds_are_told_to_all() -> None:
    told = meet(0, 1, 2, sizes=(3, 4, 3))
    assert all("ranks differ in WORLD_SIZE: " in said for said in told[::2])
    assert all("rank 1 has 4" in said for said in told)


def test_a_missing_rank_is_named_after_a_short_time() -> None:
    told = meet(0, 2, seconds=0.3)
    says = "after 0.3 s ranks [1] of WORLD_SIZE=3 have not come to there:1 (MASTER_ADDR"
    assert all(says in said for said in told)


def test_where_a_missing_rank_stands_is_told_if_it_was_there_before() -> None:
    store = HashStore()
    with subprocess.Popen(["sleep", "60"]) as child:
        started = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[19]
        child.send_signal(signal.SIGSTOP)
        process = Process(this_process().host, child.pid, started)
        store.set("process/1", json.dumps(process.as_json()))
        with pytest.raises(
            AgreementError, match=f"process {child.pid} of rank 1 is stopped by a signal"
        ):
            Rendezvous(0, 2, lambda _: store, 0.2).meet()
        child.kill()


def test_who_is_stopped_while_they_meet_is_named() -> None:
    store = HashStore()
    waits = {"token": "1", "ranks": 2, "process": this_process().as_json()}
    store.set("waits/1", json.dumps(waits))
    with pytest.raises(
        AgreementError, match=r"ranks \[1\] of 2 came to make their pipeline, but do not"
    ):
        Rendezvous(0, 2, lambda _: store, 0.2).meet()


def test_they_meet_again_and_again() -> None:
    store = HashStore()
    for _ in range(3):
        Rendezvous(0, 1, lambda _: store, 5.0).meet()


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
        Rendezvous.of_launcher(1.0).meet()


def test_what_listens_and_never_answers_is_told_in_time(
    launched: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.faults.rendezvous.SLACK", 0.1)
    began = time.monotonic()
    with (
        launched,
        pytest.raises(AgreementError, match=r"rank 1, on the way to 127\.0\.0\.1:"),
    ):
        Rendezvous.of_launcher(0.3).meet()
    assert time.monotonic() - began < 5.0


def test_nobody_there_is_told(launched: socket.socket) -> None:
    launched.close()
    with pytest.raises(AgreementError, match="rank 1 found nobody at 127"):
        Rendezvous.of_launcher(0.3).meet()


def test_gloo_stays_on_the_loopback_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    set_: dict[str, str] = {}
    monkeypatch.setattr("penstock.faults.rendezvous.os.environ", set_)
    stay_local(Call(0, 3, "127.0.0.1", 29511))
    assert set_ == {}
    stay_local(Call(0, 3, "127.0.0.1", 29511, one_host=True))
    assert set_["GLOO_SOCKET_IFNAME"] in ("lo", "lo0")
    set_["GLOO_SOCKET_IFNAME"] = "eth0"
    stay_local(Call(0, 3, "127.0.0.1", 29511, one_host=True))
    assert set_["GLOO_SOCKET_IFNAME"] == "eth0"
