"""The module of a stage, called through what it is compiled to."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from time import perf_counter
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from penstock.compiled import names
from penstock.compiled.backend import Compiler, Tally, tally
from penstock.errors import PenstockError, UsageError

log = logging.getLogger("penstock")

Function = Callable[..., Any]

# What may differ from call to call: mode, shapes, masks or none, which inputs need gradients.
RECOMPILATIONS = 64

_CHECKPOINTS = ("keep", "again")
_OF_TORCH = {"dynamic", "fullgraph", "isolate_recompiles", "recompile_limit"}
_KNOWN = {"backend", "mode", "options", "checkpoints", *_OF_TORCH}


class RefusedError(PenstockError):
    """A module that does not run compiled as it does without."""


class CompiledModule:
    """A stage's module, called through what it is compiled to.

    A module that says with ``pieces`` which modules run in it as wholes is compiled piece by piece, in place,
    as their own ``compile()`` would, but for those that are compiled already.

    Args:
        module: The module.
        settings: Options of `torch.compile`, and ``checkpoints``.
        name: What to call it in messages.
        pieces_of: What has the pieces, where something is wrapped around it.

    Raises:
        UsageError: There is no such option.
    """

    def __init__(
        self,
        module: nn.Module,
        settings: Mapping[str, Any],
        name: str,
        pieces_of: nn.Module | None = None,
    ) -> None:
        self._module, self._name = module, name
        self._backend = _backend(module, settings)
        self._strict = bool(settings.get("fullgraph"))
        self._passed: set[tuple[bool, bool]] = set()
        options = {key: value for key, value in settings.items() if key in _OF_TORCH}
        pieces = getattr(module if pieces_of is None else pieces_of, "pieces", None)
        self._call: Function = module
        if pieces is None:
            self._call = _compiled(module, self._backend, options)
        self._pieces = [piece for piece in pieces or () if _is_worth_it(piece)]
        for piece in self._pieces:
            piece._compiled_call_impl = _compiled(piece, self._backend, options)

    def undo(self) -> None:
        """Leaves the module as it was."""
        for piece in self._pieces:
            piece._compiled_call_impl = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls it, with a net below the first call of each kind.

        Raises:
            RefusedError: The call failed, or its result is not to be had; it has left no traces.
        """
        kind = self._module.training, torch.is_grad_enabled()
        if kind in self._passed or names.runs_as_written():
            return self._call(*args, **kwargs)
        result = self._first(args, kwargs)
        self._passed.add(kind)
        return result

    def _first(self, args: Any, kwargs: Any) -> Any:
        started, before = perf_counter(), replace(tally)
        with _undone_on_error(self._module):
            try:
                result = self._call(*args, **kwargs)
            except Exception as error:
                if self._strict:
                    raise
                raise RefusedError(f"{self._name}: {type(error).__name__}: {error}") from error
            self._tell(before, perf_counter() - started)
            if _is_differentiated_twice(result):
                raise RefusedError(f"{self._name}: it differentiates twice what is compiled")
        return result

    def _tell(self, before: Tally, seconds: float) -> None:
        """Logs what the first call has compiled."""
        if not isinstance(self._backend, Compiler):
            log.info("%s: compiled by %s in %.1f s", self._name, self._backend, seconds)
            return
        graphs, compiled = tally.graphs - before.graphs, tally.compiled - before.compiled
        if not graphs and any(True for _ in self._module.parameters()):
            raise RefusedError(f"{self._name}: torch.compile can capture nothing of it")
        log.info(
            "%s: %d graphs, %d of them compiled now, %.1f s", self._name, graphs, compiled, seconds
        )


def _is_worth_it(piece: nn.Module) -> bool:
    """Says whether to compile a piece: one operation gains nothing, and what is compiled stays so."""
    is_single = type(piece).__module__.startswith("torch.nn.") and not any(piece.children())
    return piece._compiled_call_impl is None and not is_single


