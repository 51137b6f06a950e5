"""Units under recompute=True that change what they keep: each moves once, and gradients keep their bits."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.nn.utils import parametrizations, spectral_norm

from penstock import Loss, Pipeline
from penstock.errors import StageError
from penstock.testing import Case, compare
from tests.catalogue.making import Does

WIDTH = 4
X = torch.linspace(-1, 1, 6 * WIDTH).reshape(6, WIDTH)


def linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


def runs_on(m: Any, x: Tensor) -> Any:
    """Takes off a mean that runs on, in place."""
    x = m.lin(x) - m.mean
    with torch.no_grad():
        m.mean.mul_(0.5).add_(x.abs().mean(0))
    return torch.tanh(x)


def replaces(m: Any, x: Tensor) -> Any:
    """Makes a new mean instead, as an attribute, and counts."""
    m.count += 1
    x = m.lin(x) * m.count + m.seen["sum"]
    if m.last is not None:
        x = x - m.last
    m.last = x.detach().mean(0)
    m.seen["sum"] += 1
    return torch.tanh(x)


class Meter:
    """Keeps what a unit has counted, in many ways."""

    def __init__(self) -> None:
        self.share, self.seen, self.log = 1.0, {"calls": 0}, list[int]()
        self.last, self.lots = deque[int](maxlen=3), set[int]()
        self.sum = torch.zeros(())


def counts(m: Any, x: Tensor) -> Any:
    meter = m.meter
    meter.share *= 0.5
    meter.seen["calls"] += 1
    meter.log.append(1)
    meter.last.append(1)
    meter.lots.add(len(meter.lots))
    meter.sum += 1
    counted = meter.seen["calls"], len(meter.log), len(meter.last), len(meter.lots), meter.sum
    return torch.tanh(m.lin(x) * meter.share + sum(counted))


def draws_by_itself(m: Any, x: Tensor) -> Any:
    noise = torch.rand(x.shape, generator=m.torchs) + float(m.numpys.random())
    return torch.tanh(m.lin(x) * noise)


def scales(m: Any, x: Tensor) -> Any:
    """Keeps the scale of its first call, in which it does more."""
    x = m.lin(x)
    if not hasattr(m, "scale"):
        m.scale = x.detach().abs().mean()
        x = torch.sin(x)
    return torch.tanh(x / m.scale)


def quantises(m: Any, x: Tensor) -> Any:
    """By codes that follow what they stand for, written through ``.data``."""
    x = m.lin(x)
    nearest = torch.cdist(x, m.codes).argmin(1)
    quantised = m.codes[nearest].clone()
    for code in range(WIDTH):
        if (nearest == code).any():
            m.codes.data[code].mul_(0.9).add_(0.1 * x.detach()[nearest == code].mean(0))
    return x + (quantised - x).detach() + (x - quantised).square()


def looks_up(m: Any, x: Tensor) -> Any:
    return x * m.table((x.detach()[:, 0].abs() * 7).long())


def changes_at_times(m: Any, x: Tensor) -> Any:
    """Halves its scale in every second call; the others run again with the scale that they had, too."""
    m.count += 1
    x = torch.tanh(m.lin(x) * m.scale)
    if m.count % 2 == 0:
        m.scale = m.scale * 0.5
    return x


UNITS: dict[str, Callable[[], nn.Module]] = {
    "batch norm": lambda: nn.BatchNorm1d(WIDTH),
    "spectral norm of old": lambda: spectral_norm(linear()),
    "spectral norm": lambda: parametrizations.spectral_norm(linear()),
    "a running mean that is used": lambda: Does(runs_on, lin=linear(), mean=torch.ones(WIDTH)),
    "attributes": lambda: Does(
        replaces, lin=linear(), count=0, last=None, seen={"sum": torch.zeros(())}
    ),
    "what some calls change": lambda: Does(
        changes_at_times, lin=linear(), count=0, scale=torch.ones(WIDTH)
    ),
    "what an object holds": lambda: Does(counts, lin=linear(), meter=Meter()),
    "generators of its own": lambda: Does(
        draws_by_itself,
        lin=linear(),
        torchs=torch.Generator().manual_seed(1),
        numpys=np.random.default_rng(1),
    ),
    "an attribute of the first call": lambda: Does(scales, lin=linear()),
    "a codebook": lambda: Does(quantises, lin=linear(), codes=torch.eye(WIDTH)),
    "a table of short rows": lambda: Does(looks_up, table=nn.Embedding(8, WIDTH, max_norm=0.5)),
}


@pytest.mark.parametrize("name", UNITS)
def test_it_is_as_without_a_checkpoint(name: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(linear(), UNITS[name](), linear(), UNITS[name]())
    # What changes between microbatches makes another loss of the whole batch.
    case = Case(model, (X,), X.flip(0), Loss(mse_loss, check=False), evaluates=False)
    options: dict[str, Any] = {"schedule": "ZB-H1", "ranks": 2, "microbatches": 3, "steps": 2}
    plain, again = (compare(case, recompute=way, **options) for way in (False, True))
    again.check(1e-5)
    assert plain.digest() == again.digest()


def test_a_parameter_that_moves_is_refused_by_name() -> None:
    def moves(m: Any, x: Tensor) -> Any:
        with torch.no_grad():
            m.lin.weight.mul_(0.5)
        return m.lin(x)

    model = nn.Sequential(Does(moves, lin=linear()), linear())
    pipe = Pipeline(model, ranks=2, microbatches=1, recompute=["0"], loss_fn=mse_loss)
    with pytest.raises(StageError, match=r"Does changes its parameter lin\.weight in place"):
        pipe.step(X, target=X)
