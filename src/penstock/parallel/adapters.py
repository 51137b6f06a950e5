"""Adapters for replicated and sharded stages: gradients are reduced once per call, not per microbatch."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from contextlib import ExitStack

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from penstock.parallel.wrapping import Adapter, Apart

BUCKET_BYTES = 25 * 2**20
"""How many bytes are reduced at a time, as in DistributedDataParallel."""


def make_adapter(module: nn.Module, apart: Apart) -> Adapter | None:
    """The adapter of a module that is, or has a part that is, replicated or sharded; None for others."""
    if isinstance(module, DistributedDataParallel):
        return ReplicatedStage(module, apart)
    sharded = _sharded_parts(module)
    return Sharded(sharded, apart) if sharded else None


class ReplicatedStage(Adapter):
    """A stage in ``DistributedDataParallel``: gradients are averaged over its replicas once per step.

    Its own reducer expects a single backward that reaches every parameter. A step has many, so the reducer
    is switched off, and all-reduces run when the last gradient is there.
    """

    def __init__(self, module: DistributedDataParallel, apart: Apart) -> None:
        self._module = module
        self._group = module.process_group
        self._apart = apart
        self._stack = ExitStack()
        self._under_way: list[tuple[dist.Work | None, Tensor, list[Tensor]]] = []
        self._reduced = True

    def fits(self, module: nn.Module) -> bool:
        """Whether it is the adapter of this module."""
        return module is self._module

    def begin(self, microbatches: int, *, trains: bool = True, gathers: bool = True) -> None:
        """Switch the module's own reduction off."""
        self._reduced = not trains
        self._stack.enter_context(self._module.no_sync())

    def reduce(self) -> None:
        """Start the all-reduces, once."""
        if self._reduced:
            return
        self._reduced = True
        size = dist.get_world_size(self._group)
        with self._apart():
            gradients = list(_gradients(self._module))
        for bucket in _buckets(gradients):
            flat = torch.cat([gradient.flatten() for gradient in bucket]).div_(size)
            work = dist.all_reduce(flat, group=self._group, async_op=True)
            self._under_way.append((work, flat, bucket))

    def finish(self) -> None:
        """Wait for the all-reduces, and copy buffers from the first replica, as the module itself would."""
        trained = not self._reduced or bool(self._under_way)
        self.reduce()
        for work, flat, gradients in self._under_way:
            if work is not None:
                work.wait()
            _fill(gradients, flat)
        if trained and self._module.broadcast_buffers:
            self._share_buffers()
        self.abandon()

    def _share_buffers(self) -> None:
        ignored = self._module.parameters_to_ignore
        named = self._module.module.named_buffers()
        for bucket in _buckets(buffer for name, buffer in named if name not in ignored):
            flat = torch.cat([buffer.flatten() for buffer in bucket])
            dist.broadcast(flat, group=self._group, group_src=0)
            _fill(bucket, flat)

    def abandon(self) -> None:
        """Switch the module's own reduction on again."""
        self._under_way.clear()
        self._stack.close()


def _fill(tensors: Sequence[Tensor], flat: Tensor) -> None:
    parts = flat.split([tensor.numel() for tensor in tensors])
    for tensor, part in zip(tensors, parts, strict=True):
        tensor.copy_(part.view_as(tensor))


def _gradients(module: nn.Module) -> Iterable[Tensor]:
    """A gradient for each trained parameter; zeros if this replica has none, since another one may."""
    for parameter in module.parameters():
        if parameter.requires_grad:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            yield parameter.grad


