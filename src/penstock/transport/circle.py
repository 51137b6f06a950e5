"""Processes that exchange values outside of a pipeline's own connections."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore

from penstock.devices import numbered
from penstock.errors import AgreementError, MessageError
from penstock.faults import DAY, Activity, Meeting, Watch, end_waits, ranges


def launched() -> bool:
    """Whether several processes were launched, by their process group or the variables of ``torchrun``."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size() > 1
    # RANK without WORLD_SIZE is the launcher's mistake, which is reported when the ranks meet.
    return os.environ.get("WORLD_SIZE", "2" if "RANK" in os.environ else "1") != "1"


# ---- exchanges


_JSON = 0x4A534F4E
WITH_FIRST = "an exchange with the leader"
TO_FIRST, FROM_FIRST = _JSON + 1, _JSON + 2
"""These mark the length of JSON bytes, to tell it from another collective's data."""


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
def name_in_numbers(call: str) -> list[int]:
    """The name of a call, cut to 32 letters, as numbers that are gathered with what marks an exchange."""
    text = call.encode("ascii", "replace")[: 8 * _NAMED].ljust(8 * _NAMED)
    numbers: list[int] = torch.frombuffer(bytearray(text), dtype=torch.int64).tolist()
    return numbers


def check_called(rows: Iterable[Sequence[int]], alike: Callable[[int], bool]) -> None:
    """Check that all processes have come to the same exchange.

    Args:
        rows: what each has gathered: a mark, a number, and the name of the call that it is in.
        alike: whether a mark is that of this process's exchange.

    Raises:
        DifferentCalls: some process calls something else.
    """
    rows = list(rows)
    if not all(alike(row[0]) for row in rows):
        texts = [torch.tensor(name, device="cpu").numpy().tobytes() for _, _, *name in rows]
        raise DifferentCalls([text.decode("ascii", "replace").strip() for text in texts])


def is_marked(mark: int) -> bool:
    """Whether a number marks an exchange of JSON bytes."""
    return mark in (_JSON, TO_FIRST, FROM_FIRST)


def as_text(value: Any) -> Tensor:
    """A value as JSON bytes."""
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def value_of(text: Tensor) -> Any:
    """The value of JSON bytes on the CPU."""
    return json.loads(text.numpy().tobytes())


def sizes_of(
    size: int, mark: int, gather: Callable[[Tensor], Iterable[Tensor]], call: str = ""
) -> list[int]:
    """Exchange how many bytes each process will send, and check that all call the same.

    Args:
        size: the number of this process.
        mark: what is called.
        gather: gathers a tensor of each process.
        call: the call of the user's that this process is in.

    Raises:
        DifferentCalls: some process calls something else.
    """
    row = torch.tensor([mark, size, *name_in_numbers(call)], device="cpu")
    rows = [row.tolist() for row in gather(row)]
    check_called(rows, lambda one: one == mark)
    return [row[1] for row in rows]


def exchange_json(
    value: Any, gather: Callable[[Tensor], Iterable[Tensor]], call: str = ""
) -> list[Any]:
    """Exchange JSON values by a function that gathers tensors: first lengths, then bytes."""
    text = as_text(value)
    lengths = sizes_of(text.numel(), _JSON, gather, call)
    padded = torch.zeros(max(lengths), dtype=torch.uint8, device="cpu")
    padded[: text.numel()] = text
    rows = zip(gather(padded), lengths, strict=True)
    return [value_of(row[:length]) for row, length in rows]


