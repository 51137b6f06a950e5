"""Whether the losses of microbatches make that of the batch.

They do only if the loss is a mean or a sum over samples. So it is asked, in the first step and now and then:
the last stage holds the loss of two microbatches together against their own losses. If the model's forward
computes the loss, its outputs do not say what the loss of two microbatches is; then the batch is evaluated in
fewer microbatches.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from penstock._engine.rng import generator_states, generators_kept
from penstock._engine.runtime.kinds import Agreement
from penstock._engine.runtime.loss import MAIN, Reduction, StepLoss, Weights
from penstock._engine.runtime.whole import Evaluate, Joins
from penstock._engine.values import map_tensors, tensors_in
from penstock.errors import MicrobatchError, UsageError

_AGAIN = frozenset((10, 100, 1000))
"""The steps in which a loss is asked once more: batches that show what it is may come late."""
ASKING = _AGAIN | {1}
"""The steps in which a loss is asked that the model's forward computes."""
_MOST = 20
"""How often a loss is asked because a batch looks new."""
_TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-4}
_COARSE = 5e-2
"""The relative difference allowed for what was computed in a type; in smaller ones more."""
_PRECISE = (torch.float64, torch.float32)
"""The types in which a loss is computed where there is doubt."""
_ROUNDINGS = 16
"""How often the precision of its type the same loss may differ from itself."""


def _allowed(*kinds: torch.dtype) -> float:
    return max(_TOLERANCE.get(kind, _COARSE) for kind in kinds if kind.is_floating_point)


def _apart(together: float, expected: float, allowed: float) -> bool:
    """Whether two losses differ; if one of the parts is no number, the loss of both must be none either."""
    return math.isfinite(together) and not abs(together - expected) <= allowed


# ---- a loss of outputs: two microbatches together


