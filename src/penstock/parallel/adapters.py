"""What a replicated or sharded stage needs around a step: no reduction per microbatch, one at the end."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from penstock.parallel.adapter import Adapter

BUCKET_BYTES = 25 * 2**20
"""How much is reduced at a time; as much as DistributedDataParallel does."""


def make_adapter(module: nn.Module) -> Adapter | None:
    """The adapter of a module, where it or a part of it is replicated or sharded."""
    if isinstance(module, DistributedDataParallel):
        return Replicated(module)
    sharded = [part for part in module.modules() if isinstance(part, FSDPModule)]
    return Sharded(sharded) if sharded else None


class Replicated(Adapter):
    """A stage in ``DistributedDataParallel``: gradients are averaged over its replicas once a step.

    Its own reducer waits for one backward that reaches every parameter. A step has many, so it is kept out
    and all-reduces run when the last gradient is there. It still refuses a forward between the two halves of
    a backward, which therefore comes in one piece.
    """

    whole_backward = True

    def __init__(self, module: DistributedDataParallel) -> None:
        self._module = module
        self._group = module.process_group
        self._stack = ExitStack()
        self._under_way: list[tuple[dist.Work | None, Tensor, list[Tensor]]] = []
        self._reduced = False

    def begin(self, microbatches: int) -> None:
        """Keep the module's own reduction out."""
        self._reduced = False
        self._stack.enter_context(self._module.no_sync())

    def reduce(self) -> None:
        """Start the all-reduces, once."""
        if self._reduced:
            return
        self._reduced = True
        size = dist.get_world_size(self._group)
        for gradients in _buckets(_gradients(self._module)):
            flat = torch.cat([gradient.flatten() for gradient in gradients]).div_(size)
            work = dist.all_reduce(flat, group=self._group, async_op=True)
            self._under_way.append((work, flat, gradients))

    def finish(self) -> None:
        """Wait for them."""
        self.reduce()
        for work, flat, gradients in self._under_way:
            if work is not None:
                work.wait()
            sizes = [gradient.numel() for gradient in gradients]
            for gradient, mean in zip(gradients, flat.split(sizes), strict=True):
                gradient.copy_(mean.view_as(gradient))
        self.abandon()

    def abandon(self) -> None:
        """Let the module's own reduction in again."""
        self._under_way.clear()
        self._stack.close()


def _gradients(module: nn.Module) -> Iterable[Tensor]:
    """A gradient for each trained parameter; zeros where this replica has none and another may."""
    for parameter in module.parameters():
        if parameter.requires_grad:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            yield parameter.grad


def _buckets(gradients: Iterable[Tensor]) -> Iterable[list[Tensor]]:
    """Gradients of one type and device together, up to a size."""
    bucket: list[Tensor] = []
    size = 0
    for gradient in gradients:
        alike = not bucket or (gradient.dtype, gradient.device) == (
            bucket[0].dtype,
            bucket[0].device,
        )
        if bucket and (size >= BUCKET_BYTES or not alike):
            yield bucket
            bucket, size = [], 0
        bucket.append(gradient)
        size += gradient.numel() * gradient.element_size()
    if bucket:
        yield bucket


class Sharded(Adapter):
    """A stage with modules under FSDP2's ``fully_shard`` or ``replicate``.

    Gradients stay unreduced until the last microbatch's backward, in which torch reduces them as ever. It
    does so when the inputs' gradients are there, so the weights' must be there as well.
    """

    whole_backward = True

    def __init__(self, modules: Sequence[FSDPModule]) -> None:
        self._modules = modules
        self._begun: set[int] = set()
        self._microbatches = 0

    def begin(self, microbatches: int) -> None:
        """Put reduction off."""
        self._begun.clear()
        self._microbatches = microbatches
        self._reduce_next(False)

    def backward(self, microbatch: int) -> None:
        """Let the last microbatch's backward reduce."""
        first = microbatch not in self._begun
        self._begun.add(microbatch)
        if first and len(self._begun) == self._microbatches:
            self._reduce_next(True)

    def unshard(self) -> None:
        """Start to gather."""
        for module in self._modules:
            module.unshard(async_op=True)

    def reshard(self) -> None:
        """Free what was gathered."""
        for module in self._modules:
            module.reshard()

    def finish(self) -> None:
        """Leave the modules as they were."""
        self._reduce_next(True)

    def abandon(self) -> None:
        """Leave the modules as they were."""
        self._reduce_next(True)

    def _reduce_next(self, wanted: bool) -> None:
        for module in self._modules:
            module.set_requires_gradient_sync(wanted, recurse=False)
            module.set_is_last_backward(wanted)
            module.set_reshard_after_backward(wanted, recurse=False)
