"""Units under recompute=True that change what they keep: each moves once, and gradients keep their bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.nn.utils import parametrizations, spectral_norm
from torch.utils.checkpoint import checkpoint

from penstock import Pipeline
from penstock.errors import StageError
from penstock.testing import Case, compare

WIDTH = 4
X = torch.linspace(-1, 1, 6 * WIDTH).reshape(6, WIDTH)


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)


class Running(Linear):
    """Takes off a mean that runs on, in place."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Any:
        x = self.lin(x) - self.mean
        with torch.no_grad():
            self.mean.mul_(0.5).add_(x.abs().mean(0))
        return torch.tanh(x)


class Replaced(Running):
    """Makes a new mean instead, as an attribute, and counts."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.seen = 0, [torch.zeros(())]
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Any:
        self.count += 1
        x = self.lin(x) * self.count + self.seen[0]
        if self.last is not None:
            x = x - self.last
        self.last = x.detach().mean(0)
        self.seen[0] += 1
        return torch.tanh(x)


class First(Linear):
    """Keeps the scale of its first call, in which it does more."""

    def forward(self, x: Tensor) -> Any:
        x = self.lin(x)
        if not hasattr(self, "scale"):
            self.scale = x.detach().abs().mean()
            x = torch.sin(x)
        return torch.tanh(x / self.scale)


class Codebook(Linear):
    """Vector quantisation, whose codes follow what they stand for, written through ``.data``."""

    codes: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.eye(WIDTH))

    def forward(self, x: Tensor) -> Any:
        x = self.lin(x)
        nearest = torch.cdist(x, self.codes).argmin(1)
        quantised = self.codes[nearest].clone()
        for code in range(WIDTH):
            if (nearest == code).any():
                self.codes.data[code].mul_(0.9).add_(0.1 * x.detach()[nearest == code].mean(0))
        return x + (quantised - x).detach() + (x - quantised).square()


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, WIDTH, max_norm=0.5)

    def forward(self, x: Tensor) -> Any:
        return x * self.table((x.detach()[:, 0].abs() * 7).long())


UNITS: dict[str, Callable[[], nn.Module]] = {
    "batch norm": lambda: nn.BatchNorm1d(WIDTH),
    "spectral norm of old": lambda: spectral_norm(nn.Linear(WIDTH, WIDTH)),
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
    "a running mean that is used": Running,
    "attributes": Replaced,
    "an attribute of the first call": First,
    "a codebook": Codebook,
    "a table of short rows": Table,
}


def trained(name: str, recompute: bool) -> dict[str, Tensor]:
    """Gradients and state after two steps."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(WIDTH, WIDTH), UNITS[name](), nn.Linear(WIDTH, WIDTH), UNITS[name]()
    )
    pipe = Pipeline(
        model, schedule="ZB-H1", ranks=2, microbatches=3, recompute=recompute,
        loss_fn=lambda output, target: (output - target).square().mean(),
    )  # fmt: skip
    for _ in range(2):
        pipe.step(X, target=X.flip(0))
    kept = {n: torch.as_tensor(v) for n, v in vars(model[1]).items() if isinstance(v, Tensor | int)}
    grads = {f"{n}.grad": p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {**dict(model.named_buffers()), **kept, **grads}


@pytest.mark.parametrize("name", UNITS)
def test_it_is_as_without_a_checkpoint(name: str) -> None:
    plain, again = trained(name, recompute=False), trained(name, recompute=True)
    assert plain.keys() == again.keys()
    for key, value in plain.items():
        assert torch.equal(value, again[key]), key


class Moving(Linear):
    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            self.lin.weight.mul_(0.5)
        return self.lin(x)


def test_a_parameter_that_moves_is_refused_by_name() -> None:
    pipe = Pipeline(
        nn.Sequential(Moving(), nn.Linear(WIDTH, WIDTH)), ranks=2, microbatches=1, recompute=["0"],
        loss_fn=lambda output, target: (output - target).square().mean(),
    )  # fmt: skip
    with pytest.raises(StageError, match=r"Moving changes its parameter lin\.weight in place"):
        pipe.step(X, target=X)


class Passes(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


class GivesArgumentBack(nn.Module):
    """Checkpoints a unit that returns the model's argument, and goes on with that argument."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = Passes(), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = checkpoint(self.first, x, use_reentrant=False)
        twice = x * 2
        hidden: Tensor = self.last(self.second(h) + twice)
        return hidden


def test_a_checkpoint_that_gives_an_argument_back() -> None:
    torch.manual_seed(0)
    case = Case(GivesArgumentBack(), (torch.randn(4, 4),), torch.ones(4, 4), mse_loss)
    stages = [["first", "second"], ["last"]]
    compare(case, stages=stages, schedule="1F1B", ranks=2, microbatches=2).check(1e-5)
