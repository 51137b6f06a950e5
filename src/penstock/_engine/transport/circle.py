"""Processes that exchange values: the ranks of a pipeline, its replicas, or any others."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache, reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore

from penstock._engine.devices import numbered
from penstock._engine.faults import DAY, Activity, Meeting, Watch, end_waits, ranges
from penstock.errors import AgreementError, MessageError


def launched() -> bool:
    """Whether several processes were launched, by their process group or the variables of ``torchrun``."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size() > 1
    # RANK without WORLD_SIZE is the launcher's mistake, which is reported when the ranks meet.
    return os.environ.get("WORLD_SIZE", "2" if "RANK" in os.environ else "1") != "1"


# ---- exchanges


WITH_FIRST = "an exchange with the leader"
_ALL, _TO_FIRST, _FROM_FIRST = _MARKS = 0x4A534F4E, 0x4A534F4F, 0x4A534F50
"""These mark the length of JSON bytes, to tell exchanges from each other and from what goes before a step."""
_NAMED = 4
"""How many numbers hold the name of a call, eight letters in each."""


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
            "call the same methods of the pipeline in the same order on every rank"
        )


@cache
def _name_in_numbers(call: str) -> list[int]:
    """The name of a call, cut to 32 letters, as numbers that are gathered with what marks an exchange."""
    text = call.encode("ascii", "replace")[: 8 * _NAMED].ljust(8 * _NAMED)
    numbers: list[int] = torch.frombuffer(bytearray(text), dtype=torch.int64).tolist()
    return numbers


def _name_of_numbers(numbers: Sequence[int]) -> str:
    text: bytes = torch.tensor(numbers, device="cpu").numpy().tobytes()
    return text.decode("ascii", "replace").strip()


def as_text(value: Any) -> Tensor:
    """A value as JSON bytes."""
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def value_of(text: Tensor) -> Any:
    """The value of JSON bytes on the CPU."""
    return json.loads(text.numpy().tobytes())


