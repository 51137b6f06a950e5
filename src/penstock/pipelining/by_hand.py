"""Communication of stages driven by hand: layouts once, then tensors, by torch's ``P2POp``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import P2POp
from torch.func import functional_call

from penstock.parallel import alone
from penstock.pipelining._utils import CallError, PipeliningMetadataError
from penstock.values import (
    Layout,
    TensorLayout,
    check_plain,
    flatten,
    layout_of,
    restrided,
    tensors_in,
    unflatten,
)


def start(p2p_ops: Sequence[P2POp], desc: str | None = None) -> list[Any]:
    """Start sends and receives, and return the work to wait for.

    Operations in one direction start one by one: they cannot block each other, whereas NCCL would run a
    batch of them in sequence. Only a mixture could deadlock, so it goes as a batch.
    """
    ways = {one.op for one in p2p_ops}
    if ways in ({dist.isend}, {dist.irecv}):
        peer = "group_dst" if ways == {dist.isend} else "group_src"
        return [
            one.op(one.tensor, group=one.group, tag=one.tag, **{peer: one.group_peer})
            for one in p2p_ops
        ]
    return dist.batch_isend_irecv(list(p2p_ops)) if p2p_ops else []


def start_by_peer(p2p_ops: Sequence[P2POp], desc: str | None = None) -> dict[int, list[Any]]:
    """Start sends and receives peer by peer, in rank order, and return the work to wait for by peer."""
    peers = sorted({operation.peer for operation in p2p_ops})
    return {peer: start([one for one in p2p_ops if one.peer == peer]) for peer in peers}


def wait_all(work: Sequence[Any]) -> None:
    """Wait for communication."""
    for item in work:
        item.wait()


def may_learn(tensor: Tensor) -> bool:
    """Whether a tensor is of a type that has gradients."""
    return tensor.is_floating_point() or tensor.is_complex()


def value_layout(value: Any, *, trains: bool) -> Layout:
    """Return a value's layout; in training, a gradient comes back for each tensor that may have one."""

    def look(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return layout_of(leaf)._replace(learns=trains and may_learn(leaf))

    leaves, tree = flatten(value)
    return Layout(tree, tuple(map(look, leaves)))


def infer_layout(
    module: nn.Module,
    args: Layout,
    kwargs: Mapping[str, Any],
    device: torch.device,
    *,
    trains: bool,
) -> Layout:
    """Infer the layout of a module's output from a run on zeros, which changes nothing in it."""
    inner = alone(module)
    buffers = {name: buffer.clone() for name, buffer in inner.named_buffers()}
    with torch.no_grad(), torch.random.fork_rng():
        values = arrived([x.empty(device).zero_() for x in args.tensors], args)
        output = functional_call(inner, buffers, tuple(values), dict(kwargs))
    return value_layout(output, trains=trains)


class Neighbour:
    """The rank of the previous or the next stage, in another process.

    Args:
        group: the process group of the pipeline.
        rank: the neighbour's rank in the group.
        device: the device that holds the messages.
    """

    def __init__(self, group: Any, rank: int, device: torch.device) -> None:
        self._group, self._rank, self._device = group, rank, device

    def describe(self, layout: Layout) -> None:
        """Send this rank the layout of later messages."""
        text = json.dumps(layout.describe()).encode()
        data = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(self._device)
        for message in (torch.tensor([len(text)], device=self._device), data):
            dist.send(message, group=self._group, group_dst=self._rank)

    def described(self) -> Layout:
        """Receive the layout of this rank's later messages."""
        size = torch.zeros(1, dtype=torch.int64, device=self._device)
        dist.recv(size, group=self._group, group_src=self._rank)
        data = torch.empty(int(size), dtype=torch.uint8, device=self._device)
        dist.recv(data, group=self._group, group_src=self._rank)
        return Layout.read(json.loads(bytes(data.tolist()).decode()))

    def sends(self, tensors: Sequence[Tensor]) -> list[P2POp]:
        """Sends of tensors to this rank."""
        return [self._operation(dist.isend, tensor.detach().contiguous()) for tensor in tensors]

    def receives(self, tensors: Sequence[Tensor]) -> list[P2POp]:
        """Receives of tensors from this rank."""
        return [self._operation(dist.irecv, tensor) for tensor in tensors]

    def _operation(self, way: Any, tensor: Tensor) -> P2POp:
        data = tensor.reshape(-1).view(torch.uint8)
        return P2POp(way, data, group=self._group, group_peer=self._rank)


def arrived(tensors: Sequence[Tensor], layout: Layout) -> Any:
    """Rebuild a value of a layout from the tensors that have arrived."""
    left = iter(tensors)
    grad = torch.is_grad_enabled()
    leaves = [
        restrided(next(left), x.strides).requires_grad_(x.learns and grad)
        if isinstance(x, TensorLayout)
        else x
        for x in layout.leaves
    ]
    return unflatten(leaves, layout.tree)


def check_fits(value: Any, layout: Layout, what: str) -> list[Tensor]:
    """Check a value against the layout that its receiver expects, and return its tensors.

    Raises:
        PipeliningMetadataError: the value has another layout.
    """
    check_plain(value, what)
    tensors = tensors_in(value)
    looks, expected = (
        [str(x._replace(learns=False)) for x in of]
        for of in (map(layout_of, tensors), layout.tensors)
    )
    if looks != expected:
        raise PipeliningMetadataError(
            f"{what} is {', '.join(looks)}; expected {', '.join(expected)}"
        )
    return tensors


def take(left: dict[int, Any], microbatch: int, stage: int, before: str) -> Any:
    """Remove and return what a microbatch left; ``before`` names the call that leaves it."""
    if microbatch not in left:
        raise CallError(
            f"stage {stage} has nothing for microbatch {microbatch}; {before} comes first"
        )
    return left.pop(microbatch)
