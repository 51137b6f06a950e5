"""Weights that several stages use: one tensor within a process, equal copies across processes, one gradient.

Each stage collects its share of the gradient beside ``.grad``, over all microbatches of a step. After the
step, the ranks that hold copies exchange the shares of their stages; each rank adds all shares up in the
order of the stages, and adds the sum to ``.grad``. So the result depends neither on which rank has which
stages, nor on whose backward ran first, and optimizers keep the copies equal bit by bit.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Sequence
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock.errors import AgreementError, UsageError
from penstock.parallel import local_part, spreads_over_processes, with_local
from penstock.partition import Shared
from penstock.runtime import Task, Wait
from penstock.stage import PipelineStage
from penstock.transport import SHARED, Channel, Transport
from penstock.values import TensorSpec

log = logging.getLogger("penstock")
_DIFFERED = "%r differed between the ranks that share it: ranks %s got that of rank %d"

_Item = tuple[int, int]
"""A weight, by its position in the table, and a stage that uses it."""


class _Peer(NamedTuple):
    """The shares that this rank and another one exchange."""

    rank: int
    mine: tuple[_Item, ...]
    theirs: tuple[_Item, ...]


class Sharing:
    """The shared weights that live in this process.

    Args:
        stages: those of this process.
        table: what stages share, the same on every rank; or only what the stages here share with each other.
        rank_of: the rank of each stage.

    Raises:
        UsageError: stages on different devices of one process share a weight.
    """

    def __init__(
        self, stages: Sequence[PipelineStage], table: Sequence[Shared], rank_of: Sequence[int]
    ) -> None:
        self._stages = {stage.index: stage for stage in stages}
        self._table = tuple(table)
        self._rank_of = rank_of
        self._tensors: dict[int, Tensor] = {}
        self._is_first_step = True
        self._buffers: dict[int, tuple[int, Tensor | None]] = {}
        self._shares: dict[_Item, Tensor | None] = {}
        self._here = {rank_of[index] for index in self._stages}
        self._tie()
        self._peers = tuple(self._find_peers())

    @property
    def idle(self) -> bool:
        """Whether the stages here share nothing with other stages."""
        return not any(len(self._table[index].stages) > 1 for index in self._tensors)

    @property
    def table(self) -> list[list[Any]]:
        """The part of the table that concerns several ranks, as JSON data."""
        return [
            [list(one.names), [list(holder) for holder in one.holders]]
            for one in self._table
            if len(self._ranks(one)) > 1
        ]

    @property
    def channels(self) -> list[Channel]:
        """The channels that shares travel on, of all ranks."""
        pairs = {
            Channel(source, target, SHARED)
            for one in self._table
            for source in self._ranks(one)
            for target in self._ranks(one)
            if source != target
        }
        return sorted(pairs)

    def _ranks(self, one: Shared) -> list[int]:
        return sorted({self._rank_of[stage] for stage in one.stages})

    # ---- one tensor within a process

    def _tie(self) -> None:
        """Make the stages here hold the same tensor.

        Materialising each stage alone undoes the model's ties.
        """
        for index, one in enumerate(self._table):
            names = [(self._stages[s], name) for s, name in one.holders if s in self._stages]
            if names:
                self._tensors[index] = _made_one(one, names)
        for index, stage in self._stages.items():
            stage.keep_apart([self._tensors[weight] for weight in self._trained(index)])

    def tie_filled(self) -> None:
        """Tie again weights that have been given memory since, stage by stage."""
        if any(tensor.is_meta for tensor in self._tensors.values()) and not self._is_tied():
            self._tie()

    def _trained(self, stage: int) -> list[int]:
        """The positions of the parameters that a stage here shares with other stages."""
        return [
            index
            for index, tensor in self._tensors.items()
            if stage in self._table[index].stages and self._adds_up(index, tensor)
        ]

    def _adds_up(self, index: int, tensor: Tensor) -> bool:
        return isinstance(tensor, nn.Parameter) and len(self._table[index].stages) > 1

    def _is_tied(self) -> bool:
        return all(
            _find(self._stages[stage], name) is tensor
            for index, tensor in self._tensors.items()
            for stage, name in self._table[index].holders
            if stage in self._stages
        )

    # ---- equal copies across ranks

    def align(self, transport: Transport, level: int = logging.WARNING) -> Task[None]:
        """Check that the ranks' copies are equal; if not, all ranks get the copy of the first stage.

        Args:
            transport: of the rank.
            level: the log level of the message that says so.

        Raises:
            AgreementError: the copies differ in shape or type.
        """
        if not set(self._rank_of) - self._here or not self.channels:
            return
        ticket = transport.agree([[index, *_summary(t)] for index, t in self._tensors.items()])
        yield Wait(ticket, transport.rank, "waits to compare weights that stages share")
        told = [{index: rest for index, *rest in one} for one in ticket.take()]
        for index, one in enumerate(self._table):
            ranks = self._ranks(one)
            _check_alike(one, {rank: told[rank][index][0] for rank in ranks})
            digests = {rank: told[rank][index][1] for rank in ranks}
            source = self._rank_of[one.stages[0]]
            others = [rank for rank in ranks if None not in {digests[rank], digests[source]}]
            others = [rank for rank in others if digests[rank] != digests[source]]
            if others and transport.rank in (source, *others):
                if transport.rank == source:
                    log.log(level, _DIFFERED, self._table[index].names[0], others, source)
                yield from self._spread(transport, index, source, others)
        transport.finish()

    def _spread(
        self, transport: Transport, index: int, source: int, others: Sequence[int]
    ) -> Task[None]:
        name, tensor = self._table[index].names[0], self._tensors[index]
        if transport.rank == source:
            for rank in others:
                transport.post_send(Channel(source, rank, SHARED), [local_part(tensor)])
            return
        part = local_part(tensor)
        ticket = transport.post_receive(
            Channel(source, transport.rank, SHARED), [TensorSpec.of(part)], part.device
        )
        yield Wait(ticket, transport.rank, f"waits for {name!r}, which it shares")
        part.copy_(ticket.take()[0])

    # ---- one gradient

    def prepare(self) -> None:
        """Before a step, tie weights again that were replaced, and note the versions of shared buffers."""
        if not self._is_tied():
            self._tie()
        self._buffers = {
            index: (tensor._version, tensor.clone() if self._is_first_step else None)
            for index, tensor in self._tensors.items()
            if not isinstance(tensor, nn.Parameter) and len(self._table[index].stages) > 1
        }

    def collect(self) -> None:
        """Take the shares that a step has left in the stages here."""
        for index, stage in self._stages.items():
            shares = stage.take_shares()
            self._shares |= zip(((w, index) for w in self._trained(index)), shares, strict=True)

    def exchange(self, transport: Transport) -> Task[None]:
        """Exchange the shares of a step with other processes.

        Raises:
            UsageError: the step changed a buffer that stages share.
        """
        changed = [index for index in self._buffers if self._is_changed(index)]
        if changed:
            raise _changed([self._table[index] for index in changed])
        self._is_first_step = False
        for peer in self._peers:
            self._send(transport, peer)
        for peer in self._peers:
            yield from self._receive(transport, peer)
        if self._peers:
            transport.finish()

    def _is_changed(self, index: int) -> bool:
        # Not every operation that changes a tensor increments its version: batch_norm does not.
        version, before = self._buffers[index]
        tensor = self._tensors[index]
        return tensor._version != version or not (before is None or torch.equal(tensor, before))

    def _find_peers(self) -> Iterator[_Peer]:
        """The ranks of other processes that share something with the rank here."""
        for other in sorted(set(self._rank_of) - self._here):
            common = [
                index
                for index, tensor in self._tensors.items()
                if self._adds_up(index, tensor) and other in self._ranks(self._table[index])
            ]
            if common:
                (own,) = self._here
                yield _Peer(other, self._items(common, own), self._items(common, other))

    def _items(self, weights: Sequence[int], rank: int) -> tuple[_Item, ...]:
        return tuple(
            (weight, stage)
            for weight in weights
            for stage in self._table[weight].stages
            if self._rank_of[stage] == rank
        )

    def _send(self, transport: Transport, peer: _Peer) -> None:
        """Send which shares there are, and then the shares."""
        channel = Channel(transport.rank, peer.rank, SHARED)
        found = [self._shares[item] for item in peer.mine]
        there = torch.tensor([share is not None for share in found])
        transport.post_send(channel, [there.to(self._device)])
        parts = [
            _dense(self._tensors[weight], share)
            for (weight, _), share in zip(peer.mine, found, strict=True)
            if share is not None
        ]
        if parts:
            transport.post_send(channel, parts)

    def _receive(self, transport: Transport, peer: _Peer) -> Task[None]:
        channel = Channel(peer.rank, transport.rank, SHARED)
        flags = TensorSpec((len(peer.theirs),), "bool", requires_grad=False)
        (there,) = yield from _arrived(transport, channel, [flags], self._device)
        present = [item for item, flag in zip(peer.theirs, there.tolist(), strict=True) if flag]
        specs = [_gradient_spec(self._tensors[weight]) for weight, _ in present]
        parts: list[Tensor] = []
        if specs:
            parts = yield from _arrived(transport, channel, specs, self._device)
        self._shares |= dict.fromkeys(peer.theirs) | dict(zip(present, parts, strict=True))

    @property
    def _device(self) -> torch.device:
        return next(iter(self._stages.values())).device

    def add_up(self) -> None:
        """Add the sums of the shares to the weights' ``.grad``."""
        shares, self._shares = self._shares, {}
        for index, tensor in self._tensors.items():
            found = [shares.get((index, stage)) for stage in self._table[index].stages]
            present = [_dense(tensor, share) for share in found if share is not None]
            if present:
                _add_to_grad(tensor, reduce(torch.add, present))


