"""Follow an author's forward: which tensors come from calls of units, and what is done with them.

What happens between the calls is seen as the functions of PyTorch that are called there, and the author's
own that have a backward. Those that touch a *followed* tensor, one that comes from a unit or from such a
function, are *events*, like the calls. They come in the same order in every stage, because every stage runs
the same forward.
"""

from __future__ import annotations

import contextlib
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint as checkpointing

from penstock.partition.calls.trees import replaced, tensors_in
from penstock.partition.faces import Run, seen

# Before anybody puts another in its place.
_CHECKPOINTED = checkpointing.CheckpointFunction


class Watch(TorchFunctionMode, ABC):
    """Sees the events of one forward pass."""

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
        """A custom function is applied: it is one event, for its backward is one."""
        if not self._inside and function is not _CHECKPOINTED:
            with self.unseen():
                if self.concerns(function, args, kwargs):
                    return self._answered(partial(self.operation, function, run), args, kwargs)
        return run(*args, **kwargs)

    def _answered(self, answer: Run, args: tuple[Any, ...], kwargs: Any) -> Any:
        """The answer to a call with what is used instead of its tensors; the author's code keeps its own."""
        if not self._instead:
            return answer(args, kwargs)
        own = tensors_in((args, kwargs))
        args, kwargs = self.current((args, kwargs))
        back = {id(new): old for new, old in zip(tensors_in((args, kwargs)), own, strict=True)}
        return replaced(answer(args, kwargs), lambda leaf: back.get(id(leaf), leaf))

    def checkpointed(
        self, run: Run, args: tuple[Any, ...], kwargs: Any, options: Mapping[str, Any]
    ) -> Any:
        """A part of the forward is to be computed again in backward."""
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
            args: the function, and what it is called with.
            kwargs: likewise, by name.
            options: the rest of what the checkpoint is given.
        """

    @abstractmethod
    def inner_loss(self, loss: Tensor) -> Tensor | None:
        """What is added of a loss inside of a unit."""

    @abstractmethod
    def outer_loss(self, loss: Tensor) -> Tensor | None:
        """What is added of a loss between the units."""

    @contextlib.contextmanager
    def unseen(self) -> Iterator[None]:
        """Inside a unit or a function nothing is an event, and nothing costs anything."""
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

        A function that has nothing to do may give its argument where it gave a new tensor in the analysis.
        """
        found = self._followed.get(id(tensor))
        return [] if found is None or found[0]() is not tensor else found[1]

    def number_of(self, tensor: Tensor) -> int | None:
        """The newest number of a followed tensor."""
        known = self.numbers_of(tensor)
        return known[-1] if known else None

    def tensor_of(self, number: int) -> Tensor | None:
        """A tensor that is this value now."""
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
        """From now on the views of a tensor that the author's code has already are followed, like it."""
        self._bases[id(base)] = base

    def current(self, value: Any) -> Any:
        """A value with what is used instead of its tensors."""
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
        """What is used instead of a view of ``old``, for which ``new`` is used."""


def _shallow(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """The tensors among a function's arguments: mostly they stand at the top."""
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from tensors_in(value)


def _modes() -> int:
    # No public name tells how many modes are held. Seen in torch 2.13.
    return torch._C._len_torch_function_stack()
