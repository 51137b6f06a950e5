"""This process among those that train with it: the ranks of its pipeline, and the pipelines beside it."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial, reduce, wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from penstock._engine.faults import Activity
from penstock._engine.transport.base import WEIGHTS, Transport
from penstock._engine.transport.group import BROKEN, Group
from penstock._engine.values import (
    Layout,
    TensorLayout,
    check_plain,
    layout_in,
    layout_of,
    tensors_in,
    unflatten,
)
from penstock.errors import PoisonedError, SpecError, UsageError

logger = logging.getLogger("penstock")
_WEIGHTS_TAG = 8
"""The tag of messages that carry weights."""
_P = ParamSpec("_P")
_R = TypeVar("_R")
_T = TypeVar("_T")


def collective(method: Callable[_P, _R]) -> Callable[_P, _R]:
    """Mark a method that every rank must call, so that messages can say who is in it."""

    @wraps(method)
    def called(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        owner: Any = args[0]
        with owner.job.calling(method.__name__):
            return method(*args, **kwargs)

    return called


@dataclass(frozen=True)
class Replicas:
    """The pipelines that train the same weights on other data, where the user reduces gradients.

    Args:
        number: how many there are, including this one.
        add: sums a CPU tensor over them; every rank of every pipeline calls it.
        averaged: whether their gradients are averaged, as by DDP and FSDP, rather than added up.
        index: the index of this one.
        group: the processes at the same place in each, if gradients are to be averaged over them.
        dims: the groups of the dimensions of a mesh that they form, if there are several.
    """

    number: int = 1
    add: Callable[[Tensor], Tensor] = torch.clone
    averaged: bool = True
    index: int = 0
    group: Any = None
    dims: tuple[Any, ...] = ()

    def added(self, values: Tensor) -> Tensor:
        """The sum of numbers over the replicas."""
        return values if self.number == 1 else self.add(values)


class Job:
    """This process among those that train with it: all that they tell each other besides messages of steps.

    Args:
        transport: this rank's end, if each rank is a process; None if all ranks share this process.
        ranks: the number of ranks of the pipeline.
        replicas: the pipelines that train the same weights on other data.
        device: where the stages of this process will live.
        beside: whether all pipelines of the job save and load together.
        group: where there is no pipeline, the processes that save and load together.
        activity: where this process notes what it is doing, without a transport.

    Attributes:
        transport: this rank's end.
        ranks: the number of ranks of the pipeline.
        rank: this process's rank; 0 where all ranks share it.
        replicas: the pipelines that train the same weights.
        activity: where this process notes what it is doing.
        steps: the number of training steps that have begun.
    """

    def __init__(
        self,
        transport: Transport | None = None,
        ranks: int = 1,
        replicas: Replicas | None = None,
        device: torch.device | None = None,
        *,
        beside: bool = False,
        group: Group | None = None,
        activity: Activity | None = None,
    ) -> None:
        self.transport, self.ranks = transport, ranks
        self.rank = 0 if transport is None else transport.rank
        own = activity or Activity(0)
        self.activity = own if transport is None else transport.activity
        self.replicas, self._beside = replicas or Replicas(), beside
        self.steps = 0
        self._device = device or torch.device("cpu")
        self._group = group or Group(members=[0])
        self._own, self._every = [*range(self.pipeline.size)], [[*range(self.pipeline.size)]]
        self._replicas: list[list[int]] = []
        self._saved: int | None = None
        self._failure: BaseException | None = None
        if transport is not None and transport.wide is not None:
            self._meet_the_others(transport, transport.wide)

    def _meet_the_others(self, transport: Transport, wide: Group) -> None:
        """Learn who is in which pipeline of the job."""
        mine = [self.activity.replica or 0, [*transport.global_ranks]]
        rows = dict(zip(wide.members, wide.meet(lambda: mine), strict=True))
        wide.names[:] = [
            f"rank {ranks.index(one)} of replica {replica}"
            for one, (replica, ranks) in rows.items()
        ]
        places = {
            one: [wide.members.index(other) for other in ranks] for one, (_, ranks) in rows.items()
        }
        self._own = places[transport.global_ranks[self.rank]]
        self._every = [
            places[ranks[0]] for ranks in dict.fromkeys(tuple(of) for _, of in rows.values())
        ]
        if self.replicas.group is not None:
            inside = Group(self.replicas.group, transport.watch)
            self.replicas = replace(self.replicas, add=inside.sum)
            if {*inside.members} <= rows.keys():
                self._replicas = [places[one] for one in inside.members]

    def live_on(self, device: torch.device) -> None:
        """Note where the stages of this process live."""
        self._device = device

    # ---- who they are

    @property
    def job(self) -> Job:
        """Itself, for :func:`collective`."""
        return self

    @property
    def pipeline(self) -> Group:
        """The ranks of this pipeline, as processes."""
        return self._group if self.transport is None else self.transport

    @property
    def whole(self) -> Group:
        """All processes of the job: pipelines side by side."""
        return self.pipeline if self.transport is None else self.transport.wide or self.transport

    @property
    def together(self) -> Group:
        """The processes that save and load together.

        Raises:
            UsageError: the replicas cannot be reached.
        """
        if self.replicas.number > 1 and not self._beside:
            raise UsageError(
                "the Pipeline was given replicas that can only add up numbers; give "
                "penstock.Checkpoints(group=...) the process group of all ranks of all replicas"
            )
        return self.whole if self._beside else self.pipeline

    @property
    def layout(self) -> tuple[int, int]:
        """The number of replicas that save and load together, and of processes in each."""
        return self.together.size // self.pipeline.size, self.pipeline.size

    @property
    def is_first_pipeline(self) -> bool:
        """Whether this is the pipeline that writes for all."""
        first = not self._beside or min(self.pipeline.members) == min(self.whole.members)
        return first and self.replicas.index == 0

    @property
    def is_main_process(self) -> bool:
        """Whether this process prints and writes for all; see :attr:`Pipeline.is_main_process`."""
        return self.is_first_pipeline and self.rank == 0

    # ---- what they tell each other

    @collective
    def meet(
        self,
        question: Callable[[], Any],
        answer: Callable[[list[Any]], Any] | None = None,
        doing: str = "",
        *,
        each: bool = False,
        among: Group | None = None,
    ) -> Any:
        """Ask each process a question, and let the first one answer all; all of them call this.

        Args:
            question: called in each process; returns a JSON value.
            answer: called in the first process with the values of all; returns a JSON value for all. By
                default that is the values themselves, in the order of the processes.
            doing: what they do, for messages: ``rank 1 cannot <doing>``.
            each: whether ``answer`` returns a list with a value for each process.
            among: the processes, such as :attr:`pipeline`; by default those that save and load together.

        Raises:
            PenstockError: a question or the answer raised: the first error, the same in all processes, with
                the name of its process.
        """
        with self._unbroken():
            return (among or self.together).meet(question, answer, doing, each=each)

    def sum(self, values: Tensor, what: str = "a sum") -> Tensor:
        """The sum of CPU tensors over all ranks of this pipeline and its replicas: the same bits on each."""
        with self._unbroken():
            if not self.reaches_replicas:
                return self.replicas.added(self.pipeline.sum(values, what))
            rows = self.by_replica([*self.whole.gather(values, what)])
            total: Tensor = reduce(torch.add, [reduce(torch.add, of) for of in rows])
            return total

    @property
    def reaches_replicas(self) -> bool:
        """Whether what the whole job gathers holds what all replicas bring."""
        return bool(self._replicas)

    def own(self, rows: Sequence[_T]) -> Sequence[_T]:
        """Of rows that the whole job or this pipeline has gathered, those of this pipeline, by rank."""
        return rows if len(rows) == self.pipeline.size else [rows[place] for place in self._own]

    def by_pipeline(self, rows: Sequence[_T]) -> list[Sequence[_T]]:
        """As :meth:`own`, of each pipeline that has rows."""
        alone = len(rows) == self.pipeline.size
        return [rows] if alone else [[rows[place] for place in of] for of in self._every]

    def by_replica(self, rows: Sequence[_T]) -> list[Sequence[_T]]:
        """As :meth:`own`, of each replica in order."""
        if len(rows) == self.pipeline.size or not self._replicas:
            return [self.own(rows)]
        return [[rows[place] for place in of] for of in self._replicas]

    @collective
    def share(self, value: Any, rank: int) -> Any:
        """Send one rank's value, made of tensors and plain data, to every rank; all of them call this.

        Raises:
            SpecError: the value holds something that cannot travel.
        """
        if self.transport is None:
            return value

        def described() -> Any:
            if self.rank != rank:
                return None
            try:
                check_plain(value, "the model's output")
                return layout_in(value).describe()
            except SpecError as error:
                raise SpecError(f"{error}; or use step and evaluate without outputs=True") from None

        layout = Layout.read(self.meet(described, among=self.pipeline)[rank])
        tensors = (
            tensors_in(value)
            if self.rank == rank
            else [entry.empty(self._device) for entry in layout.tensors]
        )
        arrived = iter([self.broadcast(tensor, rank) for tensor in tensors])
        leaves = [next(arrived) if isinstance(x, TensorLayout) else x for x in layout.leaves]
        return unflatten(leaves, layout.tree)

    def broadcast(self, tensor: Tensor, rank: int) -> Tensor:
        """One rank's tensor on every rank; the others pass one of the same shape, type and device."""
        with self._unbroken():
            return tensor if self.transport is None else self.transport.broadcast(tensor, rank)

    def open(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Prepare :meth:`swap` for pairs of ranks (source, target); all ranks call this."""
        if self.transport is not None:
            self.transport.connect([(source, target, WEIGHTS) for source, target in pairs])

    def swap(
        self, sends: Mapping[int, Sequence[Tensor]], receives: Mapping[int, Sequence[Tensor]]
    ) -> None:
        """Send tensors to ranks, and fill others with what ranks send; both ends pass the same shapes."""
        transport = self.transport
        assert transport is not None
        with self._unbroken():
            leaving = [
                (peer, transport.send(peer, _WEIGHTS_TAG, tensors, WEIGHTS))
                for peer, tensors in sends.items()
            ]
            for peer, tensors in receives.items():
                layouts = [layout_of(tensor.detach()) for tensor in tensors]
                transport.activity.wait("weights", peer)
                arrived = transport.post(peer, _WEIGHTS_TAG, layouts, WEIGHTS).take()
                for tensor, value in zip(tensors, arrived, strict=True):
                    tensor.detach().copy_(value)
            for peer, sending in leaving:
                transport.activity.wait("weights to leave", peer)
                sending.wait()
            transport.settle()

    def wrap_transport(self, wrap: Callable[[Transport], Any]) -> None:
        """Wrap this rank's transport, such as by a counter; does nothing in one process."""
        if self.transport is not None:
            self.transport = wrap(self.transport)

    # ---- failures

    @contextmanager
    def _unbroken(self) -> Iterator[None]:
        """A context in which the pipeline ends if an exchange breaks."""
        self.check_usable()
        try:
            yield
        except BROKEN as error:
            raise self.fail(error) from None

    @property
    def usable(self) -> bool:
        """False once a call between processes has failed in the middle."""
        return self._failure is None

    def check_usable(self) -> None:
        """Check that no earlier call has failed in the middle.

        Raises:
            PoisonedError: one has.
        """
        if self._failure is not None:
            raise PoisonedError(
                f"an earlier call failed ({type(self._failure).__name__}: {self._failure}), and this "
                "Pipeline was closed, since its ranks may be anywhere in the step; make a new Pipeline"
            ) from self._failure

    def fail(self, error: BaseException) -> BaseException:
        """The error to raise for one in the middle of a call; between processes, the pipeline has ended."""
        if self.transport is None:
            return error
        if (
            self._saved is not None
            and self._failure is None
            and os.environ.get("LOCAL_RANK", "0") == "0"
        ):
            logger.warning(
                "penstock: at most %d steps since the last complete checkpoint are lost",
                self.steps - self._saved,
            )
        self._failure = self.transport.watch.failed(error)
        return self._failure

    def report_failures_to(self, folder: str | os.PathLike[str]) -> None:
        """Write the report of a failed rank to ``failure.json`` in a folder."""
        if self.transport is not None:
            self.transport.watch.keep_in(Path(folder))

    # ---- what the watch over them is told

    def calling(self, name: str, seconds: float = 0.0) -> AbstractContextManager[None]:
        """A context for a call that every rank must make, and that may take so many seconds.

        Args:
            name: the name by which messages speak of it.
            seconds: how long it may take, if that is more than usual.
        """
        return self.activity.calling(name, seconds)

    def patient(self, seconds: float) -> AbstractContextManager[None]:
        """Let this rank take longer than ``timeout`` allows between two steps, such as to save.

        Args:
            seconds: the time that it may need. The ranks that wait for it need not call this.
        """
        return self.calling("", seconds)

    def when_checkpointed(self) -> Callable[[], None]:
        """Return what is to be called when a checkpoint of this moment is complete.

        If the job fails later, the steps since then are counted in the log.
        """
        return partial(self._note_saved, self.steps)

    def _note_saved(self, steps: int) -> None:
        self._saved = steps