class Circle:
    """Processes that exchange values outside of a pipeline's own connections, such as its replicas.

    Args:
        group: their process group, also a bare ``ProcessGroupGloo``; None for all processes.
        watch: the watch over the job, which learns what this process waits for, and why a wait broke.
        members: their global ranks, if the group is a bare one; a single one needs no group.
        gather: gathers small tensors in exchanges; by default :meth:`gather`.
    """

    def __init__(
        self,
        group: Any = None,
        watch: Watch | None = None,
        members: Sequence[int] = (),
        gather: Callable[[Tensor], Iterable[Tensor]] | None = None,
    ) -> None:
        is_launched = dist.is_available() and dist.is_initialized()
        alone = len(members) == 1 or (group is None and not is_launched)
        world: Any = dist.group.WORLD if is_launched else None
        self._group: Any = None if alone else group or world
        self._watch = watch
        self._activity = Activity(0) if watch is None else watch.activity
        self._device: Any = torch.device("cpu")
        self.rank = 0 if self._group is None else self._group.rank()
        self.size = 1 if self._group is None else self._group.size()
        self._members = tuple(members)
        self._gather = gather
        if self._group is not None and not members:
            self._members = tuple(dist.get_process_group_ranks(self._group))
            kinds = [pair.split(":")[0] for pair in dist.get_backend_config(self._group).split(",")]
            if "cpu" not in kinds:
                self._device = self._group.bound_device_id or numbered(torch.device(kinds[0]))

    def _small(self, values: Tensor) -> Iterable[Tensor]:
        return (self._gather or self.gather)(values)

    def exchange(self, value: Any) -> list[Any]:
        """The JSON values of all processes, in rank order; all of them call this."""
        return exchange_json(value, self._small, self._activity.call)

    def to_first(self, value: Any) -> list[Any] | None:
        """Send a JSON value to the first process, which gets those of all; all of them call this."""
        if self._group is None:
            return [value]
        text = as_text(value)
        sizes = sizes_of(
            text.numel() if self.rank else 0, TO_FIRST, self._small, self._activity.call
        )
        longest = max(sizes)
        # All texts travel padded to one length; the first process's own stays where it is.
        mine = self._padded(text if self.rank else text[:0], longest)
        rows = [] if self.rank else [torch.empty_like(mine) for _ in sizes]
        if longest:
            options: Any = dist.GatherOptions()
            options.rootRank = 0
            outputs = [rows] if rows else []
            self._wait(WITH_FIRST, lambda: self._group.gather(outputs, [mine], options))
        if self.rank:
            return None
        others = zip(rows[1:], sizes[1:], strict=True)
        return [value, *(value_of(row.cpu()[:size]) for row, size in others)]

    def from_first(self, values: Sequence[Any] | None) -> Any:
        """Get this process's JSON value from the first one, which passes those of all; all call this."""
        if self._group is None:
            assert values is not None
            return values[0]
        texts = [as_text(None)] + [as_text(value) for value in (values or ())[1:]]
        most = max(text.numel() for text in texts)
        longest = sizes_of(most, FROM_FIRST, self._small, self._activity.call)[0] + 8
        mine = self._padded(texts[0], longest)
        # Each text follows its length.
        lengths = [torch.tensor([text.numel()], device="cpu").view(torch.uint8) for text in texts]
        pairs = zip(lengths, texts, strict=True)
        rows = [] if self.rank else [self._padded(torch.cat(pair), longest) for pair in pairs]
        options: Any = dist.ScatterOptions()
        options.rootRank = 0
        inputs = [rows] if rows else []
        self._wait(WITH_FIRST, lambda: self._group.scatter([mine], inputs, options))
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

    def sum(self, values: Tensor, what: str = "a sum") -> Tensor:
        """The sum of all processes' CPU tensors, the same bits on each; all of them call this."""
        return self.gather(values, what).sum(0)

    def gather(self, values: Tensor, what: str = "an exchange") -> Tensor:
        """All processes' CPU tensors in one, in rank order; all have one shape and type.

        Args:
            values: the tensor of this process.
            what: what it is for, in words, for messages about who does not come.
        """
        if self._group is None:
            return values[None]
        mine = values.to(self._device).contiguous()
        rows = torch.empty((self.size, *mine.shape), dtype=mine.dtype, device=self._device)
        self._wait(what, lambda: self._group.allgather([list(rows.unbind())], [mine]))
        return rows.cpu()

    def abort(self) -> None:
        """End all waits on this circle, here and elsewhere; its connections are broken for good."""
        if self._group is not None:
            end_waits(self._group)


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
