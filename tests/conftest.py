"""What all tests share: one torch thread, one pool of worker processes, and which cases are nightly.

A test with several parameters is a product. By default as few cases run as show every value of each of them;
the rest of the product is marked ``nightly``, as some long tests of launchers are, and `make test-all` runs
it too. Tests marked ``whole`` always run all their cases, and those marked ``on_cpu`` only on a CPU.
"""

from __future__ import annotations

import gc
from collections import Counter, defaultdict
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from penstock.testing import WorkerPool
from tests import played
from tests.device import DEVICE, NAME, switch
from tests.processes import warm_up

switch()


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.import_plugin("tests.holes")


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    """The bits of sums depend on the number of threads, which other libraries set too."""
    torch.set_num_threads(1)


@pytest.fixture(scope="module", autouse=True)
def no_group_is_left() -> Iterator[None]:
    """A process group that is left would change what the next tests in this process do."""
    yield
    assert not dist.is_initialized()


@pytest.fixture(scope="session", autouse=True)
def cheap_collections() -> None:
    """Keeps what was imported out of garbage collections: it is far more than what tests make."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def warm_processes() -> None:
    warm_up()


@pytest.fixture(scope="session")
def workers() -> Iterator[WorkerPool]:
    with WorkerPool(4) as pool:
        yield pool


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks what is nightly, before pytest looks at the marks; files that take longest come first.

    Whole files go to one process or the other: a long one at the end would keep one of them waiting.
    """
    for item in items:
        mark = item.get_closest_marker("on_cpu")
        if mark is not None and NAME not in ("", "cpu"):
            item.add_marker(pytest.mark.skip(mark.args[0]))
    slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    items.sort(key=lambda item: -slow[item.path])
    products: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        if len(values_of(item)) > 1 and not marks & {"whole", "nightly"}:
            products[item.nodeid.partition("[")[0]].append(item)
    for product in products.values():
        for item in without_new_values(product):
            item.add_marker("nightly")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Notes how many kernels of the played device a test ran, in all of its processes."""
    before = played.kernels()
    yield
    item.user_properties.append(("kernels", played.kernels() - before))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Says how many tests computed on the played device."""
    reports = [r for way in ("passed", "failed") for r in terminalreporter.stats.get(way, [])]
    counts = [count for r in reports for name, count in r.user_properties if name == "kernels"]
    if DEVICE == played.NAME:
        terminalreporter.write_line(f"on {DEVICE}: {sum(map(bool, counts))} of {len(counts)} tests")


def values_of(item: pytest.Item) -> set[tuple[str, str]]:
    """The parameters of a case, each with its value."""
    params = getattr(getattr(item, "callspec", None), "params", {})
    return {(name, repr(value)) for name, value in params.items()}


def without_new_values(product: list[pytest.Item]) -> list[pytest.Item]:
    """What is left of a product after taking the case with the most new values, as long as there is one."""
    values = {item: values_of(item) for item in product}
    seen: set[tuple[str, str]] = set()
    while values:
        richest = max(values, key=lambda item: len(values[item] - seen))
        if values[richest] <= seen:
            break
        seen |= values.pop(richest)
    return list(values)
