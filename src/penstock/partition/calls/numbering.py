"""Number the tensors of an analysed call, also when they are changed in place.

A tensor that is written into is another value afterwards, and so is each that shows the same memory.
"""

from __future__ import annotations

import contextlib
import weakref
from abc import ABC
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.autograd.graph import GradientEdge, get_gradient_edge

from penstock.errors import PartitionError
from penstock.partition.calls.inference import memory_of, view_like
from penstock.partition.calls.tape import Change, Form, Origin, Tape, Value
from penstock.partition.calls.watch import Watch


class _Memory(NamedTuple):
    """What is known to show the same memory.

    Attributes:
        first: the first that was seen.
        number: the number it had then.
        views: the others.
    """

    first: Tensor
    number: int
    views: list[weakref.ref[Tensor]]


class Numbering(Watch, ABC):
    """Gives each value its number.

    Args:
        mode: of the tensors without data.

    Attributes:
        tape: where the values stand.
        edges: where the gradients of the values arrive, by number.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()
        self.tape = Tape()
        self.edges: dict[int, GradientEdge] = {}
        self._mode = mode
        self._memories: dict[int, _Memory] = {}
        self._taken: dict[int, Tensor] = {}
        self._shown: dict[int, Tensor] = {}
        self._names: dict[str, int] = {}

    def number(
        self,
        tensor: Tensor,
        name: str,
        maker: int | None,
        parameter: str | None = None,
        origin: Origin = Origin.VIEW,
    ) -> int:
        """Give a tensor its next number.

        Args:
            tensor: the tensor.
            name: says what it is.
            maker: the event that makes it.
            parameter: the parameter's name, if it is one.
            origin: how it comes to show its memory, where another value shows that too.
        """
        number = len(self.tape.values)
        memory = self._memories.setdefault(memory_of(tensor), _Memory(tensor, number, []))
        whole = None
        if memory.first is tensor:
            origin = Origin.OWN
        else:
            whole = self.number_of(memory.first)
            if self.number_of(tensor) is None:
                memory.views.append(weakref.ref(tensor))
        form, edge = Form.of(tensor), _edge_of(tensor)
        if edge is None:
            form = replace(form, requires_grad=False)
        else:
            self.edges[number] = edge
        self.tape.values.append(
            Value(form, self._unique(name), maker, parameter, memory.number, whole, origin)
        )
        self.follow(tensor, number)
        return number

    def _unique(self, name: str) -> str:
        name = name.removesuffix("[0]")
        count = self._names[name] = self._names.get(name, 0) + 1
        return name if count == 1 else f"{name}#{count}"

    def changed(
        self, event: int, label: str, given: Sequence[Any], written: Set[int], *, real: bool
    ) -> Iterator[Change]:
        """What shows memory that was written into is no longer what it was; it gets new numbers.

        Args:
            event: what has written.
            label: says what it is.
            given: its arguments.
            written: the memory.
            real: whether what was written are numbers, since they were drawn by chance.
        """
        for key in sorted(
            written & self._memories.keys(), key=lambda key: self._memories[key].number
        ):
            memory = self._memories[key]
            shown = self._shown.get(key, memory.first)
            if not isinstance(shown, FakeTensor):
                self._taken[memory_of(shown)] = shown
            views = [view for found in memory.views if (view := found()) is not None]
            for tensor in (memory.first, *views):
                yield self.renewed(event, label, given, tensor)
        for argument, found in enumerate(given):
            if not isinstance(found, Tensor) or self.number_of(found) is not None:
                continue
            if memory_of(found) in written:
                yield from self._taken_over(event, label, argument, found, real)

    def renewed(self, event: int, label: str, given: Sequence[Any], tensor: Tensor) -> Change:
        """A followed tensor is another value from an event on."""
        argument = next((i for i, t in enumerate(given) if t is tensor), None)
        old = self.number_of(tensor)
        assert old is not None
        origin = self.tape.values[old].origin
        return Change(argument, old, self.number(tensor, f"{label}!", event, origin=origin))

    def _taken_over(
        self, event: int, label: str, argument: int, tensor: Tensor, real: bool
    ) -> Iterator[Change]:
        """A tensor that every stage had is a value from then on, and so are its views."""
        whole = tensor if tensor._base is None else tensor._base
        if isinstance(tensor, FakeTensor) or id(whole) in self._instead:
            return
        kind = contextlib.nullcontext() if real else self._mode
        with kind, torch.set_grad_enabled(whole.requires_grad):
            twin = whole.clone()
        self.put_instead(whole, twin)
        self.follow_views(whole)
        self._taken[memory_of(whole)] = whole
        new = self.number(twin, f"{label}!", event)
        yield Change(argument, None, new, base=whole is not tensor)

    def check_taken(self, given: Iterable[Tensor]) -> None:
        """Refuse what shows memory that has become a value, but cannot be told to."""
        if self._taken and any(
            memory_of(tensor) in self._taken for tensor in self.everywhere(given)
        ):
            raise PartitionError(
                "between its modules the model writes what a module gave into a tensor, and reads it through "
                "another that shows the same memory by detach(), under torch.inference_mode() or as what a "
                "module was given, which other stages cannot follow. Write into the tensor itself, into a "
                "clone of it, or use torch.no_grad()"
            )

    def has_become_a_value(self, tensor: Tensor) -> bool:
        """Whether what modules give was written into a tensor that every stage had."""
        return memory_of(tensor) in self._taken

    def everywhere(self, given: Iterable[Any]) -> list[Tensor]:
        """Of what is given the tensors that every stage has."""
        return [
            found
            for found in given
            if isinstance(found, Tensor)
            and not isinstance(found, FakeTensor)
            and self.number_of(found) is None
        ]

    def shows(self, results: Iterable[Tensor], given: Iterable[Any]) -> None:
        """Note which results of a unit are views of what every stage has."""
        memories = {memory_of(self._mode.from_tensor(t)): t for t in self.everywhere(given)}
        found = {memory_of(tensor) for tensor in results}
        self._shown |= {key: t for key, t in memories.items() if key in found}

    def view_again(self, view: Tensor, old: Tensor, new: Tensor) -> Tensor:
        """A view of what has become a value is one too."""
        made = view_like(view, old, new)
        number = self.number_of(new)
        assert number is not None
        value = self.tape.values[number]
        self.number(made, f"{value.name}[]", value.maker, origin=Origin.FOUND)
        return made

    def settle_changes(self) -> None:
        """Keep of all changes those that somebody sees, from the last event to the first.

        What changes one of several tensors that show the same memory needs all of that memory.
        """
        seen: set[int | None] = set(self._taken_for(self.tape.outputs))
        for index in reversed(range(len(self.tape.events))):
            event = self.tape.events[index]
            kept, wholes = [], []
            for of in _by_memory(event.changes, self.tape.values):
                own = [change for change in of if change.argument is not None]
                if len(own) > 1 or any(c.new in seen for c in of if c.argument is None):
                    kept += of
                    wholes += [c.old for c in of if c.old is not None and self._is_whole(c.old)]
                else:
                    kept += own
            inputs = tuple(dict.fromkeys([*event.inputs, *wholes]))
            self.tape.events[index] = replace(event, inputs=inputs, changes=tuple(kept))
            olds = (change.old for change in kept)
            seen.update(self._taken_for(inputs), olds, (event.on,))

    def _taken_for(self, numbers: Iterable[int]) -> Iterator[int]:
        """What is taken to use values: for a view that every stage makes itself, what it is a view of."""
        for number in numbers:
            value = self.tape.values[number]
            if value.origin is Origin.FOUND and value.whole is not None:
                yield value.whole
            else:
                yield number

    def is_base(self, tensor: Tensor) -> bool:
        """Whether a followed tensor is a view of this one."""
        followed = (found() for found, _ in self._followed.values())
        return any(view is not None and view._base is tensor for view in followed)

    def _is_whole(self, number: int) -> bool:
        return self.tape.values[number].whole is None


def _edge_of(tensor: Tensor) -> GradientEdge | None:
    """Where a tensor's gradient arrives, if any can."""
    try:
        return get_gradient_edge(tensor) if tensor.requires_grad else None
    except (AssertionError, RuntimeError):
        # A view of a weight that was made without a gradient says that it requires one. One of several views
        # that a function made at once has no place in the graph when what it is a view of was changed.
        return None


def _by_memory(changes: Sequence[Change], values: Sequence[Value]) -> list[list[Change]]:
    found: dict[int, list[Change]] = {}
    for change in changes:
        found.setdefault(values[change.new].memory, []).append(change)
    return list(found.values())
