"""Let a module's calls be seen while a forward runs, and at no other time.

A module's class is exchanged for one that is the same but for ``__call__``, which is how a call is seen
before checkpointing, hooks and all else that the author has put around ``forward``.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from torch import nn

from penstock.errors import PartitionError

Run = Callable[..., Any]
"""A module's own call."""


class Listener(Protocol):
    """Who is told of calls."""

    def called(self, module: nn.Module, run: Run, args: tuple[Any, ...], kwargs: Any) -> Any:
        """Answers for the module; ``run`` is what it would have done."""


_LISTENER: ContextVar[Listener | None] = ContextVar("listener", default=None)


@contextlib.contextmanager
def seen(units: Sequence[nn.Module], listener: Listener) -> Iterator[None]:
    """Tell ``listener`` of the calls of these modules in this thread, for as long as the context lasts."""
    kinds = [(unit, type(unit)) for unit in units]
    token = _LISTENER.set(listener)
    try:
        for unit, kind in kinds:
            _become(unit, _face_of(kind))
        yield
    finally:
        for unit, kind in kinds:
            _become(unit, kind)
        _LISTENER.reset(token)


def _become(unit: nn.Module, kind: type[nn.Module]) -> None:
    try:
        object.__setattr__(unit, "__class__", kind)
    except TypeError as error:
        raise PartitionError(
            f"calls of a {type(unit).__name__} cannot be seen ({error}); use how='traced'"
        ) from error


_FACES: WeakKeyDictionary[type[nn.Module], type[nn.Module]] = WeakKeyDictionary()


def _face_of(kind: type[nn.Module]) -> type[nn.Module]:
    if kind not in _FACES:
        _FACES[kind] = _make_face(kind)
    return _FACES[kind]


def _make_face(kind: type[nn.Module]) -> type[nn.Module]:
    def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        face = type(self)
        # The author's code may ask for its class.
        _become(self, kind)
        try:
            return kind.__call__(self, *args, **kwargs)
        finally:
            _become(self, face)

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        listener = _LISTENER.get()
        if listener is None:
            # Another thread uses the module meanwhile.
            return kind.__call__(self, *args, **kwargs)
        return listener.called(self, partial(run, self), args, kwargs)

    names = {"__call__": call, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return types.new_class(kind.__name__, (kind,), exec_body=lambda space: space.update(names))