class Circle:
    """Processes that exchange values, such as a pipeline's replicas.

    Args:
        group: their process group, also a bare ``ProcessGroupGloo``; None for all processes.
        watch: the watch over the job, which learns what this process waits for, and why a wait broke.
        members: their global ranks, if the group is a bare one; a single one needs no group.

    Attributes:
        group: their process group; None if this process is the only one.
        rank: this process's position among them.
        size: how many they are.
    """

    def __init__(
        self,
        group: Any = None,
        watch: Watch | None = None,
        members: Sequence[int] = (),
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
        self._members = tuple(members)
        if self.group is not None and not members:
            self._members = tuple(dist.get_process_group_ranks(self.group))
            kinds = [pair.split(":")[0] for pair in dist.get_backend_config(self.group).split(",")]
            if "cpu" not in kinds:
                self._device = self.group.bound_device_id or numbered(torch.device(kinds[0]))

    def gather(self, values: Tensor, what: str = "an exchange") -> Tensor:
        """All processes' CPU tensors in one, in rank order; all have one shape and type.

        Args:
            values: the tensor of this process.
            what: what it is for, in words, for messages about who does not come.

        Raises:
            AgreementError: another process gathers a tensor of another size, where that can be seen.
        """
        if self.group is None:
            return values[None]
        mine = values.to(self._device).contiguous()
        rows = torch.empty((self.size, *mine.shape), dtype=mine.dtype, device=self._device)
        self._wait(what, lambda: self.group.allgather([list(rows.unbind())], [mine]))
        return rows.cpu()

    def sum(self, values: Tensor, what: str = "a sum") -> Tensor:
        """The sum of all processes' CPU tensors, added in rank order: the same bits on each."""
        total: Tensor = reduce(torch.add, self.gather(values, what))
        return total

    def exchange(self, value: Any) -> list[Any]:
        """The JSON values of all processes, in rank order; all of them call this."""
        if self.group is None:
            return [value]
        text = as_text(value)
        sizes = self._sizes(_ALL, text.numel())
        padded = torch.zeros(max(sizes), dtype=torch.uint8, device="cpu")
        padded[: text.numel()] = text
        rows = zip(self.gather(padded), sizes, strict=True)
        return [value_of(row[:size]) for row, size in rows]

    def gather_numbers(
        self, first: int, second: int, what: str = "an exchange", call: str = "", third: int = 0
    ) -> list[tuple[int, int, int]]:
        """Numbers of each process, in rank order, if all have come to the same exchange.

        Args:
            first: a number that marks the exchange; all that mark none are of one.
            second: any number.
            what: what it is for, in words.
            call: the user's call that this process is in, if the watch knows of none.
            third: any number.

        Raises:
            DifferentCalls: some process calls something else.
        """
        name = _name_in_numbers(self._activity.call or call)
        row = torch.tensor([first, second, third, *name], device="cpu")
        rows = self.gather(row, what).tolist()
        marks = {mark if mark in _MARKS else None for mark, *_ in rows}
        if len(marks) > 1:
            raise DifferentCalls([_name_of_numbers(numbers) for _, _, _, *numbers in rows])
        return [(mark, number, other) for mark, number, other, *_ in rows]

    def _sizes(self, mark: int, size: int) -> list[int]:
        """How many bytes each process will send in a kind of exchange."""
        return [number for _, number, _ in self.gather_numbers(mark, size)]

    def to_first(self, value: Any) -> list[Any] | None:
        """Send a JSON value to the first process, which gets those of all; all of them call this."""
        if self.group is None:
            return [value]
        text = as_text(value)
        sizes = self._sizes(_TO_FIRST, text.numel() if self.rank else 0)
        longest = max(sizes)
        # All texts travel padded to one length; the first process's own stays where it is.
        mine = self._padded(text if self.rank else text[:0], longest)
        rows = [] if self.rank else [torch.empty_like(mine) for _ in sizes]
        if longest:
            options: Any = dist.GatherOptions()
            options.rootRank = 0
            outputs = [rows] if rows else []
            self._wait(WITH_FIRST, lambda: self.group.gather(outputs, [mine], options))
        if self.rank:
            return None
        others = zip(rows[1:], sizes[1:], strict=True)
        return [value, *(value_of(row.cpu()[:size]) for row, size in others)]

    def from_first(self, values: Sequence[Any] | None) -> Any:
        """Get this process's JSON value from the first one, which passes those of all; all call this."""
        if self.group is None:
            assert values is not None
            return values[0]
        texts = [as_text(None)] + [as_text(value) for value in (values or ())[1:]]
        most = max(text.numel() for text in texts)
        longest = self._sizes(_FROM_FIRST, most)[0] + 8
        mine = self._padded(texts[0], longest)
        # Each text follows its length.
        lengths = [torch.tensor([text.numel()], device="cpu").view(torch.uint8) for text in texts]
        pairs = zip(lengths, texts, strict=True)
        rows = [] if self.rank else [self._padded(torch.cat(pair), longest) for pair in pairs]
        options: Any = dist.ScatterOptions()
        options.rootRank = 0
        inputs = [rows] if rows else []
        self._wait(WITH_FIRST, lambda: self.group.scatter([mine], inputs, options))
        if values is not None:
            return values[0]
        data = mine.cpu()
        return value_of(data[8 : 8 + int(data[:8].view(torch.int64))])

    def _padded(self, text: Tensor, length: int) -> Tensor:
        padded = torch.zeros(length, dtype=torch.uint8, device="cpu")
        padded[: text.numel()] = text
        return padded.to(self._device)

    def _wait(self, what: str, start: Callable[[], Any]) -> None:
        """Start an operation, and wait for it on the host."""
        self._activity.come(what, self._members)
        try:
            start().wait()
            if self._device.type != "cpu":
                torch.accelerator.current_stream(self._device).synchronize()
        except RuntimeError as error:
            broken = MessageError(f"a connection is closed: {error}")
            raise (broken if self._watch is None else self._watch.failed(broken)) from error
        self._activity.go_on()

    def abort(self) -> None:
        """Break all connections, from any thread; waits on them end at once, at both ends."""
        if self.group is not None:
            end_waits(self.group)


def circle_beside(meeting: Meeting, watch: Watch, wait: float) -> Circle:
    """The processes at this place in each pipeline of the job, with connections of their own.

    Args:
        meeting: where the processes have met.
        watch: the watch over them.
        wait: seconds to wait for all of them to connect.
    """
    members = meeting.job.beside
    if len(members) == 1:
        return Circle(None, watch, members)
    store = PrefixStore(f"beside/{ranges(members)}", meeting.room)
    watch.activity.wait("the other replicas to connect", None)
    place = members.index(meeting.job.process)
    group: Any = dist.ProcessGroupGloo(store, place, len(members), timedelta(seconds=wait))
    group.set_timeout(DAY)
    circle = Circle(group, watch, members)
    watch.protect(circle.abort)
    return circle
