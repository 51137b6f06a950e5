"""Batch norms whose running statistics are updated once per step, as by the whole batch."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm

from penstock.errors import UsageError

BatchStatistics = Literal["microbatch", "batch"]
"""What batch norms update their running statistics for: each microbatch, or the whole batch at once."""

# Stand-ins until this file goes with its withdrawn option.
OwnHook: Any = functools.partial


def in_backward() -> bool:
    """Whether a backward pass runs in this thread."""
    return torch._C._current_graph_task_id() != -1


def visible(model: Any) -> dict[Any, tuple[str, ...]]:
    """The modules with their paths."""
    return {module: (path,) for path, module in model.named_modules()}



def check_statistics(
    wanted: BatchStatistics, models: Iterable[nn.Module], *, compiled: bool = False
) -> None:
    """Check that the statistics of models can be updated as wanted.

    Raises:
        UsageError: they cannot, or ``batch_statistics=`` has another value.
    """
    if wanted not in get_args(BatchStatistics):
        raise UsageError(f"batch_statistics={wanted!r}: must be 'microbatch' or 'batch'")
    found = [_unfit(model, compiled) for model in models if wanted == "batch"]
    for what, names in ((what, names) for of in found for what, names in of.items() if names):
        raise UsageError(
            f"batch_statistics='batch' cannot follow {what}: {', '.join(names)}; use 'microbatch', or "
            "plain batch norms that are not compiled"
        )


def _unfit(model: nn.Module, compiled: bool) -> dict[str, list[str]]:
    seen = {} if compiled else visible(model)
    norms = [(name, m) for name, m in model.named_modules() if isinstance(m, BatchNorm)]
    return {
        "SyncBatchNorm": [name for name, m in norms if isinstance(m, nn.SyncBatchNorm)],
        "what is compiled": [name for name, m in norms if m not in seen],
    }


@dataclass(frozen=True)
class _Moments:
    """What a norm saw in one call: the count per channel, the means, and the sums of squared deviations."""

    count: int
    mean: Tensor
    squares: Tensor

    @staticmethod
    def of(values: Tensor) -> _Moments:
        found = values.detach()
        found = found if found.dtype == torch.float64 else found.float()
        variance, mean = torch.var_mean(found, [0, *range(2, found.ndim)], correction=0)
        count = found.numel() // found.shape[1]
        return _Moments(count, mean.double(), variance.double() * count)


def _together(moments: list[_Moments]) -> _Moments:
    count = sum(m.count for m in moments)
    zero = torch.zeros_like(moments[0].mean)
    mean = sum((m.mean * m.count for m in moments), zero) / count
    squares = sum((m.squares + m.count * (m.mean - mean) ** 2 for m in moments), zero)
    return _Moments(count, mean, squares)


class WholeBatch:
    """Follows the batch norms of a stage during a step; a companion of the stage's work.

    Each call still normalises by its own microbatch.

    Args:
        module: the stage's module.
    """

    # Stages of one process may share a module, which then has the hooks of all of them.
    _at_work: ClassVar[WholeBatch | None] = None

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._microbatch = 0
        self._calls: dict[nn.Module, int] = {}
        self._seen: dict[tuple[nn.Module, int], dict[int, _Moments]] = {}

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Follow the norms in this context, and then update their statistics, unless something failed."""
        norms = [
            m
            for m in self._module.modules()
            if isinstance(m, BatchNorm) and m.training and m.track_running_stats
        ]
        handles = [
            m.register_forward_pre_hook(OwnHook(self._note), with_kwargs=True) for m in norms
        ]
        self._seen.clear()
        try:
            with _untracked(norms):
                yield
        finally:
            WholeBatch._at_work = None
            for handle in handles:
                handle.remove()
        seen, self._seen = self._seen, {}
        for (norm, _), moments in sorted(seen.items(), key=lambda item: item[0][1]):
            _update(norm, _together([moments[index] for index in sorted(moments)]))

    def forward(self, microbatch: int) -> None:
        """A microbatch's forward begins."""
        WholeBatch._at_work = self
        self._microbatch = microbatch
        self._calls.clear()

    def loss(self, microbatch: int) -> None:
        """Does nothing: a loss calls no norms."""

    def backward(self, microbatch: int) -> None:
        """Does nothing: what backward recomputes was seen in forward."""

    def done(self, microbatch: int) -> None:
        """Does nothing: nothing is kept for backward."""

    def _note(self, norm: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        values = args[0] if args else kwargs["input"]
        if WholeBatch._at_work is not self or in_backward() or not _is_real(values):
            return
        call = self._calls[norm] = self._calls.get(norm, -1) + 1
        self._seen.setdefault((norm, call), {})[self._microbatch] = _Moments.of(values)


def _is_real(values: Tensor) -> bool:
    """Whether a tensor has data: a partition may run modules of other stages on tensors without."""
    return not values.is_meta and type(values).__name__ != "FakeTensor"


@contextmanager
def _untracked(norms: list[BatchNorm]) -> Iterator[None]:
    """Keep norms from updating their running statistics, which they do not use in training."""
    for norm in norms:
        norm.track_running_stats = False
    try:
        yield
    finally:
        for norm in norms:
            norm.track_running_stats = True


@torch.no_grad()
def _update(norm: Any, seen: _Moments) -> None:
    """Update a norm's running statistics as the norm itself does, from these moments."""
    if norm.num_batches_tracked is not None:
        norm.num_batches_tracked.add_(1)
    share = norm.momentum
    if share is None:
        share = 1.0 / float(norm.num_batches_tracked)
    variance = seen.squares / max(seen.count - 1, 1)
    for running, found in ((norm.running_mean, seen.mean), (norm.running_var, variance)):
        running.copy_((1 - share) * running.double() + share * found)
