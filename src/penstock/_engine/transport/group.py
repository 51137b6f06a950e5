"""Processes that tell each other numbers and JSON values: the ranks of a pipeline, or all of a job.

Numbers of a known size are gathered. Everything else is one :meth:`Group.meet`: each process is asked a
question, and all get the answer, or the first error.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from functools import cache, reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from penstock._engine.devices import numbered
from penstock._engine.faults import Activity, Watch, end_waits
from penstock._engine.transport.sockets import SMALL, Line, connect_lines
from penstock.errors import (
    AgreementError,
    CheckpointError,
    MessageError,
    PeerFailed,
    PenstockError,
    StorageError,
    error_named,
    public_name,
)


def launched() -> bool:
    """Tell if several processes were launched, by their process group or the variables of ``torchrun``."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size() > 1
    # RANK without WORLD_SIZE is the launcher's mistake, which is reported when the ranks meet.
    return os.environ.get("WORLD_SIZE", "2" if "RANK" in os.environ else "1") != "1"


class DifferentCalls(AgreementError):
    """The ranks called different collective methods, and may be anywhere in their programs.

    Args:
        names: the call that each rank is in, in rank order, where that is known.
    """

    def __init__(self, names: Sequence[str] = ()) -> None:
        ranks: dict[str, list[str]] = {}
        for rank, name in enumerate(names):
            ranks.setdefault(name or "another call", []).append(str(rank))
        shown = "; ".join(
            f"rank {', '.join(of)} is in {name}, which every rank must call"
            for name, of in ranks.items()
        )
        super().__init__(
            f"the ranks called different collective methods{shown and f': {shown}'}; "
            "call the same methods of the pipeline in the same order on every rank; was one called on one "
            "rank only, as under `if pipe.is_main_process:`?"
        )


BROKEN = (MessageError, PeerFailed, DifferentCalls)
"""Errors of an exchange itself: they refuse nothing, but end the pipeline."""
STEP, _MEETING, _WITH_FIRST = 1, 2, 3
"""What processes gather a row of whole numbers for."""
_NAMED, _NUMBERS = 4, 11
"""How many numbers of a row hold the name of a call, eight letters in each; and how many are free."""
_WORDS = 5
"""The tag of messages to the first process, of those that carry no steps."""
_CONTROL = 1
"""The tag of what is gathered over sockets."""
_ANSWER = 512
"""The bytes of an answer that travel with its length."""


