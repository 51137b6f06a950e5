"""How processes meet: what their launcher told them, and clear words where that is wrong."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined] # public, but not marked so

from penstock.errors import AgreementError, UsageError
from penstock.faults import Patience, meet
from penstock.faults.meeting import gather, read_environment
from tests.scripts import forked

GOOD = {"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}


def test_the_environment_is_read() -> None:
    call = read_environment(GOOD)
    assert (call.rank, call.ranks, call.port, call.one_host) == (1, 3, 29511, True)
    assert not read_environment(GOOD | {"MASTER_ADDR": "node7"}).one_host
    assert read_environment(GOOD | {"MASTER_ADDR": "node7", "LOCAL_WORLD_SIZE": "3"}).one_host


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
        read_environment(GOOD | change)


# ---- how they meet at a store


def come(
    store: Any, *ranks: int, sizes: tuple[int, ...] = (3, 3, 3), seconds: float = 60.0
) -> list[Any]:
    """What becomes of the ranks that come: the name that they are told, or their error as text."""
    results: list[Any] = [None] * len(ranks)

    def one(index: int) -> None:
        try:
            results[index] = gather(store, ranks[index], sizes[index], seconds, "the store")[0]
        except AgreementError as error:
            results[index] = str(error)

    threads = [threading.Thread(target=one, args=(index,)) for index in range(len(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
    return results


@pytest.fixture
def store() -> Any:
    made = HashStore()
    made.set_timeout(timedelta(seconds=60))
    return made


def test_all_are_told_one_name_that_nobody_can_guess(store: Any) -> None:
    first, second = come(store, 0, 1, 2), come(store, 2, 1, 0)
    assert len(set(first)) == len(set(second)) == 1
    assert first[0] != second[0]
    assert len(first[0]) > 32
    assert store.get(f"{first[0]}/failure") == b"-"


@pytest.mark.parametrize(("ranks", "absent"), [((0, 1), [2]), ((1, 2), [0]), ((0,), [1, 2])])
def test_who_is_absent_is_named_by_all_and_may_come_later(
    store: Any, ranks: tuple[int, ...], absent: list[int]
) -> None:
    for text in come(store, *ranks, seconds=1.0):
        assert text.startswith(f"after 1 s ranks {absent} of 3 have not come to the store")
        assert "rendezvous_timeout=" in text
    time.sleep(1.5)
    assert len(set(come(store, 0, 1, 2))) == 1


def test_who_came_before_is_told_from_who_never_came(store: Any) -> None:
    come(store, 0, 1, 2)
    texts = come(store, 0, 1, seconds=1.0)
    assert all(f"process {os.getpid()} of rank 2 runs, elsewhere in its code" in t for t in texts)


def test_other_world_sizes_are_refused(store: Any) -> None:
    texts = come(store, 0, 1, sizes=(2, 3))
    assert all("differ in WORLD_SIZE: rank 0 has 2, rank 1 has 3" in text for text in texts)


# ---- with a launcher's variables, and with a group


def _meet(rank: int, port: int, folder: str, case: dict[str, Any]) -> None:
    os.environ |= GOOD | {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_PORT": str(port)}
    os.environ.pop("GLOO_SOCKET_IFNAME", None)
    group = None
    try:
        if case.get("group"):
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"
            dist.init_process_group("gloo", timeout=timedelta(seconds=30))
            group = dist.new_group([1, 0]) if case["group"] == "reversed" else None
        if rank in case.get("absent", ()):
            # It is there for as long as the other one waits.
            while not Path(folder, str(1 - rank)).exists():
                time.sleep(0.05)
            os._exit(0)
        meeting = meet(group, Patience(rendezvous_timeout=case["seconds"]))
        text = json.dumps([meeting.rank, meeting.ranks, meeting.global_ranks, meeting.created])
        dist.barrier(meeting.group)
        meeting.close()
        text += f" {dist.is_initialized()} {os.environ['GLOO_SOCKET_IFNAME']}"
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    Path(folder, str(rank)).write_text(text)


def run(folder: Path, ranks: tuple[int, ...] = (0, 1), **case: Any) -> list[str]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = case.get("port") or server.getsockname()[1]
    case.setdefault("seconds", 60.0)
    with forked(_meet, ((rank, port, str(folder), case) for rank in ranks)) as processes:
        for process in processes:
            process.join(100.0)
    return [(folder / str(r)).read_text() for r in ranks if r not in case.get("absent", ())]


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_group_is_started_or_used(tmp_path: Path) -> None:
    assert run(tmp_path) == [f"[{rank}, 2, [0, 1], true] False lo" for rank in (0, 1)]
    assert run(tmp_path, group="world")[1] == "[1, 2, [0, 1], false] True lo"


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_who_does_not_come_is_named(tmp_path: Path) -> None:
    absent = "AgreementError: after 1 s ranks [1] of 2 have not come to "
    assert run(tmp_path, ranks=(0,), seconds=1.0)[0].startswith(f"{absent}127.0.0.1:")
    texts = run(tmp_path, group="world", absent=(1,), seconds=1.0)
    assert texts[0].startswith(f"{absent}make their pipeline")
    alone = run(tmp_path, ranks=(1,), seconds=1.0)[0]
    assert "rank 1 found no store of torch at 127.0.0.1:" in alone


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_what_listens_there_must_be_a_store(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        texts = run(tmp_path, port=port, seconds=2.0)
    assert "UsageError: rank 0 cannot listen at 127.0.0.1:" in texts[0]
    assert texts[1].startswith("AgreementError: ")
    assert "choose another MASTER_PORT" in texts[1]
