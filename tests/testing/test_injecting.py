"""Injected faults: where and how often they strike, in one process."""

from __future__ import annotations

import math

import pytest

from penstock import Loss
from penstock.errors import StageError
from penstock.testing import fail_at
from tests.pipeline.models import X, Y, chain, make, mean_loss


def test_a_fault_strikes_once() -> None:
    struck: list[int] = []
    with make(chain(4), loss_fn=Loss(mean_loss, nonfinite="warn")) as pipe:
        with fail_at(0, 1, "0F*", "nan", before=lambda: struck.append(1)) as fault:
            assert math.isnan(pipe.step(X, target=Y).loss)
        assert (fault.fired, struck) == (True, [1])
        pipe.zero_grad()
        assert pipe.step(X, target=Y).finite


@pytest.mark.parametrize(
    ("rank", "step", "action"), [(1, 1, "1B0"), (1, 2, "1F0"), (0, 1, "1F0"), (1, 1, "1F9")]
)
def test_a_change_of_a_forward_waits_for_the_forward_that_is_named(
    rank: int, step: int, action: str
) -> None:
    with (
        make(chain(4)) as pipe,
        fail_at(rank, step, action, "nan") as fault,
    ):
        assert pipe.step(X, target=Y).finite
        assert not fault.fired


def test_a_fault_that_is_removed_never_strikes() -> None:
    with make(chain(4)) as pipe:
        fault = fail_at(1, 1, "1F2")
        fault.remove()
        pipe.step(X, target=Y)
        with fail_at(1, 2, "1F2"), pytest.raises(StageError, match="1F2: InjectedError"):
            pipe.step(X, target=Y)