class Inquiry:
    """Decides when a loss is asked.

    Attributes:
        is_inside: whether the model's forward seems to compute the loss, so that outputs cannot be asked.
    """

    def __init__(self) -> None:
        self.is_inside = False
        self._asked = self._steps = 0

    def question(
        self,
        loss: StepLoss | None,
        weights: Weights,
        agreement: Agreement,
        joins: Callable[[], Joins],
        *,
        trains: bool,
    ) -> Question | None:
        """The question to ask in a call, if any.

        Args:
            loss: the loss of the call.
            weights: how much its microbatches count.
            agreement: what the ranks agreed on for it.
            joins: makes what puts microbatches together.
            trains: whether the call is a training step.
        """
        self._steps += trains
        new = not agreement.asked and self._asked < _MOST
        asks = loss is not None and loss.asks and len(weights.shares) > 1
        if loss is None or not asks or not (new or (trains and self._steps in _AGAIN)):
            return None
        self._asked += not agreement.asked
        agreement.asked = True
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

    def __init__(self, loss: StepLoss, weights: Weights, joins: Joins, inquiry: Inquiry) -> None:
        self._loss, self._weights, self._joins = loss, weights, joins
        self._inquiry = inquiry
        self._calls: dict[int, tuple[Any, Any]] = {}
        self._losses: dict[int, Tensor] = {}

    def look(self, microbatch: int, output: Any, target: Any) -> None:
        """Note what the loss gets, before it may change it in place."""
        if len(self._calls) < 2:
            self._inquiry.is_inside |= _holds_a_loss(output)
            self._calls[microbatch] = map_tensors((output, target), lambda t: t.detach().clone())

    def check(
        self, microbatch: int, loss: Tensor, evaluate: Evaluate, device: torch.device
    ) -> None:
        """Note the loss of a microbatch; after the second one, ask.

        Raises:
            UsageError: the loss is not what its ``reduction`` and ``weight`` say.
        """
        if microbatch not in self._calls or len(self._losses) > 1:
            return
        self._losses[microbatch] = loss.detach().clone()
        if len(self._losses) == 2:
            try:
                self._ask(partial(self._again, evaluate, device))
            finally:
                self._calls.clear()

    def _ask(self, again: Callable[..., Tensor | None]) -> None:
        first, second = self._losses
        together = again((first, second))
        if together is None:
            return
        values = [float(value) for value in (together, *self._losses.values())]
        rounding = _ROUNDINGS * torch.finfo(together.dtype).eps
        agrees = not _apart(values[0], self._expected(values), rounding * max(map(abs, values)))
        if agrees and together.dtype in _PRECISE:
            return
        # What the loss reads elsewhere, such as what a module keeps of its last call, is that of the second
        # microbatch by now. Then the first one's loss is not what it was, and that of both says nothing.
        alone = again((first,))
        if alone is None or abs(float(alone) - values[1]) > rounding * abs(values[1]):
            return
        kinds = {together.dtype, *(t.dtype for t in tensors_in(self._calls[first][0]))}
        allowed = _allowed(*kinds, *_autocast_types(together.device))
        floor = allowed / 100
        # More precise types tell a loss of another kind from roundings.
        for kind in _PRECISE:
            precise = [again(which, kind) for which in ((first, second), (first,), (second,))]
            known = [value for value in precise if value is not None]
            if len(known) == 3:
                values = [float(value) for value in known]
                allowed = _allowed(known[0].dtype)
                floor = 0.0 if known[0].dtype is torch.float64 else allowed / 100
                break
        self._compare(values, allowed * max(map(abs, values)) + floor)

    def _again(
        self,
        evaluate: Evaluate,
        device: torch.device,
        microbatches: Sequence[int],
        kind: torch.dtype | None = None,
    ) -> Tensor | None:
        """The loss of microbatches together; None if it cannot be computed, or draws random numbers."""
        before = generator_states([device])
        with torch.no_grad(), generators_kept([device]), left_alone(self._loss.function):
            try:
                outputs, targets = ({m: self._calls[m][at] for m in microbatches} for at in (0, 1))
                pair = self._joins.outputs(outputs), self._joins.targets(targets)
                if kind is not None:
                    pair = map_tensors(pair, partial(_converted, kind))
                value = evaluate(*pair)
            except Exception:
                return None
            drawn = generator_states([device])
        return value if all(map(torch.equal, before, drawn)) else None

    def _expected(self, values: Sequence[float]) -> float:
        """The loss of both that their own losses make."""
        _, *losses = values
        if self._loss.reduction == "sum":
            return sum(losses)
        counts = [self._weights.counts[index] for index in self._losses]
        return sum(n * x for n, x in zip(counts, losses, strict=True)) / (sum(counts) or 1.0)

    def _compare(self, values: Sequence[float], allowed: float) -> None:
        """Raise an error if the loss of both is not what their own losses make.

        Args:
            values: the loss of both microbatches, and their own.
            allowed: the difference that is allowed.
        """
        together, a, b = values
        expected, is_mean = self._expected(values), self._loss.reduction == "mean"
        if not _apart(together, expected, allowed):
            return
        first, second = self._losses
        counts = [self._weights.counts[index] for index in (first, second)]
        what = f"a mean weighted by {counts[0]:g} and {counts[1]:g}" if is_mean else "a sum"
        looks: Reduction | None = None
        if is_mean and abs(together - a - b) <= allowed:
            looks = "sum"
        elif not is_mean and abs(together - (a + b) / 2) <= allowed:
            looks = "mean"
        raise UsageError(
            f"loss_fn of microbatches {first} and {second} together is {together:.6g}, but from their own "
            f"losses, {a:.6g} and {b:.6g}, it would be {expected:.6g} as {what}, so the microbatches would "
            f"not train on the loss of the batch.{self._joins.guess}{_remedies(looks)} {_COMPARES}"
            'over="batch" computes it once, on the outputs of all microbatches'
        )


_COMPARES = "If it compares samples with each other, or is otherwise not linear in them: "


def _remedies(looks: Reduction | None) -> str:
    """What to do about a loss of microbatches that do not make that of the batch."""
    likely = f' It looks like a {looks}: reduction="{looks}".' if looks else ""
    return (
        f"{likely} If it is a mean over something else than samples, such as tokens that count or class "
        "weights, say how much a microbatch counts: penstock.Loss(fn, weight=...), or loss_weight= of the "
        'step or the strategy, a function of the target. If it is a sum, say reduction="sum". '
        'over="microbatch" means the loss of each microbatch by itself.'
    )


