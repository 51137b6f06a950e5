"""When each action ran."""

from __future__ import annotations

import pytest
import torch

from penstock.runtime import instrumentation
from penstock.runtime.instrumentation import Recorder
from penstock.schedule import Action, Op

FORWARD, BACKWARD = Action(0, Op.F, 0), Action(0, Op.B, 0)


@pytest.fixture
def ticking(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that goes on by a second with each reading, from 100."""
    times = iter(range(100, 200))
    monkeypatch.setattr(instrumentation, "perf_counter", lambda: float(next(times)))


@pytest.mark.usefixtures("ticking")
def test_spans_count_from_the_beginning() -> None:
    recorder = Recorder(3, torch.device("cpu"))
    for action in (FORWARD, BACKWARD):
        recorder.start()
        recorder.stop(action)
    assert [(s.rank, s.action, s.start, s.end) for s in recorder.spans] == [
        (3, FORWARD, 1.0, 2.0),
        (3, BACKWARD, 3.0, 4.0),
    ]
    assert recorder.elapsed() == 5.0


@pytest.mark.usefixtures("ticking")
def test_pieces_of_an_action_are_one_span() -> None:
    recorder = Recorder(0, torch.device("cpu"))
    for action in (FORWARD, BACKWARD, BACKWARD, FORWARD):
        recorder.start()
        recorder.stop(action)
    found = [(span.action, span.start, span.end) for span in recorder.spans]
    assert found == [(FORWARD, 1.0, 2.0), (BACKWARD, 3.0, 6.0), (FORWARD, 7.0, 8.0)]


def test_an_accelerator_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[None] = []
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: waits.append(None))
    recorder = Recorder(0, torch.device("cuda"))
    recorder.start()
    recorder.stop(FORWARD)
    assert len(waits) == 3
