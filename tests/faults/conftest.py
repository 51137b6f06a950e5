"""Jobs that mostly sleep run beside each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.faults.jobs import Outcome, run_job

BESIDE = 5
"""So many jobs at once: most of a job's time is a wait for heartbeats that do not come."""


@pytest.fixture(scope="module")
def job_of(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[dict[str, Any]], Outcome]]:
    """Returns what came of a case: all values of ``case`` in this module start at once."""
    cases: list[Any] = [
        item.callspec.params["case"]
        for item in request.session.items
        if isinstance(item, pytest.Function)
        and item.module is request.module
        and hasattr(item, "callspec")
        and "case" in item.callspec.params
    ]
    with ThreadPoolExecutor(BESIDE) as pool:
        # The longest first. Folders are made here: two threads that make the first ones of this process would
        # each begin with removing what is there.
        jobs = {
            id(case): pool.submit(run_job, tmp_path_factory.mktemp("job"), **case)
            for case in sorted(cases, key=lambda case: "timeout" not in case)
        }
        yield lambda case: jobs[id(case)].result()
        for job in jobs.values():
            job.cancel()