def _converted(kind: torch.dtype, tensor: Tensor) -> Tensor:
    return tensor.to(kind) if tensor.is_floating_point() else tensor


def _autocast_types(device: torch.device) -> set[torch.dtype]:
    on = torch.is_autocast_enabled(device.type)
    return {torch.get_autocast_dtype(device.type)} if on else set()


# ---- a loss that the model's forward computes: the batch in fewer microbatches


def _holds_a_loss(output: Any) -> bool:
    """Whether an output has a number that may be its loss, but for the balance loss of experts.

    That one is of a microbatch by custom.
    """
    if isinstance(output, Mapping) and output.get("aux_loss") is not None:
        return False
    return any(t.numel() == 1 and not t.dim() and t.requires_grad for t in tensors_in(output))


def ask_inside(
    count: int,
    evaluate: Callable[[int], Mapping[str, float]],
    exchange: Callable[[Any], list[Any]],
    modules: Iterable[nn.Module],
    device: torch.device,
    names: Collection[str] | None = None,
) -> dict[str, tuple[float, float]]:
    """Hold the losses of a batch against those of the batch in half as many microbatches.

    All ranks call this. Only dropouts and batch norms are in evaluation mode. A loss that draws random
    numbers is let be, and so is one that is another one when it is computed again.

    Args:
        count: the number of microbatches.
        evaluate: computes the losses of the batch in a number of microbatches, by name.
        exchange: exchanges JSON values with all ranks.
        modules: those of this process.
        device: where they live.
        names: the losses to compare; all by default.

    Returns:
        Both values of each other loss that differs, by name.

    Raises:
        UsageError: the main losses differ.
    """
    modules = list(modules)
    # A forward may compute its loss in float32, whatever its weights are.
    types = {p.dtype for module in modules for p in module.parameters()} | {torch.float32}
    before, fewer = generator_states([device]), max(1, count // 2)
    with generators_kept([device]), left_alone(*modules, depth=2):
        for module in modules:
            if isinstance(module, nn.modules.dropout._DropoutNd | nn.modules.batchnorm._NormBase):
                module.training = False
        many, few = evaluate(count), evaluate(fewer)
        drew = not all(map(torch.equal, before, generator_states([device])))
        rows = exchange([drew, _allowed(*types, *_autocast_types(device))])
        allowed = max(of for _, of in rows)

        def differing(others: Mapping[str, float], names: Iterable[str]) -> list[str]:
            largest = {name: max(abs(many[name]), abs(others[name])) for name in names}
            return [
                name
                for name, size in largest.items()
                if _apart(others[name], many[name], allowed * size + allowed / 100)
            ]

        known = many.keys() & few.keys()
        apart = differing(few, known if names is None else known & {*names})
        if not apart or any(drew for drew, _ in rows):
            return {}
        changed = {*differing(evaluate(count), apart)}
    apart = [name for name in apart if name not in changed]
    if MAIN in apart:
        adds_up = abs(many[MAIN] * count - few[MAIN] * fewer)
        looks: Reduction | None = "sum" if adds_up <= allowed * abs(many[MAIN]) * count else None
        raise UsageError(
            f"the loss of the batch is {many[MAIN]:.6g} in {count} microbatches and {few[MAIN]:.6g} in "
            f"{fewer}, so the microbatches would not train on the loss of the batch.{_remedies(looks)} "
            f'{_COMPARES}compute it in loss_fn, from outputs of the model, with over="batch"'
        )
    return {name: (many[name], few[name]) for name in apart}


def remedy_of_added(loss: StepLoss, name: str, many: float, few: float, count: int) -> str:
    """What to say of an added loss that microbatches do not make up.

    Args:
        loss: the loss.
        name: the name of the added one.
        many: its value in ``count`` microbatches.
        few: its value in half as many.
        count: the number of microbatches.
    """
    differs = (
        f"the added loss {name!r} of the batch is {many:.6g} in {count} microbatches and {few:.6g} in "
        f"{max(1, count // 2)}"
    )
    if name in loss.weights:
        return (
            f"{differs}, so the weight of {name!r} does not count what it is a mean over; give a function of "
            "the target that does"
        )
    main = "" if loss.weights[MAIN] is None else f"{MAIN!r}: ..., "
    return (
        f"{differs}, as it counts by the weights of the loss. If it is a mean over something else, such as "
        f"other tokens, say weight={{{main}{name!r}: a function of the target that counts them}}; if it "
        "is one of each microbatch by itself, such as a balance of experts, say "
        f'weight={{{main}{name!r}: "microbatch"}}, in penstock.Loss or as loss_weight= of the step'
    )


# ---- what is called once more leaves no trace


@contextmanager
def left_alone(*objects: Any, depth: int = 4) -> Iterator[None]:
    """Restore what functions and objects keep: in attributes, closures and globals, in lists and tensors.

    Args:
        objects: the functions and objects.
        depth: how far to look into values of values.
    """
    notes = _Notes()
    for value in objects:
        notes.take(value, depth)
    try:
        yield
    finally:
        for restore in notes.undo:
            restore()


class _Notes:
    """How to restore values that may be changed in place.

    Attributes:
        undo: calls that restore them.
    """

    def __init__(self) -> None:
        self.undo: list[Callable[[], Any]] = []
        self._seen = set[int]()

    def take(self, value: Any, depth: int) -> None:
        """Note a value, and those in it."""
        if (
            not depth
            or id(value) in self._seen
            or isinstance(value, type | ModuleType | nn.Parameter)
        ):
            return
        self._seen.add(id(value))
        if isinstance(value, Tensor):
            if (
                not value.is_meta
            ):  # otherwise it has no numbers, such as one that lies on another rank
                self.undo.append(partial(_restore, value, value.detach().clone()))
        elif isinstance(value, FunctionType | MethodType | partial):
            self._take_variables(value, depth - 1)
        elif isinstance(value, list | deque | dict | set):
            inside = list(value.values() if isinstance(value, dict) else value)
            self._take_all(value, inside, depth - 1)
        else:
            for part in value.modules() if isinstance(value, nn.Module) else (value,):
                kept = getattr(part, "__dict__", {})
                self._take_all(
                    kept, [*kept.values(), *kept.get("_buffers", {}).values()], depth - 1
                )
            self.take(getattr(type(value), "forward", None), depth)

    def _take_all(self, container: Any, inside: Iterable[Any], depth: int) -> None:
        self.undo.append(partial(_refill, container, container.copy()))
        for value in inside:
            self.take(value, depth)

    def _take_variables(self, function: Any, depth: int) -> None:
        """Note what a function uses: its object, the variables of its closure, and globals that it names."""
        if not isinstance(function, FunctionType):
            for part in ("__self__", "__func__", "func"):
                self.take(getattr(function, part, None), depth)
            return
        for cell in function.__closure__ or ():
            try:
                value = cell.cell_contents
            except ValueError:
                continue
            self.undo.append(partial(setattr, cell, "cell_contents", value))
            self.take(value, depth)
        names = function.__globals__
        for name in names.keys() & {*function.__code__.co_names}:
            self.undo.append(partial(names.__setitem__, name, names[name]))
            self.take(names[name], depth)


def _restore(tensor: Tensor, before: Tensor) -> None:
    # The running statistics of batch norms change without another version.
    if not torch.equal(tensor, before):
        with torch.no_grad():
            tensor.copy_(before)


def _refill(container: Any, before: Any) -> None:
    if not isinstance(container, dict):
        container.clear()
        (container.update if isinstance(container, set) else container.extend)(before)
        return
    # Other threads may read an object meanwhile, so what has not changed stays where it is.
    for name in container.keys() - before.keys():
        del container[name]
    for name, value in before.items():
        if name not in container or container[name] is not value:
            container[name] = value


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
