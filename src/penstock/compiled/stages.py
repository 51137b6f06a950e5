"""The module of a stage, called through what it is compiled to; and the backend that compiles it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from time import perf_counter
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils._pytree import tree_leaves

from penstock.compiled import names
from penstock.compiled.halves import Policy
from penstock.errors import PenstockError, UsageError

# ---- the backend of `torch.compile` for stages: it compiles each graph that Dynamo captures once
# Dynamo captures graphs, with guards that say when each holds; AOT autograd traces a graph together with its
# backward and separates the two. They handle graph breaks, in-place changes, views and random numbers, and
# nothing about that is changed here.


log = logging.getLogger("penstock")

CUDA_GRAPHS = "triton.cudagraphs"


@dataclass
class Tally:
    """Counts how many compiled graphs were called so far, and how many were compiled."""

    graphs: int = 0
    compiled: int = 0


tally = Tally()


class Compiler:
    """Compiles what Dynamo captures.

    Args:
        inductor: The options of inductor; with None the operations of the graphs run as they are.
        checkpoints: Whether the weights' half computes checkpointed regions once more.
    """

    compiler_name = "penstock"

    def __init__(self, inductor: names.Options | None, *, checkpoints: bool = False) -> None:
        if inductor is not None and inductor.get(CUDA_GRAPHS):
            log.info(
                "compiled stages run without CUDA graphs, whose memory microbatches under way would share"
            )
            inductor = {**inductor, CUDA_GRAPHS: False}
        self._inductor = inductor
        self._checkpoints = checkpoints

    def __eq__(self, other: object) -> bool:
        # If backends are equal, Dynamo uses for one stage what it has compiled for another.
        return isinstance(other, Compiler) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash(self._checkpoints)

    def __call__(self, graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Returns a function that computes a graph."""
        started = perf_counter()
        names.note(Policy(fused=self._inductor is not None, checkpoints=self._checkpoints))
        if self._inductor is None:
            compiled = names.compile_plainly(graph, inputs, names.function_of)
        else:
            compiled = names.compile_with_inductor(graph, inputs, self._inductor)
        tally.compiled += 1
        seconds, nodes = perf_counter() - started, len(graph.graph.nodes)
        log.info("compiled a forward pass of %d operations in %.1f s", nodes, seconds)

        def run(*args: Any) -> Any:
            tally.graphs += 1
            return compiled(*args)

        return run


# ---- the module of a stage, called through what it is compiled to


# Calls may differ in mode, in shapes, in having masks, and in which inputs need gradients.
RECOMPILATIONS = 64

_CHECKPOINTS = ("keep", "again")
_OF_TORCH = {"dynamic", "fullgraph", "isolate_recompiles", "recompile_limit"}
_KNOWN = {"backend", "mode", "options", "checkpoints", *_OF_TORCH}


class RefusedError(PenstockError):
    """A compiled module does not do what the module itself does."""


class CompiledModule:
    """A stage's module, called through what it is compiled to.

    If the module has ``units``, the modules that run in it as wholes, these are compiled one by one, in
    place, as by their own ``compile()``, except for those that are compiled already.

    Args:
        module: The module.
        settings: Options of `torch.compile`, and ``checkpoints``.
        name: The name for messages.
        units_of: The module with the units, if ``module`` is wrapped around it.

    Raises:
        UsageError: There is no such option.
    """

    def __init__(
        self,
        module: nn.Module,
        settings: Mapping[str, Any],
        name: str,
        units_of: nn.Module | None = None,
    ) -> None:
        self._module, self._name = module, name
        self._backend = _backend(module, settings)
        self._strict = bool(settings.get("fullgraph"))
        self._passed: set[tuple[bool, bool]] = set()
        options = {key: value for key, value in settings.items() if key in _OF_TORCH}
        units = getattr(module if units_of is None else units_of, "units", None)
        self._call: Callable[..., Any] = module
        if units is None:
            self._call = _compiled(module, self._backend, options)
        self._units = [unit for unit in units or () if _is_worth_it(unit)]
        for unit in self._units:
            unit._compiled_call_impl = _compiled(unit, self._backend, options)

    def undo(self) -> None:
        """Undoes the compilation of units in place."""
        for unit in self._units:
            unit._compiled_call_impl = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module; the first call of each kind is undone if it fails.

        Raises:
            RefusedError: The call failed, or its result cannot be used; it has left no traces.
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
            self._report(before, perf_counter() - started)
            if _is_differentiated_twice(result):
                raise RefusedError(f"{self._name}: it differentiates twice through compiled code")
        return result

    def _report(self, before: Tally, seconds: float) -> None:
        """Logs what the first call has compiled; refuses a module of which nothing was."""
        if not isinstance(self._backend, Compiler):
            log.info("%s: compiled by %s in %.1f s", self._name, self._backend, seconds)
            return
        graphs, compiled = tally.graphs - before.graphs, tally.compiled - before.compiled
        if not graphs and any(True for _ in self._module.parameters()):
            raise RefusedError(f"{self._name}: torch.compile cannot capture any of it")
        log.info(
            "%s: %d graphs, %d of them compiled now, %.1f s", self._name, graphs, compiled, seconds
        )


def _is_worth_it(unit: nn.Module) -> bool:
    """Says whether to compile a unit: not a single operation, nor one that is compiled already."""
    is_single = type(unit).__module__.startswith("torch.nn.") and not any(unit.children())
    return unit._compiled_call_impl is None and not is_single


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
    log.info(
        "there is no compiler for %s here: compiled graphs run as they are", ", ".join(devices)
    )
    return "plain"


def _compiled(module: nn.Module, backend: Any, options: Mapping[str, Any]) -> Callable[..., Any]:
    """Returns a compiled function that calls a module.

    Dynamo keeps what it has compiled by code object. Equal modules share one, so that they share what is
    compiled; different modules do not, as their shapes would seem to vary.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        return module._call_impl(*args, **kwargs)

    key = _signature(module)
    code = _codes.setdefault(key, call.__code__.replace(co_name=f"stage_kind_{len(_codes)}"))
    function = FunctionType(code, call.__globals__, code.co_name, closure=call.__closure__)
    limit = {"recompile_limit": RECOMPILATIONS, **options}
    made: Callable[..., Any] = torch.compile(function, backend=backend, **limit)
    return made


_codes: dict[str, CodeType] = {}


def _signature(module: nn.Module) -> str:
    """Returns a text that is the same for modules for which Dynamo may use the same code."""
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
    """Says whether backward would differentiate a compiled backward, which AOT autograd refuses."""
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
