"""The module of a stage, called through what it is compiled to.

Dynamo captures graphs, with guards that say when each holds; AOT autograd traces a graph together with its
backward and separates the two. They handle graph breaks, in-place changes, views and random numbers, and
nothing about that is changed here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from time import perf_counter
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from penstock._engine.compiled import names
from penstock._engine.rng import generator_states, set_generator_states
from penstock.errors import PenstockError, UsageError

log = logging.getLogger("penstock")

# Calls may differ in mode, in shapes, in having masks, and in which inputs need gradients.
RECOMPILATIONS = 64

_OPTIONS = {
    "backend",
    "dynamic",
    "fullgraph",
    "isolate_recompiles",
    "mode",
    "options",
    "recompile_limit",
}
_CUDA_GRAPHS = "triton.cudagraphs"


class RefusedError(PenstockError):
    """A compiled module does not do what the module itself does."""


class CompiledModule:
    """A stage's module, called through what it is compiled to.

    If the module has ``units``, the modules that run in it as wholes, these are compiled one by one, in
    place, as by their own ``compile()``, except for those that are compiled already.

    Args:
        module: the module.
        settings: options of ``torch.compile``; a backend of ``"plain"`` runs graphs as they are.
        name: the name for messages.
        units_of: the module with the units, if ``module`` is wrapped around it.

    Raises:
        UsageError: there is no such option.
    """

    def __init__(
        self,
        module: nn.Module,
        settings: Mapping[str, Any],
        name: str,
        units_of: nn.Module | None = None,
    ) -> None:
        self._module, self._name = module, name
        options = _options(module, settings)
        self._strict = bool(settings.get("fullgraph"))
        self._has_other_backend = options["backend"] not in ("inductor", names.PLAIN)
        self._passed: set[tuple[bool, bool]] = set()
        units = getattr(module if units_of is None else units_of, "units", None)
        self._call: Callable[..., Any] = module
        if units is None:
            self._call = _compiled(module, options)
        self._units = [unit for unit in units or () if _is_worth_it(unit)]
        for unit in self._units:
            unit._compiled_call_impl = _compiled(unit, options)
        self._has_none = units is not None and not any(u._compiled_call_impl for u in units)
        if units and self._has_none:
            log.warning(
                "penstock: nothing of %s is compiled, as it has single layers of torch.nn alone; to compile "
                "several together, put them into a module of your own and name that in stages=",
                name,
            )

    def undo(self) -> None:
        """Undo the compilation of units in place."""
        for unit in self._units:
            unit._compiled_call_impl = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module; the first call of each kind is undone if it fails.

        Raises:
            RefusedError: the call failed, or its result cannot be used; it has left no traces.
        """
        if self.has_passed or names.runs_as_written():
            return self._call(*args, **kwargs)
        result = self._first(args, kwargs)
        self._passed.add(self._kind)
        return result

    @property
    def _kind(self) -> tuple[bool, bool]:
        return self._module.training, torch.is_grad_enabled()

    @property
    def has_passed(self) -> bool:
        """Whether a call of this kind cannot be undone any more, as one has succeeded or none is compiled."""
        return self._has_none or self._kind in self._passed

    def _first(self, args: Any, kwargs: Any) -> Any:
        started, before = perf_counter(), names.graphs_compiled()
        with _undone_on_error(self._module):
            try:
                result = self._call(*args, **kwargs)
            except Exception as error:
                if self._strict:
                    raise
                raise RefusedError(f"{self._name}: {type(error).__name__}: {error}") from error
            if reason := self._reason_against(result):
                raise RefusedError(f"{self._name}: {reason}")
        graphs, seconds = names.graphs_compiled() - before, perf_counter() - started
        log.info("%s: compiled %d graphs in %.1f s", self._name, graphs, seconds)
        return result

    def _reason_against(self, result: Any) -> str | None:
        """Why a result cannot be used, if there is a reason."""
        kinds = _kinds_behind(result)
        if "CompiledFunctionBackwardBackward" in kinds:
            return "it differentiates twice through compiled code"
        if kinds and "CompiledFunctionBackward" not in kinds and not self._has_other_backend:
            return "torch.compile cannot capture any of it"
        return None


