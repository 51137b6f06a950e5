"""Losses and whole batches: whether a loss can be computed by microbatches, and one that cannot.

The losses of microbatches give that of the batch only if it is a mean or a sum over samples. So the last
stage asks, in the first step and now and then: it holds the loss of two microbatches together against their
own losses. If the model's forward computes the loss, its outputs do not say what the loss of two microbatches
is; then the batch is evaluated in fewer microbatches. With ``loss_over="batch"`` the outputs of all
microbatches meet instead, the loss is computed once, and its gradient is cut up again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from penstock.errors import MicrobatchError, UsageError
from penstock.rng import generator_states, generators_kept
from penstock.runtime.kinds import ModelCall
from penstock.runtime.loss import Loss, Reduction, Weights
from penstock.schedule import Op, Schedule
from penstock.values import (
    Split,
    flatten,
    map_tensors,
    output_dim,
    tensors_in,
    unflatten,
)

TARGET = "target"
_AGAIN = frozenset((10, 100, 1000))
"""The steps in which a loss is asked once more: batches that show what it is may come late."""
ASKING = _AGAIN | {1}
"""The steps in which a loss is asked that the model's forward computes."""
_MOST = 20
"""How often a loss is asked because a batch looks new."""
_TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-4}
_COARSE = 5e-2
"""The relative difference allowed for what was computed in a type; in smaller ones more."""

Evaluate = Callable[[Any, Any], Tensor]
"""``(output, target)`` -> the loss."""


# ---- microbatches put together again


class Joins:
    """Puts outputs and targets of microbatches together.

    Args:
        loss: the loss, with the rules by which batches are split.
        call: what the ranks brought, which says how many samples each microbatch has.
        guesses: whether to try it with a batch that the user has split: if all tensors have one entry for
            each sample, they can be put together.

    Raises:
        MicrobatchError: there is no rule by which to put them together.
    """

    def __init__(self, loss: Loss, call: ModelCall, *, guesses: bool = False) -> None:
        rules = loss.rules or {}
        rule = rules.get(TARGET, Split()) if isinstance(rules, Mapping) else Split()
        said = not isinstance(rule, Mapping) and not callable(rule)
        if (call.presplit and not call.counted) or ((call.counted or not said) and not guesses):
            # Where the user has counted the samples of each microbatch, it is for them to say what counts.
            raise MicrobatchError("the batch was split by the user's own rule")
        self._samples, self._exact = call.samples, call.counted or not said
        self._target: Any = rule if said else Split()
        self._output = 0 if call.presplit else output_dim(loss.rules)

    def outputs(self, parts: Mapping[int, Any]) -> Any:
        """The output of several microbatches."""
        return self._joined(parts, self._output, "outputs")

    def targets(self, parts: Mapping[int, Any]) -> Any:
        """Their target."""
        if not isinstance(self._target, Split):
            return next(iter(parts.values()))
        return self._joined(parts, self._target.dim or 0, "targets")

    def _joined(self, parts: Mapping[int, Any], dim: int, what: str) -> Any:
        lists = [(part, self._samples[m]) for m, part in parts.items() if type(part) is list]
        if len(lists) == len(parts) and all(len(part) == count for part, count in lists):
            return [sample for part, _ in lists for sample in part]
        flat = [flatten(part) for part in parts.values()]
        if any(tree != flat[0][1] for _, tree in flat):
            raise MicrobatchError(f"the {what} of microbatches differ in their structure")
        samples = [self._samples[microbatch] for microbatch in parts]
        columns = zip(*(leaves for leaves, _ in flat), strict=True)
        return unflatten([self._join(column, samples, dim, what) for column in columns], flat[0][1])

    def _join(self, leaves: Sequence[Any], samples: Sequence[int], dim: int, what: str) -> Any:
        """One leaf of several microbatches: put together if it has their samples, else the same in all."""
        first = leaves[0]
        if not isinstance(first, Tensor):
            if any(leaf != first for leaf in leaves):
                raise MicrobatchError(f"the {what} of microbatches hold plain values that differ")
            return first
        sizes = [leaf.shape[dim] if leaf.dim() > dim else 0 for leaf in leaves]
        if all(
            n and size and (size == n if self._exact else size % n == 0)
            for size, n in zip(sizes, samples, strict=True)
        ):
            try:
                return torch.cat(list(leaves), dim)
            except RuntimeError as error:
                shapes = [list(leaf.shape) for leaf in leaves]
                raise MicrobatchError(
                    f"the {what} of microbatches have the shapes {shapes}"
                ) from error
        if not all(torch.equal(leaf, first) for leaf in leaves[1:]):
            raise MicrobatchError(
                f"the {what} of microbatches hold a tensor of shape {list(first.shape)} that is not "
                "one entry for each sample, and not the same in all of them"
            )
        return first


