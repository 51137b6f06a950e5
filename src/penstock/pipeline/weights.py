"""The weights of a pipeline in this process, and those that they share with other stages."""

from __future__ import annotations

import logging
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from penstock.elsewhere import Elsewhere, Whereabouts, is_elsewhere, leave_gradients
from penstock.partition import Shared
from penstock.runtime import Runner
from penstock.stage import PipelineStage
from penstock.weights.norms import all_norms
from penstock.weights.sharing import SharedWeights
from penstock.weights.states import LoadResult, Names, StageWeights, load_state
from penstock.weights.team import Level, Team

Listed = list[tuple[str, Elsewhere | None]]
"""All parameters of the model by name, in order: stand-ins for those elsewhere, None for those held here."""


class HeldWeights:
    """The weights of the stages of this process, and those that they share with other stages.

    Args:
        stages: the stages of this process.
        ranks: the runner, through which this process reaches the others.
        shared: the table of weights that stages share.
        rank_of: the rank of each stage.
        named: the parameters of the model that was cut; without them, the ranks tell each other theirs.

    Raises:
        AgreementError: a shared weight has different shapes or types on different ranks.
    """

    def __init__(
        self,
        stages: Sequence[PipelineStage],
        ranks: Runner,
        shared: Sequence[Shared],
        rank_of: Sequence[int],
        named: Iterable[tuple[str, nn.Parameter]] | None = None,
    ) -> None:
        self.stages = stages
        self._rank_of = rank_of
        self.ranks = ranks
        self.stage_count = len(rank_of)
        self.names = Names(shared)
        self._sharing = SharedWeights(stages, shared, rank_of, ranks)
        self.align()
        self._listed = self._list_by_hand() if named is None else _listed(named)

    # ---- the parameters of the whole model

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters of the whole model, each once; those of other ranks are stand-ins."""
        here = defaultdict[str, deque[nn.Parameter]](deque)
        for name, parameter in self.weights.named_parameters():
            here[name].append(parameter)
        for name, absent in self._listed:
            if absent is not None:
                yield name, absent  # type: ignore[misc]  # it passes as an nn.Parameter
            elif here[name]:
                yield name, here[name].popleft()
        for name, added in here.items():
            yield from ((name, parameter) for parameter in added)

    @property
    def absent(self) -> list[Elsewhere]:
        """The stand-ins for the parameters of other ranks."""
        return [absent for _, absent in self._listed if absent is not None]

    def leave_gradients(self) -> None:
        """After a step: leave stand-ins as the gradients of the weights of other ranks."""
        leave_gradients(self.absent, self._norms)

    def _list_by_hand(self) -> Listed:
        """The parameters of stages placed by hand, in the order of the stages."""
        rows = [
            [stage.index, self.names.first(name), list(p.shape), str(p.dtype), p.requires_grad]
            for stage in self.stages
            for name, p in stage.named_parameters()
        ]
        device, listed, seen = self.stages[0].device, Listed(), set[str]()
        saved = [[*stage.state_dict()] for stage in self.stages]
        gathered = self.ranks.gather([rows, saved])
        of_ranks = [rows for rows, _ in gathered]
        self.names.find_clashes(names for _, of_rank in gathered for names in of_rank)
        held = {name for _, name, *_ in rows} if len(of_ranks) > 1 else ()
        for index, name, shape, dtype, learns in sorted(row for rows in of_ranks for row in rows):
            rank, shared = self._rank_of[index], self.names.is_shared(name)
            if shared and name in seen:
                continue
            seen.add(name)
            if len(of_ranks) == 1 or rank == self.ranks.rank or (shared and name in held):
                listed.append((name, None))
                continue
            kind = getattr(torch, dtype.removeprefix("torch."))
            bare = torch.empty(shape, dtype=kind, device="meta", requires_grad=learns)
            listed.append(
                (name, Elsewhere.of(bare, Whereabouts(name, rank, device), parameter=True))
            )
        return listed

    def _norms(self, order: float, present: int, absent: Sequence[str]) -> Tensor | None:
        """The norms of all gradients, where all ranks ask for them; see :class:`penstock.elsewhere.Norms`."""
        learning = [
            (name, weight) for name, weight in self.named_parameters() if weight.requires_grad
        ]
        expected = [
            name for name, weight in learning if is_elsewhere(weight) and weight.grad is not None
        ]
        here = [w for _, w in learning if not is_elsewhere(w) and w.grad is not None]
        if present != len(here) or sorted(absent) != sorted(expected):
            return None
        homes = [self._ranks_with(name, weight) for name, weight in learning]
        # A rank that has all weights which learn computes the norm by itself, and would not join.
        if any(all(rank in home for home in homes) for rank in {*self._rank_of}):
            return None
        return all_norms(self.ranks, self.weights.counted(), order)

    def _ranks_with(self, name: str, weight: Tensor) -> set[int]:
        if self.names.is_shared(name):
            return {self._rank_of[stage] for stage in self.names.stages(name)}
        return {weight.place.rank if is_elsewhere(weight) else self.ranks.rank}

    # ---- those of this process

    def align(self, level: int = logging.WARNING) -> None:
        """Make the ranks' copies of shared weights equal, and log where they differed."""
        self._sharing.align(level)

    @contextmanager
    def training(self) -> Iterator[None]:
        """A context for a training step; its exit sums the gradients of shared weights over stages."""
        self._sharing.prepare()
        yield
        try:
            self._sharing.check_buffers()
            self._sharing.sum_gradients()
        except BaseException as error:
            # One rank alone may find a changed buffer, or lose a peer; the others must learn of it.
            raise self.ranks.fail(error) from error.__cause__

    @property
    def weights(self) -> StageWeights:
        """The parameters and buffers that live in this process."""
        self._sharing.tie_again()
        return StageWeights(self.stages, self.names)

    def check_filled(self) -> None:
        """Check that the stages have memory; tensors are looked up by name only on failure.

        Raises:
            UsageError: a tensor is on the meta device.
        """
        modules = [stage.module for stage in self.stages]
        tensors = [t for module in modules for t in (*module.parameters(), *module.buffers())]
        if True in [tensor.is_meta for tensor in tensors]:
            self.weights.check_filled()
        for stage in self.stages:
            stage.follow_memory()

    def names_by_identity(self) -> dict[int, str]:
        """The name of each parameter that lives in this process, by its ``id``."""
        return {id(parameter): name for name, parameter in self.weights.named_parameters()}

    def load(
        self, read: Callable[[], Mapping[str, Any]], *, strict: bool, any_name: bool
    ) -> LoadResult:
        """Load values by name; with ``any_name``, one of a weight's names is enough."""
        result = load_state(self.team, self.weights, read, strict=strict, any_name=any_name)
        self.align()
        return result

    @property
    def level(self) -> Level:
        """The ranks of this pipeline, of which the first collects what the others tell."""
        transport = self.ranks.transport
        size = 1 if transport is None else transport.ranks
        return Level(self.ranks.rank, size, self.ranks.to_first, self.ranks.from_first)

    @property
    def team(self) -> Team:
        """The ranks of this pipeline, as processes that load together."""
        return Team([self.level], (1, self.level.size))


def _listed(named: Iterable[tuple[str, nn.Parameter]]) -> Listed:
    return [(name, weight if is_elsewhere(weight) else None) for name, weight in named]
