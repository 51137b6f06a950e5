"""How processes meet: what their launcher told them, and clear words where that is wrong."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined] # public, but not marked so

from penstock import Timeouts
from penstock._engine.faults import Patience, meet
from penstock.errors import AgreementError, UsageError
from tests.processes import Job, free_port, variables

GOOD = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"RANK": ""}, "RANK is not set"),
        ({"RANK": "x"}, "RANK='x' is no number"),
        ({"RANK": "2"}, "RANK=2 must be below WORLD_SIZE=2"),
        ({"MASTER_PORT": "0"}, "MASTER_PORT=0 is no port"),
        ({"MASTER_ADDR": "", "WORLD_SIZE": "many"}, "WORLD_SIZE='many' is no number; MASTER_ADDR"),
    ],
)
def test_a_wrong_environment_is_refused(
    change: dict[str, str], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (GOOD | change).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=says):
        meet()


# ---- processes that meet; each writes down what became of it

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.on_cpu("processes meet, whatever they compute on"),
]


def work(number: int, folder: str, case: dict[str, Any]) -> None:
    """One of two processes, in the order of their ranks."""
    os.environ.pop("GLOO_SOCKET_IFNAME", None)
    if "group" in case:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        where = f"file://{folder}/store" if case["group"] == "file" else None
        rank, ranks = (number, 2) if where else (-1, -1)
        limit = timedelta(seconds=100)
        dist.init_process_group("gloo", where, limit, world_size=ranks, rank=rank)
    group = dist.new_group([0, 1]) if case.get("group") == "new" else None
    lines = []
    # In a turn of one rank, the other is still doing something else.
    begun = Path(folder, "begun")
    if "delay" in case:
        # The first, which hosts the store, comes this much later than the second.
        begun.touch() if number else None
        while not begun.exists():
            time.sleep(0.02)
        time.sleep(0 if number else case["delay"])
    for turn, seconds in enumerate(case["turns"]):
        if seconds[number]:
            lines.append(come(group, seconds[number]))
            Path(folder, f"{turn}-{number}").touch()
        while not all(Path(folder, f"{turn}-{n}").exists() for n in (0, 1) if seconds[n]):
            time.sleep(0.02)
    Path(folder, str(number)).write_text(json.dumps(lines))


def come(group: Any, seconds: float) -> str:
    try:
        meeting = meet(group, Patience(Timeouts(rendezvous=seconds)))
        job = meeting.job
        text = f"{job.rank} of {len(job.pipeline)} is {job.pipeline}"
        dist.barrier(meeting.group)
        meeting.close()
        return f"{text}, {dist.is_initialized()} {os.environ['GLOO_SOCKET_IFNAME']}"
    except (AgreementError, UsageError) as error:
        return f"{type(error).__name__}: {error}"


Said = tuple[list[str], list[str]]


def run(
    folder: Path,
    *turns: tuple[float, float],
    port: int = 0,
    changes: Sequence[dict[str, str]] = ({}, {}),
    **case: Any,
) -> Said:
    """What both say of each turn in which they came; with changes of what they are told."""
    port = port or free_port()
    case["turns"] = turns or [(60.0, 60.0)]
    told = [variables(number, 2, port) | change for number, change in enumerate(changes)]
    with Job(work, [(number, str(folder), case) for number in (0, 1)], told) as job:
        job.wait()
    first, second = (json.loads((folder / str(number)).read_text()) for number in (0, 1))
    return first, second


def listened_to(folder: Path) -> Said:
    """Where something listens that is no store of torch."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return run(folder, (1.0, 1.0), port=server.getsockname()[1])


AGENT = {"TORCHELASTIC_USE_AGENT_STORE": "True"}


def contradicted(folder: Path, change: dict[str, str]) -> Said:
    """A launcher, which has the store, tells the second process something else than the first."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return run(folder, (3.0, 3.0), port=store.port, changes=[AGENT, AGENT | change])


def restarted(folder: Path) -> Said:
    """A launcher, which has the store, starts all processes again."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for count in ("0", "1"):
        (folder / count).mkdir()
        changes = [AGENT | {"TORCHELASTIC_RESTART_COUNT": count}] * 2
        said = run(folder / count, port=store.port, changes=changes)
    return said


CASES: dict[str, Callable[[Path], Said]] = {
    "started": run,
    "used": partial(run, group="new"),
    "restarted": restarted,
    "late": lambda folder: run(folder, (1.0, 0.0), (60.0, 60.0), (1.0, 0.0), group="world"),
    "late, in a file": lambda folder: run(folder, (1.0, 0.0), (60.0, 60.0), group="file"),
    "first late, third never": lambda folder: run(
        folder, (5.0, 5.0), delay=2.0, changes=[{"WORLD_SIZE": "3"}] * 2
    ),
    "first alone": lambda folder: run(folder, (1.0, 0.0)),
    "second alone": lambda folder: run(folder, (0.0, 1.0)),
    "another size": partial(contradicted, change={"WORLD_SIZE": "3"}),
    "the same rank": partial(contradicted, change={"RANK": "0"}),
    "no store": listened_to,
}


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Said]]:
    """What both say in a case: as they mostly wait, all cases run side by side."""
    with ThreadPoolExecutor(len(CASES)) as pool:
        runs = {
            name: pool.submit(case, tmp_path_factory.mktemp("m")) for name, case in CASES.items()
        }
        yield lambda name: runs[name].result()


Of = Callable[[str], Said]


@pytest.mark.slow
def test_a_group_is_started_or_used(said: Of) -> None:
    assert said("started") == tuple([f"{rank} of 2 is (0, 1), False lo"] for rank in (0, 1))
    assert said("restarted") == said("started")
    assert said("used")[1] == ["1 of 2 is (0, 1), True lo"]


def test_who_does_not_come_is_named_and_may_come_later(said: Of) -> None:
    come = [f"{rank} of 2 is (0, 1), True lo" for rank in (0, 1)]
    text = "AgreementError: after 1 s ranks [1] of 2 have not come to make their pipeline; "
    for way in ("late", "late, in a file"):
        first, second = said(way)
        assert first[0].startswith(f"{text}start them, or wait longer with timeout=")
        assert [first[1], *second] == come
    assert said("late")[0][2].startswith(f"{text}rank 1 was here before, as process ")
    # All name who is absent and no other; also one that was there first, and waited for the store.
    first, second = said("first late, third never")
    assert first == second
    assert first[0].startswith(
        "AgreementError: after 5 s ranks [2] of 3 have not come to 127.0.0.1:"
    )


def test_who_comes_alone_says_so(said: Of) -> None:
    for who, says in {
        "first alone": "AgreementError: after 1 s ranks [1] of 2 have not come to 127.0.0.1:",
        "second alone": "AgreementError: rank 1 found no store of torch at 127.0.0.1:",
    }.items():
        first, second = said(who)
        assert [line.startswith(says) for line in first + second] == [True]


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("another size", {"ranks differ in WORLD_SIZE: rank "}),
        ("the same rank", {"two processes have come with RANK=0", "after 3 s ranks [1] of 2"}),
    ],
)
def test_a_launcher_that_contradicts_itself_is_told(what: str, says: set[str], said: Of) -> None:
    lines = said(what)
    assert {text for text in says for line in lines if text in line[0]} == says
    assert all(line[0].startswith("AgreementError: ") for line in lines)


def test_what_listens_there_must_be_a_store(said: Of) -> None:
    first, second = said("no store")
    assert first[0].startswith("UsageError: rank 0 cannot listen at 127.0.0.1:")
    assert second[0].startswith("AgreementError: ")
    assert "choose another MASTER_PORT" in second[0]
