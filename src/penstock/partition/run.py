"""Run a model without data, on ones or on the numbers of its arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeGuard

import torch
from torch import nn

from penstock._engine.values import tensors_in
from penstock.partition.alike import Memo
from penstock.partition.base import Example
from penstock.partition.seen import Door
from penstock.partition.trace import Homes, Trace
from penstock.partition.tracer import record


class WithoutData:
    """Runs a model without data.

    The model's arguments are ones, or an example's numbers where it fits. If the model's code cannot go on
    with ones, as code that counts tokens of a kind, the arguments' own numbers are tried, where this process
    has them.

    Args:
        model: the model.
        forward: runs it.
        example: arguments whose numbers are used for calls of the same kind.

    Attributes:
        reads_numbers: whether the model's code could not go on with ones: calls that look alike may differ.
        memo: what units gave, so that those that are alike need not run.
    """

    def __init__(
        self, model: nn.Module, forward: Callable[..., Any], example: Example | None = None
    ) -> None:
        self.model, self.forward, self._example = model, forward, example
        self.reads_numbers, self.memo = False, Memo()

    def record(
        self,
        doors: Sequence[Door],
        call: Example,
        homes: Homes | None = None,
        inner: Sequence[Door] = (),
    ) -> Trace:
        """The trace of a call, see :func:`record`."""

        def run(numbers: Example | None) -> Trace:
            return record(self.model, self.forward, doors, call, numbers, homes, inner, self.memo)

        with_data = has_data(call)
        if not (with_data and self.reads_numbers):
            if has_data(self._example) and kind_of(self._example) == kind_of(call):
                return run(self._example)
            if not with_data:
                return self._on_ones(run, call)
        if self.reads_numbers:
            return run(call)
        try:
            return run(None)
        except Exception:
            trace = run(call)
            self.reads_numbers = True
            return trace

    def _on_ones(self, run: Callable[[Example | None], Trace], call: Example) -> Trace:
        try:
            return run(None)
        except Exception as error:
            if any(tensor.is_meta for tensor in tensors_in(call)):
                error.add_note(
                    "this process was not given the arguments of the model; if its code needs their numbers, "
                    "as one does that counts image tokens, give every rank the batch"
                )
            raise


def has_data(call: Example | None) -> TypeGuard[Example]:
    """Whether there are tensors in a call, and all have data."""
    tensors = tensors_in(call)
    return bool(tensors) and not any(tensor.is_meta for tensor in tensors)


def kind_of(call: Example) -> Any:
    """The kind of a call: its shapes, types and plain values."""
    tensors = tuple(
        (tuple(t.shape), t.stride(), t.dtype, t.requires_grad) for t in tensors_in(call)
    )
    return tensors, _plain((tuple(call[0]), dict(call[1])))


def _plain(value: Any) -> str:
    if isinstance(value, int | float | str | type(None) | torch.dtype | torch.device):
        return repr(value)
    if isinstance(value, Mapping):
        return f"{type(value).__name__}{[(name, _plain(child)) for name, child in value.items()]}"
    if isinstance(value, list | tuple):
        return f"{type(value).__name__}{[_plain(child) for child in value]}"
    return type(value).__name__
