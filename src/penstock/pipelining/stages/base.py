"""What all stages under torch's names have."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import P2POp

from penstock.errors import UsageError
from penstock.parallel import group_of, seat
from penstock.partition import Shared
from penstock.pipelining.refusals import CallError, PlacementError
from penstock.pipelining.rows.orders import ActionTuple, stage_to_rank
from penstock.stage import Gradients, PipelineStage
from penstock.stage import PipelineStage as OwnStage
from penstock.values import ValueSpec

# ---- Penstock's stage as this face needs it, and one whose weights' half of backward is the user's


Build = Callable[[], Callable[[], object]]


class HeldStage(PipelineStage):
    """A list between stages becomes several arguments too."""

    spread = (tuple, list)


class OwnWeights(HeldStage):
    """Autograd does all that it knows in the inputs' half; the rest is the user's.

    Args:
        args: of the stage.
        build: is called after each microbatch's backward and gives what does the rest.
    """

    def __init__(self, *args: Any, build: Build) -> None:
        super().__init__(*args, engine="none")
        self._build = build
        self._put_off: dict[int, Callable[[], object]] = {}

    def backward(self, microbatch: int, output_grads: Sequence[Tensor | None] | None) -> Gradients:
        """Full backward of a microbatch."""
        found = super().backward(microbatch, output_grads)
        self._build()()
        return found

    def backward_input(
        self, microbatch: int, output_grads: Sequence[Tensor | None] | None
    ) -> Gradients:
        """All but the user's part, which is made and put off."""
        found = super().backward_input(microbatch, output_grads)
        self._put_off[microbatch] = self._build()
        return found

    def backward_weight(self, microbatch: int) -> None:
        """The user's part."""
        super().backward_weight(microbatch)
        self._put_off.pop(microbatch)()

    def clear(self) -> None:
        """Drop whatever microbatches have left here."""
        super().clear()
        self._put_off.clear()


# ---- how a stage that is driven by hand reaches the ranks of its neighbours


__all__ = ["P2POp", "Wires", "start", "start_by_peer", "wait_all"]


class Wires:
    """The group of a pipeline as one stage sees it.

    Args:
        group: the process group.
        rank: this process's place there.
        rank_of: the rank of a stage.
        device: where messages lie.
    """

    def __init__(
        self, group: Any, rank: int, rank_of: Callable[[int], int], device: torch.device
    ) -> None:
        self._group, self._rank, self._rank_of, self._device = group, rank, rank_of, device

    def is_here(self, stage: int) -> bool:
        """Whether a stage is in this process."""
        return self._rank_of(stage) == self._rank

    def outgoing(self, tensor: Tensor, stage: int) -> P2POp:
        """A send to the rank of a stage."""
        return P2POp(dist.isend, tensor, group=self._group, group_peer=self._rank_of(stage))

    def incoming(self, buffer: Tensor, stage: int) -> P2POp:
        """A receive from the rank of a stage."""
        return P2POp(dist.irecv, buffer, group=self._group, group_peer=self._rank_of(stage))

    def tell(self, stage: int, spec: ValueSpec) -> None:
        """Tell a stage what it will be sent."""
        text = json.dumps(spec.to_json()).encode()
        data = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(self._device)
        size = torch.tensor([len(text)], device=self._device)
        for message in (size, data):
            dist.send(message, group=self._group, group_dst=self._rank_of(stage))

    def told(self, stage: int) -> ValueSpec:
        """What a stage tells that it will send."""
        size = torch.zeros(1, dtype=torch.int64, device=self._device)
        dist.recv(size, group=self._group, group_src=self._rank_of(stage))
        data = torch.empty(int(size), dtype=torch.uint8, device=self._device)
        dist.recv(data, group=self._group, group_src=self._rank_of(stage))
        return ValueSpec.from_json(json.loads(bytes(data.tolist()).decode()))


def start(p2p_ops: Sequence[P2POp], desc: str | None = None) -> list[Any]:
    """Start sends and receives; what to wait for.

    Those of one direction need no order among each other, and as a batch NCCL would run them one after the
    other; only a mixture could wait in a circle.
    """
    if len({one.op for one in p2p_ops}) == 1:
        return [one.op(one.tensor, None, one.group, one.tag, one.group_peer) for one in p2p_ops]
    return dist.batch_isend_irecv(list(p2p_ops)) if p2p_ops else []


def start_by_peer(p2p_ops: Sequence[P2POp], desc: str | None = None) -> dict[int, list[Any]]:
    """Start them peer by peer, in the order of the peers; what to wait for, by peer."""
    peers = sorted({operation.peer for operation in p2p_ops})
    return {peer: start([one for one in p2p_ops if one.peer == peer]) for peer in peers}