def _buckets(gradients: Iterable[Tensor]) -> Iterable[list[Tensor]]:
    """Group tensors of one type and device, up to a size."""
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

    Gradients stay unreduced until the weights' half of the last microbatch is done. Torch would reduce them
    as soon as the inputs' gradients are there; here the callback that it runs at the end of a backward is
    run once more, at the right time.

    Parameters are gathered once, at the beginning of a call, and freed at its end, since every microbatch in
    flight needs them. There are two exceptions: a schedule with UNSHARD and RESHARD decides itself, and with
    the user's ``reshard_after_forward=True`` parameters are gathered again for each microbatch.
    """

    whole_backward = True

    def __init__(self, modules: Sequence[FSDPModule], apart: Apart) -> None:
        self._modules = modules
        self._apart = apart
        # There is no public way to read the policy that a module was given; seen in torch 2.13.
        self.casts = any(m._get_fsdp_state()._mp_policy.param_dtype for m in modules)
        self._held = [module for module in modules if _may_be_held(module)]
        for module in self._held:
            module.set_reshard_after_forward(False, recurse=False)
        self._left: set[int] = set()
        self._reduced = True
        self._has_run = False

    def fits(self, module: nn.Module) -> bool:
        """Whether the sharded modules are still the same."""
        found = _sharded_parts(module)
        return len(found) == len(self._modules) and all(map(operator.is_, found, self._modules))

    def begin(self, microbatches: int, *, trains: bool = True, gathers: bool = True) -> None:
        """Put reduction off, and start to gather parameters."""
        self._left = set(range(microbatches))
        self._reduced = not trains
        if trains:
            self._reduce_next(False)
        # In their first forward, modules learn which of them is outermost and which streams they share;
        # before that, they cannot gather ahead.
        if gathers and self._has_run:
            for module in self._held:
                module.unshard(async_op=True)
        self._has_run = True

    def done(self, microbatch: int) -> None:
        """After the last microbatch, reduce gradients and free the gathered parameters.

        Not module by module within a backward: torch would prefetch modules that other microbatches needed.
        """
        self._left.discard(microbatch)
        if self.casts:
            self._add_up()
        if not self._left:
            self.reduce()

    def _add_up(self) -> None:
        """Add up a microbatch's gradients in the type in which they are reduced."""
        for group in (g for m in self._modules for g in m._get_fsdp_state()._fsdp_param_groups):
            for parameter in group.fsdp_params:
                if hasattr(parameter, "_unsharded_param"):
                    parameter.accumulate_unsharded_grad_if_needed()
                    parameter.to_accumulated_grad_if_needed()

    def reduce(self) -> None:
        """Reduce the gradients, once."""
        if self._reduced:
            return
        self._reduced = True
        self._reduce_next(True)
        with self._apart():
            for module in self._outermost():
                # As in torch.distributed.pipelining; there is no public way.
                module._get_fsdp_state()._root_post_backward_final_callback()
        self.reshard()

    def _outermost(self) -> Iterable[FSDPModule]:
        """The root modules, whose forward runs first and which manage the others."""
        return [module for module in self._modules if module._get_fsdp_state()._is_root]

    def unshard(self) -> None:
        """Start to gather."""
        for module in self._modules:
            module.unshard(async_op=True)

    def reshard(self) -> None:
        """Free what was gathered."""
        for module in self._modules:
            module.reshard()

    def finish(self) -> None:
        """Leave the modules as they were before the call, with their parameters sharded."""
        self.reduce()
        self._reduce_next(True)
        self.reshard()

    def abandon(self) -> None:
        """Leave the modules as they were before an interrupted call."""
        self._reduced = True
        self._reduce_next(True)
        for module in self._outermost():
            module.reset_iter_state()
        self.reshard()

    def _reduce_next(self, wanted: bool) -> None:
        for module in self._modules:
            module.set_requires_gradient_sync(wanted, recurse=False)
            module.set_is_last_backward(wanted)
            module.set_reshard_after_backward(module not in self._held, recurse=False)


def _sharded_parts(module: nn.Module) -> list[FSDPModule]:
    return [part for part in module.modules() if isinstance(part, FSDPModule)]


def _may_be_held(module: FSDPModule) -> bool:
    """Whether its parameters may stay gathered through a call: the user has not asked to free them earlier.

    There is no public way to read that; seen in torch 2.13. A replicated module gathers nothing.
    """
    state = module._get_fsdp_state()
    if any(not hasattr(group.mesh_info, "shard_mesh_size") for group in state._fsdp_param_groups):
        return False
    asked = any(group.post_forward_mesh_info for group in state._fsdp_param_groups)
    return state._auto_reshard_after_forward is not False or not asked
