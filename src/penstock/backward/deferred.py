"""The deferred engine: what heavy weights need for their gradients is kept for the weights' half of backward.

Forward is left alone. The inputs' half is one backward pass towards all but the weights whose gradients can
wait (`penstock.backward.waiting`); the weights' half computes those (`penstock.backward.store`).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from torch import nn

from penstock.backward.full import (
    Gradients,
    Pair,
    backward_through,
    explained,
    seeds_of,
    stage_backward,
)
from penstock.backward.store import Standing, WeightGradStore
from penstock.backward.waiting import Waiting, what_waits
from penstock.errors import UsageError

log = logging.getLogger("penstock")

# Classes by name, since most of them live in parts of torch that this one does not import.
_REASONS = {
    "FSDPModule": "FSDP reduces its gradients in the inputs' half",
    "FullyShardedDataParallel": "FSDP reduces its gradients in the inputs' half",
}


class DeferredBackward:
    """Splits the backward passes of one module.

    A weight gets its whole gradient in one of the halves: in the weights' half where all its uses can wait,
    else in the inputs' half, as in a full backward pass.

    Args:
        module: The stage's module.
        fused: Multiply the weights' gradients straight into ``.grad``, once that is there, with no
            tensor of a weight's size in between. It changes bits, and the accumulators do not run: for
            weights without hooks of their own only, and not together with DistributedDataParallel.
            ``.grad`` keeps its type; ``weight.grad_dtype`` says which that is.
        joined: Of how many microbatches to compute the weights' gradients as one larger product. It
            changes bits, holds the pairs longer, and hooks run once for all of them. `flush` computes
            what is left over.

        reduced_later: Whether sharded gradients are reduced after the weights' half, by who drives this,
            and not by FSDP2 in the inputs' half.

    Raises:
        UsageError: ``joined`` is less than 1.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        fused: bool = False,
        joined: int = 1,
        reduced_later: bool = False,
    ) -> None:
        if joined < 1:
            raise UsageError(
                f"joined={joined}: must be at least 1: the number of microbatches "
                "whose weight gradients are computed together"
            )
        self._module = module
        self._fused, self._joined = fused, joined
        self._reduced_later = reduced_later
        self._left: list[WeightGradStore] = []
        self._standing = Standing()
        self._whole: bool | None = None
        self._told = ""

    @property
    def is_plain(self) -> bool:
        """Whether nothing is put off in a full backward pass."""
        return not self._fused and self._joined == 1

    def full(self, outputs: Any, output_grads: Any, inputs: Sequence[Any]) -> Gradients:
        """Runs both halves; arguments and result as of `input_half`."""
        if self.is_plain:
            return stage_backward(outputs, output_grads, inputs)
        found, store = self.input_half(outputs, output_grads, inputs)
        self.weight_half(store)
        return found

    def input_half(
        self, outputs: Any, output_grads: Any, inputs: Sequence[Any]
    ) -> tuple[Gradients, WeightGradStore]:
        """Computes the inputs' gradients, and those of weights that cannot wait.

        Args:
            outputs: What forward returned, or its loss.
            output_grads: As for `stage_backward`; they must stay as they are until the other half.
            inputs: The inputs of the stage.

        Returns:
            One gradient of each input's shape, or None where it needs or gets none; and what `weight_half`
            needs.

        Raises:
            UsageError: ``output_grads`` has another structure than the outputs.
            StageError: Autograd failed; the cause is chained.
        """
        pairs = seeds_of(outputs, output_grads)
        with explained("the inputs' half of backward", output=outputs, gradient=output_grads):
            ends, store = self._waiting(pairs, inputs).start()
            return backward_through(pairs, inputs, ends), store

    def weight_half(self, store: WeightGradStore) -> None:
        """Adds to the weights' ``.grad`` what `input_half` has left in ``store``."""
        self._left.append(store)
        if len(self._left) >= self._joined:
            self._deliver()

    def flush(self) -> None:
        """Computes what has been left for a larger product, and forgets the step."""
        self._deliver()
        self._standing.clear()

    def _deliver(self) -> None:
        left, self._left = self._left, []
        if not left:
            return
        for store in left[1:]:
            left[0].take(store)
        with explained("the weights' half of backward"):
            left[0].deliver(fused=self._fused, joined=len(left) > 1, standing=self._standing)

    def _waiting(self, pairs: Sequence[Pair], inputs: Sequence[Any]) -> Waiting:
        """Returns what waits in a microbatch; says once why nothing does."""
        if self._whole is None:
            said = _reason_in(self._module, reduced_later=self._reduced_later)
            self._whole = said is not None
            self._tell(said)
        waiting = Waiting() if self._whole else what_waits(pairs, inputs, self._standing)
        if waiting.refusing is not None:
            self._tell(f"{waiting.refusing} runs in whole backward passes only")
        return waiting

    def _tell(self, reason: str | None) -> None:
        if reason is not None and reason != self._told:
            self._told = reason
            log.info("no weight gradient of a stage waits: %s", reason)


def _reason_in(root: nn.Module, *, reduced_later: bool) -> str | None:
    """Says why no backward pass of a module is to be cut, if there is a reason."""
    for name, module in root.named_modules():
        kinds = [kind.__name__ for kind in type(module).__mro__]
        reason = next((_REASONS[kind] for kind in kinds if kind in _REASONS), None)
        if reduced_later and "FSDPModule" in kinds:
            reason = None
        if "DistributedDataParallel" in kinds and _is_searching(module):
            reason = "DistributedDataParallel searches the graph for its parameters"
        if reason is not None:
            return f"in {name or type(module).__name__}, {reason}"
    return None


def _is_searching(module: Any) -> bool:
    return bool(module.find_unused_parameters or module.static_graph)
