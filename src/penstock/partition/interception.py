"""Watch what an author's forward does between its units, while it runs.

A ``TorchFunctionMode`` sees PyTorch functions. No mode sees calls of units, custom functions and checkpoints;
they are intercepted here.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint as checkpointing

from penstock._engine.rng import Draws
from penstock.partition.functions import may_draw
from penstock.partition.names import left

Run = Callable[..., Any]
"""Makes the call that was intercepted."""

# ---- the calls of units


_CALL = "_compiled_call_impl"
"""The attribute that ``nn.Module.__call__`` calls, if set, in place of the forward and its hooks.
``Module.compile`` sets it. As of torch 2.13."""


Call = Callable[..., Any]
"""Answers calls of modules: ``call(interceptor, run, *args, **kwargs)``, where ``run`` is the module's own
call, with its hooks."""


class Interceptor:
    """Takes over the calls of one module while it is open, without lasting changes to the module.

    Args:
        module: the module.
        path: its path in the model.

    Attributes:
        call: answers the calls while it is open.
    """

    def __init__(self, module: nn.Module, path: str) -> None:
        self.module, self.path = module, path
        self._state = vars(module)
        self._saved: dict[str, Any] = {}
        self.call: Call | None = None

    def open(self, call: Call, *, direct: bool) -> None:
        """Let another answer for calls of the module.

        Args:
            call: answers the calls.
            direct: whether calls of ``module.forward`` are taken over too.
        """
        state = self._state
        self._saved = {name: state[name] for name in (_CALL, "forward") if name in state}
        self.call = call
        state[_CALL] = functools.partial(call, self, state.get(_CALL) or self.module._call_impl)
        if direct and not isinstance(self.module, torch.jit.ScriptModule):
            state["forward"] = functools.partial(call, self, self.module.forward)

    def close(self) -> None:
        """Restore the module."""
        state, self.call = self._state, None
        for name in (_CALL, "forward"):
            if name in self._saved:
                state[name] = self._saved[name]
            else:
                state.pop(name, None)


@contextlib.contextmanager
def intercepted(
    interceptors: Sequence[Interceptor], call: Call, direct: Collection[str] = ()
) -> Iterator[None]:
    """Let ``call`` answer for calls of modules, and at the paths in ``direct`` for those of ``forward``."""
    try:
        for interceptor in interceptors:
            interceptor.open(call, direct=interceptor.path in direct)
        yield
    finally:
        for interceptor in interceptors:
            interceptor.close()


BETWEEN = ":between"
"""Stands for a unit's path where the author's code draws between units."""


# ---- custom functions, checkpoints, and attributes that are set


class Listener(Protocol):
    """Answers for custom functions and checkpoints, and is told of attributes."""

    def applied(self, function: type[Function], run: Run, args: Any, kwargs: Any) -> Any:
        """Answer for a custom function."""

    def checkpointed(self, run: Run, args: Any, kwargs: Any, options: Mapping[str, Any]) -> Any:
        """Answer for a checkpoint ``run``, whose arguments are a function and that function's arguments."""

    def has_set(self, module: nn.Module, name: str) -> None:
        """Hear of an attribute of a module that was set."""


_APPLY: Any = vars(Function)["apply"]
_CHECKPOINT: Any = inspect.unwrap(checkpointing.checkpoint)
_SWITCH = "__dynamo_disable"
"""At each call, the checkpoint runs what this attribute of itself holds instead, if set. So setting it works
under any name that the author imported the function by. It is torch's own switch, and has no public name. As
of torch 2.13."""
_OPTIONS = {"preserve_rng_state"} | {
    name
    for name, parameter in inspect.signature(checkpointing.checkpoint).parameters.items()
    if parameter.kind is parameter.KEYWORD_ONLY or parameter.default is not parameter.empty
}
"""The arguments of a checkpoint that are not passed on to the function."""


class _Heard(threading.local):
    """Who answers in a thread: torch's functions belong to all threads, of which another may train now."""

    listener: Listener | None = None


_heard = _Heard()


