"""The module of a stage, called through what it is compiled to; and the backend that compiles it."""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from time import perf_counter
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves

from penstock.compiled import names
from penstock.compiled.halves import Function, Policy
from penstock.compiled.names import global_state, is_wrapper, storage_of
from penstock.errors import PenstockError, UsageError

# ---- a graph as a Python function: one line per operation, and nothing else


def function_of(module: GraphModule, _: Any = None) -> Function:
    """Returns a function that runs a graph's operations in their order."""
    return _Writer(module).function()


class _Writer:
    def __init__(self, module: GraphModule) -> None:
        self._module = module
        self._known: dict[str, Any] = {}
        self._names: dict[Node, str] = {}

    def function(self) -> Function:
        nodes = list(self._module.graph.nodes)
        arguments = [node for node in nodes if node.op == "placeholder"]
        for place, node in enumerate(nodes):
            self._names[node] = f"v{place}"
        taken = "".join(f"{self._names[node]}, " for node in arguments)
        lines = [f"{taken}= args" if taken else "", "args.clear()"]
        lines += self._dropped(node for node in arguments if not node.users)
        last = {used: node for node in nodes for used in node.all_input_nodes}
        for node in nodes:
            if node.op != "placeholder":
                lines.append(self._line(node))
                over = [used for used in node.all_input_nodes if last[used] is node]
                lines += self._dropped(over if node.op != "output" else ())
                lines += self._dropped([node] if node.op != "output" and not node.users else ())
        source = "def run(args):\n" + "".join(f"    {line}\n" for line in lines if line)
        exec(compile(source, "<compiled stage>", "exec"), self._known)
        made: Function = self._known["run"]
        vars(made)["_boxed_call"] = True
        return made

    def _dropped(self, nodes: Any) -> list[str]:
        names = [self._names[node] for node in nodes]
        return [f"del {', '.join(names)}"] if names else []

    def _line(self, node: Node) -> str:
        if node.op == "output":
            return f"return {self._text(node.args[0])}"
        return f"{self._names[node]} = {self._call(node)}"

    def _call(self, node: Node) -> str:
        if node.op == "get_attr":
            return self._constant(operator.attrgetter(str(node.target))(self._module))
        if node.target is operator.getitem:
            return f"{self._text(node.args[0])}[{self._text(node.args[1])}]"
        # The same as the overload's own __call__ does, without the cost of that call.
        target = node.target._op if isinstance(node.target, OpOverload) else node.target
        arguments = [self._text(value) for value in node.args]
        arguments += [f"{name}={self._text(value)}" for name, value in node.kwargs.items()]
        return f"{self._constant(target)}({', '.join(arguments)})"

    def _text(self, value: Any) -> str:
        if isinstance(value, Node):
            return self._names[value]
        if isinstance(value, tuple):
            return f"({''.join(f'{self._text(each)}, ' for each in value)})"
        if isinstance(value, list):
            return f"[{', '.join(map(self._text, value))}]"
        if isinstance(value, dict):
            return f"{{{', '.join(f'{k!r}: {self._text(v)}' for k, v in value.items())}}}"
        if isinstance(value, slice):
            parts = value.start, value.stop, value.step
            return f"slice({', '.join(map(self._text, parts))})"
        if value is None or isinstance(value, bool | int | str):
            return repr(value)
        return self._constant(value)

    def _constant(self, value: Any) -> str:
        name = f"c{len(self._known)}"
        self._known[name] = value
        return name


# ---- when two captured graphs are equal, so that they need be compiled only once


_CONSTANTS: set[Any] = {bool, int, float, complex, str, bytes, type(None), type(...), torch.dtype}
_CONSTANTS |= {torch.device, torch.layout, torch.memory_format, torch.Size}


class _UnlikeError(Exception):
    """Something in a graph cannot be compared."""


def key_of(graph: GraphModule, inputs: Sequence[Any]) -> str | None:
    """Returns a text that is equal for graphs that compute the same from inputs of the same kinds.

    None means that no other graph is equal: sizes are not fixed, inputs share memory, or it has constants.
    """
    tensors = [value for value in inputs if isinstance(value, Tensor)]
    if len(tensors) < len(inputs) or any(map(is_wrapper, tensors)):
        return None
    if len(set(map(storage_of, tensors))) < len(tensors):
        return None
    try:
        return "\n".join([global_state(), *map(_input, tensors), *_lines(graph)])
    except _UnlikeError:
        return None


def _input(value: Tensor) -> str:
    shape = (*value.shape, *value.stride(), value.storage_offset())
    if not all(type(size) is int for size in shape):
        raise _UnlikeError
    kind = "weight" if isinstance(value, nn.Parameter) else "value"
    told = value.dtype, value.device, value.requires_grad, value.is_conj(), value.is_neg()
    return f"{kind} {shape} {told}"


