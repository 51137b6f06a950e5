"""The network between machines is cut, one way or both: all stop, and say so. Needs network namespaces."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.jobs import SLACK, run_job

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

NOWHERE = ["lladdr", "02:00:00:00:00:99", "nud", "permanent"]
"""A machine that is not there: what goes to it is lost without a word, as behind a broken switch."""


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


@pytest.mark.parametrize(
    "ways",
    [
        "to the far side",
        *(
            pytest.param(ways, marks=pytest.mark.nightly)
            for ways in ("both", "to the near side", "link")
        ),
    ],
)
def test_all_sides_of_a_cut_network_stop(
    spaces: list[tuple[str, str]], tmp_path: Path, ways: str
) -> None:
    (near, here), (far, there) = spaces

    def cut() -> None:
        if ways == "link":
            assert ip("-n", near, "link", "set", here, "down")
        if ways in ("both", "to the far side"):
            assert ip("-n", near, "neigh", "replace", "10.213.0.2", "dev", here, *NOWHERE)
        if ways in ("both", "to the near side"):
            assert ip("-n", far, "neigh", "replace", "10.213.0.1", "dev", there, *NOWHERE)

    # The store is with rank 0; of those that lose it, two are on one machine.
    job = run_job(
        tmp_path,
        fault={"rank": 9, "step": 1, "how": "sleep"},
        steps=10**9,
        timeout=60.0,
        spaces=[spaces[0], spaces[1], spaces[1]],
        meddle=cut,
    )
    assert [ended.error for ended in job.ranks] == ["PeerFailed"] * 3, job.ranks[0].output
    assert [ended.status for ended in job.ranks] == [75] * 3
    assert all("or the network to it is cut" in ended.text for ended in job.ranks)
    # Ten seconds on a quiet machine.
    assert job.heard() < 10.0 + SLACK
