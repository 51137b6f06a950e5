"""See the heavy uses of weights while a stage runs, at little cost.

A mode sees every function that PyTorch offers, but it costs a little for each of them. So it is held
around the whole of the first forward pass only, which finds the modules that use weights through
functions. From then on it is held while those modules run, and modules of known kinds, like
``nn.Linear``, are replaced by a function that does the same. Nothing stays in the modules: what they
get for ``forward`` is taken out again when the stage's forward or backward is over.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from penstock.backward.compiled import opaque_modules
from penstock.backward.deferral import Deferral
from penstock.backward.finders import Finder, function_finder, module_finder
from penstock.backward.function import SplitFunction
from penstock.backward.store import WeightGradStore

Forward = Callable[..., Any]


class Interception:
    """Watches the forward passes of one stage, and backward passes that recompute parts of them.

    Args:
        module: The stage's module.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._deferral = Deferral()
        opaque, self.reason = opaque_modules(module)
        self._visible = [m for m in module.modules() if m not in opaque]
        self._known = {m: f for m in self._visible if (f := module_finder(m))}
        self._through_functions: set[nn.Module] = set()
        self._stand_ins = [(m, _stand_in(self._deferral, m, f)) for m, f in self._known.items()]
        self._explored: set[bool] = set() if self.reason is None else {True, False}
        self._everywhere = False

    def forward(self, store: WeightGradStore) -> contextlib.AbstractContextManager[Any]:
        """Leaves weight gradients of what runs in the context to ``store``."""
        if self._module.training in self._explored:
            return self._watching(store)
        return self._exploring(store)

    def backward(self, store: WeightGradStore) -> contextlib.AbstractContextManager[Any]:
        """Does so for what a backward pass recomputes, and keeps what it computes."""
        return self._watching(store, recording=True)

    @property
    def needs_mode(self) -> bool:
        """Whether the mode is held in backward, which takes gradient edges as roots."""
        return self._everywhere

    def anchors(self) -> list[Tensor]:
        """Returns the leaves that make autograd reach every deferred operation."""
        return self._deferral.anchors()

    # ---- what is in the modules while they run

    def _watching(
        self, store: WeightGradStore, *, recording: bool = False
    ) -> contextlib.AbstractContextManager[Any]:
        installed = _Installed(self._deferral, store, self._stand_ins, recording=recording)
        return _both(installed, _Mode(self._deferral)) if self._everywhere else installed

    # ---- the first forward pass

    @contextlib.contextmanager
    def _exploring(self, store: WeightGradStore) -> Iterator[None]:
        running = _Running()
        mode = self._module.training
        trackers = [(m, running.tracker(m)) for m in self._visible if m not in self._known]
        stand_ins = [*self._stand_ins, *trackers]
        with _Installed(self._deferral, store, stand_ins), _Mode(self._deferral, running):
            yield
        self._everywhere |= running.recomputed_apart
        for module in (m for m in running.found if m not in self._through_functions):
            self._through_functions.add(module)
            self._stand_ins.append((module, _with_mode(self._deferral, module)))
        self._explored.add(mode)


def _stand_in(deferral: Deferral, module: nn.Module, find: Finder) -> Forward:
    original = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        call = None if torch.compiler.is_compiling() else find(module, *args, **kwargs)
        return original(*args, **kwargs) if call is None else deferral.run(call)[0]

    return forward


def _with_mode(deferral: Deferral, module: nn.Module) -> Forward:
    original = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return original(*args, **kwargs)
        with _Mode(deferral):
            return original(*args, **kwargs)

    return forward


class _Running:
    """Which modules are running, and which of them use weights through functions."""

    def __init__(self) -> None:
        self._stack: list[tuple[nn.Module | None, Any]] = [(None, None)]
        self.found: dict[nn.Module, None] = {}
        self.recomputed_apart = False

    def tracker(self, module: nn.Module) -> Forward:
        original = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            self._stack.append((module, _saved_tensor_hooks()))
            try:
                return original(*args, **kwargs)
            finally:
                self._stack.pop()

        return forward

    def note(self) -> None:
        """Says that a function is being called that only the mode can see."""
        module, hooks = self._stack[-1]
        if module is None:
            # The loss, or another function that is called by no module.
            self.recomputed_apart = True
            return
        self.found[module] = None
        # A checkpoint begun inside the module recomputes a part of it without calling the module.
        self.recomputed_apart |= hooks != _saved_tensor_hooks()


def _saved_tensor_hooks() -> Any:
    # No public name tells whether hooks are there. Seen in torch 2.13.
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


class _Mode(TorchFunctionMode):
    """Sees the functions that are called with weights."""

    def __init__(self, deferral: Deferral, running: _Running | None = None) -> None:
        super().__init__()
        self._deferral = deferral
        self._running = running

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        options = kwargs or {}
        if func is torch.autograd.grad:
            self._note()
            return self._deferral.gradients(*args, **options)
        if isinstance(func, type) and issubclass(func, SplitFunction):
            return self._noted(*self._deferral.run_function(func, args))
        find = function_finder(func)
        if find is None or not torch.is_grad_enabled():
            return func(*args, **options)
        return self._run(find, func, args, options)

    def _run(self, find: Finder, func: Any, args: Sequence[Any], options: dict[str, Any]) -> Any:
        call = None if torch.compiler.is_compiling() else find(*args, **options)
        if call is None:
            return func(*args, **options)
        return self._noted(*self._deferral.run(call))

    def _noted(self, output: Any, waits: bool) -> Any:
        if waits:
            self._note()
        return output

    def _note(self) -> None:
        if self._running is not None:
            self._running.note()


class _Installed:
    """A store that gradients are left to, and other ``forward`` of modules, while the context lasts.

    They stand in the modules' instance dicts, so that no hook of theirs is bypassed. Every microbatch enters
    it twice: a class costs a fraction of what generators would.
    """

    def __init__(
        self,
        deferral: Deferral,
        store: WeightGradStore,
        stand_ins: Sequence[tuple[nn.Module, Forward]],
        *,
        recording: bool = False,
    ) -> None:
        self._deferral = deferral
        self._store = store
        self._stand_ins = stand_ins
        self._recording = recording
        self._before: list[tuple[dict[str, Any], Forward | None]] = []

    def __enter__(self) -> None:
        self._store_before = self._deferral.lead_to(self._store)
        self._recording_before = self._store.recording
        self._store.recording |= self._recording
        for module, forward in self._stand_ins:
            names = module.__dict__
            self._before.append((names, names.get("forward")))
            names["forward"] = forward

    def __exit__(self, *_: object) -> None:
        for names, forward in reversed(self._before):
            if forward is None:
                del names["forward"]
            else:
                names["forward"] = forward
        self._store.recording = self._recording_before
        self._deferral.lead_to(self._store_before)


@contextlib.contextmanager
def _both(first: contextlib.AbstractContextManager[Any], second: Any) -> Iterator[None]:
    with first, second:
        yield