# ---- is it a mean or a sum over samples?


class Inquiry:
    """Decides when a loss is asked.

    Attributes:
        is_inside: whether the model's forward seems to compute the loss, so that outputs cannot be asked.
    """

    def __init__(self) -> None:
        self.is_inside = False
        self._kinds = set[Any]()
        self._steps = 0

    def question(
        self,
        loss: Loss | None,
        weights: Weights,
        kinds: Any,
        joins: Callable[[], Joins],
        *,
        trains: bool,
    ) -> Question | None:
        """The question to ask in a call, if any.

        Args:
            loss: the loss of the call.
            weights: how much its microbatches count.
            kinds: how the microbatches look.
            joins: makes what puts microbatches together.
            trains: whether the call is a training step.
        """
        self._steps += trains
        new = (kinds, trains) not in self._kinds and len(self._kinds) < _MOST
        asks = loss is not None and loss.loss_over == "samples" and len(weights.shares) > 1
        if loss is None or not asks or not (new or (trains and self._steps in _AGAIN)):
            return None
        self._kinds.add((kinds, trains))
        try:
            return Question(loss, weights, joins(), self)
        except MicrobatchError:
            return None


class Question:
    """Holds the loss of two microbatches together against their own losses.

    Args:
        loss: the loss.
        weights: how much the microbatches count.
        joins: puts microbatches together.
        inquiry: learns whether the loss is computed inside the model.
    """

    def __init__(self, loss: Loss, weights: Weights, joins: Joins, inquiry: Inquiry) -> None:
        self._loss, self._weights, self._joins = loss, weights, joins
        self._inquiry = inquiry
        self._outputs: dict[int, Any] = {}
        self._targets: dict[int, Any] = {}
        self._losses: dict[int, Tensor] = {}

    def look(self, microbatch: int, output: Any, target: Any) -> None:
        """Note what the loss gets, before it may change it in place."""
        if len(self._outputs) < 2:
            self._outputs[microbatch] = map_tensors(output, lambda t: t.detach().clone())
            self._inquiry.is_inside |= _holds_a_loss(output)
            self._targets[microbatch] = map_tensors(target, lambda t: t.detach().clone())

    def check(
        self, microbatch: int, loss: Tensor, evaluate: Evaluate, device: torch.device
    ) -> None:
        """Note the loss of a microbatch; after the second one, ask.

        A loss that is another one when it is computed again, because of something besides its arguments,
        is not told.

        Raises:
            UsageError: the loss is not what ``reduction`` and ``loss_weight`` say.
        """
        if microbatch not in self._outputs or len(self._losses) > 1:
            return
        self._losses[microbatch] = loss.detach().clone()
        if len(self._losses) < 2:
            return
        try:
            together = self._again((*self._losses,), evaluate, device)
            error = None if together is None else self._compare(*together)
            if error is not None:
                # What the loss reads elsewhere, such as what a module keeps of its last call, is that of
                # the second microbatch by now. Then the first one's loss is not what it was, and that of
                # both together says nothing.
                alone = self._again((next(iter(self._losses)),), evaluate, device)
                if alone is not None and self._is_as_before(*alone):
                    raise error
        finally:
            self._outputs.clear()
            self._targets.clear()

    def _again(
        self, microbatches: Sequence[int], evaluate: Evaluate, device: torch.device
    ) -> tuple[float, float] | None:
        """The loss of microbatches together, and the difference allowed; None if it cannot be computed."""
        before = generator_states([device])
        with torch.no_grad(), generators_kept([device]), left_alone(self._loss.function):
            try:
                output = self._joins.outputs({m: self._outputs[m] for m in microbatches})
                target = self._joins.targets({m: self._targets[m] for m in microbatches})
                value = evaluate(output, target)
            except Exception:
                return None
            drawn = generator_states([device])
        if not all(map(torch.equal, before, drawn)):
            return None  # a loss that draws numbers
        types = {t.dtype for t in (value, *tensors_in(output)) if t.is_floating_point()}
        if torch.is_autocast_enabled(device.type):
            types.add(torch.get_autocast_dtype(device.type))
        return float(value), max(_TOLERANCE.get(kind, _COARSE) for kind in types)

    def _is_as_before(self, again: float, tolerance: float) -> bool:
        """Whether the first microbatch has the loss that it had."""
        first = float(next(iter(self._losses.values())))
        return abs(again - first) <= tolerance * max(abs(again), abs(first)) + tolerance / 100

    def _compare(self, together: float, tolerance: float) -> UsageError | None:
        """The error to raise if the loss of both is not what their own losses make."""
        first, second = self._losses
        losses = [float(loss) for loss in self._losses.values()]
        counts = [self._weights.counts[index] for index in (first, second)]
        mean = sum(n * x for n, x in zip(counts, losses, strict=True)) / (sum(counts) or 1.0)
        is_mean = self._loss.reduction == "mean"
        expected = mean if is_mean else sum(losses)
        allowed = tolerance * max(map(abs, (together, expected, *losses))) + tolerance / 100
        # Anything compared with nan is false.
        if not abs(together - expected) > allowed:
            return None
        a, b = losses
        what = f"a mean weighted by {counts[0]:g} and {counts[1]:g}" if is_mean else "a sum"
        looks: Reduction | None = None
        if is_mean and abs(together - sum(losses)) <= allowed:
            looks = "sum"
        elif not is_mean and abs(together - mean) <= allowed:
            looks = "mean"
        return UsageError(
            f"loss_fn of microbatches {first} and {second} together is {together:.6g}, but from their own "
            f"losses, {a:.6g} and {b:.6g}, it would be {expected:.6g} as {what}, so the microbatches would "
            f"not train on the loss of the batch.{_remedies(looks)} {_COMPARES}"
            'loss_over="batch" computes it once, on the outputs of all microbatches'
        )


