"""The network between machines is cut, one way or both. Needs network namespaces."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.faults.jobs import LIMIT, RANKS, SILENT, SLACK, Outcome, run_job
from tests.faults.machines import cuts, heal, machines

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(180),
    pytest.mark.on_cpu("networks are cut, whatever goes through them"),
]


def test_all_sides_of_a_cut_network_stop(tmp_path: Path) -> None:
    """Each machine has a replica; ``campaigns/faults.py`` cuts in other ways too."""
    with machines() as spaces:
        if not spaces:
            pytest.skip("this machine does not let us make network namespaces and links")

        def cut() -> None:
            assert cuts(spaces)["to the far side"]()

        # The store is with rank 0.
        job = run_job(
            tmp_path,
            fault={"rank": 9, "step": 1, "how": "sleep"},
            steps=10**9,
            timeout=SILENT,
            spaces=[spaces[0]] * 2 + [spaces[1]] * 2,
            shape=(2, 2),
            meddle=cut,
        )
    assert [ended.error for ended in job.ranks] == ["PeerFailed"] * 4, job.ranks[0].output
    assert [ended.status for ended in job.ranks] == [75] * 4
    assert all("or the network to it is cut" in ended.text for ended in job.ranks)
    # Ten seconds on a quiet machine.
    assert job.heard() < 10.0 + SLACK


def fail_over(folder: Path) -> Outcome | None:
    """A job whose network is cut for a while; none where there are no namespaces."""
    with machines() as spaces:
        if not spaces:
            return None

        def meddle() -> None:
            assert cuts(spaces)["both ways"]()
            time.sleep(6.0)
            assert heal(spaces)
            # TCP doubles its pauses: every connection tries again within as long as nothing came through.
            time.sleep(8.0)
            trained = [folder / f"trains-{rank}" for rank in range(RANKS)]
            before = [file.stat().st_mtime_ns for file in trained]
            deadline = time.monotonic() + LIMIT / 2
            while any(
                file.stat().st_mtime_ns == then for file, then in zip(trained, before, strict=True)
            ):
                assert time.monotonic() < deadline, "the job does not go on"
                time.sleep(0.1)
            (folder / "fired").write_text(str(time.monotonic()))
            os.kill(int((folder / "pid-1").read_text()), signal.SIGINT)

        return run_job(
            folder,
            fault={"rank": 9, "step": 1, "how": "sleep"},
            steps=10**9,
            spaces=[spaces[0], *[spaces[1]] * 2],
            meddle=meddle,
        )


@pytest.fixture(scope="module", autouse=True)
def failed_over(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Future[Outcome | None]]:
    """What comes of it; as it mostly waits, it runs beside the other tests."""
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(fail_over, tmp_path_factory.mktemp("job"))


def test_a_network_that_is_back_in_time_ends_nobody(failed_over: Future[Outcome | None]) -> None:
    """As when a switch fails and another takes over."""
    job = failed_over.result()
    if job is None:
        pytest.skip("this machine does not let us make network namespaces and links")
    assert all("was interrupted by Ctrl-C" in job.ranks[rank].text for rank in (0, 2)), job.ranks
    assert [ended.status for ended in job.ranks] == [130] * 3