class _Patched:
    """A patch of torch's classes, for as long as any thread needs it.

    Args:
        patch: makes it, and returns a function that takes it back.
    """

    def __init__(self, patch: Callable[[], Callable[[], None]]) -> None:
        self._patch, self._lock, self._count = patch, threading.Lock(), 0

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        with self._lock:
            self._count += 1
            if self._count == 1:
                self._take_back = self._patch()
        try:
            yield
        finally:
            with self._lock:
                self._count -= 1
                if not self._count:
                    self._take_back()


def _patch_functions() -> Callable[[], None]:
    """Let the listener answer for custom functions and checkpoints."""
    before = vars(Function)["apply"], vars(_CHECKPOINT).get(_SWITCH)
    plain = before[1] or _CHECKPOINT

    def apply(function: type[Function], *args: Any, **kwargs: Any) -> Any:
        # Up to torch 2.13 it is a classmethod, later a builtin one; both are descriptors.
        run, listener = _APPLY.__get__(None, function), _heard.listener
        if listener is None:
            return run(*args, **kwargs)
        return listener.applied(function, run, args, kwargs)

    def checkpoint(*args: Any, **kwargs: Any) -> Any:
        listener = _heard.listener
        if listener is None:
            return plain(*args, **kwargs)
        options = {name: kwargs.pop(name) for name in _OPTIONS & kwargs.keys()}
        return listener.checkpointed(_CHECKPOINT, args, kwargs, options)

    def take_back() -> None:
        # To torch, None means not set.
        Function.apply, switch = before  # type: ignore[method-assign]
        setattr(_CHECKPOINT, _SWITCH, switch)

    Function.apply = classmethod(apply)  # type: ignore[assignment, method-assign]
    setattr(_CHECKPOINT, _SWITCH, checkpoint)
    return take_back


def _patch_attributes() -> Callable[[], None]:
    """Tell the listener of attributes."""
    plain = nn.Module.__setattr__

    def set_attribute(module: nn.Module, name: str, value: Any) -> None:
        plain(module, name, value)
        if _heard.listener is not None:
            _heard.listener.has_set(module, name)

    def take_back() -> None:
        nn.Module.__setattr__ = plain  # type: ignore[method-assign]

    nn.Module.__setattr__ = set_attribute  # type: ignore[method-assign, assignment]
    return take_back


_functions_patched = _Patched(_patch_functions)
attributes_told = _Patched(_patch_attributes)
"""A context in which listeners are told of attributes. To enter it costs a millisecond."""


@contextlib.contextmanager
def others_seen(listener: Listener) -> Iterator[None]:
    """A context in which a listener answers for the custom functions and checkpoints of this thread."""
    before = _heard.listener
    with _functions_patched():
        _heard.listener = listener
        try:
            yield
        finally:
            _heard.listener = before


# ---- what a run without data leaves alone in the whole process


_ALONE = threading.RLock()


