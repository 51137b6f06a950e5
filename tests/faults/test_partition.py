"""The network between two ranks is cut: both stop, and say so. Needs to make network namespaces."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.jobs import SLACK

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

SILENT, LATER = 2.0, 3.0
START = 120.0

CODE = """
import sys, time, torch
from pathlib import Path
from torch import nn
from penstock import Pipeline
torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
x = torch.ones(8, 4)
pipe = Pipeline(model, microbatches=4, loss_fn=lambda o, t: (o - t).square().mean(),
                timeout=(60.0, float(sys.argv[2])))
try:
    while True:
        pipe.step(x, target=x)
        pipe.zero_grad()
        Path(sys.argv[1]).touch()
except Exception as error:
    print(time.monotonic(), type(error).__name__, error, flush=True)
"""


def ip(*arguments: str) -> bool:
    try:
        done = subprocess.run(["ip", *arguments], capture_output=True, timeout=20, check=False)
    except OSError:
        return False
    return done.returncode == 0


@pytest.fixture
def spaces() -> Iterator[list[tuple[str, str]]]:
    """Two namespaces, each with an end of a link: their names and the devices'."""
    tag = f"{os.getpid() % 10000}"
    names = [(f"penstock{side}{tag}", f"ps{side}{tag}") for side in "ab"]
    (first, here), (second, there) = names
    try:
        made = (
            ip("netns", "add", first)
            and ip("netns", "add", second)
            and ip(
                "link", "add", here, "netns", first, "type", "veth", "peer", there, "netns", second
            )
            and all(
                ip("-n", name, "addr", "add", f"10.213.0.{number}/24", "dev", device)
                and ip("-n", name, "link", "set", device, "up")
                and ip("-n", name, "link", "set", "lo", "up")
                for number, (name, device) in enumerate(names, start=1)
            )
        )
        if not made:
            pytest.skip("this machine does not let us make network namespaces and links")
        yield names
    finally:
        for name, _ in names:
            ip("netns", "del", name)


@pytest.mark.parametrize("finder", [0, 1])
def test_both_sides_of_a_cut_network_stop(
    spaces: list[tuple[str, str]], tmp_path: Path, finder: int
) -> None:
    ranks = []
    for rank, (name, device) in enumerate(spaces):
        variables = {
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "10.213.0.1",
            # Of a network that is this test's own: nobody else can hold it.
            "MASTER_PORT": "29533",
            "GLOO_SOCKET_IFNAME": device,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        }
        command = [
            "ip",
            "netns",
            "exec",
            name,
            sys.executable,
            "-c",
            CODE,
            str(tmp_path / f"{rank}"),
            str(SILENT if rank == finder else LATER),
        ]
        ranks.append(
            subprocess.Popen(
                command,
                env=os.environ | variables,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    try:
        deadline = time.monotonic() + START
        while not all((tmp_path / f"{rank}").exists() for rank in range(2)):
            assert time.monotonic() < deadline, "the ranks did not begin to train"
            assert all(process.poll() is None for process in ranks)
            time.sleep(0.05)
        cut = time.monotonic()
        assert ip("-n", spaces[0][0], "link", "set", spaces[0][1], "down")
        outputs = [process.communicate(timeout=60)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    for output in outputs:
        line = next(text for text in output.splitlines() if "PeerFailed" in text)
        assert "wait for each other" in line
        assert float(line.split()[0]) - cut < (LATER + 5.0) * SLACK