class Group:
    """Processes that exchange values.

    Args:
        group: their process group, also a bare ``ProcessGroupGloo``; None for all processes.
        watch: the watch over the job, which learns what this process waits for, and why a wait broke.
        members: their global ranks, if the group is a bare one; a single one needs no group.

    Attributes:
        group: their process group; None if this process is the only one.
        rank: this process's position among them.
        size: how many they are.
        names: their names, for messages.
        members: their global ranks.
    """

    def __init__(
        self, group: Any = None, watch: Watch | None = None, members: Sequence[int] = ()
    ) -> None:
        is_launched = dist.is_available() and dist.is_initialized()
        alone = len(members) == 1 or (group is None and not is_launched)
        world: Any = dist.group.WORLD if is_launched else None
        self.group: Any = None if alone else group or world
        self._watch = watch
        self._activity = Activity(0) if watch is None else watch.activity
        self._device: Any = torch.device("cpu")
        self.rank = 0 if self.group is None else self.group.rank()
        self.size = 1 if self.group is None else self.group.size()
        self.names = [f"rank {rank}" for rank in range(self.size)]
        self.members = tuple(members)
        self._lines: dict[int, Line] = {}
        if self.group is not None and not members:
            self.members = tuple(dist.get_process_group_ranks(self.group))
            kinds = [pair.split(":")[0] for pair in dist.get_backend_config(self.group).split(",")]
            if "cpu" not in kinds:
                self._device = self.group.bound_device_id or numbered(torch.device(kinds[0]))

    # ---- numbers

    def gather(self, values: Tensor, what: str = "an exchange") -> Tensor:
        """All processes' CPU tensors in one, in rank order; all have one shape and type.

        Args:
            values: the tensor of this process.
            what: what it is for, in words, for messages about who does not come.

        Raises:
            DifferentCalls: another process gathers a tensor of another size, where that can be seen.
        """
        if self.group is None:
            return values[None]
        if self._lines and 0 < values.nbytes <= SMALL:
            return self._gather_over_lines(values, what)
        mine = values.to(self._device).contiguous()
        rows = torch.empty((self.size, *mine.shape), dtype=mine.dtype, device=self._device)
        self._wait(what, lambda: self.group.allgather([list(rows.unbind())], [mine]))
        return rows.cpu()

    def _gather_over_lines(self, values: Tensor, what: str) -> Tensor:
        self._activity.come(what, self.members)
        data = values.contiguous().reshape(-1).view(torch.uint8)
        for line in self._lines.values():
            line.send(_CONTROL, [data.numpy()], data.numel())
        rows = torch.empty((self.size, *values.shape), dtype=values.dtype, device="cpu")
        rows[self.rank] = values
        for peer, line in self._lines.items():
            row = torch.frombuffer(line.receive(_CONTROL), dtype=torch.uint8)
            if row.numel() != data.numel():
                raise DifferentCalls
            rows[peer].reshape(-1).view(torch.uint8).copy_(row)
        self._activity.go_on()
        return rows

    def sum(self, values: Tensor, what: str = "a sum") -> Tensor:
        """The sum of all processes' CPU tensors, added in rank order: the same bits on each."""
        total: Tensor = reduce(torch.add, self.gather(values, what))
        return total

    def announce(
        self, mark: int, numbers: Sequence[int], what: str = "an exchange", call: str = ""
    ) -> list[list[int]]:
        """A few whole numbers of each process, in rank order, if all have come to the same thing.

        Args:
            mark: what they have come to.
            numbers: up to eleven numbers.
            what: what it is for, in words.
            call: the user's call that this process is in, if the watch knows of none.

        Raises:
            DifferentCalls: some process calls something else.
        """
        free = [*numbers, *[0] * (_NUMBERS - len(numbers))]
        if self.group is None:
            return [free]
        row = [mark, *_name_in_numbers(self._activity.call or call), *free]
        rows = self.gather(torch.tensor(row, device="cpu"), what).tolist()
        if any(row[0] != mark for row in rows):
            raise DifferentCalls([_name_of_numbers(row[1 : 1 + _NAMED]) for row in rows])
        return [row[1 + _NAMED :] for row in rows]

    # ---- questions

    def meet(
        self,
        question: Callable[[], Any],
        answer: Callable[[list[Any]], Any] | None = None,
        doing: str = "",
        *,
        each: bool = False,
    ) -> Any:
        """Ask each process a question, and let the first one answer; all processes call this.

        Args:
            question: called in each process; returns a JSON value.
            answer: called in the first process with the values of all, in rank order; returns a JSON value
                for all. By default that is the values themselves.
            doing: what the processes do, for messages: ``rank 1 cannot <doing>``.
            each: whether ``answer`` returns a list with a value for each process.

        Raises:
            PenstockError: a question or the answer raised: the first error, the same in all processes, with
                the name of its process. Where the user's code raised, its own error is.
        """
        value, error = None, None
        try:
            value = question()
        except BROKEN:
            raise
        except Exception as raised:
            error = raised
        if self.size == 1:
            if error is not None:
                raise error
            values = [value] if answer is None else answer([value])
            return values[0] if each else values
        report = [value, None if error is None else _described(error, doing)]
        reports, verdicts = self._reported(report, to_all=answer is None), None
        if reports is not None:
            problem, replies = self._problem_of(reports), [None] * self.size
            try:
                if problem is None:
                    values = [value for value, _ in reports]
                    made: Any = values if answer is None else answer(values)
                    replies = made if each else [made] * self.size
            except Exception as raised:
                error, problem = raised, [*_described(raised, doing)[:-1], None]
            verdicts = [[reply, problem] for reply in replies]
        if answer is None and verdicts is not None:
            answered, problem = verdicts[self.rank]
        else:
            answered, problem = self._from_first(verdicts)
        if problem is None:
            return answered
        if error is not None and not isinstance(error, PenstockError):
            raise error
        raise self._error(doing, *problem) from (error and error.__cause__)

    def _problem_of(self, reports: list[Any]) -> list[Any] | None:
        """The first problem that no process has only heard of, and its place; None for one that all have."""
        problems = [(place, problem) for place, (_, problem) in enumerate(reports) if problem]
        if not problems:
            return None
        place, problem = next((one for one in problems if not one[1][-1]), problems[0])
        is_shared = len(problems) == self.size and all(one == problem for _, one in problems)
        return [*problem[:-1], None if is_shared else place]

    def _error(
        self, doing: str, kind: str, text: str, number: int | None, place: int | None
    ) -> PenstockError:
        """The error of a process, or of all."""
        theirs = "" if place is None else f"{self.names[place]}{doing and f' cannot {doing}'}: "
        error = error_named(kind)(f"{theirs}{text}")
        error.rank = place
        if isinstance(error, StorageError):
            error.errno = number
        return error

    def _reported(self, value: Any, *, to_all: bool) -> list[Any] | None:
        """The JSON values of all processes, in each of them or in the first one; None in the others."""
        text = as_text(value)
        size = text.numel()
        short = torch.zeros(_INLINE, dtype=torch.uint8, device="cpu")
        short[:size] = text[:_INLINE]
        mark = _MEETING if to_all else _WITH_FIRST
        rows = self.announce(mark, [size, *short.view(torch.int64).tolist()])
        sizes = [size for size, *_ in rows]
        longest = max(sizes)
        if self.rank and not to_all:
            if size > _INLINE:
                self._send(text, 0)
            return None
        texts = (
            torch.tensor([numbers for _, *numbers in rows], device="cpu").view(torch.uint8).unbind()
        )
        if to_all and longest > _INLINE:
            padded = torch.zeros(longest, dtype=torch.uint8, device="cpu")
            padded[:size] = text
            texts = self.gather(padded).unbind()
        elif not to_all:
            texts = (
                text,
                *(
                    self._receive(size, place) if size > _INLINE else texts[place]
                    for place, size in enumerate(sizes)
                    if place
                ),
            )
        return [value_of(one[:size]) for one, size in zip(texts, sizes, strict=True)]

    def _send(self, text: Tensor, place: int) -> None:
        data = text.to(self._device)
        self._wait(_WITH_FIRST_ONE, lambda: self.group.send([data], place, _WORDS), place)

    def _receive(self, size: int, place: int) -> Tensor:
        text = torch.empty(size, dtype=torch.uint8, device=self._device)
        self._wait(_WITH_FIRST_ONE, lambda: self.group.recv([text], place, _WORDS), place)
        return text.cpu()

    def _from_first(self, values: Sequence[Any] | None) -> Any:
        """This process's JSON value, of those that the first one has for all."""
        if values is None:
            head = self._receive(8 + _ANSWER, 0)
            size = int(head[:8].view(torch.int64))
            return value_of(head[8 : 8 + size] if size <= _ANSWER else self._receive(size, 0))
        for place, value in enumerate(values[1:], start=1):
            text = as_text(value)
            head = torch.zeros(8 + _ANSWER, dtype=torch.uint8, device="cpu")
            head[:8] = torch.tensor([text.numel()], device="cpu").view(torch.uint8)
            head[8 : 8 + text.numel()] = text[:_ANSWER]
            self._send(head, place)
            if text.numel() > _ANSWER:
                self._send(text, place)
        return values[0]

    # ---- waits

    def _wait(self, what: str, start: Callable[[], Any], place: int | None = None) -> None:
        """Start an operation, of all processes or with one, and wait for it on the host."""
        if place is None:
            self._activity.come(what, self.members)
        else:
            self._activity.wait_for(what, self.members[place])
        try:
            start().wait()
            if self._device.type != "cpu":
                torch.accelerator.current_stream(self._device).synchronize()
        except RuntimeError as error:
            broken = MessageError(f"a connection is closed: {error}")
            raise (broken if self._watch is None else self._watch.failed(broken)) from error
        self._activity.go_on()

    def connect_lines(self) -> None:
        """Connect sockets for small messages, where all share a machine; all processes call this."""
        self._lines = connect_lines(self.rank, self.size, lambda value: self.meet(lambda: value))

    def end(self) -> None:
        """Close all connections."""
        for line in self._lines.values():
            line.close()
        if self.group is not None:
            end_waits(self.group)
        del self.group

    def abort(self) -> None:
        """Break all connections, from any thread; waits on them end at once, at both ends."""
        for line in list(self._lines.values()):
            line.abort()
        if self.group is not None:
            end_waits(self.group)


