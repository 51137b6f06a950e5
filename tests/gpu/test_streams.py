"""No kernel touches what a message on another stream still reads or writes; faults put in are found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext, suppress
from typing import Any
from unittest.mock import patch

import pytest
from torch import Tensor

from penstock._engine.transport import VALUES
from penstock._engine.transport.base import GRADIENTS
from penstock.errors import PenstockError
from penstock.schedule import names
from penstock.testing import WorkerPool, fail_at
from tests.catalogue.cases import CASES, pipeline
from tests.gpu.streams import PlayedGroup, PlayedTransport, PlayedWork, played

pytestmark = pytest.mark.on_cpu("plays a GPU's streams itself")
SHAPES = (
    pytest.param("attention", marks=pytest.mark.nightly), "skip edges", "tied",
    pytest.param("ragged", marks=pytest.mark.nightly),
    pytest.param("dropout, recomputed", marks=pytest.mark.nightly), "model: nested values",
    "gradient: a branch of microbatch 2",
)  # fmt: skip
"""A chain, values that skip stages, tied weights, changing shapes, messages of many tensors, or none."""

SCHEDULES = ("1F1B", "Interleaved1F1B", "ZB-V")
"""By day: whole backwards and halves, one stage on a rank and several."""
OTHERS = [
    pytest.param(name, marks=pytest.mark.nightly)
    for name in names()
    if name not in (*SCHEDULES, "forward-only")
]

send, group_send, group_recv = PlayedTransport.send, PlayedGroup.send, PlayedGroup.recv


def unwaited(direction: int) -> Callable[[], Any]:
    """Receives of one direction are used before their wait."""

    def recv(self: PlayedGroup, parcels: Sequence[Tensor], place: int, tag: int) -> PlayedWork:
        work = group_recv(self, parcels, place, tag)
        if self.channel.direction == direction:
            work.wait = work.arrive  # type: ignore[method-assign]
        return work

    return lambda: patch.object(PlayedGroup, "recv", recv)


def seems_to_have_left(self: PlayedWork) -> bool:
    """A message is done as soon as somebody looks, so that what is sent may be freed."""
    self.arrive()
    return True


def changes(self: PlayedTransport, peer: int, tag: int, tensors: Any, way: int = VALUES) -> Any:
    """A tensor is changed while it is sent."""
    sending = send(self, peer, tag, tensors, way)
    for tensor in tensors:
        tensor.data.add_(0)
    return sending


def unordered(self: PlayedGroup, parcels: Sequence[Tensor], place: int, tag: int) -> PlayedWork:
    """A channel does not wait for what has been computed."""
    with patch.object(self.device, "hold"):
        return group_send(self, parcels, place, tag)


def run(group: Any, case: str, schedule: str, fault: str = "", fails: bool = False) -> list[str]:
    """A worker's task: the races of some steps, an evaluation between them, and perhaps a failure."""
    of = CASES[case]()
    options = {"split": of.split, "mesh": group}
    pipe = pipeline(of, None, schedule=schedule, ranks=2, microbatches=4, **options)
    with pipe, ExitStack() as stack:
        device = stack.enter_context(played(pipe))
        if fault:
            stack.enter_context(FAULTS[fault]())
        if fails:
            stack.enter_context(fail_at(1, 3, how="exception"))
        with suppress(PenstockError) if fails or fault else nullcontext():
            pipe.step(*of.args, target=of.target, **of.kwargs)
            pipe.evaluate(*of.args, target=of.target, **of.kwargs)
            pipe.step(*of.args, target=of.target, **of.kwargs)
        return device.races


FAULTS: dict[str, Callable[[], Any]] = {
    "gradients are used before their wait": unwaited(GRADIENTS),
    "a parcel is unpacked before its wait": unwaited(VALUES),
    "freed while it is sent": lambda: patch.object(PlayedWork, "is_completed", seems_to_have_left),
    "changed while it is sent": lambda: patch.object(PlayedTransport, "send", changes),
    "sent before it is computed": lambda: patch.object(PlayedGroup, "send", unordered),
}


@pytest.mark.slow
@pytest.mark.parametrize("schedule", [*SCHEDULES, *OTHERS])
@pytest.mark.parametrize("case", SHAPES)
def test_no_races(workers: WorkerPool, case: str, schedule: str) -> None:
    assert workers.run(f"{__name__}:run", 2, 60.0, case=case, schedule=schedule) == [[], []]


def test_a_failure_in_the_middle_of_a_step_races_neither(workers: WorkerPool) -> None:
    options = {"case": "attention", "schedule": "ZB-V", "fails": True}
    assert workers.run(f"{__name__}:run", 2, 60.0, **options) == [[], []]


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_that_are_put_in_are_found(workers: WorkerPool, fault: str) -> None:
    several = fault.startswith("a parcel")
    options = {"case": "model: nested values" if several else "attention", "schedule": "ZB-V"}
    assert any(workers.run(f"{__name__}:run", 2, 60.0, **options, fault=fault))