def _lines(graph: GraphModule) -> Iterable[str]:
    places: dict[Node, str] = {}
    for node in graph.graph.nodes:
        places[node] = f"v{len(places)}"
        inner = node.target if isinstance(node.target, str) else None
        if node.op == "placeholder":
            yield places[node]
        elif node.op in {"get_attr", "call_module"}:
            yield from _attribute(graph, str(inner))
        target = inner if node.op == "call_method" else _function(node.target)
        yield f"{node.op} {target} {_text(node.args, places)} {_text(node.kwargs, places)}"


def _attribute(graph: GraphModule, name: str) -> Iterable[str]:
    value: Any = graph
    for part in name.split("."):
        value = getattr(value, part)
    if not isinstance(value, GraphModule):
        raise _UnlikeError
    yield from _lines(value)


def _function(target: Any) -> str:
    # By identity too, since two functions of the same name may do different things.
    return "" if isinstance(target, str) else f"{target} {id(target)}"


def _text(value: Any, places: dict[Node, str]) -> str:
    if isinstance(value, Node):
        return places[value]
    if isinstance(value, list | tuple):
        return f"{type(value).__name__}({', '.join(_text(each, places) for each in value)})"
    if isinstance(value, dict):
        return ", ".join(f"{key!r}: {_text(each, places)}" for key, each in value.items())
    if isinstance(value, slice):
        return f"slice{_text((value.start, value.stop, value.step), places)}"
    if type(value) not in _CONSTANTS:
        raise _UnlikeError
    return repr(value)


# ---- the backend of `torch.compile` for stages: it compiles each graph that Dynamo captures once
# Dynamo captures graphs, with guards that say when each holds; AOT autograd traces a graph together with its
# backward and separates the two. They handle graph breaks, in-place changes, views and random numbers, and
# nothing about that is changed here.


log = logging.getLogger("penstock")

CUDA_GRAPHS = "triton.cudagraphs"

_known: dict[tuple[str, str], tuple[Callable[..., Any], GraphModule]] = {}


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
        return isinstance(other, Compiler) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))

    def __str__(self) -> str:
        return f"Compiler({self._inductor}, {self._checkpoints})"

    def __call__(self, graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Returns a function that computes a graph."""
        key = key_of(graph, inputs)
        known = key and _known.get((str(self), key))
        if known:
            return known[0]
        made = self._compiled(graph, inputs)
        if made is None:
            return graph.forward

        def run(*args: Any) -> Any:
            tally.graphs += 1
            return made(*args)

        if key:
            # Keeps the graph alive too, since the key contains the identities of its functions.
            _known[str(self), key] = run, graph
        return run

    def reset(self) -> None:
        """Forgets all graphs; `torch.compiler.reset` calls it."""
        _known.clear()

    def _compiled(self, graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any] | None:
        """Compiles a graph, or if inductor fails, without inductor; None if that fails too."""
        for inductor in [self._inductor, None] if self._inductor is not None else [None]:
            started = perf_counter()
            names.note(Policy(fused=inductor is not None, checkpoints=self._checkpoints))
            try:
                if inductor is None:
                    made = names.compile_plainly(graph, inputs, function_of)
                else:
                    made = names.compile_with_inductor(graph, inputs, inductor)
            except Exception as error:
                if names.is_no_failure(error):
                    raise
                by = "as it is" if inductor is None else "by inductor"
                told = f"{type(error).__name__}: {error}"
                log.warning("a part of a stage could not be compiled %s: %s", by, told)
                continue
            tally.compiled += 1
            done, nodes = perf_counter() - started, len(graph.graph.nodes)
            log.info("compiled a forward pass of %d operations in %.1f s", nodes, done)
            return made
        return None


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

    If the module has ``pieces``, the modules that run in it as wholes, these are compiled one by one, in
    place, as by their own ``compile()``, except for those that are compiled already.

    Args:
        module: The module.
        settings: Options of `torch.compile`, and ``checkpoints``.
        name: The name for messages.
        pieces_of: The module with the pieces, if ``module`` is wrapped around it.

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
        self._call: Callable[..., Any] = module
        if pieces is None:
            self._call = _compiled(module, self._backend, options)
        self._pieces = [piece for piece in pieces or () if _is_worth_it(piece)]
        for piece in self._pieces:
            piece._compiled_call_impl = _compiled(piece, self._backend, options)

    def undo(self) -> None:
        """Undoes the compilation of pieces in place."""
        for piece in self._pieces:
            piece._compiled_call_impl = None

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
            self._tell(before, perf_counter() - started)
            if _is_differentiated_twice(result):
                raise RefusedError(f"{self._name}: it differentiates twice through compiled code")
        return result

    def _tell(self, before: Tally, seconds: float) -> None:
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


def _is_worth_it(piece: nn.Module) -> bool:
    """Says whether to compile a piece: not a single operation, nor one that is compiled already."""
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
    log.info(
        "there is no compiler for %s here: compiled graphs run as they are", ", ".join(devices)
    )
    return "plain"


def settings_of(function: Callable[..., Any]) -> dict[str, Any]:
    """Returns the settings with which a function was compiled."""
    known = names.compiled_with(function)
    if known.inductor is not None:
        return {"backend": "inductor", "options": known.inductor, **known.options}
    return {"backend": known.backend, **known.options}


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