class _Muted:
    """The standard output without what one thread prints."""

    def __init__(self, shown: Any) -> None:
        self._shown, self._thread = shown, threading.get_ident()

    def write(self, text: str) -> int:
        """Print what another thread prints."""
        muted = threading.get_ident() == self._thread
        return len(text) if muted else int(self._shown.write(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._shown, name)


@contextlib.contextmanager
def alone_and_silent() -> Iterator[None]:
    """A context in which nothing that this thread prints is shown, and that threads enter one by one.

    What such a run puts back belongs to the whole process: the standard output, globals of the author's code.
    """
    with _ALONE, contextlib.redirect_stdout(_Muted(sys.stdout)):
        yield


def is_checkpoint(function: type[Function]) -> bool:
    """Tell whether a custom function is the reentrant checkpoint's own."""
    return function is checkpointing.CheckpointFunction


@contextlib.contextmanager
def uncheckpointed(args: tuple[Any, ...], options: Mapping[str, Any]) -> Iterator[None]:
    """A context in which a checkpointed function runs plainly, with the same gradients.

    A reentrant checkpoint gives gradients only if one of its arguments requires them.
    """
    reentrant = options.get("use_reentrant") is not False
    learns = any(isinstance(a, Tensor) and a.requires_grad for a in args)
    with torch.set_grad_enabled(torch.is_grad_enabled() and (learns or not reentrant)):
        yield


# ---- a plain run of the model with the generators seeded


class Seeded(TorchFunctionMode):
    """Runs the author's code with the generators seeded, as in the stages of a pipeline.

    Args:
        interceptors: the interceptors of the units.
        draws: seeds the generators.
        calls: how often each unit was called before, by path.
        drawn: how often code between units drew before.
    """

    def __init__(
        self,
        interceptors: Sequence[Interceptor],
        draws: Draws | None,
        calls: Mapping[str, int],
        drawn: int = 0,
    ) -> None:
        super().__init__()
        self._interceptors, self._draws = interceptors, draws
        self._before = Counter(calls), drawn
        self._inside = False

    def run(self, function: Run, args: Any, kwargs: Any) -> Any:
        """Run a function, which draws the same each time."""
        self._calls, self._drawn = Counter(self._before[0]), self._before[1]
        # Some code calls a module's forward itself. What was compiled would be compiled again.
        direct = [
            interceptor.path
            for interceptor in self._interceptors
            if not interceptor.module._compiled_call_impl
        ]
        with intercepted(self._interceptors, self._unit, direct), self, others_seen(self):
            return function(*args, **kwargs)

    def _unit(self, interceptor: Interceptor, run: Run, /, *args: Any, **kwargs: Any) -> Any:
        if interceptor.call != self._unit:
            # A checkpoint has kept this, and calls it again when others answer, or nobody does.
            others = interceptor.call
            return others(interceptor, run, *args, **kwargs) if others else run(*args, **kwargs)
        if self._inside:
            return run(*args, **kwargs)
        number = self._calls[interceptor.path]
        self._calls[interceptor.path] += 1
        if self._draws is not None:
            self._draws.enter(interceptor.path, number)
        self._inside = True
        try:
            with left(self):
                return run(*args, **kwargs)
        finally:
            self._inside = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self._inside and self._draws is not None and may_draw(func):
            self._draws.enter(BETWEEN, self._drawn)
            self._drawn += 1
        return func(*args, **(kwargs or {}))

    def applied(self, function: type[Function], run: Run, args: Any, kwargs: Any) -> Any:
        """Run a custom function; as inside a unit, its draws are not seen one by one."""
        return run(*args, **kwargs)

    def has_set(self, module: nn.Module, name: str) -> None:
        """Attributes are the module's business here."""

    def checkpointed(self, run: Run, args: Any, kwargs: Any, options: Mapping[str, Any]) -> Any:
        """Run a checkpoint, and seed its recomputation again."""
        if self._inside:
            return run(*args, **kwargs, **options)
        function, *rest = args
        again = recomputed(function, self._interceptors, self._draws, self._calls, self._drawn)
        return run(again, *rest, **kwargs, **options)


def recomputed(
    function: Run,
    interceptors: Sequence[Interceptor],
    draws: Draws | None,
    calls: Mapping[str, int],
    drawn: int,
) -> Run:
    """A function whose first call is plain, and whose later calls draw what the first one drew."""
    if draws is None:
        return function
    seeded = Seeded(interceptors, draws, dict(calls), drawn)
    been = False

    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal been
        if been:
            return seeded.run(function, args, kwargs)
        been = True
        return function(*args, **kwargs)

    return run


# ---- what is read of a module


@contextlib.contextmanager
def reads_noted(
    attributes: Sequence[tuple[nn.Module, str, Any]], note: Callable[[Any], None]
) -> Iterator[None]:
    """Note whenever an attribute is read before it is set: each has its module, name, and what to note."""
    events: dict[int, dict[str, Any]] = {}
    for module, name, what in attributes:
        events.setdefault(id(module), {})[name] = what
    modules = {id(module): module for module, _, _ in attributes}
    kinds = {key: type(module) for key, module in modules.items()}
    for key, module in modules.items():
        module.__class__ = _noting(kinds[key], events[key], note)
    try:
        yield
    finally:
        for key, module in modules.items():
            module.__class__ = kinds[key]


def _noting(kind: Any, events: dict[str, Any], note: Callable[[Any], None]) -> Any:
    """A module's class that notes what is read, see :func:`reads_noted`."""

    def read(self: Any, name: str) -> Any:
        if name in events:
            note(events[name])
        return kind.__getattribute__(self, name)

    def write(self: Any, name: str, value: Any) -> None:
        events.pop(name, None)
        kind.__setattr__(self, name, value)

    return type(
        kind.__name__,
        (kind,),
        {"__getattribute__": read, "__setattr__": write, "__module__": kind.__module__},
    )
