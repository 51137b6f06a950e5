"""Weights that several stages use: one tensor in a process, equal copies across processes, one gradient.

Each stage collects its share of the gradient apart from ``.grad``, over all microbatches of a step. After
the step, the ranks that hold copies exchange the shares of their stages. Each rank adds up all shares in the
order of the stages, and adds the sum to ``.grad``. So the result depends neither on which rank has which
stages, nor on which backward ran first, and optimizers keep the copies equal, bit for bit.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from penstock._engine.parallel import is_sharded, local_part, spread_parts, with_local
from penstock._engine.transport import Job
from penstock._engine.weights.files import digest
from penstock.errors import AgreementError, UsageError
from penstock.partition import Shared
from penstock.stage import PipelineStage

log = logging.getLogger("penstock")


class SharedWeights:
    """The shared weights that live in this process.

    Args:
        stages: the stages of this process.
        table: the weights that stages share, the same on every rank; or only those shared among stages here.
        rank_of: the rank of each stage.
        job: the ranks of the pipeline.
    """

    def __init__(
        self,
        stages: Sequence[PipelineStage],
        table: Sequence[Shared],
        rank_of: Sequence[int],
        job: Job,
    ) -> None:
        self._stages = {stage.index: stage for stage in stages}
        self._here = {rank_of[index] for index in self._stages}
        self._job = job
        self._shared = [one for one in table if self._stages.keys() & {*one.stages}]
        self._ranks_of = [sorted({rank_of[stage] for stage in one.stages}) for one in self._shared]
        self._rank_of = rank_of
        self._is_first_step = True
        self._buffers: list[tuple[Shared, Tensor, int, Tensor | None]] = []
        self.tie()
        wide = [one for one in table if len({rank_of[stage] for stage in one.stages}) > 1]
        self._is_wide = bool(wide) and len(self._here) < len({*rank_of})
        rows = [[one.names, one.holders] for one in wide]
        tables = job.meet(lambda: rows, among=job.pipeline)
        if any(of_rank != tables[0] for of_rank in tables):
            raise AgreementError(
                "ranks were given different tables of shared weights; give all of them the same shared=. "
                f"The tables, by rank: {tables}"
            )
        homes = [sorted({rank_of[stage] for stage in one.stages}) for one in wide]
        job.open(sorted({(a, b) for of in homes for a in of for b in of if a != b}))

    # ---- one tensor in a process

    def tie(self) -> None:
        """Make the stages here hold the same tensors: giving each of them memory undoes the model's ties."""
        self._tensors = [self._make_one(one) for one in self._shared]
        self._places = [self._places_of(one) for one in self._shared]
        self._trained = [
            isinstance(tensor, nn.Parameter) and len(one.stages) > 1
            for one, tensor in zip(self._shared, self._tensors, strict=True)
        ]
        for index, stage in self._stages.items():
            stage.share_gradients([self._tensors[i] for i in self._trained_by(index)])

    def tie_again(self) -> None:
        """Tie weights again after each stage got memory; refuse a weight that was replaced."""
        for one, before, places in zip(self._shared, self._tensors, self._places, strict=True):
            now = [_find(self._stages[stage], name) for stage, name in places]
            if any(tensor is not before for tensor in now):
                if not (before.is_meta or id(now[0]) in self._between()):
                    self._check_same(one, before, now, places)
                self.tie()
                return

    def _check_same(
        self, one: Shared, before: Tensor, now: Sequence[Tensor], places: Sequence[tuple[int, str]]
    ) -> None:
        was_sharded = is_sharded(now[0]) != is_sharded(before) and now[0].shape == before.shape
        is_one = all([tensor is now[0] for tensor in now])
        # Even if all stages here have one new tensor, stages elsewhere have the old one, or another.
        if not is_one or (not was_sharded and {*one.stages} - self._stages.keys()):
            stage, name = next(
                place for place, t in zip(places, now, strict=True) if t is not before
            )
            raise UsageError(
                f"{name!r} of stage {stage} was replaced, but it is one tensor with "
                f"{', '.join(n for n in one.names if n != name) or 'that of other stages'} in stages "
                f"{list(one.stages)}; change it in place, as by copy_(), or make a new Pipeline"
            )

    def _make_one(self, one: Shared) -> Tensor:
        holders = [(self._stages[s], name) for s, name in one.holders if s in self._stages]
        first = _find(*holders[0])
        devices = {str(stage.device) for stage, _ in holders}
        if len(devices) > 1:
            raise UsageError(
                f"{one.names[0]!r} is shared by stages {list(one.stages)}, which live in one process on "
                f"{sorted(devices)}; put them on one device, or start one process per rank"
            )
        for index, name in self._places_of(one):
            if _find(self._stages[index], name) is not first:
                _check_can_be_one(one, [stage for stage, _ in holders])
                path, _, leaf = name.rpartition(".")
                setattr(self._stages[index].part(path), leaf, first)
        return first

    def _places_of(self, one: Shared) -> list[tuple[int, str]]:
        """The stages here that have a weight, each with every name it has there."""
        names = dict.fromkeys((*one.names, *(name for _, name in one.holders)))
        here = {
            stage: dict(self._stages[stage].named_tensors())
            for stage in one.stages
            if stage in self._stages
        }
        return [
            (stage, name) for stage, tensors in here.items() for name in names if name in tensors
        ]

    def _trained_by(self, stage: int) -> list[int]:
        """The positions of the parameters that a stage here shares with other stages."""
        return [i for i, one in enumerate(self._shared) if self._trained[i] and stage in one.stages]

    # ---- equal copies across ranks

    def align(self, level: int = logging.WARNING) -> None:
        """Where copies differ between ranks, give all of them the first stage's, and log it."""
        if not self._is_wide:
            return
        digests = {
            one.names[0]: [str(list(tensor.shape)), str(tensor.dtype), digest(local_part(tensor))]
            for one, tensor in zip(self._shared, self._tensors, strict=True)
        }
        copies = self._job.meet(lambda: digests, among=self._job.pipeline)
        for one, tensor, ranks in zip(self._shared, self._tensors, self._ranks_of, strict=True):
            of_ranks = {rank: copies[rank][one.names[0]] for rank in ranks}
            kinds = {rank: " ".join(copy[:2]) for rank, copy in of_ranks.items()}
            if len({*kinds.values()}) > 1:
                raise AgreementError(
                    f"ranks share {one.names[0]!r}, but it differs between them: {kinds}; "
                    "give every rank the same model"
                )
            source = self._rank_of[one.stages[0]]
            others = [r for r in ranks if "" not in (of_ranks[r][2], of_ranks[source][2])]
            others = [r for r in others if of_ranks[r][2] != of_ranks[source][2]]
            part = local_part(tensor)
            if others and self._job.rank == source:
                text = "%r differed between the ranks that share it: ranks %s got that of rank %d"
                log.log(level, text, one.names[0], others, source)
                self._job.swap({rank: [part] for rank in others}, {})
            elif self._job.rank in others:
                received = torch.empty_like(part, memory_format=torch.contiguous_format)
                self._job.swap({}, {source: [received]})
                part.copy_(received)

    # ---- one gradient

    def prepare(self) -> None:
        """Before a step: tie weights again (:meth:`tie_again`), and note the shared buffers."""
        if not self._shared:
            return
        for stage in self._stages.values():
            stage.take_shares()  # those of a step that failed before its end
        self.tie_again()
        between = self._between()
        # Not every operation that changes a tensor increments its version: batch_norm does not.
        self._buffers = [
            (one, tensor, tensor._version, tensor.clone() if self._is_first_step else None)
            for one, tensor in zip(self._shared, self._tensors, strict=True)
            if not isinstance(tensor, nn.Parameter)
            and len(one.stages) > 1
            and id(tensor) not in between
        ]

    def _between(self) -> set[int]:
        """The buffers between units, by identity: the author's code sets these alike in all processes."""
        around = (module for stage in self._stages.values() for module in stage.around)
        return {id(buffer) for module in around for buffer in module._buffers.values()}

    def finish(self) -> None:
        """After a step: check that it did not change shared buffers, and add up the stages' gradients."""
        if self._shared:
            self._check_buffers()
            self._sum_gradients()

    def _check_buffers(self) -> None:
        changed = [
            f"{one.names[0]!r} (stages {list(one.stages)})"
            for one, tensor, version, before in self._buffers
            if tensor._version != version or not (before is None or torch.equal(tensor, before))
        ]
        if changed:
            raise UsageError(
                f"a step changed buffers that several stages share: {', '.join(changed)}; each rank would "
                "change its own copy, in another order than the unsplit model. Put the modules that use them "
                "into one stage, or keep the buffer fixed (a BatchNorm with track_running_stats=False, or in "
                "evaluation mode)"
            )
        self._is_first_step = False

    def _sum_gradients(self) -> None:
        """Add the sum of all stages' shares to the ``.grad`` of each weight."""
        shares: dict[tuple[int, int], Tensor | None] = {}
        for index, stage in self._stages.items():
            keys = [(i, index) for i in self._trained_by(index)]
            shares |= zip(keys, stage.take_shares(), strict=True)
        shares = {key: self._dense(key[0], one) for key, one in shares.items()}
        if self._is_wide:
            self._exchange(shares)
        for i, (one, tensor) in enumerate(zip(self._shared, self._tensors, strict=True)):
            parts = [shares.get((i, stage)) for stage in one.stages]
            present = [part for part in parts if part is not None]
            if present:
                _add_to_grad(tensor, reduce(torch.add, present))

    def _exchange(self, shares: dict[tuple[int, int], Tensor | None]) -> None:
        """Swap with the other ranks: first flags for the shares that exist, then the shares."""
        mine, theirs = dict[int, list[tuple[int, int]]](), dict[int, list[tuple[int, int]]]()
        for i, one in enumerate(self._shared):
            for rank in self._ranks_of[i] if self._trained[i] else ():
                if rank not in self._here:
                    of_rank = [(i, stage) for stage in one.stages if self._rank_of[stage] == rank]
                    theirs.setdefault(rank, []).extend(of_rank)
                    items = [(i, stage) for stage in one.stages if (i, stage) in shares]
                    mine.setdefault(rank, []).extend(items)
        device = next(iter(self._stages.values())).device
        flags = {rank: torch.zeros(len(keys), device=device) for rank, keys in theirs.items()}
        there = {
            rank: [torch.tensor([float(shares[key] is not None) for key in keys], device=device)]
            for rank, keys in mine.items()
        }
        self._job.swap(there, {rank: [flag] for rank, flag in flags.items()})
        sends = {
            r: [s for key in keys if (s := shares[key]) is not None] for r, keys in mine.items()
        }
        receives: dict[int, list[Tensor]] = {}
        for rank, keys in theirs.items():
            for key, flag in zip(keys, flags[rank].tolist(), strict=True):
                if flag:
                    shares[key] = buffer = self._empty(key[0])
                    receives.setdefault(rank, []).append(buffer)
        self._job.swap({rank: of for rank, of in sends.items() if of}, receives)

    def _empty(self, i: int) -> Tensor:
        weight: Any = self._tensors[i]
        part = local_part(weight)
        return torch.empty(part.shape, dtype=weight.grad_dtype or part.dtype, device=part.device)

    def _dense(self, i: int, share: Tensor | None) -> Tensor | None:
        """A share in the form that is sent: its local part, dense, in the gradient's type."""
        if share is None:
            return None
        part = local_part(share)
        part = part.to_dense() if part.is_sparse else part
        weight: Any = self._tensors[i]
        return part.to(weight.grad_dtype or weight.dtype).contiguous()


def _find(stage: PipelineStage, name: str) -> Tensor:
    path, _, leaf = name.rpartition(".")
    tensor: Tensor = getattr(stage.part(path), leaf)
    return tensor


def _check_can_be_one(one: Shared, stages: Sequence[PipelineStage]) -> None:
    for stage in stages:
        if any(part.how == "fully_shard" for part in spread_parts(stage.module)):
            raise UsageError(
                f"{one.names[0]!r} is shared by stages {list(one.stages)}, several of which live in this "
                f"process, and fully_shard has sharded it in each of them separately; replicate these stages "
                "with DistributedDataParallel, or use a schedule that places them on different ranks"
            )


def _add_to_grad(weight: Any, total: Tensor) -> None:
    with torch.no_grad():
        if weight.grad is None:
            weight.grad = with_local(weight, total)
        elif weight.grad.is_sparse:
            weight.grad = total + weight.grad
        else:
            local_part(weight.grad).add_(total)