def _changed(buffers: Sequence[Shared]) -> UsageError:
    listed = ", ".join(f"{one.names[0]!r} (stages {list(one.stages)})" for one in buffers)
    return UsageError(
        f"a step changed buffers that several stages share: {listed}; each rank would change its own copy, "
        "in another order than the unsplit model. Put the modules that use them into one stage, or keep the "
        "buffer fixed (a BatchNorm with track_running_stats=False, or in evaluation mode)"
    )


def _made_one(one: Shared, holders: Sequence[tuple[PipelineStage, str]]) -> Tensor:
    devices = {stage.device for stage, _ in holders}
    if len(devices) > 1:
        raise UsageError(
            f"{one.names[0]!r} is shared by stages {list(one.stages)}, which live in one process on "
            f"{sorted(map(str, devices))}; put them on one device, or start one process per rank"
        )
    for stage, name in holders[1:]:
        if _find(stage, name) is not _find(*holders[0]):
            _check_can_be_one(one, [stage for stage, _ in holders])
    first = _find(*holders[0])
    for stage, _ in holders:
        held = dict(stage.named_tensors())
        for name in {*one.names, *(name for _, name in one.holders)} & held.keys():
            if held[name] is not first:
                _put(stage, name, first)
    return first


def _check_can_be_one(one: Shared, stages: Sequence[PipelineStage]) -> None:
    for stage in stages:
        found = spreads_over_processes(stage.module)
        if found is not None and found[1] == "fully_shard":
            raise UsageError(
                f"{one.names[0]!r} is shared by stages {list(one.stages)}, several of which live in this "
                f"process, and {found[1]} has sharded it in each of them separately; replicate these stages "
                "with DistributedDataParallel, or use a schedule that places them on different ranks"
            )