def wait_all(work: Sequence[Any]) -> None:
    """Wait for communication."""
    for item in work:
        item.wait()


# ---- what schedules need of a stage


Perform = Callable[[ActionTuple], Any]
"""Carries out an action of the step that runs."""


class StageBase:
    """What schedules need of a stage.

    Attributes:
        submod: the slice of the model; it may be replaced before the first step.
        stage_index: which stage it is.
        num_stages: how many there are.
        device: where it lives.
        group: the process group of the pipeline.
        group_rank: this process's place there.
        group_size: how many processes it has.
        has_backward: whether the schedule runs a backward for it.
        chunks: how many microbatches the step has that ran last.
        stage_index_to_group_rank: on which rank each stage is; in a loop until a schedule says it.
        output_chunks: on the last stage, what each microbatch of the last step gave.
        log_prefix: what it is called in messages.
        edges: which values travel between the stages; ``None`` where each feeds the next.
        shared: the weights that stages share, the same on every rank: their gradients are added up and copies
            stay equal. Without it they are as many weights as there are stages that hold one.
    """

    submod: Any = None
    stage_index: int = 0
    num_stages: int = 1
    device: torch.device = torch.device("cpu")
    group: Any = None
    group_rank: int = 0
    group_size: int = 1
    edges: Any = None
    shared: Sequence[Shared] = ()
    dw_builder: Any = None
    chunks: int | None = None
    _has_backward: bool = False

    def __init__(
        self,
        submodule: nn.Module,
        stage_index: int,
        num_stages: int,
        device: torch.device | str,
        group: Any = None,
        dw_builder: Build | None = None,
    ) -> None:
        if not 0 <= stage_index < num_stages:
            raise UsageError(f"stage index {stage_index} is out of range of {num_stages} stages")
        self.submod = submodule
        self.stage_index = stage_index
        self.num_stages = num_stages
        self.device = torch.device(device)
        self.group = group_of(group)
        self.group_rank, self.group_size = seat(self.group)
        if self.group_size > num_stages:
            raise PlacementError(
                f"{self.group_size} processes cannot run {num_stages} stages; each needs at least one"
            )
        self.dw_builder = dw_builder
        self.stage_index_to_group_rank = stage_to_rank(self.group_size, num_stages)
        self.output_chunks: list[Any] = []
        self.log_prefix = f"[Stage {stage_index}]"

    @property
    def has_backward(self) -> bool:
        """Whether the schedule runs a backward for it."""
        return self._has_backward

    @has_backward.setter
    def has_backward(self, has_backward: bool) -> None:
        self._has_backward = has_backward

    def own(self) -> OwnStage:
        """Penstock's stage.

        Raises:
            CallError: this stage has no module to run.
        """
        raise CallError(f"a {type(self).__name__} has nothing to run; make a PipelineStage")

    def place(self, rank_of: Mapping[int, int]) -> None:
        """Say on which rank each stage is."""
        self.stage_index_to_group_rank = dict(rank_of)

    def agree(self, chunks: int, args: Any, kwargs: Any = None) -> Any:
        """Agree with the stages beside this one on what travels, to be driven by hand.

        Args:
            chunks: how many microbatches there are.
            args: a microbatch's arguments; else what the stage before gives, where it is here.
            kwargs: arguments by name.

        Returns:
            What the stage gives, where the next one is here.

        Raises:
            CallError: this stage has no module to run.
        """
        raise CallError(f"a {type(self).__name__} has nothing to run; make a PipelineStage")

    def start(self, rank_of: Sequence[int] | None, chunks: int, *, trains: bool) -> None:
        """A step begins.

        Args:
            rank_of: the rank of each stage, where a schedule says it.
            chunks: how many microbatches there are.
            trains: whether there is a backward.
        """
        self.has_backward, self.chunks = trains, chunks
        self.output_chunks.clear()
        if rank_of is not None:
            self.place(dict(enumerate(rank_of)))

    def end(self, outputs: Sequence[Any]) -> None:
        """The engine has run a step, whose outputs are to be kept."""
        self.output_chunks[:] = outputs

    def bind(self, perform: Perform | None) -> None:
        """Say who carries out this stage's actions while a custom function runs."""

    @property
    def is_first(self) -> bool:
        """Whether the batch enters here."""
        return self.stage_index == 0

    @property
    def is_last(self) -> bool:
        """Whether the loss is computed here."""
        return self.stage_index == self.num_stages - 1
