"""Data parallelism: replicas begin with equal weights, and average their gradients once a step."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock._engine.faults import Activity
from penstock._engine.parallel.groups import ranks_in
from penstock._engine.parallel.tensors import is_sharded, local_part, with_local
from penstock._engine.parallel.wrapping import mesh_ranks, spread_parts

BUCKET_BYTES = 25 * 2**20
"""The number of bytes reduced at a time, as in DistributedDataParallel."""


class GradientAverage:
    """Averages gradients over replicas, with one all-reduce for each 25 MiB.

    A replica also sends which gradients it has: one that no replica has stays None.

    Args:
        group: the process group of the replicas.
        activity: where this process notes what it waits for.
    """

    def __init__(self, group: dist.ProcessGroup, activity: Activity | None = None) -> None:
        self._group = group
        self._activity = activity or Activity(0)
        self._members = dist.get_process_group_ranks(group)
        self._under_way: deque[tuple[Any, Tensor, list[nn.Parameter], Any]] = deque()

    def start(self, parameters: Iterable[nn.Parameter]) -> None:
        """Start the all-reduces; each replica has the same parameters in the same order."""
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        for bucket in _buckets(trained):
            parts = [_flat_gradient(parameter) for parameter in bucket]
            present = parts[0].new_tensor([parameter.grad is not None for parameter in bucket])
            flat = torch.cat([*parts, present]).div_(self._group.size())
            come = self._activity.arrive(self._members)
            work = dist.all_reduce(flat, group=self._group, async_op=True)
            self._under_way.append((work, flat, bucket, come))

    def finish(self, what: str = "the average of gradients") -> None:
        """Wait for the all-reduces, and replace each ``.grad`` by the average.

        Args:
            what: what is waited for, in words.
        """
        while self._under_way:
            work, flat, bucket, come = self._under_way.popleft()
            self._activity.wait(what, collective=come)
            work.wait()
            sizes = [local_part(parameter).numel() for parameter in bucket]
            *parts, present = flat.split([*sizes, len(bucket)])
            if any(parameter.grad is None for parameter in bucket):
                somewhere = present.ne(0).tolist()
            else:
                somewhere = [True] * len(bucket)
            for parameter, part, has_gradient in zip(bucket, parts, somewhere, strict=True):
                if has_gradient:
                    _replace_gradient(parameter, part)
        self._activity.go_on()

    def forget(self) -> None:
        """Forget the all-reduces of a call that was interrupted."""
        self._under_way.clear()


def _kind(tensor: Tensor) -> tuple[Any, torch.device]:
    return getattr(tensor, "grad_dtype", None) or tensor.dtype, tensor.device


def _buckets(tensors: Iterable[Any]) -> Iterator[list[Any]]:
    """Group tensors into buckets of one type and device."""
    alike: dict[object, list[Any]] = {}
    for tensor in tensors:
        alike.setdefault(_kind(tensor), []).append(tensor)
    for members in alike.values():
        bucket, size = [], 0
        for tensor in members:
            bucket.append(tensor)
            size += local_part(tensor).nbytes
            if size >= BUCKET_BYTES:
                yield bucket
                bucket, size = [], 0
        if bucket:
            yield bucket


def _flat_gradient(parameter: nn.Parameter) -> Tensor:
    dtype, device = _kind(parameter)
    if parameter.grad is None:
        return torch.zeros(local_part(parameter).numel(), dtype=dtype, device=device)
    part = local_part(parameter.grad)
    return (part.to_dense() if part.is_sparse else part).flatten().to(dtype)


def _replace_gradient(parameter: nn.Parameter, flat: Tensor) -> None:
    gradient, shape = parameter.grad, local_part(parameter).shape
    if gradient is None:
        # A copy, since a view would keep the whole bucket alive.
        parameter.grad = with_local(parameter, flat.view(shape).clone())
    elif gradient.is_sparse:
        parameter.grad = flat.view(shape).to_sparse(gradient.sparse_dim())
    else:
        local_part(gradient).copy_(flat.view(shape))


def copy_from_first(tensors: Iterable[Tensor], group: dist.ProcessGroup) -> None:
    """Copy tensors from the first process of a group; all of its processes call this."""
    for bucket in _buckets(local_part(tensor) for tensor in tensors if not tensor.is_meta):
        flat = torch.cat([tensor.flatten() for tensor in bucket])
        # As bytes, since not every backend sends every type.
        dist.broadcast(flat.view(torch.uint8), group=group, group_src=0)
        parts = flat.split([tensor.numel() for tensor in bucket])
        for tensor, part in zip(bucket, parts, strict=True):
            tensor.copy_(part.view_as(tensor))


def begin_equal(modules: Iterable[nn.Module], group: dist.ProcessGroup) -> None:
    """Give stages the weights and buffers of the first replica; all replicas call this.

    Tensors that a wrapper replicates or shards, and those on the meta device, are left alone.
    """
    for module in modules:
        parameters, buffers = unreduced(module, group)
        copy_from_first([*parameters, *buffers], group)


def left_alone(module: nn.Module, group: dist.ProcessGroup) -> list[nn.Parameter]:
    """The parameters of a stage whose gradients no wrapper and no DTensor reduces over the replicas.

    Args:
        module: the stage's module, in its wrapper.
        group: the process group of the replicas.
    """
    return unreduced(module, group)[0]


def unreduced(
    module: nn.Module, group: dist.ProcessGroup
) -> tuple[list[nn.Parameter], list[Tensor]]:
    """The parameters as :func:`left_alone` has them, and the buffers that no wrapper copies."""
    parts, replicas = spread_parts(module), ranks_in(group)
    reduced = {id(p) for part in parts for p in part.parameters}
    parameters = [
        p
        for p in module.parameters()
        if id(p) not in reduced and not (is_sharded(p) and replicas <= mesh_ranks(p.device_mesh))
    ]
    return parameters, [] if parts else list(module.buffers())
