"""Losses that people write: those that are means or sums over samples are right, and others are refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock import Loss, Pipeline, Split
from penstock.errors import UsageError

ROWS, LENGTH, CLASSES = 8, 6, 5


class Net(nn.Module):
    """Rows of tokens to logits for each of them, and what a loss may need besides."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, CLASSES)
        self.scale: Tensor
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = self.second(self.first(x).tanh()).tanh()
        return {"logits": self.head(hidden), "hidden": hidden}


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


def divergence(output: Any, target: Tensor, reduction: str) -> Tensor:
    logits = output["logits"]
    teacher = (one_hot(target, logits) * 2).softmax(-1)
    return functional.kl_div(logits.log_softmax(-1), teacher, reduction=reduction)


def ctc(output: Any, target: Tensor, reduction: str = "mean") -> Tensor:
    steps = output["logits"].log_softmax(-1).transpose(0, 1)
    many = torch.full((len(target),), LENGTH)
    few = 1 + target[:, 2] % 2
    return functional.ctc_loss(steps, target[:, :2] % (CLASSES - 1) + 1, many, few, 0, reduction)


def focal(output: Any, target: Tensor) -> Any:
    losses = functional.cross_entropy(
        output["logits"].flatten(0, 1), target.flatten(), reduction="none"
    )
    return ((1 - (-losses).exp()) ** 2 * losses).mean()


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


def tasks(output: Any, target: Tensor) -> Any:
    return (
        0.3 * entropy(output, target)
        + 0.1 * output["hidden"].square().mean()
        + functional.huber_loss(pooled(output)[:, 0], target[:, 0].to(output["logits"]))
    )


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


