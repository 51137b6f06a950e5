"""Losses that people write: those that are means or sums over samples are right, and others are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock import Loss, Pipeline, Split
from penstock.errors import UsageError
from tests.catalogue.making import Does

ROWS, LENGTH, CLASSES = 8, 6, 5


def two_values(m: Any, x: Tensor) -> dict[str, Tensor]:
    """Rows of tokens to logits for each of them, and what a loss may need besides."""
    hidden = m.second(m.first(x).tanh()).tanh()
    return {"logits": m.head(hidden), "hidden": hidden}


def net() -> nn.Module:
    torch.manual_seed(0)
    first, second, head = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, CLASSES)
    return Does(two_values, first=first, second=second, head=head)


def inputs(kind: torch.dtype) -> Tensor:
    return torch.randn(ROWS, LENGTH, 4, generator=torch.Generator().manual_seed(1)).to(kind)


def labels(ragged: bool = False) -> Any:
    """Of each token; with ``ragged``, other numbers of them count in each row."""
    numbers = torch.randint(3, (ROWS, LENGTH), generator=torch.Generator().manual_seed(2))
    numbers = (numbers + torch.arange(ROWS)[:, None] // 3) % CLASSES
    counts = torch.tensor([6, 1, 3, 5, 2, 6, 4, 1])
    return numbers.masked_fill(torch.arange(LENGTH) >= counts[:, None], -100) if ragged else numbers


def valid(target: Tensor) -> Any:
    return (target != -100).sum()


def entropy(output: Any, target: Tensor, **options: Any) -> Tensor:
    return functional.cross_entropy(output["logits"].flatten(0, 1), target.flatten(), **options)


def pooled(output: Any) -> Any:
    return output["logits"].mean(1)


def one_hot(target: Tensor, like: Tensor) -> Any:
    return functional.one_hot(target.clamp(min=0), CLASSES).to(like)


def bce(output: Any, target: Tensor, **options: Any) -> Tensor:
    logits = output["logits"]
    return functional.binary_cross_entropy_with_logits(logits, one_hot(target, logits), **options)


def ctc(output: Any, target: Tensor) -> Tensor:
    steps = output["logits"].log_softmax(-1).transpose(0, 1)
    many = torch.full((len(target),), LENGTH)
    few = 1 + target[:, 2] % 2
    return functional.ctc_loss(steps, target[:, :2] % (CLASSES - 1) + 1, many, few, 0, "sum")


def dice(output: Any, target: Tensor, over: Any) -> Any:
    shares, truth = output["logits"].softmax(-1), one_hot(target, output["logits"])
    common = (shares * truth).sum(over)
    return (1 - (2 * common + 1) / (shares.sum(over) + truth.sum(over) + 1)).mean()


def regression(output: Any, target: Tensor, of_row: bool) -> Any:
    """Errors of the tokens that count, over their number in each row or in all."""
    errors = (output["logits"][..., 0] - target).square()
    counted = (target != -100).to(errors)
    if of_row:
        return ((errors * counted).sum(1) / counted.sum(1)).mean()
    return (errors * counted).sum() / counted.sum()


def triplet(output: Any, target: Tensor) -> Any:
    anchor, near, far = output["hidden"][:, :3].unbind(1)
    return functional.triplet_margin_loss(anchor, near, far, margin=2.0)


def negatives(output: Any, target: Tensor) -> Any:
    rows = (
        functional.normalize(output["hidden"][:, 0]),
        functional.normalize(output["hidden"][:, 1]),
    )
    return functional.cross_entropy(rows[0] @ rows[1].T, torch.arange(len(target)))


def decorrelates(output: Any, target: Tensor) -> Any:
    rows = output["hidden"][:, 0]
    rows = (rows - rows.mean(0)) / (rows.var(0) + 1e-3).sqrt()
    return (rows.T @ rows / len(rows) - torch.eye(8).to(rows)).square().sum()


class Anneals(nn.Module):
    """Counts its calls, and so is another loss each time."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, output: Any, target: Tensor) -> Tensor:
        self.calls += 1
        return entropy(output, target) * min(1.0, self.calls / 100)


def in_place(output: Any, target: Tensor) -> Any:
    return output["logits"].sub_(1.0).square_().mean()


def drawn(output: Any, target: Tensor) -> Any:
    return functional.dropout(output["hidden"], 0.5).square().mean()


WEIGHT = torch.tensor([0.1, 1.0, 2.0, 9.0, 0.5])
LABELS, RAGGED = labels(), labels(ragged=True)
HALF = LABELS.masked_fill(torch.arange(ROWS)[:, None] < 4, -100)


