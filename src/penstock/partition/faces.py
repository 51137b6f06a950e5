"""Let what an author's forward does be seen while it runs, and at no other time.

A module's class is exchanged for one that is the same but for ``__call__``, which is how a call is seen
before checkpointing, hooks and all else that the author has put around ``forward``. Functions of PyTorch are
seen by a mode of its own; here is what no mode sees: custom functions, checkpoints and added losses.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.utils import checkpoint as checkpointing

from penstock.errors import PartitionError
from penstock.step.losses import losses_heard

Run = Callable[..., Any]
"""What would have been done."""


class Listener:
    """Who is told, and answers; by default with what would have been done, but for checkpoints."""

    def called(self, module: nn.Module, run: Run, args: tuple[Any, ...], kwargs: Any) -> Any:
        """A module is called."""
        return run(*args, **kwargs)

    def applied(
        self, function: type[Function], run: Run, args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        """A custom function is applied."""
        return run(*args, **kwargs)

    def checkpointed(
        self, run: Run, args: tuple[Any, ...], kwargs: Any, options: Mapping[str, Any]
    ) -> Any:
        """A checkpoint ``run`` is called for a function and what that is called with; it is left out."""
        with uncheckpointed(args, options):
            return args[0](*args[1:], **kwargs)

    def added(self, loss: Tensor) -> Tensor | None:
        """A loss is added; answers what is added here."""
        return loss


_LISTENER: ContextVar[Listener | None] = ContextVar("listener", default=None)


@contextlib.contextmanager
def seen(units: Sequence[nn.Module], listener: Listener) -> Iterator[None]:
    """Tell ``listener`` of what is done in this thread, for as long as the context lasts.

    Args:
        units: the modules whose calls are told.
        listener: who is told.
    """
    kinds = [(unit, type(unit)) for unit in units]
    token = _LISTENER.set(listener)
    try:
        for unit, kind in kinds:
            _become(unit, _face_of(kind))
        with losses_heard(listener.added), _TAPS.open():
            yield
    finally:
        for unit, kind in kinds:
            _become(unit, kind)
        _LISTENER.reset(token)


# ---- the calls of modules


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


# ---- custom functions and checkpoints

_APPLY: Any = vars(Function)["apply"]
_CHECKPOINT: Any = inspect.unwrap(checkpointing.checkpoint)
_SWITCH = "__dynamo_disable"
"""By whatever name the author has imported the checkpoint, this attribute of it is asked at each call what to
run. It is torch's own switch, without a public name. Seen in torch 2.13."""


_OPTIONS = {"preserve_rng_state"} | {
    name
    for name, parameter in inspect.signature(checkpointing.checkpoint).parameters.items()
    if parameter.kind is parameter.KEYWORD_ONLY or parameter.default is not parameter.empty
}
"""Of a checkpoint's arguments those that are not for the function."""


class _Taps:
    """Makes torch ask this thread's listener, as long as any thread has one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._switch: Any = None

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._switch = vars(_CHECKPOINT).pop(_SWITCH, None)
                setattr(_CHECKPOINT, _SWITCH, _checkpoint)
                Function.apply = classmethod(_apply)  # type: ignore[assignment, method-assign]
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if not self._users:
                    Function.apply = _APPLY  # type: ignore[method-assign]
                    # None is what torch takes for not set.
                    setattr(_CHECKPOINT, _SWITCH, self._switch)


_TAPS = _Taps()


def _apply(function: type[Function], *args: Any, **kwargs: Any) -> Any:
    listener, run = _LISTENER.get(), partial(_APPLY.__func__, function)
    if listener is None:
        return run(*args, **kwargs)
    return listener.applied(function, run, args, kwargs)


def _checkpoint(*args: Any, **kwargs: Any) -> Any:
    listener = _LISTENER.get()
    if listener is None:
        return _CHECKPOINT(*args, **kwargs)
    options = {name: kwargs.pop(name) for name in _OPTIONS & kwargs.keys()}
    return listener.checkpointed(_CHECKPOINT, args, kwargs, options)


@contextlib.contextmanager
def uncheckpointed(args: tuple[Any, ...], options: Mapping[str, Any]) -> Iterator[bool]:
    """What runs here gives the gradients that it would give checkpointed.

    A reentrant checkpoint gives some only if what it is given has some. The context tells whether it is such
    a one, that would run twice.
    """
    reentrant = options.get("use_reentrant") is not False
    given = any(isinstance(a, Tensor) and a.requires_grad for a in args)
    with torch.set_grad_enabled(torch.is_grad_enabled() and (given or not reentrant)):
        yield reentrant and torch.is_grad_enabled()


# ---- what leaves no value

_TENSOR: Any = Tensor
HOOKS = {
    *(_TENSOR.register_hook, _TENSOR.register_post_accumulate_grad_hook),
    # The node of the graph, on which hooks can be set as well.
    _TENSOR.grad_fn.__get__,
}
"""Functions by which a hook is set on the gradient of a tensor."""
EFFECTS = {*HOOKS, _TENSOR.retain_grad}
"""Functions that return nothing of a tensor but have a part in its gradient."""

GET_DATA, SET_DATA = _TENSOR.data.__get__, _TENSOR.data.__set__
REQUIRES_GRAD = {_TENSOR.requires_grad_, _TENSOR.requires_grad.__set__}
"""Functions that make a tensor ask for a gradient, or no longer."""


def written_by(schema: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Any]:
    """Those of an operator's arguments that it writes into, as its schema tells."""
    for argument, value in given_to(schema, args, kwargs):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield value


def given_to(
    schema: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[tuple[Any, Any]]:
    """The arguments of an operator that are given, each with what its schema says of it."""
    for position, argument in enumerate(schema.arguments):
        if position < len(args):
            yield argument, args[position]
        elif argument.name in kwargs:
            yield argument, kwargs[argument.name]
