"""What all tests share: one torch thread, and one pool of worker processes for the whole run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from penstock.testing import WorkerPool


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def workers() -> Iterator[WorkerPool]:
    with WorkerPool(4) as pool:
        yield pool
