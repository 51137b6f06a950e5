"""Commands set the number of threads for the whole process; a test must not keep it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def same_threads() -> Iterator[None]:
    """Leave torch's threads as they were."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
