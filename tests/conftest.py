"""What all tests share: one torch thread, one pool of worker processes, and which cases are nightly.

A test with several parameters is a product. By default one case runs for each value of the largest parameter,
with the values of the others in turn, so that every value of each is there; the rest of the product is marked
``nightly``, as some long tests of launchers are, and `make test-all` runs it too. Tests marked ``whole``
always run all their cases.
"""

from __future__ import annotations

import gc
import multiprocessing
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from multiprocessing import forkserver
from typing import Any

import pytest
import torch

from penstock.testing import WorkerPool


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def cheap_collections() -> None:
    """Keeps what was imported out of garbage collections: it is far more than what tests make."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def warm_processes() -> None:
    """Starts the process that all others are forked from, which imports what they need meanwhile."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(["tests.warm"])
    forkserver.ensure_running()


@pytest.fixture(scope="session")
def workers() -> Iterator[WorkerPool]:
    with WorkerPool(4) as pool:
        yield pool


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks what is nightly, before pytest looks at the marks; files that take longest come first.

    Whole files go to one process or the other: a long one at the end would keep one of them waiting.
    """
    slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    items.sort(key=lambda item: -slow[item.path])
    products: dict[str, list[Any]] = defaultdict(list)
    for item in items:
        params = getattr(getattr(item, "callspec", None), "params", {})
        if len(params) > 1 and item.get_closest_marker("whole") is None:
            products[item.nodeid.partition("[")[0]].append(item)
    for product in products.values():
        for item in rest_of(product):
            item.add_marker("nightly")


def rest_of(product: Sequence[Any]) -> list[Any]:
    """The cases of a test that tell nothing of a single value that the others do not tell."""
    params = [
        {name: repr(value) for name, value in item.callspec.params.items()} for item in product
    ]
    values = {name: list(dict.fromkeys(of[name] for of in params)) for name in params[0]}
    longest = max(values, key=lambda name: len(values[name]))
    seen: set[tuple[str, str]] = set()
    left = []
    for item, of in zip(product, params, strict=True):
        turn = values[longest].index(of[longest])
        if all(found.index(of[name]) == turn % len(found) for name, found in values.items()):
            seen.update(of.items())
        else:
            left.append((item, of))
    rest = []
    # Where not all combinations are there, a value may have had no turn.
    for item, of in left:
        if seen.issuperset(of.items()):
            rest.append(item)
        seen.update(of.items())
    return rest