OVER_BATCH = 'over="batch"'
WEIGHED = "Loss(fn, weight="
OF_SUM = "It looks like a sum"
WEIGHS: dict[str, Any] = {"weight": valid}
SUMS: dict[str, Any] = {"reduction": "sum"}
Written = tuple[Callable[[Any, Any], Any], Tensor, dict[str, Any]]
FIT: dict[str, Written] = {
    "cross entropy": (entropy, LABELS, {}),
    "label smoothing": (lambda o, t: entropy(o, t, label_smoothing=0.1), RAGGED, WEIGHS),
    "ignore_index, loss_weight": (entropy, RAGGED, WEIGHS),
    "ignore_index, over tokens": (entropy, RAGGED, {"over": "tokens"}),
    "a sum": (lambda o, t: entropy(o, t, reduction="sum"), RAGGED, SUMS),
    "a sum of tokens that count": (
        lambda o, t: entropy(o, t, reduction="sum"), RAGGED, SUMS | WEIGHS
    ),
    "class weights": (
        lambda o, t: entropy(o, t, weight=WEIGHT.to(o["logits"])), LABELS,
        {"weight": lambda t: WEIGHT[t].sum()},
    ),
    "BCE with pos_weight": (lambda o, t: bce(o, t, pos_weight=WEIGHT), LABELS, {}),
    "triplet": (triplet, LABELS, {}),
    "dice of each row": (lambda o, t: dice(o, t, (1, 2)), LABELS, {}),
    "a mean of means of rows": (lambda o, t: regression(o, t, True), RAGGED, {}),
    "a mean over tokens, loss_weight": (lambda o, t: regression(o, t, False), RAGGED, WEIGHS),
    "a module with a state": (Anneals(), LABELS, {}),
    "in place": (in_place, LABELS, {}),
    "with random numbers": (drawn, LABELS, {}),
    "a hinge that is satisfied": (lambda o, t: functional.relu(o["logits"] - 99).mean(), LABELS, {}),
    "very small": (lambda o, t: 1e-12 * entropy(o, t), LABELS, {}),
    "terms that cancel": (
        lambda o, t: (o["logits"] + 1e3).square().mean() - (o["hidden"] + 1e3).square().mean(),
        LABELS, {},
    ),
    "squares of large numbers": (lambda o, t: (1e4 * o["logits"]).square().mean(), LABELS, {}),
}  # fmt: skip
UNFIT: dict[str, tuple[Written, str]] = {
    "ignore_index": ((entropy, RAGGED, {}), WEIGHED),
    "a microbatch without labels": ((entropy, HALF, {}), WEIGHED),
    "class weights": (
        (lambda o, t: entropy(o, t, weight=WEIGHT.to(o["logits"])), LABELS, {}),
        WEIGHED,
    ),
    "a sum": ((lambda o, t: entropy(o, t, reduction="sum"), LABELS, {}), OF_SUM),
    "a small sum": ((lambda o, t: 1e-12 * entropy(o, t, reduction="sum"), LABELS, {}), OF_SUM),
    "a mean said to be a sum": ((entropy, LABELS, SUMS), "It looks like a mean"),
    "a mean over tokens": ((lambda o, t: regression(o, t, False), RAGGED, {}), WEIGHED),
    "CTC, sum": ((ctc, LABELS, {}), OF_SUM),
    "dice of the batch": ((lambda o, t: dice(o, t, (0, 1)), LABELS, {}), OVER_BATCH),
    "a root": ((lambda o, t: o["logits"].square().mean().sqrt(), LABELS, {}), OVER_BATCH),
    "in-batch negatives": ((negatives, LABELS, {}), OVER_BATCH),
    "decorrelation": ((decorrelates, LABELS, {}), OVER_BATCH),
    "a largest": ((lambda o, t: o["logits"].max(), LABELS, {}), OVER_BATCH),
}
"""With what the refusal says to do."""


def run(written: Written, kind: torch.dtype) -> tuple[float, float]:
    """The loss in two microbatches, and that of the whole batch."""
    function, target, options = written
    model, x = net().to(kind), inputs(kind)
    with torch.no_grad():
        expected = float(function(model(x), target))
        if options.keys() >= {"weight", "reduction"}:
            expected /= float(options["weight"](target))
    loss_fn = Loss(function, nonfinite="warn", **options)
    pipe = Pipeline(model, ranks=2, microbatches=2, split={"output": Split(0)}, loss_fn=loss_fn)
    return pipe.step(x, target=target).loss, expected


GAPS = {torch.float32: 1e-5, torch.float64: 1e-9, torch.bfloat16: 0.05}
NOT_COMPARED = ("a module with a state", "with random numbers", "terms that cancel")
ONLY_FLOAT32 = ("CTC, sum", "decorrelation", "terms that cancel", "class weights")


def kinds(name: str) -> list[torch.dtype]:
    return [*GAPS][: 1 if name in ONLY_FLOAT32 else 3]


@pytest.mark.parametrize("name", FIT)
def test_a_mean_or_a_sum_is_never_refused(name: str) -> None:
    for kind in kinds(name):
        loss, expected = run(FIT[name], kind)
        if name not in NOT_COMPARED:
            assert loss == pytest.approx(expected, rel=GAPS[kind], abs=1e-14)


@pytest.mark.parametrize("name", UNFIT)
def test_any_other_loss_is_refused_with_what_to_do(name: str) -> None:
    written, remedy = UNFIT[name]
    for kind in kinds(name):
        with pytest.raises(UsageError, match="microbatches 0 and 1 together is") as caught:
            run(written, kind)
        assert remedy in str(caught.value)
