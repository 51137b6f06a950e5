"""Follow an author's forward: which tensors come from calls of units, and what is done with them.

What happens between the calls is seen as calls of PyTorch's functions, and of the author's own that have a
backward. A call that touches a *followed* tensor, one that comes from a unit or from such a call, is an
*event*, and so is the call of a unit. Events come in the same order in every stage, because every stage runs
the same forward. In the analysis each followed tensor gets a number. A tensor that is written into counts as
another value afterwards, and so does every tensor that shares its memory.
"""

from __future__ import annotations

import contextlib
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.autograd import Function
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint as checkpointing

from penstock.errors import PartitionError
from penstock.partition.calls.inference import memory_of, view_like
from penstock.partition.calls.tape import Change, Origin, Tape, Value, form_of, replaced, tensors_in
from penstock.partition.faces import Listener, Run, seen

# Kept, since others may put a class of theirs in its place.
_CHECKPOINTED = checkpointing.CheckpointFunction


class Watch(TorchFunctionMode, Listener, ABC):
    """Sees the events of one forward pass; a subclass decides what they return."""

    def __init__(self) -> None:
        super().__init__()
        self._followed: dict[int, tuple[weakref.ref[Tensor], list[int]]] = {}
        self._instead: dict[int, tuple[Tensor, Tensor]] = {}
        self._bases: dict[int, Tensor] = {}
        self._depth = 0
        self._inside = False

    @contextlib.contextmanager
    def watching(self, units: Sequence[nn.Module]) -> Iterator[None]:
        """See the calls of ``units`` and what happens between them."""
        with seen(units, self), self:
            self._depth = _modes()
            yield

    # ---- what is seen

    def called(self, module: nn.Module, run: Run, args: tuple[Any, ...], kwargs: Any) -> Any:
        """A unit is called."""
        if self._inside:
            return run(*args, **kwargs)
        with self.unseen():
            return self._answered(partial(self.call, module, run), args, kwargs)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """A function of PyTorch is called."""
        options = kwargs or {}
        if self._inside or not self.concerns(func, args, options):
            return func(*args, **options)
        with self.unseen():
            return self._answered(partial(self.operation, func, func), args, options)

    def applied(
        self, function: type[Function], run: Run, args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        """A custom function is applied: it is one event, since it has one backward."""
        if not self._inside and function is not _CHECKPOINTED:
            with self.unseen():
                if self.concerns(function, args, kwargs):
                    return self._answered(partial(self.operation, function, run), args, kwargs)
        return run(*args, **kwargs)

    def _answered(self, answer: Run, args: tuple[Any, ...], kwargs: Any) -> Any:
        """The answer to a call with what replaces its tensors; the author's code keeps its own."""
        if not self._instead:
            return answer(args, kwargs)
        own = tensors_in((args, kwargs))
        args, kwargs = self.current((args, kwargs))
        back = {id(new): old for new, old in zip(tensors_in((args, kwargs)), own, strict=True)}
        return replaced(answer(args, kwargs), lambda leaf: back.get(id(leaf), leaf))

    def checkpointed(
        self, run: Run, args: tuple[Any, ...], kwargs: Any, options: Mapping[str, Any]
    ) -> Any:
        """A part of the forward is checkpointed: it is to be computed again in backward."""
        if self._inside:
            return run(*args, **kwargs, **options)
        return self.region(run, args, kwargs, options)

    def added(self, loss: Tensor) -> Tensor | None:
        """A loss is added."""
        if self._inside:
            return self.inner_loss(loss)
        with self.unseen():
            return self.outer_loss(self.current(loss))

    def concerns(self, what: Any, args: tuple[Any, ...], kwargs: Any) -> bool:
        """Whether a function is an event, or asks something of a followed tensor."""
        return any(self._is_followed(tensor) for tensor in _shallow(args, kwargs))

    @abstractmethod
    def call(self, module: nn.Module, run: Run, args: tuple[Any, ...], kwargs: Any) -> Any:
        """Answer for a unit."""

    @abstractmethod
    def operation(self, what: Any, run: Run, args: tuple[Any, ...], kwargs: Any) -> Any:
        """Answer for a function that has a followed tensor among its arguments."""

    @abstractmethod
    def region(
        self, run: Run, args: tuple[Any, ...], kwargs: Any, options: Mapping[str, Any]
    ) -> Any:
        """Answer for what the author has checkpointed.

        Args:
            run: torch's checkpoint.
            args: the function, and its positional arguments.
            kwargs: its arguments by name.
            options: the checkpoint's own arguments.
        """

    @abstractmethod
    def inner_loss(self, loss: Tensor) -> Tensor | None:
        """What to add for a loss that a unit adds."""

    @abstractmethod
    def outer_loss(self, loss: Tensor) -> Tensor | None:
        """What to add for a loss that is added between the units."""

    @contextlib.contextmanager
    def unseen(self) -> Iterator[None]:
        """Inside a unit or a function nothing is an event, and watching costs nothing."""
        top = _modes() == self._depth
        self._inside = True
        if top:
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            if top:
                self.__enter__()  # type: ignore[no-untyped-call]
            self._inside = False

    # ---- which tensors are followed

    def follow(self, tensor: Tensor, number: int) -> None:
        """From now on this tensor is value ``number``."""
        known = self.numbers_of(tensor)
        if known:
            known.append(number)
        else:
            self._followed[id(tensor)] = (weakref.ref(tensor), [number])

    def numbers_of(self, tensor: Tensor) -> list[int]:
        """The numbers of a tensor, the newest last; none for one that is not followed.

        A tensor can have several: a function that has nothing to do, such as a cast, may return its argument
        where it returned a new tensor in the analysis.
        """
        found = self._followed.get(id(tensor))
        return [] if found is None or found[0]() is not tensor else found[1]

    def number_of(self, tensor: Tensor) -> int | None:
        """The newest number of a followed tensor."""
        known = self.numbers_of(tensor)
        return known[-1] if known else None

    def tensor_of(self, number: int) -> Tensor | None:
        """A tensor that is this value now, if one is alive."""
        found = (ref() for ref, known in self._followed.values() if known[-1] == number)
        return next((tensor for tensor in found if tensor is not None), None)

    def _is_followed(self, tensor: Tensor) -> bool:
        if id(tensor) in self._instead or self.number_of(tensor) is not None:
            return True
        return bool(self._bases) and id(tensor._base) in self._bases

    def put_instead(self, old: Tensor, new: Tensor) -> None:
        """From now on ``new`` is used where the author's code holds ``old``."""
        if old is not new:
            self._instead[id(old)] = (old, new)

    def follow_views(self, base: Tensor) -> None:
        """From now on the views of a tensor that the author's code already holds are followed, as it is."""
        self._bases[id(base)] = base

    def current(self, value: Any) -> Any:
        """A value with what replaces its tensors."""
        return replaced(value, self._newest) if self._instead else value

    def _newest(self, leaf: Any) -> Any:
        while id(leaf) in self._instead:
            leaf = self._instead[id(leaf)][1]
        old = leaf._base if self._bases and isinstance(leaf, Tensor) else None
        if old is None or id(old) not in self._bases:
            return leaf
        new = self._newest(old)
        return leaf if new is old else self.view_again(leaf, old, new)

    @abstractmethod
    def view_again(self, view: Tensor, old: Tensor, new: Tensor) -> Tensor:
        """What replaces a view of ``old``, where ``new`` replaces ``old``."""


def _shallow(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """The tensors among a function's arguments, most of which are arguments themselves."""
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from tensors_in(value)


def _modes() -> int:
    # There is no public name for the number of modes that are on. As of torch 2.13.
    return torch._C._len_torch_function_stack()


# ---- number the tensors of an analysed call, including those that are changed in place


class _Memory(NamedTuple):
    """Tensors that are known to share memory.

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
        mode: the mode of the tensors without data.

    Attributes:
        tape: the record of the values.
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
            origin: how it comes to share its memory with another value, if it does.
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
        form, edge = form_of(tensor), _edge_of(tensor)
        if edge is None:
            form = form._replace(requires_grad=False)
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
        """Give new numbers to all tensors that show memory that was written into.

        Args:
            event: the event that has written.
            label: says what it is.
            given: its arguments.
            written: the memory.
            real: whether actual numbers were written, because they were drawn at random.
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
        """Give a followed tensor the number of the value that an event has made of it."""
        argument = next((i for i, t in enumerate(given) if t is tensor), None)
        old = self.number_of(tensor)
        assert old is not None
        origin = self.tape.values[old].origin
        return Change(argument, old, self.number(tensor, f"{label}!", event, origin=origin))

    def _taken_over(
        self, event: int, label: str, argument: int, tensor: Tensor, real: bool
    ) -> Iterator[Change]:
        """Make a value of a tensor that every stage had, and of its views."""
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
        """Refuse a tensor that shares memory with a new value in a way that cannot be followed."""
        if self._taken and any(
            memory_of(tensor) in self._taken for tensor in self.everywhere(given)
        ):
            raise PartitionError(
                "between its modules the model writes what a module gave into a tensor, and reads it through "
                "another that shares its memory: one made by detach(), under torch.inference_mode() or that "
                "a module was given. Other stages cannot follow that. Write into the tensor itself, into a "
                "clone of it, or use torch.no_grad()"
            )

    def has_become_a_value(self, tensor: Tensor) -> bool:
        """Whether the output of a module was written into a tensor that every stage had."""
        return memory_of(tensor) in self._taken

    def everywhere(self, given: Iterable[Any]) -> list[Tensor]:
        """Those of some arguments that are tensors that every stage has."""
        return [
            found
            for found in given
            if isinstance(found, Tensor)
            and not isinstance(found, FakeTensor)
            and self.number_of(found) is None
        ]

    def shows(self, results: Iterable[Tensor], given: Iterable[Any]) -> None:
        """Note which results of a unit are views of tensors that every stage has."""
        memories = {memory_of(self._mode.from_tensor(t)): t for t in self.everywhere(given)}
        found = {memory_of(tensor) for tensor in results}
        self._shown |= {key: t for key, t in memories.items() if key in found}

    def view_again(self, view: Tensor, old: Tensor, new: Tensor) -> Tensor:
        """A view of a tensor that has become a value is a value too."""
        made = view_like(view, old, new)
        number = self.number_of(new)
        assert number is not None
        value = self.tape.values[number]
        self.number(made, f"{value.name}[]", value.maker, origin=Origin.FOUND)
        return made

    def settle_changes(self) -> None:
        """Keep only those changes whose effect is used, going from the last event to the first.

        An event that changes one of several tensors that share memory needs all of that memory.
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
        """What is needed to use values: for a view that every stage makes itself, what it is a view of."""
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
        # A view of a weight that was made under no_grad() says that it requires a gradient, yet has no node.
        # One of several views that were made at once loses its node when what it is a view of is changed.
        return None


def _by_memory(changes: Sequence[Change], values: Sequence[Value]) -> list[list[Change]]:
    found: dict[int, list[Change]] = {}
    for change in changes:
        found.setdefault(values[change.new].memory, []).append(change)
    return list(found.values())
