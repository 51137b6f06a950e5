"""Whether a loss is what it says, so that the losses of microbatches make that of the batch.

It is compared once, in the first call that has two microbatches: that of a few rows of both with that of the
rows of each. Nothing is put back afterwards: a loss that counts its calls counts these too.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock._engine.microbatches import OUTPUT, TARGET, Split, labels_that_count
from penstock._engine.rng import generator_states, generators_kept
from penstock._engine.runtime.kinds import ModelCall
from penstock._engine.runtime.loss import MAIN, StepLoss
from penstock._engine.values import flatten, tensors_in, unflatten
from penstock.errors import MicrobatchError, UsageError
from penstock.stage import uncompiled

logger = logging.getLogger("penstock")

_NUMBERS = 2**21
"""How many numbers of a microbatch's output and target are taken at most: 16 MiB in float64."""
_TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-4}
"""The relative difference allowed between losses of a type; in smaller ones more."""


def differ(found: float, expected: float, size: float, kind: torch.dtype) -> bool:
    """Return whether losses of a type, made of numbers up to ``size``, differ by more than roundings."""
    relative = _TOLERANCE.get(kind, 5e-2)
    floor = 0.0 if kind is torch.float64 else relative / 100
    # A mean over nothing is no number; then that of more rows must be none either.
    return math.isfinite(found) and not abs(found - expected) <= relative * size + floor


def advice(looks: str | None, instead: str) -> str:
    """Say what to do about a loss that is not what it says.

    Args:
        looks: what it seems to be, a mean or a sum, if that is known.
        instead: what to do if it compares samples with each other.
    """
    likely = f'It looks like a {looks}: reduction="{looks}". ' if looks else ""
    return (
        f"so the microbatches would not train on the loss of the batch. {likely}If it is a mean over the "
        'labels that are not -100, say over="tokens"; over something else, such as class weights, say how '
        "much a microbatch counts: penstock.Loss(fn, weight=...), or loss_weight= of the step or the "
        'strategy, a function of the target. If it is a sum, say reduction="sum". If it compares samples '
        f"with each other, or is otherwise not linear in them, {instead}. check=False takes the losses of "
        "microbatches as they are"
    )


class _Rows(NamedTuple):
    """A few rows of a microbatch.

    Attributes:
        leaves: the leaves of its output and target.
        tree: the structure of these.
        ways: for each leaf, in which dimension it has how many rows for each sample, if it has some.
        weight: how much they count in a mean.
    """

    leaves: list[Any]
    tree: Any
    ways: list[tuple[int, int] | None]
    weight: float


class LossCheck:
    """Compares the loss of a few rows of two microbatches together with those of their own, once.

    Attributes:
        is_due: whether that is still to be done.
        is_inside: whether the model's forward seems to compute the loss, so that outputs do not say what that
            of other rows is.
    """

    def __init__(self) -> None:
        self.is_due, self.is_inside = True, False
        self._rows: dict[int, _Rows] = {}

    def begin(self) -> None:
        """Forget the rows of a call that had no second microbatch."""
        self._rows.clear()

    def take(
        self,
        loss: StepLoss,
        call: ModelCall,
        microbatch: int,
        pair: tuple[Any, Any],
        evaluate: Callable[[Any, Any], Tensor],
        device: torch.device,
    ) -> None:
        """Take rows of a microbatch's output and target, before its loss may change them; of two, compare.

        Raises:
            UsageError: the loss is not what it says.
        """
        self.is_inside |= _holds_a_loss(pair[0])
        try:
            self._rows[microbatch] = _rows_of(loss, call, microbatch, *pair)
            if len(self._rows) < 2:
                return
            one, other = self._rows.values()
            parts = [one, other], [one], [other], [one, other]
            (together, a, b, again), kind = _losses(parts, evaluate, device)
        except Exception as error:  # also of the user's code, which may not expect a few rows
            self.is_due = False
            if not self.is_inside:
                logger.info("penstock: loss_fn is taken to be what it says, since %s", error)
            return
        mean = (one.weight * a + other.weight * b) / (one.weight + other.weight)
        is_mean, size = loss.reduction == "mean", max(map(abs, (together, a, b)))
        expected, otherwise = (mean, a + b) if is_mean else (a + b, (a + b) / 2)
        # A loss that is another one each time, for it depends on what it keeps, is let be.
        if differ(together, expected, size, kind) and not differ(again, together, size, kind):
            what = f"a mean weighted by {one.weight:g} and {other.weight:g}" if is_mean else "a sum"
            looks = (
                None if differ(together, otherwise, size, kind) else "sum" if is_mean else "mean"
            )
            whole = 'over="batch" computes it once, on the outputs of all microbatches'
            several = max(way[1] for way in one.ways if way is not None)
            guess = (
                f"{several} rows of an output were taken for one sample: if they are blocks, each with a row "
                f"for every sample, say split={{'output': Split(0, chunks={several})}}; "
                if several > 1
                else ""
            )
            raise UsageError(
                f"loss_fn of a few rows of microbatches {' and '.join(map(str, self._rows))} together is "
                f"{together:.6g}, but from their own losses, {a:.6g} and {b:.6g}, it would be "
                f"{expected:.6g} as {what}, {guess}{advice(looks, whole)}"
            )
        self.is_due = False
        logger.info(
            "penstock: loss_fn was compared: that of a few rows of two microbatches with their own, in four "
            "calls. Loss(..., check=False) leaves them out"
        )