_WITH_FIRST_ONE = "an exchange with the first process"
_INLINE = 8 * (_NUMBERS - 1)
"""The most bytes of a value that travel with its length."""


def _described(error: Exception, doing: str) -> list[Any]:
    """An error for other processes: its class, text and number, and whether this process only heard of it."""
    foreign = CheckpointError if doing else PenstockError
    kind = type(error) if isinstance(error, PenstockError) else foreign
    told = getattr(error, "rank", None) is not None
    return [public_name(kind), str(error), getattr(error, "errno", None), told]


@cache
def _name_in_numbers(call: str) -> list[int]:
    """The name of a call, cut to 32 letters, as numbers that are gathered with what marks an exchange."""
    return _numbers_of(call.encode("ascii", "replace")[: 8 * _NAMED].ljust(8 * _NAMED))


def _name_of_numbers(numbers: Sequence[int]) -> str:
    return _bytes_of(numbers).decode("ascii", "replace").strip()


def _numbers_of(text: bytes) -> list[int]:
    numbers: list[int] = torch.frombuffer(bytearray(text), dtype=torch.int64).tolist()
    return numbers


def _bytes_of(numbers: Sequence[int]) -> bytes:
    text: bytes = torch.tensor(numbers, device="cpu").numpy().tobytes()
    return text


def as_text(value: Any) -> Tensor:
    """A value as JSON bytes."""
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def value_of(text: Tensor) -> Any:
    """The value of JSON bytes on the CPU."""
    return json.loads(text.numpy().tobytes())
