"""See what an author's forward does, for as long as it runs.

A module's class is exchanged for one that differs in ``__call__`` alone: so a call is seen before hooks,
checkpointing and whatever else the author has put around ``forward``. Functions of PyTorch are seen by a
``TorchFunctionMode``; this file sees what no mode does: custom functions, checkpoints and added losses.
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
from penstock.step.loss import losses_heard

Run = Callable[..., Any]
"""Does what would have been done."""


class Listener:
    """Is told what happens, and answers for it; by default nothing changes, but checkpoints are left out."""

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
        """A checkpoint ``run`` is called with a function and its arguments; by default it is left out."""
        with uncheckpointed(args, options):
            return args[0](*args[1:], **kwargs)

    def added(self, loss: Tensor) -> Tensor | None:
        """A loss is added; the answer is what to add instead, or ``None``."""
        return loss


_LISTENER: ContextVar[Listener | None] = ContextVar("listener", default=None)


@contextlib.contextmanager
def seen(units: Sequence[nn.Module], listener: Listener) -> Iterator[None]:
    """Tell ``listener`` what is done in this thread, for as long as the context lasts.

    Args:
        units: the modules of whose calls it is told.
        listener: answers for what is done.
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
            # Called by another thread meanwhile.
            return kind.__call__(self, *args, **kwargs)
        return listener.called(self, partial(run, self), args, kwargs)

    names = {"__call__": call, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return types.new_class(kind.__name__, (kind,), exec_body=lambda space: space.update(names))


# ---- custom functions and checkpoints

_APPLY: Any = vars(Function)["apply"]
_CHECKPOINT: Any = inspect.unwrap(checkpointing.checkpoint)
_SWITCH = "__dynamo_disable"
"""At each call the checkpoint looks at this attribute of itself for what to run instead, so that setting it
works under whatever name the author has imported the function. It is torch's own switch and has no public
name. As of torch 2.13."""


_OPTIONS = {"preserve_rng_state"} | {
    name
    for name, parameter in inspect.signature(checkpointing.checkpoint).parameters.items()
    if parameter.kind is parameter.KEYWORD_ONLY or parameter.default is not parameter.empty
}
"""The arguments of a checkpoint that are not passed on to the function."""


class _Taps:
    """Makes torch call the listener of the current thread, as long as any thread has one."""

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
                    # Torch takes None for not set.
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
    """Run what was checkpointed without that, so that it still gives the same gradients.

    A reentrant checkpoint gives gradients only if one of its arguments requires them. The context's value
    says whether it is a reentrant one that would run a second time.
    """
    reentrant = options.get("use_reentrant") is not False
    given = any(isinstance(a, Tensor) and a.requires_grad for a in args)
    with torch.set_grad_enabled(torch.is_grad_enabled() and (given or not reentrant)):
        yield reentrant and torch.is_grad_enabled()


# ---- functions that return nothing, and what operators write

_TENSOR: Any = Tensor
HOOKS = {
    *(_TENSOR.register_hook, _TENSOR.register_post_accumulate_grad_hook),
    # The node of the graph, on which hooks can be set as well.
    _TENSOR.grad_fn.__get__,
}
"""Functions by which a hook is set on the gradient of a tensor."""
EFFECTS = {*HOOKS, _TENSOR.retain_grad}
"""Functions that return nothing, but act on the gradient of a tensor."""

GET_DATA, SET_DATA = _TENSOR.data.__get__, _TENSOR.data.__set__
REQUIRES_GRAD = {_TENSOR.requires_grad_, _TENSOR.requires_grad.__set__}
"""Functions that make a tensor require a gradient, or stop requiring it."""


def written_by(schema: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Any]:
    """The arguments that an operator writes into, according to its schema."""
    for argument, value in given_to(schema, args, kwargs):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield value


def given_to(
    schema: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[tuple[Any, Any]]:
    """The arguments that an operator is given, each after its declaration in the schema."""
    for position, argument in enumerate(schema.arguments):
        if position < len(args):
            yield argument, args[position]
        elif argument.name in kwargs:
            yield argument, kwargs[argument.name]