class Smoothed(nn.Module):
    """Weighs two tasks by parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.logs = nn.Parameter(torch.tensor([0.3, -0.2]))

    def forward(self, output: Any, target: Tensor) -> Any:
        first, second = self.logs.exp()
        return entropy(output, target) / first + output["hidden"].abs().mean() / second


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


def under_autocast(output: Any, target: Tensor) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        return (output["hidden"] @ torch.ones(8, 3, dtype=output["hidden"].dtype)).square().mean()


WEIGHT = torch.tensor([0.1, 1.0, 2.0, 9.0, 0.5])
LABELS, RAGGED = labels(), labels(ragged=True)
HALF = LABELS.masked_fill(torch.arange(ROWS)[:, None] < 4, -100)


@dataclass
class Case:
    """A loss, its target, options of the pipeline, and types in which it can be computed."""

    function: Callable[[Any, Any], Any]
    target: Tensor = LABELS
    options: dict[str, Any] = field(default_factory=dict)
    types: str = "float32 float64 bfloat16"
    # What the refusal of an unfit one says to do.
    remedy: str = ""


F32 = "float32"
WEIGHS = {"weight": valid}
SUMS = {"reduction": "sum"}
CASES: dict[str, Case] = {
    "cross entropy": Case(entropy),
    "label smoothing": Case(lambda o, t: entropy(o, t, label_smoothing=0.1)),
    "label smoothing of tokens that count": Case(
        lambda o, t: entropy(o, t, label_smoothing=0.1), RAGGED, WEIGHS
    ),
    "ignore_index, nothing ignored": Case(lambda o, t: entropy(o, t, ignore_index=-100)),
    "ignore_index, loss_weight": Case(entropy, RAGGED, WEIGHS),
    "ignore_index, a sum": Case(lambda o, t: entropy(o, t, reduction="sum"), RAGGED, SUMS),
    "a sum over tokens that count": Case(
        lambda o, t: entropy(o, t, reduction="sum"), RAGGED, {**SUMS, **WEIGHS}
    ),
    "class weights, loss_weight": Case(
        lambda o, t: entropy(o, t, weight=WEIGHT), LABELS, {"weight": lambda t: WEIGHT[t].sum()},
        F32,
    ),
    "class weights, a sum": Case(
        lambda o, t: entropy(o, t, weight=WEIGHT, reduction="sum"), LABELS, SUMS, F32
    ),
    "BCE with pos_weight": Case(lambda o, t: bce(o, t, pos_weight=WEIGHT)),
    "BCE with weight": Case(lambda o, t: bce(o, t, weight=WEIGHT)),
    "KL, batchmean": Case(lambda o, t: divergence(o, t, "batchmean")),
    "KL over tokens": Case(lambda o, t: divergence(o, t, "sum") / t.numel()),
    "CTC": Case(ctc, types="float32 float64"),
    "triplet": Case(triplet),
    "focal": Case(focal),
    "dice of each row": Case(lambda o, t: dice(o, t, (1, 2))),
    "a mean of means of rows": Case(lambda o, t: regression(o, t, True), RAGGED),
    "a mean over tokens, loss_weight": Case(lambda o, t: regression(o, t, False), RAGGED, WEIGHS),
    "several tasks": Case(tasks),
    "a module with parameters": Case(Smoothed()),
    "a module with a state": Case(Anneals()),
    "in place": Case(in_place),
    "with random numbers": Case(drawn),
    "under autocast": Case(under_autocast),
    "a hinge that is satisfied": Case(lambda o, t: functional.relu(o["logits"] - 99).mean()),
    "very small": Case(lambda o, t: 1e-12 * entropy(o, t)),
    "terms that cancel": Case(
        lambda o, t: (o["logits"] + 1e3).square().mean() - (o["hidden"] + 1e3).square().mean(),
        types=F32,
    ),
    "squares of large numbers": Case(lambda o, t: (1e4 * o["logits"]).square().mean()),
    "a sum that is said": Case(lambda o, t: o["logits"].square().sum(), LABELS, SUMS),
}  # fmt: skip

OVER_BATCH = 'over="batch"'
UNFIT: dict[str, Case] = {
    "ignore_index": Case(entropy, RAGGED, remedy="Loss(fn, weight="),
    "a microbatch without labels": Case(entropy, HALF, remedy="Loss(fn, weight="),
    "label smoothing, ignore_index": Case(
        lambda o, t: entropy(o, t, label_smoothing=0.1), RAGGED, remedy="Loss(fn, weight="
    ),
    "class weights": Case(
        lambda o, t: entropy(o, t, weight=WEIGHT), types=F32, remedy="Loss(fn, weight="
    ),
    "a sum": Case(lambda o, t: entropy(o, t, reduction="sum"), remedy='It looks like a sum'),
    "a small sum": Case(
        lambda o, t: 1e-12 * entropy(o, t, reduction="sum"), remedy='It looks like a sum'
    ),
    "a mean said to be a sum": Case(entropy, LABELS, SUMS, remedy='It looks like a mean'),
    "a mean over tokens": Case(lambda o, t: regression(o, t, False), RAGGED, remedy="Loss(fn, weight="),
    "KL, sum": Case(lambda o, t: divergence(o, t, "sum"), remedy='It looks like a sum'),
    "CTC, sum": Case(lambda o, t: ctc(o, t, "sum"), types=F32, remedy='It looks like a sum'),
    "dice of the batch": Case(lambda o, t: dice(o, t, (0, 1)), remedy=OVER_BATCH),
    "a root": Case(lambda o, t: o["logits"].square().mean().sqrt(), remedy=OVER_BATCH),
    "in-batch negatives": Case(negatives, remedy=OVER_BATCH),
    "decorrelation": Case(decorrelates, types="float32 float64", remedy=OVER_BATCH),
    "a largest": Case(lambda o, t: o["logits"].max(), remedy=OVER_BATCH),
}  # fmt: skip


def run(case: Case, kind: str, microbatches: int = 2) -> tuple[float, float]:
    """The loss in microbatches, and that of the whole batch."""
    dtype = getattr(torch, kind)
    target, x = case.target, inputs(dtype)
    with torch.no_grad():
        net = Net().to(dtype)
        expected = float(case.function(net(x), target))
        if "weight" in case.options and "reduction" in case.options:
            expected /= float(case.options["weight"](target))
    pipe = Pipeline(
        net, ranks=2, microbatches=microbatches, split={"output": Split(0)},
        loss_fn=Loss(case.function, nonfinite="warn", **case.options),
    )  # fmt: skip
    return pipe.step(x, target=target).loss, expected


def each(cases: dict[str, Case]) -> Any:
    """In each of its types; by day, one after the other in another one."""
    return [
        pytest.param(
            case,
            kind,
            id=f"{name}, {kind}",
            marks=pytest.mark.nightly if (number + place) % len(case.types.split()) else (),
        )
        for number, (name, case) in enumerate(cases.items())
        for place, kind in enumerate(case.types.split())
    ]


GAPS = {"float64": 1e-9, "float32": 1e-5, "bfloat16": 0.05}
NOT_COMPARED = ("a module with a state", "with random numbers", "terms that cancel")


@pytest.mark.whole
@pytest.mark.parametrize(("case", "kind"), each(CASES))
def test_a_mean_or_a_sum_is_never_refused(case: Case, kind: str) -> None:
    loss, expected = run(case, kind)
    if all(case is not CASES[name] for name in NOT_COMPARED):
        assert loss == pytest.approx(expected, rel=GAPS[kind], abs=1e-14)


@pytest.mark.whole
@pytest.mark.parametrize(("case", "kind"), each(UNFIT))
def test_any_other_loss_is_refused_with_what_to_do(case: Case, kind: str) -> None:
    with pytest.raises(UsageError, match="microbatches 0 and 1 together is") as caught:
        run(case, kind)
    assert case.remedy in str(caught.value)
