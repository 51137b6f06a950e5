"""The host does not wait for a device more often where there are more microbatches."""

from __future__ import annotations

import pytest

from penstock.testing import WorkerPool

pytestmark = pytest.mark.on_cpu("plays a GPU's transfers itself")


@pytest.mark.parametrize("schedule", ["1F1B", "ZB-V"])
@pytest.mark.parametrize("case", ["attention", "tied", "dropout"])
def test_a_step_reads_as_often_for_any_number_of_microbatches(
    workers: WorkerPool, case: str, schedule: str
) -> None:
    for few, many in workers.run(
        "tests.gpu.waits:of_two_counts", 2, 60.0, case=case, schedule=schedule
    ):
        assert few == many
        assert sum(few.values()) < 10, few