def _backend(module: nn.Module, settings: Mapping[str, Any]) -> Any:
    if unknown := settings.keys() - _KNOWN:
        raise UsageError(
            f"compile= has no option {', '.join(sorted(unknown))}; there are {sorted(_KNOWN)}"
        )
    checkpoints = settings.get("checkpoints", _CHECKPOINTS[0])
    if checkpoints not in _CHECKPOINTS:
        raise UsageError(f"checkpoints={checkpoints!r}: must be one of {_CHECKPOINTS}")
    backend = settings.get("backend") or _default_backend(module)
    if backend not in ("inductor", "plain"):
        return backend
    inductor = names.inductor_options(settings) if backend == "inductor" else None
    return Compiler(inductor, checkpoints=checkpoints == "again")


def _default_backend(module: nn.Module) -> str:
    devices = {tensor.device.type for tensor in (*module.parameters(), *module.buffers())}
    if all(map(names.has_compiler, devices or {"cpu"})):
        return "inductor"
    log.info("no compiler for %s is at hand: compiled graphs run as they are", ", ".join(devices))
    return "plain"


def settings_of(function: Function) -> dict[str, Any]:
    """Returns how to compile in the way in which a function was compiled."""
    known = names.compiled_with(function)
    if known.inductor is not None:
        return {"backend": "inductor", "options": known.inductor, **known.options}
    return {"backend": known.backend, **known.options}


def _compiled(module: nn.Module, backend: Any, options: Mapping[str, Any]) -> Function:
    """Returns a compiled function that calls a module.

    Dynamo keeps what it has compiled by code object: one for all modules that are equal, so that they share
    it, and no others, whose shapes would seem to vary.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        return module._call_impl(*args, **kwargs)

    key = _signature(module)
    code = _codes.setdefault(key, call.__code__.replace(co_name=f"stage_kind_{len(_codes)}"))
    function = FunctionType(code, call.__globals__, code.co_name, closure=call.__closure__)
    limit = {"recompile_limit": RECOMPILATIONS, **options}
    made: Function = torch.compile(function, backend=backend, **limit)
    return made


_codes: dict[str, CodeType] = {}


def _signature(module: nn.Module) -> str:
    """Returns a text that is the same for modules that Dynamo may take for one another."""
    kinds = (f"{path}: {type(inner)} {_settings(inner)}" for path, inner in module.named_modules())
    tensors = (
        f"{path}: {tuple(tensor.shape)}, {tensor.dtype}, {tensor.device}, {tensor.requires_grad}"
        for path, tensor in (*module.named_parameters(), *module.named_buffers())
    )
    return "\n".join((*kinds, *tensors))


def _settings(module: nn.Module) -> dict[str, Any]:
    plain = (int, float, bool, str)
    found = {name: value for name, value in vars(module).items() if type(value) in plain}
    return {name: value for name, value in found.items() if name != "training"}


# ---- the first call


@contextmanager
def _undone_on_error(module: nn.Module) -> Iterator[None]:
    buffers = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    devices = {tensor.device for tensor in (*module.parameters(), *module.buffers())}
    state = torch.get_rng_state()
    modules = [torch.get_device_module(device) for device in devices if device.type != "cpu"]
    others = [(of, of.get_rng_state()) for of in modules]
    try:
        yield
    except BaseException:
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
        torch.set_rng_state(state)
        for of, other in others:
            of.set_rng_state(other)
        raise


def _is_differentiated_twice(result: Any) -> bool:
    """Says whether backward would go through a compiled backward, which AOT autograd refuses."""
    leaves = tree_leaves(result)
    pending: list[Any] = [leaf.grad_fn for leaf in leaves if isinstance(leaf, Tensor)]
    seen: set[Any] = set()
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        if type(node).__name__ == "CompiledFunctionBackwardBackward":
            return True
        seen.add(node)
        pending += [above for above, _ in node.next_functions]
    return False
