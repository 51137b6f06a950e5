"""Data parallelism: replicas begin with equal weights, and average their gradients once a step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock._engine.faults import Activity
from penstock._engine.parallel.groups import ranks_in
from penstock._engine.parallel.tensors import is_sharded, local_part, with_local
from penstock._engine.parallel.wrapping import mesh_ranks, spread_parts
from penstock.errors import UsageError

BUCKET_BYTES = 25 * 2**20
"""The number of bytes reduced at a time, as in DistributedDataParallel."""
LARGE_BYTES = 2**20
"""Gradients of at least so many bytes are reduced by themselves, where they lie."""


def _kind(tensor: Tensor) -> tuple[Any, torch.device]:
    return getattr(tensor, "grad_dtype", None) or tensor.dtype, tensor.device


class GradientAverage:
    """Averages gradients over replicas where they lie, bucket by bucket, while backward still runs.

    All replicas reduce in one order: from the last parameter to the first, as backward mostly completes them.
    A bucket starts once its gradients are complete, and those before it have started. Its large gradients are
    reduced in place; copies of the small ones go in one message, with flags that say which gradients a
    replica has: one that no replica has stays None.

    A weight that is itself sharded over replicas, such as one of experts, has the gradients of their samples
    in it already: it is averaged over the others alone, see :func:`averaged_over`.

    Args:
        group: the process group of the replicas.
        activity: where this process notes what it waits for.
        dims: the groups of the dimensions that the replicas form, if there are several.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        activity: Activity | None = None,
        dims: Sequence[dist.ProcessGroup] = (),
    ) -> None:
        self._group, self._dims = group, dims
        self._activity = activity or Activity(0)
        self._waiting: deque[list[nn.Parameter]] = deque()
        self._under_way: deque[tuple[list[Any], list[Tensor], Tensor, list[nn.Parameter], Any]] = (
            deque()
        )
        self._hooks: list[Any] = []
        self._complete: set[int] = set()
        """The parameters whose gradients are complete, by identity, while a backward is watched."""
        self._is_simple: bool | None = None
        """Whether a backward adds to each gradient once; known after the first, which is only watched."""

    def take(self, parameters: Iterable[nn.Parameter]) -> None:
        """Take up the gradients of a step; each replica has the same parameters in the same order."""
        self.forget()
        self._waiting += _buckets([*parameters][::-1], self._alike)

    def _over(self, parameter: Tensor) -> dist.ProcessGroup | None:
        return averaged_over(parameter, self._group, self._dims)

    def _alike(self, parameter: Tensor) -> object:
        return _kind(parameter), self._over(parameter)

    def watch(self, adds_to: Collection[int] | None) -> None:
        """Start each bucket as soon as the next backward, which is the last one, has completed it.

        Args:
            adds_to: the parameters to whose gradients it may add, by identity; all by default.
        """
        if self._is_simple is False:
            return
        for parameter in chain.from_iterable(self._waiting):
            if parameter.requires_grad and (adds_to is None or id(parameter) in adds_to):
                hook = parameter.register_post_accumulate_grad_hook(self._note_added)
                self._hooks.append(hook)
            else:
                self._complete.add(id(parameter))

    def _note_added(self, parameter: Tensor) -> None:
        again = id(parameter) in self._complete
        if again and self._is_simple:
            raise UsageError(
                "a backward adds to one gradient several times, as reentrant checkpoints of layers with a "
                "shared weight do, and did not in the first step: it may be on its way to the other replicas "
                "by then. Checkpoint with use_reentrant=False"
            )
        self._is_simple = False if again else self._is_simple
        self._complete.add(id(parameter))
        while self._is_simple and self._waiting and self._is_complete(self._waiting[0]):
            self._start(self._waiting.popleft())

    def _is_complete(self, bucket: Sequence[nn.Parameter]) -> bool:
        return self._complete.issuperset(map(id, bucket))

    def start(self) -> None:
        """Start what remains: all gradients are complete."""
        if self._hooks and self._is_simple is None:
            self._is_simple = True
        self._end_watch()
        while self._waiting:
            self._start(self._waiting.popleft())

    def _start(self, bucket: list[nn.Parameter]) -> None:
        group = self._over(bucket[0])
        if group is None:
            for parameter in bucket:
                if parameter.grad is not None:
                    local_part(parameter.grad).div_(self._group.size())
            return
        works: list[Any] = []
        large: list[Tensor] = []
        small: list[Tensor] = []
        for parameter in bucket:
            part = _dense_gradient(parameter)
            if part.nbytes < LARGE_BYTES:
                small.append(part.flatten())
            else:
                large.append(part.div_(self._group.size()))
        dtype, device = _kind(bucket[0])
        there = [parameter.grad is not None for parameter in bucket]
        flags = torch.tensor(there, dtype=dtype, device=device)
        flat = torch.cat([*small, flags]).div_(self._group.size())
        come = self._activity.arrive(dist.get_process_group_ranks(group))
        for tensor in (*large, flat):
            works.append(dist.all_reduce(tensor, group=group, async_op=True))
        self._under_way.append((works, large, flat, bucket, come))

    def finish(self, what: str = "the average of gradients") -> None:
        """Wait for the all-reduces, and leave the averages in ``.grad``.

        Args:
            what: what is waited for, in words.
        """
        while self._under_way:
            works, large, flat, bucket, come = self._under_way.popleft()
            self._activity.wait(what, collective=come)
            for work in works:
                work.wait()
            flags = flat[-len(bucket) :]
            has_all = all(parameter.grad is not None for parameter in bucket)
            somewhere = [True] * len(bucket) if has_all else flags.ne(0).tolist()
            of_large, start = iter(large), 0
            for parameter, has_gradient in zip(bucket, somewhere, strict=True):
                size = local_part(parameter).numel()
                if _bytes_of(parameter) >= LARGE_BYTES:
                    part = next(of_large)
                else:
                    part, start = flat[start : start + size], start + size
                if has_gradient:
                    _set_gradient(parameter, part)
        self._activity.go_on()

    def forget(self) -> None:
        """Forget the all-reduces of a call that was interrupted."""
        self._end_watch()
        self._under_way.clear()
        self._waiting.clear()

    def _end_watch(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._complete.clear()


def _buckets(
    tensors: Iterable[Any], kind: Callable[[Tensor], object] = _kind
) -> Iterator[list[Any]]:
    """Group tensors into buckets of one kind: by default, of one type and device."""
    alike: dict[object, list[Any]] = {}
    for tensor in tensors:
        alike.setdefault(kind(tensor), []).append(tensor)
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


def _bytes_of(parameter: nn.Parameter) -> int:
    """The bytes of a parameter's gradient in this process."""
    return int(local_part(parameter).numel() * _kind(parameter)[0].itemsize)


def _dense_gradient(parameter: nn.Parameter) -> Tensor:
    """A gradient's dense numbers in this process: where they lie if they can be reduced there."""
    dtype, device = _kind(parameter)
    if parameter.grad is None:
        return torch.zeros(local_part(parameter).shape, dtype=dtype, device=device)
    part = local_part(parameter.grad)
    return (part.to_dense() if part.is_sparse else part).to(dtype).contiguous()


def _set_gradient(parameter: nn.Parameter, average: Tensor) -> None:
    """Leave an average in ``.grad``, unless it lies there already."""
    gradient, shape = parameter.grad, local_part(parameter).shape
    if gradient is None:
        # A copy, since a view would keep the whole message alive.
        parameter.grad = with_local(parameter, average.view(shape).clone())
    elif gradient.is_sparse:
        parameter.grad = average.view(shape).to_sparse(gradient.sparse_dim())
    elif local_part(gradient).data_ptr() != average.data_ptr():
        local_part(gradient).copy_(average.view(shape))


def copy_from_first(tensors: Iterable[Tensor], group: dist.ProcessGroup) -> None:
    """Copy tensors from the first process of a group; all of its processes call this."""
    for bucket in _buckets(local_part(tensor) for tensor in tensors if not tensor.is_meta):
        flat = torch.cat([tensor.flatten() for tensor in bucket])
        # As bytes, since not every backend sends every type.
        dist.broadcast(flat.view(torch.uint8), group=group, group_src=0)
        parts = flat.split([tensor.numel() for tensor in bucket])
        for tensor, part in zip(bucket, parts, strict=True):
            tensor.copy_(part.view_as(tensor))


def begin_equal(
    modules: Iterable[nn.Module],
    group: dist.ProcessGroup,
    dims: Sequence[dist.ProcessGroup] = (),
) -> None:
    """Give stages the weights and buffers of the first replica; all replicas call this.

    Tensors that a wrapper replicates or shards, those that are sharded over all replicas and those on the
    meta device are left alone.
    """
    for module in modules:
        parameters, buffers = unreduced(module)
        over: dict[Any, list[Tensor]] = {group: list(buffers)}
        for parameter in parameters:
            over.setdefault(averaged_over(parameter, group, dims), []).append(parameter)
        for among, tensors in over.items():
            if among is not None:
                copy_from_first(tensors, among)


def left_alone(
    module: nn.Module, group: dist.ProcessGroup, dims: Sequence[dist.ProcessGroup] = ()
) -> list[nn.Parameter]:
    """The parameters of a stage whose gradients no wrapper and no DTensor reduces over the replicas.

    Args:
        module: the stage's module, in its wrapper.
        group: the process group of the replicas.
        dims: the groups of the dimensions that the replicas form, if there are several.
    """
    return [p for p in unreduced(module)[0] if averaged_over(p, group, dims) is not None]


def unreduced(module: nn.Module) -> tuple[list[nn.Parameter], list[Tensor]]:
    """The parameters that no wrapper reduces, and the buffers that no wrapper copies."""
    parts = spread_parts(module)
    reduced = {id(p) for part in parts for p in part.parameters}
    parameters = [p for p in module.parameters() if id(p) not in reduced]
    return parameters, [] if parts else list(module.buffers())


def averaged_over(
    parameter: Tensor, group: dist.ProcessGroup, dims: Sequence[dist.ProcessGroup] = ()
) -> dist.ProcessGroup | None:
    """The replicas that have the same part of a weight, over which its gradients are averaged.

    Args:
        parameter: the weight. If it is a DTensor, the gradient in each process of its mesh counts all of the
            mesh.
        group: the process group of the replicas.
        dims: the groups of the dimensions that the replicas form, if there are several.

    Returns:
        The group, or None if no other replica has this part.

    Raises:
        UsageError: the weight is sharded over some of the replicas, and ``dims`` does not tell the others.
    """
    if not is_sharded(parameter):
        return group
    replicas, mesh = ranks_in(group), mesh_ranks(parameter.device_mesh)
    if replicas <= mesh:
        return None
    if len(replicas & mesh) <= 1:
        return group
    others = [one for one in dims if not ranks_in(one) <= mesh]
    if len(others) != 1:
        raise UsageError(
            f"a weight of shape {list(parameter.shape)} is sharded over the processes {sorted(mesh)}, which "
            f"are some of the replicas {sorted(replicas)}; name the dimensions of mesh= that the replicas "
            'form, those of the weight and one more: replicas=("dp", "ep")'
        )
    return others[0]
