"""How processes meet: what their launcher told them, and clear words where that is wrong."""

from __future__ import annotations

import json
import os
import socket
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined] # public, but not marked so

from penstock.errors import AgreementError, UsageError
from penstock.faults import Patience, meet
from tests.scripts import forked

GOOD = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"RANK": ""}, "RANK is not set"),
        ({"RANK": "x"}, "RANK='x' is no number"),
        ({"RANK": "3"}, "RANK=3 must be below WORLD_SIZE=2"),
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

pytestmark = pytest.mark.timeout(180)


def work(number: int, port: int, folder: str, case: dict[str, Any]) -> None:
    """One of two processes, in the order of their ranks."""
    os.environ |= GOOD | {"RANK": str(number), "MASTER_PORT": str(port)}
    os.environ |= case["environment"][number] if "environment" in case else {}
    os.environ.pop("GLOO_SOCKET_IFNAME", None)
    if "group" in case:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        dist.init_process_group("gloo", timeout=timedelta(seconds=100))
    group = dist.new_group([0, 1]) if case.get("group") == "new" else None
    lines = []
    # In a turn of one rank, the other is still doing something else.
    for turn, seconds in enumerate(case["turns"]):
        if seconds[number]:
            lines.append(come(group, seconds[number]))
            Path(folder, f"{turn}-{number}").touch()
        while not all(Path(folder, f"{turn}-{n}").exists() for n in (0, 1) if seconds[n]):
            time.sleep(0.02)
    Path(folder, str(number)).write_text(json.dumps(lines))


def come(group: Any, seconds: float) -> str:
    try:
        meeting = meet(group, Patience(rendezvous_timeout=seconds))
        job = meeting.job
        text = f"{job.rank} of {len(job.pipeline)} is {job.pipeline}"
        dist.barrier(meeting.group)
        meeting.close()
        return f"{text}, {dist.is_initialized()} {os.environ['GLOO_SOCKET_IFNAME']}"
    except (AgreementError, UsageError) as error:
        return f"{type(error).__name__}: {error}"


def run(
    folder: Path, *turns: tuple[float, float], port: int = 0, **case: Any
) -> tuple[list[str], list[str]]:
    """What both say of each turn in which they came."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = port or server.getsockname()[1]
    case["turns"] = turns or [(60.0, 60.0)]
    with forked(work, ((number, port, str(folder), case) for number in (0, 1))) as processes:
        for process in processes:
            process.join(100.0)
    first, second = (json.loads((folder / str(number)).read_text()) for number in (0, 1))
    return first, second


@pytest.mark.slow
def test_a_group_is_started_or_used(tmp_path: Path) -> None:
    assert run(tmp_path) == tuple([f"{rank} of 2 is (0, 1), False lo"] for rank in (0, 1))
    (tmp_path / "new").mkdir()
    assert run(tmp_path / "new", group="new")[1] == ["1 of 2 is (0, 1), True lo"]


@pytest.mark.slow
def test_who_does_not_come_is_named_and_may_come_later(tmp_path: Path) -> None:
    turns = [(1.0, 0.0), (60.0, 60.0), (1.0, 0.0)]
    first, second = run(tmp_path, *turns, group="world")
    said = "AgreementError: after 1 s ranks [1] of 2 have not come to make their pipeline; "
    assert first[0].startswith(f"{said}start them, or wait longer with rendezvous_timeout=")
    assert [first[1], *second] == [f"{rank} of 2 is (0, 1), True lo" for rank in (0, 1)]
    assert first[2].startswith(f"{said}rank 1 was here before, as process ")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("turn", "says"),
    [
        ((1.0, 0.0), "AgreementError: after 1 s ranks [1] of 2 have not come to 127.0.0.1:"),
        ((0.0, 1.0), "AgreementError: rank 1 found no store of torch at 127.0.0.1:"),
    ],
)
def test_who_comes_alone_says_so(turn: tuple[float, float], says: str, tmp_path: Path) -> None:
    first, second = run(tmp_path, turn)
    assert [line.startswith(says) for line in first + second] == [True]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"WORLD_SIZE": "3"}, {"ranks differ in WORLD_SIZE: rank "}),
        ({"RANK": "0"}, {"two processes have come with RANK=0", "after 1.5 s ranks [1] of 2"}),
    ],
)
def test_a_launcher_that_contradicts_itself_is_told(
    change: dict[str, str], says: set[str], tmp_path: Path
) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    agent = {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    environment = [agent, agent | change]
    lines = run(tmp_path, (1.5, 1.5), port=store.port, environment=environment)
    assert {text for text in says for line in lines if text in line[0]} == says
    assert all(line[0].startswith("AgreementError: ") for line in lines)


@pytest.mark.slow
def test_what_listens_there_must_be_a_store(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        first, second = run(tmp_path, (1.0, 1.0), port=server.getsockname()[1])
    assert first[0].startswith("UsageError: rank 0 cannot listen at 127.0.0.1:")
    assert second[0].startswith("AgreementError: ")
    assert "choose another MASTER_PORT" in second[0]