def _is_worth_it(unit: nn.Module) -> bool:
    """Tell whether to compile a unit: not a single operation, nor one that is compiled already."""
    is_single = type(unit).__module__.startswith("torch.nn.") and not any(unit.children())
    return unit._compiled_call_impl is None and not is_single


def _options(module: nn.Module, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of ``torch.compile``."""
    if unknown := settings.keys() - _OPTIONS:
        raise UsageError(
            f"compile= has no option {', '.join(sorted(unknown))}; there are {sorted(_OPTIONS)}"
        )
    options = {"recompile_limit": RECOMPILATIONS, **settings}
    backend = options["backend"] = settings.get("backend") or _default_backend(module)
    if backend == "plain":
        options["backend"] = names.PLAIN
    elif backend == "inductor":
        options |= {"mode": None, "options": names.inductor_options(settings)}
        if options["options"].get(_CUDA_GRAPHS):
            log.info(
                "compiled stages run without CUDA graphs, whose memory microbatches under way would share"
            )
            options["options"][_CUDA_GRAPHS] = False
    return options


def _default_backend(module: nn.Module) -> str:
    devices = {tensor.device.type for tensor in (*module.parameters(), *module.buffers())}
    if all(map(names.has_compiler, devices or {"cpu"})):
        return "inductor"
    log.info(
        "there is no compiler for %s here: compiled graphs run as they are", ", ".join(devices)
    )
    return "plain"


def _compiled(module: nn.Module, options: Mapping[str, Any]) -> Callable[..., Any]:
    """A compiled function that calls a module.

    Dynamo keeps what it has compiled by code object. Equal modules share one, so that they share what is
    compiled; different modules do not, as their shapes would seem to vary.
    """

    def call_module(*args: Any, **kwargs: Any) -> Any:
        return module._call_impl(*args, **kwargs)

    key = _signature(module)
    code = _codes.setdefault(key, call_module.__code__.replace(co_name=f"stage_kind_{len(_codes)}"))
    function = FunctionType(
        code, call_module.__globals__, code.co_name, closure=call_module.__closure__
    )
    compiled: Callable[..., Any] = torch.compile(function, **options)
    return compiled


_codes: dict[str, CodeType] = {}


def _signature(module: nn.Module) -> str:
    """A text that is the same for modules for which Dynamo may use the same code."""
    plain = (int, float, bool, str)
    lines = [
        f"{path}: {type(inner)} "
        f"{ {n: v for n, v in vars(inner).items() if type(v) in plain and n != 'training'} }"
        for path, inner in module.named_modules()
    ]
    lines += [
        f"{path}: {tuple(tensor.shape)}, {tensor.dtype}, {tensor.device}, {tensor.requires_grad}"
        for path, tensor in (*module.named_parameters(), *module.named_buffers())
    ]
    return "\n".join(lines)


# ---- a first call that can be undone


@contextmanager
def _undone_on_error(module: nn.Module) -> Iterator[None]:
    buffers = [
        (part, name, buffer, buffer.detach().clone())
        for part in module.modules()
        for name, buffer in part.named_buffers(recurse=False)
    ]
    devices = {tensor.device for tensor in (*module.parameters(), *module.buffers())}
    states = generator_states(devices)
    try:
        yield
    except BaseException:
        with torch.no_grad():
            for part, name, buffer, value in buffers:
                setattr(part, name, buffer.copy_(value))
        set_generator_states(states, devices)
        raise


def _kinds_behind(result: Any) -> set[str]:
    """The names of the kinds of nodes in a result's autograd graph."""
    leaves = tree_leaves(result)
    ahead: list[Any] = [leaf.grad_fn for leaf in leaves if isinstance(leaf, Tensor)]
    seen: set[Any] = {None}
    while ahead:
        node = ahead.pop()
        if node not in seen:
            seen.add(node)
            ahead += [below for below, _ in node.next_functions]
    return {type(node).__name__ for node in seen - {None}}
