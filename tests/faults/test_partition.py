"""The network between machines is cut, one way or both: all stop, and say so. Needs network namespaces."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.jobs import SLACK, run_job
from tests.faults.machines import cuts, machines

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


@pytest.mark.parametrize(
    "way",
    [
        "to the far side",
        *(
            pytest.param(way, marks=pytest.mark.nightly)
            for way in ("both ways", "to the near side", "a machine is gone")
        ),
    ],
)
def test_all_sides_of_a_cut_network_stop(tmp_path: Path, way: str) -> None:
    with machines() as spaces:
        if not spaces:
            pytest.skip("this machine does not let us make network namespaces and links")

        def cut() -> None:
            assert cuts(spaces)[way]()

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