def _rows_of(loss: StepLoss, call: ModelCall, microbatch: int, output: Any, target: Any) -> _Rows:
    """Copy as many rows of a microbatch as hold few numbers."""
    samples = call.samples[microbatch]
    if not samples or (call.presplit and not call.counted):
        raise MicrobatchError("the user counted the samples of microbatches")
    (leaves, tree), outputs = flatten((output, target)), len(flatten(output)[0])
    rows = min(samples, max(1, samples * _NUMBERS // max(1, _numbers(leaves))))
    ways: list[tuple[int, int] | None] = []
    for at, leaf in enumerate(leaves):
        dim = _dim(loss, call, OUTPUT if at < outputs else TARGET)
        has = isinstance(leaf, Tensor) and -leaf.dim() <= dim < leaf.dim()
        # The weight of a head whose product the loss computes has no rows for samples.
        has = has and not isinstance(leaf._base, nn.Parameter)
        each, rest = divmod(leaf.shape[dim] if has else 0, samples)
        ways.append((dim, each) if each and not rest else None)
        if ways[-1] is not None:
            leaves[at] = leaf.narrow(dim, 0, rows * each)
    if not any(ways):
        raise MicrobatchError("no output or target has rows for the samples")
    is_whole = rows == samples and _numbers(leaves) <= _NUMBERS
    if _numbers(leaves) > _NUMBERS and call.dim is None:
        leaves = _fewer_tokens(leaves, outputs)
    weight: Any = loss.weights[MAIN]
    counted: float | None = rows
    if loss.reduction == "sum":
        counted = 1.0
    elif isinstance(weight, Sequence):
        counted = weight[microbatch] if is_whole else None
    elif callable(weight):
        (counted,) = loss.counts([rows], [unflatten(leaves, tree)[1]])
    elif call.weighted:  # by labels, or by tokens if there are none
        labels = labels_that_count(unflatten(leaves, tree)[1])
        counted = labels if labels is not None else None if call.dim is None else rows
    if not counted:
        raise MicrobatchError("how much a few rows count is unknown, or nothing")
    copies = [leaf.detach().clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    return _Rows(copies, tree, ways, counted)


def _dim(loss: StepLoss, call: ModelCall, name: str) -> int:
    """Return the dimension of the rows in outputs or targets."""
    rule = loss.rules.get(name) if isinstance(loss.rules, Mapping) else None
    if call.presplit or rule is None or callable(rule):
        return call.dim or 0
    if isinstance(rule, Split) and rule.dim is not None and rule.chunks == 1:
        return rule.dim
    raise MicrobatchError(f"split= has a rule of its own for the {name}")


def _numbers(leaves: Sequence[Any]) -> int:
    return sum(leaf.numel() for leaf in leaves if isinstance(leaf, Tensor))


def _fewer_tokens(leaves: list[Any], outputs: int) -> list[Any]:
    """Take some tokens of rows, all along: dimension 1, if the target has them there too."""
    lengths = {leaf.shape[1] for leaf in tensors_in(leaves[outputs:]) if leaf.dim() > 1}
    length, step = lengths.pop() if len(lengths) == 1 else 0, -(-_numbers(leaves) // _NUMBERS)
    # Of [samples, classes, tokens], with as many classes as tokens, classes might be left out.
    unclear = any([*leaf.shape[1:]].count(length) > 1 for leaf in tensors_in(leaves))
    few = [
        leaf[:, ::step]
        if isinstance(leaf, Tensor) and leaf.dim() > 1 and leaf.shape[1] == length
        else leaf
        for leaf in leaves
    ]
    if unclear or _numbers(few) > 2 * _NUMBERS:
        raise MicrobatchError("the output of one sample is large")
    return few


def _losses(
    parts: Sequence[Sequence[_Rows]], evaluate: Callable[[Any, Any], Tensor], device: torch.device
) -> tuple[list[float], torch.dtype]:
    """Compute the loss of rows in the most precise type that it takes; return that of the result too."""
    for kind in (torch.float64, torch.float32, None):
        before = generator_states([device])
        try:
            exact = torch.autocast(device.type, enabled=False)
            # Nothing is compiled for the shapes and types of a few rows.
            with torch.no_grad(), generators_kept([device]), exact, uncompiled():
                found = [evaluate(*_joined(rows, kind)) for rows in parts]
                drew = not all(map(torch.equal, before, generator_states([device])))
        except Exception:
            if kind is None:
                raise
            continue
        if drew:
            raise MicrobatchError("it draws random numbers")
        return [float(value) for value in found], torch.bfloat16 if kind is None else found[0].dtype
    raise AssertionError


def _joined(rows: Sequence[_Rows], kind: torch.dtype | None) -> tuple[Any, Any]:
    """Put rows together, as an output and a target that the loss may change in place."""
    leaves, first = [], rows[0]
    if any(of.tree != first.tree or of.ways != first.ways for of in rows):
        raise MicrobatchError("microbatches give outputs of different structures")
    for way, *column in zip(first.ways, *(of.leaves for of in rows), strict=True):
        leaf = column[0]
        if way is not None:
            leaf = torch.cat(column, way[0])
        elif any(
            not (torch.equal(leaf, of) if isinstance(of, Tensor) else leaf == of) for of in column
        ):
            raise MicrobatchError("outputs that do not count samples differ between microbatches")
        elif isinstance(leaf, Tensor):
            leaf = leaf.clone()
        floats = kind is not None and isinstance(leaf, Tensor) and leaf.is_floating_point()
        leaves.append(leaf.to(kind) if floats else leaf)
    output, target = unflatten(leaves, first.tree)
    return output, target


def _holds_a_loss(output: Any) -> bool:
    """Return whether an output has a number that may be its loss, but for the balance loss of experts.

    That one is of a microbatch by custom.
    """
    if isinstance(output, Mapping) and output.get("aux_loss") is not None:
        return False
    return any(t.numel() == 1 and not t.dim() and t.requires_grad for t in tensors_in(output))