def _find(stage: PipelineStage, name: str) -> Tensor:
    """A parameter or buffer by its name."""
    path, _, leaf = name.rpartition(".")
    found: Tensor = getattr(stage.part(path), leaf)
    return found


def _put(stage: PipelineStage, name: str, tensor: Tensor) -> None:
    path, _, leaf = name.rpartition(".")
    setattr(stage.part(path), leaf, tensor)


def _summary(tensor: Tensor) -> tuple[str, str | None]:
    """Shape and type as a text, and a digest of the data, if there are any."""
    part = local_part(tensor)
    if part.is_meta:
        return str(TensorSpec.of(part)), None
    raw = part.cpu().contiguous().flatten().view(torch.uint8)
    return str(TensorSpec.of(part)), hashlib.sha256(raw.numpy().tobytes()).hexdigest()


def _check_alike(one: Shared, kinds: dict[int, str]) -> None:
    if len(set(kinds.values())) > 1:
        raise AgreementError(
            f"ranks share {one.names[0]!r}, but it differs between them: {kinds}; "
            "give every rank the same model"
        )


def _dense(parameter: Any, share: Tensor) -> Tensor:
    """A share in the form that is sent: its local part, dense, in the gradient's type."""
    part = local_part(share)
    part = part.to_dense() if part.is_sparse else part
    return part.to(parameter.grad_dtype or parameter.dtype)


def _gradient_spec(parameter: Any) -> TensorSpec:
    dtype = parameter.grad_dtype or parameter.dtype
    name = str(dtype).removeprefix("torch.")
    return TensorSpec(tuple(local_part(parameter).shape), name, requires_grad=False)


def _arrived(
    transport: Transport, channel: Channel, specs: Sequence[TensorSpec], device: torch.device
) -> Task[list[Tensor]]:
    ticket = transport.post_receive(channel, specs, device)
    yield Wait(ticket, transport.rank, f"waits on the {channel} for gradients of shared weights")
    found: list[Tensor] = ticket.take()
    return found


def _add_to_grad(parameter: Any, total: Tensor) -> None:
    with torch.no_grad():
        if parameter.grad is None:
            parameter.grad = with_local(parameter, total)
        elif parameter.grad.is_sparse:
            parameter.grad = total + parameter.grad
        else:
            local_part(parameter.grad).add_(total)
