"""The tensors of a run without data: which value each is, and whose memory it lies in.

Memory is known by its storage. It is made by an event, or it is the model's own. What has data, and is made
from the model's arguments alone, is no value until an event writes into it; a fake tensor stands for it then.
"""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from penstock.partition.mutables import CONTAINERS
from penstock.partition.trace import Trace, Value

MODEL = -1
"""Stands for the event that made a tensor, if the tensor is the model's own."""


def storage_of(tensor: Tensor) -> int:
    """The identity of a tensor's memory."""
    return int(tensor.untyped_storage()._cdata)


def takes_gradient(tensor: Tensor) -> bool:
    """Whether a gradient can come back to a tensor.

    A view of a weight that was made under ``no_grad`` claims to require a gradient, yet has no node.
    """
    try:
        return tensor.requires_grad and not (tensor.grad_fn is None and tensor._is_view())
    except RuntimeError:
        # One of several views that were made at once has no node after its base has changed.
        return True


class Memory:
    """The tensors of a run, which are kept alive: no identity is used again.

    Args:
        trace: gets the values.
    """

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._names: Counter[str] = Counter()
        self._numbers: dict[int, int] = {}
        self._alive: list[Tensor] = []
        self._twins: dict[int, tuple[Tensor, Tensor]] = {}
        self._makers: dict[int, int] = {}
        self._values_in: dict[int, list[tuple[Tensor, int]]] = {}
        self._overwritten: set[int] = set()

    # ---- values

    def number_of(self, tensor: Tensor) -> int | None:
        """The number of the latest value that a tensor is, if it is one."""
        return self._numbers.get(id(tensor))

    def value_of(self, tensor: Tensor) -> Value | None:
        """The latest value that a tensor is, if it is one."""
        number = self._numbers.get(id(tensor))
        return None if number is None else self._trace.values[number]

    def bare(self, tensor: Tensor) -> Tensor:
        """The tensor without its graph, if it is a value: the trace must not keep the graph alive."""
        value = self.value_of(tensor)
        return tensor if value is None else value.tensor

    def add(
        self, tensor: Tensor, name: str, event: int | None, parameter: str | None = None
    ) -> int:
        """Add a value, which a tensor is from now on.

        Args:
            tensor: the tensor.
            name: its name, which gets a number if another value has it.
            event: the index of the event that made or changed it; None for a parameter or buffer.
            parameter: its name in the model, if it is a parameter or buffer.
        """
        self._names[name] += 1
        if self._names[name] > 1:
            name = f"{name}#{self._names[name]}"
        values = self._trace.values
        number = len(values)
        fake = placeholder = self.fake_of(tensor)
        if event is not None:
            with torch.no_grad():
                placeholder = fake.detach()
                placeholder.requires_grad_(fake.requires_grad)
        before = self.value_of(tensor)
        root = number if before is None else before.root
        values.append(Value(name, root, event, placeholder, takes_gradient(fake), parameter))
        self._numbers[id(tensor)] = number
        self._alive.append(tensor)
        storage = storage_of(fake)
        self._makers.setdefault(storage, MODEL if event is None else event)
        self._values_in.setdefault(storage, []).append((tensor, number))
        return number

    # ---- fake tensors for those with data

    def fake_of(self, tensor: Tensor) -> Tensor:
        """The fake tensor that stands for one with data; always the same."""
        if isinstance(tensor, FakeTensor):
            return tensor
        twin: Tensor = self._trace.mode.from_tensor(tensor)
        if id(tensor) not in self._twins:
            self._twins[id(tensor)] = (tensor, twin)
        return twin

    def overwrite(self, tensor: Tensor) -> None:
        """Note that an event wrote into a tensor with data."""
        self._overwritten.add(storage_of(tensor))

    def overwrite_through(self, storages: Collection[int]) -> None:
        """Note that events wrote into those that stand for tensors with data."""
        for tensor, twin in self._twins.values():
            if storage_of(twin) in storages:
                self.overwrite(tensor)

    def is_overwritten(self, tensor: Tensor) -> bool:
        """Whether an event wrote into the memory of a tensor with data."""
        return bool(self._overwritten) and storage_of(tensor) in self._overwritten

    # ---- memory

    def storage_of(self, tensor: Tensor) -> int:
        """The identity of a tensor's memory, or of that of the fake tensor that stands for it."""
        return storage_of(self.fake_of(tensor))

    def keep(self, tensor: FakeTensor, event: int) -> None:
        """Keep a tensor that an event gave, and which made its memory if none did before."""
        self._makers.setdefault(storage_of(tensor), event)
        self._alive.append(tensor)

    def maker_of(self, storage: int) -> int | None:
        """The event that made some memory, or ``MODEL``; None for that of tensors with data."""
        return self._makers.get(storage)

    def latest_in(self, storages: Iterable[int]) -> Iterator[tuple[Tensor, int]]:
        """The tensors in some memory that are values, each with its number."""
        for storage in storages:
            for tensor, number in self._values_in.get(storage, ()):
                if self._numbers[id(tensor)] == number:
                    yield tensor, number

    def left_in_containers(self) -> int | None:
        """An event whose tensor is in a container, though nobody else has it now; lets go of all tensors."""
        makers = [(weakref.ref(t), self._makers.get(storage_of(t), MODEL)) for t in self._alive]
        self._alive, self._values_in, self._twins = [], {}, {}
        # Once the graph is gone, so are tensors that were only passed on.
        left = [(ref, maker) for ref, maker in makers if maker != MODEL]
        if _in_containers(left):
            # A container may be garbage that waits for its collection.
            gc.collect()
        return next(iter(_in_containers(left)), None)


def _in_containers(makers: Sequence[tuple[weakref.ref[Tensor], int]]) -> list[int]:
    """The makers of the tensors that mutable containers hold.

    It walks all objects of the process, and does so once for all tensors.
    """
    tensors = tuple((tensor, maker) for ref, maker in makers if (tensor := ref()) is not None)
    held: set[int] = set()
    if tensors:
        for one in gc.get_referrers(*(tensor for tensor, _ in tensors)):
            if isinstance(one, CONTAINERS):
                items = (*one, *one.values()) if isinstance(one, dict) else one
                held |= set(map(id, items))
    return [maker for tensor, maker in tensors if id(tensor) in held]