_COMPARES = "If it compares samples with each other, or is otherwise not linear in them: "


def _remedies(looks: Reduction | None) -> str:
    """What to do about a loss of microbatches that do not make that of the batch."""
    likely = f' It looks like a {looks}: reduction="{looks}".' if looks else ""
    return (
        f"{likely} If it is a mean over something else than samples, such as tokens that count or class "
        "weights, say how much a microbatch counts: loss_weight=, a function of the target. If it is a sum, "
        'say reduction="sum". loss_over="microbatch" means the loss of each microbatch by itself.'
    )


# ---- a loss that the model's forward computes


def _holds_a_loss(output: Any) -> bool:
    """Whether an output has a number that may be its loss, but for the balance loss of experts.

    That one is of a microbatch by custom.
    """
    if isinstance(output, Mapping) and output.get("aux_loss") is not None:
        return False
    return any(t.numel() == 1 and not t.dim() and t.requires_grad for t in tensors_in(output))


def ask_inside(
    count: int,
    evaluate: Callable[[int], float],
    exchange: Callable[[Any], list[Any]],
    modules: Iterable[nn.Module],
    device: torch.device,
) -> None:
    """Hold the loss of a batch against that of the batch in half as many microbatches.

    All ranks call this. Only dropouts and batch norms are in evaluation mode. A loss that draws random
    numbers is let be, and so is one that is another one when it is computed again.

    Args:
        count: the number of microbatches.
        evaluate: computes the loss of the batch in a number of microbatches.
        exchange: exchanges JSON values with all ranks.
        modules: those of this process.
        device: where they live.

    Raises:
        UsageError: the losses differ.
    """
    modules = list(modules)
    # A forward may compute its loss in float32, whatever its weights are.
    types = {p.dtype for module in modules for p in module.parameters()} | {torch.float32}
    if torch.is_autocast_enabled(device.type):
        types.add(torch.get_autocast_dtype(device.type))
    before = generator_states([device])
    fewer = max(1, count // 2)
    with generators_kept([device]), _restored(modules):
        for module in modules:
            if isinstance(module, nn.modules.dropout._DropoutNd | nn.modules.batchnorm._NormBase):
                module.training = False
        losses = [evaluate(count), evaluate(fewer)]
        drawn = not all(map(torch.equal, before, generator_states([device])))
        coarsest = max(_TOLERANCE.get(one, _COARSE) for one in types if one.is_floating_point)
        rows = exchange([drawn, coarsest])
        tolerance = max(allowed for _, allowed in rows)
        allowed = tolerance * max(map(abs, losses)) + tolerance / 100
        apart = abs(losses[0] - losses[1]) > allowed and not any(drew for drew, _ in rows)
        if not apart or abs(evaluate(count) - losses[0]) > allowed:
            return
    many, few = losses
    looks: Reduction | None = "sum" if abs(many * count - few * fewer) <= allowed * count else None
    raise UsageError(
        f"the loss of the batch is {many:.6g} in {count} microbatches and {few:.6g} in {fewer}, so the "
        f"microbatches would not train on the loss of the batch.{_remedies(looks)} {_COMPARES}compute it in "
        'loss_fn, from outputs of the model, with loss_over="batch"'
    )


@contextmanager
def _restored(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Restore modes, buffers, and plain attributes of modules."""
    undo: list[Callable[[], Any]] = []
    for module in modules:
        undo.append(partial(vars(module).update, dict(vars(module))))
        for value in (*vars(module).values(), *module._buffers.values()):
            if isinstance(value, Tensor | list | deque):
                _note(value, undo, set(), 1)
    try:
        yield
    finally:
        for restore in undo:
            restore()


# ---- a loss of the user's, called once more, leaves no trace


@contextmanager
def left_alone(function: Any) -> Iterator[None]:
    """Restore what a function keeps in its object or its closure: counters, lists, running means."""
    undo: list[Callable[[], Any]] = []
    seen = set[int]()
    for cell in getattr(function, "__closure__", None) or ():
        try:
            value = cell.cell_contents
        except ValueError:
            continue
        undo.append(partial(setattr, cell, "cell_contents", value))
        _note(value, undo, seen, 3)
    for value in (function, getattr(function, "__self__", None), getattr(function, "func", None)):
        _note(value, undo, seen, 4)
    try:
        yield
    finally:
        for restore in undo:
            restore()


def _note(value: Any, undo: list[Callable[[], Any]], seen: set[int], depth: int) -> None:
    """Note how to restore a value that may be changed in place."""
    if not depth or id(value) in seen or isinstance(value, type | ModuleType | nn.Parameter):
        return
    seen.add(id(value))
    inner: Sequence[Any] = ()
    if isinstance(value, Tensor):
        undo.append(partial(_restore_tensor, value, value._version, value.detach().clone()))
    elif isinstance(value, list | deque):
        inner = list(value)
        undo.append(partial(_refill, value, list(value), value.extend))
    elif isinstance(value, dict | set):
        inner = list(value.values() if isinstance(value, dict) else value)
        undo.append(partial(_refill, value, value.copy(), value.update))
    elif hasattr(value, "__dict__") and not isinstance(value, FunctionType | MethodType):
        inner = list(vars(value).values())
        undo.append(partial(_refill, vars(value), dict(vars(value)), vars(value).update))
    for child in inner:
        _note(child, undo, seen, depth - 1)


def _restore_tensor(tensor: Tensor, version: int, before: Tensor) -> None:
    if tensor._version != version:
        with torch.no_grad():
            tensor.copy_(before)


def _refill(container: Any, before: Any, fill: Callable[[Any], Any]) -> None:
    container.clear()
    fill(before)


# ---- a loss that differentiates the model's output


class Differentiations(TorchFunctionMode):
    """Refuses a loss that differentiates one output by another where the way leads through other stages.

    Args:
        output: the model's output in the last stage.
        inputs: the values that came from other stages.
        arrived: their leaves.
    """

    def __init__(self, output: Any, inputs: Any, arrived: Sequence[Tensor]) -> None:
        super().__init__()
        self._arrived = arrived
        self._memory = {tensor.untyped_storage().data_ptr() for tensor in tensors_in(inputs)}
        self._outputs = {id(tensor) for tensor in tensors_in(output)}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.autograd.grad, Tensor.backward):
            inputs = kwargs.get("inputs", args[1] if func is torch.autograd.grad else ())
            for tensor in tensors_in(inputs):
                self._check(tensor)
        return func(*args, **kwargs)

    def _check(self, tensor: Tensor) -> None:
        if id(tensor) not in self._outputs or not self._arrived:
            return
        ends = _ends_of(tensor)
        whole = any(id(leaf) in ends for leaf in self._arrived)
        if whole and tensor.untyped_storage().data_ptr() not in self._memory:
            return  # it was made in this stage, and so was all that depends on it
        raise UsageError(
            f"loss_fn differentiates by an output of the model, of shape {list(tensor.shape)}, that the last "
            "stage was given, and the derivative would miss what the other stages compute from it. Compute "
            "the derivative in the model's forward, in a module that is placed as a whole, or put all that "
            "depends on this output into one stage: stages="
        )


def _ends_of(tensor: Tensor) -> set[int]:
    """The ids of the leaves that a tensor was computed from."""
    ends, seen = {id(tensor)}, set[Any]()
    waiting = [tensor.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            ends.add(id(leaf))
        waiting += [after for after, _ in node.next_functions]
    return ends


# ---- the loss of a whole batch


class BatchOutputs:
    """The outputs of a step's microbatches, for a loss that is computed once.

    Args:
        count: the number of microbatches.
        joins: puts microbatches together.
    """

    def __init__(self, count: int, joins: Joins) -> None:
        self._count, self._joins = count, joins
        self._outputs: dict[int, Any] = {}

    def add(self, microbatch: int, output: Any) -> bool:
        """Add the output of a microbatch; whether all are there."""
        self._outputs[microbatch] = output
        return len(self._outputs) == self._count

    def differentiate(
        self, targets: Sequence[Any], evaluate: Evaluate, seed: float
    ) -> tuple[Tensor, dict[int, list[Tensor | None]]]:
        """The loss, and for each microbatch the gradients of those of its outputs that require grad."""
        learners: dict[int, list[Tensor]] = {}

        def cut(microbatch: int, tensor: Tensor) -> Tensor:
            leaf = tensor.detach()
            if tensor.requires_grad and torch.is_grad_enabled():
                leaf.requires_grad_()
                learners[microbatch].append(leaf)
                # The loss may change its arguments in place, which a leaf does not allow.
                return leaf.view_as(leaf)
            return leaf

        leaves = {}
        for microbatch in sorted(self._outputs):
            learners[microbatch] = []
            leaves[microbatch] = map_tensors(self._outputs[microbatch], partial(cut, microbatch))
        loss = evaluate(
            self._joins.outputs(leaves), self._joins.targets({m: targets[m] for m in leaves})
        )
        if loss.requires_grad:
            loss.backward(torch.full_like(loss.detach(), seed))
        return loss, {m: [leaf.grad for leaf in of] for m, of in learners.items()}


def forwards_first(schedule: Schedule) -> bool:
    """Whether a schedule runs all forwards of the last stage before its first backward."""
    last = schedule.stages - 1
    ops = [
        action.op
        for action in schedule.actions(schedule.placement.rank_of[last])
        if action.stage == last and action.op in (Op.F, Op.B, Op.I)
    ]
    forwards = ops.count(Op.F)
    return all(op is Op.F for op in ops[:forwards])
