from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def cheap_collections() -> Iterator[None]:
    """Keeps what torch has imported out of the collections of the tests of memory."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)
