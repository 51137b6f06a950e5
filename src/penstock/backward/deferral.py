"""Run an operation so that the gradient of its weight is left to a store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from penstock.backward.function import SplitFunction, run_apart, run_whole
from penstock.backward.inner import gradients_inside
from penstock.backward.operations import Call, Operation
from penstock.backward.pending import Pending
from penstock.backward.store import Use, WeightGradStore
from penstock.backward.weights import Target, target_of


class Deferral:
    """Defers the weight gradients of one stage.

    It keeps the targets of parameters, and so their accumulators, from one microbatch to the next.
    """

    def __init__(self) -> None:
        self._store: WeightGradStore | None = None
        self._targets: dict[int, Target] = {}
        self._anchors: dict[torch.device, Tensor] = {}

    def lead_to(self, store: WeightGradStore | None) -> WeightGradStore | None:
        """Leaves gradients to ``store`` from now on; returns to which they were left before."""
        before, self._store = self._store, store
        return before

    def run(self, call: Call) -> tuple[Tensor, bool]:
        """Runs an operation.

        Returns:
            The output, and whether the gradient of the weight will be left to the store.
        """
        operation, value, weight, bias, options = call
        store = self._store
        if store is None or not _can_wait(value, weight):
            return operation.run(value, weight, bias, *options), False
        if operation.autocast and _is_autocast(value):
            _, value, weight, bias, _ = _cast(call)
        target = self._target(weight)
        if target is None:
            return operation.run(value, weight, bias, *options), False
        store.targets[target] = None
        waiting = operation, options, target, store, [weight]
        return _apply(value, bias, self._anchors[target.kind[1]], waiting), True

    def run_function(self, kind: type[SplitFunction], args: Sequence[Any]) -> tuple[Any, bool]:
        """Runs a function that offers its halves; result as of `run`."""
        weights = [args[position] for position in kind.weights]
        used = [w for w in weights if isinstance(w, Tensor) and w.requires_grad]
        store = self._store
        if store is None or not used or not all(_can_wait(weight, weight) for weight in used):
            return run_whole(kind, args), False
        targets = {id(weight): self._target(weight) for weight in used}
        if None in targets.values():
            return run_whole(kind, args), False
        places = [targets.get(id(weight)) for weight in weights]
        return run_apart(kind, args, places, store, self.anchor(used[0].device)), True

    def gradients(self, *args: Any, **options: Any) -> Any:
        """Is ``torch.autograd.grad`` for calls inside a forward pass."""
        assert self._store is not None
        return gradients_inside(self._store, self.anchor, *args, **options)

    def anchor(self, device: torch.device) -> Tensor:
        """Returns what makes autograd reach an operation whose input needs no gradient."""
        return self._anchors[device]

    def anchors(self) -> list[Tensor]:
        """Returns all anchors."""
        return list(self._anchors.values())

    def _target(self, weight: Tensor) -> Target | None:
        known = self._targets.get(id(weight))
        if known is not None and _is_current(known, weight):
            return known
        target = target_of(weight)
        if target is not None and target.kind[1] not in self._anchors:
            device = target.kind[1]
            self._anchors[device] = torch.zeros(0, device=device, requires_grad=True)
        if target is not None and target.is_parameter:
            self._targets[id(weight)] = target
        return target


def _is_current(known: Target, weight: Tensor) -> bool:
    # Moving a parameter's data to another type or device gives it another accumulator.
    dtype, device = known.kind
    return known.like is weight and weight.dtype is dtype and weight.device == device


def _can_wait(value: Tensor, weight: Tensor) -> bool:
    return (
        weight.requires_grad
        and torch.is_grad_enabled()
        and (type(weight) is nn.Parameter or (type(weight) is Tensor and not weight.is_leaf))
        and (type(value) is Tensor or type(value) is nn.Parameter)
        and not torch._C._are_functorch_transforms_active()
        and forward_ad._current_level < 0
    )


def _is_autocast(value: Tensor) -> bool:
    # The public question alone takes a quarter of what deferring a small layer costs.
    return torch._C._is_any_autocast_enabled() and torch.is_autocast_enabled(value.device.type)


def _cast(call: Call) -> Call:
    """Casts the operands as autocast would; the weight's cast becomes a part of its graph."""
    dtype = torch.get_autocast_dtype(call.input.device.type)
    bias = None if call.bias is None else _lower(call.bias, dtype)
    value, weight = _lower(call.input, dtype), _lower(call.weight, dtype)
    return call._replace(input=value, weight=weight, bias=bias)


def _lower(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    eligible = tensor.is_floating_point() and tensor.dtype != torch.float64
    return tensor.to(dtype) if eligible else tensor


Waiting: TypeAlias = tuple[Operation, tuple[Any, ...], Target, WeightGradStore, list[Tensor]]
"""A call under way, in which autograd does not see the weight."""


class _Deferred(torch.autograd.Function):
    """An operation with no edge to its weight."""

    @staticmethod
    def forward(
        ctx: Any, value: Tensor, bias: Tensor | None, anchor: Tensor, waiting: Waiting
    ) -> Tensor:
        operation, options, _, _, weights = waiting
        # What a checkpoint will recompute must not be held here.
        weight = weights.pop()
        ctx.waiting = waiting
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(value, weight)
        return operation.run(value, weight, bias, *options)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        if grad is None:
            return None, None, None, None
        operation, options, target, store, _ = ctx.waiting
        value, weight = ctx.saved_tensors
        if store.recording:
            version = value._version
            pending = Pending(operation, options, target.like, grad, value, version)
            store.uses.append(Use((target,), pending))
        needed = ctx.needs_input_grad
        return (
            operation.input_gradient(grad, value, weight, *options) if needed[0] else None,
            operation.bias_gradient(grad, value, *options) if needed[1] else None,
            None,
            None,
        )


# Function.apply looks for functorch first, which `_can_wait` has done; that would take half the time.
_apply: Callable[..., Tensor] = cast("Any", super(torch.autograd.Function, _Deferred)).apply
