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
        self._known = {
            m: _stand_in(self._deferral, m, f) for m in self._visible if (f := module_finder(m))
        }
        self._through_functions: dict[nn.Module, Forward] = {}
        self._explored: set[bool] = set() if self.reason is None else {True, False}
        self._everywhere = False

    @contextlib.contextmanager
    def forward(self, store: WeightGradStore) -> Iterator[None]:
        """Leaves weight gradients of what runs in the context to ``store``."""
        mode = self._module.training
        if mode in self._explored:
            with self._installed(store), self._mode_if(self._everywhere):
                yield
            return
        with self._exploring(store):
            yield
        self._explored.add(mode)

    @contextlib.contextmanager
    def backward(self, store: WeightGradStore) -> Iterator[None]:
        """Does so for what a backward pass recomputes, and keeps what it computes."""
        with self._installed(store), self._mode_if(self._everywhere), store.record():
            yield

    @property
    def needs_mode(self) -> bool:
        """Whether the mode is held in backward, which takes gradient edges as roots."""
        return self._everywhere

    def anchors(self) -> list[Tensor]:
        """Returns the leaves that make autograd reach every deferred operation."""
        return self._deferral.anchors()

    # ---- what is in the modules while they run

    @contextlib.contextmanager
    def _installed(self, store: WeightGradStore) -> Iterator[None]:
        with (
            self._deferral.into(store),
            _replaced(self._known),
            _replaced(self._through_functions),
        ):
            yield

    def _mode_if(self, wanted: bool) -> contextlib.AbstractContextManager[Any]:
        return _Mode(self._deferral) if wanted else contextlib.nullcontext()

    # ---- the first forward pass

    @contextlib.contextmanager
    def _exploring(self, store: WeightGradStore) -> Iterator[None]:
        running = _Running()
        trackers = {m: running.tracker(m) for m in self._visible if m not in self._known}
        with self._installed(store), _replaced(trackers), _Mode(self._deferral, running):
            yield
        self._everywhere |= running.recomputed_apart
        for module in running.found:
            self._through_functions.setdefault(module, _with_mode(self._deferral, module))


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


@contextlib.contextmanager
def _replaced(forwards: dict[nn.Module, Forward]) -> Iterator[None]:
    """Gives modules another ``forward``, in their instance dicts: no hook of theirs is bypassed."""
    before = [(module.__dict__, module.__dict__.get("forward")) for module in forwards]
    for module, forward in forwards.items():
        module.__dict__["forward"] = forward
    try:
        yield
    finally:
        for names, forward in reversed(before):
            if forward is None:
                del names["forward"]
            else:
                names["forward"] = forward
