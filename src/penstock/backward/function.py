"""A custom autograd function that offers its two halves of backward separately."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from penstock.backward.store import WeightGradStore
from penstock.backward.weights import Target


class SplitFunction(ABC):
    """A custom function whose weights' gradients can wait; use it like ``torch.autograd.Function``.

    A subclass says with ``weights`` which arguments are weights, by position, and defines three
    static methods. Forward's ``ctx`` is autograd's, without ``needs_input_grad``; that of the halves
    has ``saved_tensors`` and what forward has set on it, other than ``call`` and ``kind``. Outside of a
    stage, both halves run one after the other in an ordinary backward pass::

        class Scale(SplitFunction):
            weights = (1,)

            @staticmethod
            def forward(ctx, x, scale):
                ctx.save_for_backward(x, scale)
                return x * scale

            @staticmethod
            def backward_input(ctx, grad):
                return grad * ctx.saved_tensors[1], None

            @staticmethod
            def backward_weight(ctx, grad):
                return ((grad * ctx.saved_tensors[0]).sum(0),)

        y = Scale.apply(x, scale)
    """

    weights: ClassVar[tuple[int, ...]]

    @staticmethod
    @abstractmethod
    def forward(ctx: Any, *args: Any) -> Any:
        """Returns the output; saves for backward as usual."""

    @staticmethod
    @abstractmethod
    def backward_input(ctx: Any, *grads: Any) -> Sequence[Tensor | None]:
        """Returns a gradient or None for each argument of forward; None for the weights."""

    @staticmethod
    @abstractmethod
    def backward_weight(ctx: Any, *grads: Any) -> Sequence[Tensor | None]:
        """Returns a gradient or None for each weight, in the order of ``weights``."""

    @classmethod
    def apply(cls, *args: Any) -> Any:
        """Runs forward on positional arguments."""
        tensors = tuple(value for value in args if isinstance(value, Tensor))
        if has_torch_function(tensors):
            return handle_torch_function(cast("Any", cls), tensors, *args)
        return run_whole(cls, args)


def run_whole(kind: type[SplitFunction], args: Sequence[Any]) -> Any:
    """Runs a function whose weights' gradients do not wait."""
    return cast("Any", _Whole).apply(kind, *args)


def run_apart(
    kind: type[SplitFunction],
    args: Sequence[Any],
    targets: Sequence[Target | None],
    store: WeightGradStore,
    anchor: Tensor,
) -> Any:
    """Runs a function and leaves the gradients of its weights to ``store``.

    Args:
        kind: The function.
        args: Its arguments.
        targets: Where the gradient of each weight goes; None for one that needs none.
        store: Of the microbatch.
        anchor: What makes autograd reach the function if nothing else does.
    """
    wanted = [(place, target) for place, target in enumerate(targets) if target is not None]
    for _, target in wanted:
        store.expect(target)
    call = SimpleNamespace(kind=kind, wanted=wanted, store=store)
    call.weights = [args[position] for position in kind.weights]
    others = (value for position, value in enumerate(args) if position not in kind.weights)
    return cast("Any", _Apart).apply(call, anchor, *others)


class _Whole(torch.autograd.Function):
    """Both halves, one after the other."""

    @staticmethod
    def forward(ctx: Any, kind: type[SplitFunction], *args: Any) -> Any:
        ctx.kind = kind
        return kind.forward(ctx, *args)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        kept = _kept(ctx)
        found = list(ctx.kind.backward_input(kept, *grads))
        if any(ctx.needs_input_grad[1 + position] for position in ctx.kind.weights):
            of_weights = ctx.kind.backward_weight(kept, *grads)
            for position, grad in zip(ctx.kind.weights, of_weights, strict=True):
                found[position] = grad
        return None, *found


class _Apart(torch.autograd.Function):
    """The inputs' half; it has no edges to the weights."""

    @staticmethod
    def forward(ctx: Any, call: Any, anchor: Tensor, *others: Any) -> Any:
        ctx.call = call
        weights, call.weights = dict(zip(call.kind.weights, call.weights, strict=True)), None
        rest = iter(others)
        total = len(others) + len(weights)
        args = (weights[place] if place in weights else next(rest) for place in range(total))
        return call.kind.forward(ctx, *args)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        call, kept = ctx.call, _kept(ctx)
        if call.store.recording:
            compute = partial(_weight_half, call.kind, call.wanted, kept, grads)
            call.store.add(tuple(target for _, target in call.wanted), compute)
        found = call.kind.backward_input(kept, *grads)
        others = (grad for place, grad in enumerate(found) if place not in call.kind.weights)
        return None, None, *others


def _kept(ctx: Any) -> SimpleNamespace:
    """Returns what both halves may use: a checkpoint lets saved tensors be taken once only."""
    names = {name: value for name, value in vars(ctx).items() if name not in {"call", "kind"}}
    return SimpleNamespace(**names, saved_tensors=ctx.saved_tensors)


def _weight_half(
    kind: type[SplitFunction], wanted: list[tuple[int, Target]], kept: Any, grads: Sequence[Any]
) -> list[Tensor | None]:
    found = kind.backward_weight(kept, *grads)
    return [found[place] for place, _ in wanted]
