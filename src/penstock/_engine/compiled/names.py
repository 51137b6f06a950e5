"""The private names of torch that compiled stages need, all in this file. They hold for torch 2.13.

There is no public way to get the backward graph of what AOT autograd has compiled, or the settings with which
something was compiled.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from functools import cache
from importlib import import_module
from typing import Any, cast

import torch
from torch import Tensor
from torch._dynamo import eval_frame
from torch._dynamo.utils import counters
from torch._functorch import config
from torch._functorch.partitioners import get_default_op_list
from torch._guards import detect_fake_mode
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import optimization_hint
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.utils._triton import has_triton

Compile = Callable[..., Any]
Options = dict[str, Any]

# ---- graphs


def bytes_of(node: Node) -> int:
    """The bytes of a graph node's value; 0 if that is not a tensor."""
    value = node.meta.get("val")
    values = value if isinstance(value, list | tuple) else [value]
    tensors = [each for each in values if isinstance(each, Tensor)]
    return sum(optimization_hint(t.numel(), fallback=4096) * t.itemsize for t in tensors)


@cache
def _light() -> frozenset[Any]:
    return frozenset(get_default_op_list().recomputable_ops)


def is_light(node: Node) -> bool:
    """Tell whether a node costs little: a view, an elementwise operation, a reduction."""
    target = getattr(node.target, "overloadpacket", node.target)
    is_number = isinstance(node.meta.get("val"), torch.SymInt)
    return node.op != "call_function" or is_number or target in _light()


def propagate(graph: GraphModule, inputs: Sequence[Any]) -> None:
    """Note at each node its value for these inputs, whose strides a compiler may have changed."""
    mode = detect_fake_mode(inputs)
    FakeTensorProp(graph, mode).propagate_dont_convert_inputs(*inputs)


# ---- the backward of what is compiled


class Backward:
    """The backward graph of a kind of compiled nodes, which torch compiles when it is first run.

    Args:
        compiler: what compiles it.
    """

    def __init__(self, compiler: Any) -> None:
        self._compiler = compiler

    @property
    def is_fused(self) -> bool:
        """Whether inductor compiles it."""
        functions: list[Any] = []
        function = self._compiler.bw_compiler
        # Dynamo wraps functions, sometimes in a circle.
        while function is not None and function not in functions:
            functions.append(function)
            function = getattr(function, "_torchdynamo_orig_callable", None) or getattr(
                function, "compiler_fn", None
            )
        return any("_inductor" in str(getattr(one, "__module__", "")) for one in functions)

    def compiled(self, make: Compile) -> Any:
        """Call ``make`` with a copy of the graph, its inputs, and what compiles a graph."""
        how = self._compiler.bw_compiler
        with torch.no_grad():
            return replace(
                self._compiler,
                compiled_bw=None,
                bw_compiler=lambda graph, inputs: make(graph, inputs, how),
                try_save_cache_entry=None,
            ).get_or_compile(saved_tensors_use_once=False)

    def whole(self) -> Compile:
        """The whole backward, which torch has compiled, or compiles when it is first called."""
        before = replace(self._compiler)
        return lambda args: boxed(before.get_or_compile(saved_tensors_use_once=False))(args)

    def run_instead(self, function: Compile) -> None:
        """Make nodes of the kind call this function, which empties its list of arguments."""
        vars(function)["_boxed_call"] = True
        self._compiler.compiled_bw = function


def boxed(function: Any) -> Compile:
    """A compiled function as one that takes a list of arguments, which it may empty."""
    is_boxed = hasattr(function, "_boxed_call")
    return cast("Compile", function) if is_boxed else lambda args: function(*args)


class UnknownError(Exception):
    """The backward of a node cannot be had as a graph."""


def backward_of(node: Any) -> Backward:
    """The backward graph of a compiled node.

    Raises:
        UnknownError: it cannot be had.
    """
    function = type(node)._forward_cls
    run = function._backward_impl
    cells = dict(zip(run.__code__.co_freevars, run.__closure__, strict=True))
    compiler: Any = cells["backward_compiler"].cell_contents
    saved = compiler.lazy_backward_info
    if not hasattr(saved, "bw_module") or compiler.bw_compiler is None:
        raise UnknownError(
            "torch took it from its cache on disk, which holds no graph; compile it in the first step of the "
            "Pipeline, or set TORCHINDUCTOR_AUTOGRAD_CACHE=0"
        )
    context = saved.saved_context
    results = next(iter(reversed(saved.bw_module.graph.nodes))).args[0]
    if function.maybe_subclass_metadata is not None:
        raise UnknownError("it handles a type of tensors of its own")
    if (
        function.metadata.tokens
        or cells["backward_state_indices"].cell_contents
        or len(results) != len(node.needs_input_grad)
        or getattr(context, "ddp_optimizer_ctx", None) is not None
    ):
        raise UnknownError("it handles more than gradients")
    return Backward(compiler)


def running_node() -> Any:
    """The node of the autograd graph whose backward runs in this thread."""
    return torch._C._current_autograd_node()


def autocast_disabled() -> Any:
    """A context in which autocast is off."""
    return torch._C._DisableAutocast()


def runs_as_written() -> bool:
    """Tell whether compiled functions run without compilation now."""
    return eval_frame._stance.stance == "force_eager"


# ---- how something is or was compiled


PLAIN = "aot_eager_default_partitioner"
"""The backend that runs a graph's operations as they are, in one Python function."""


def graphs_compiled() -> int:
    """Return how many graphs were compiled so far."""
    return int(counters["stats"]["unique_graphs"])


def graphs_kept() -> AbstractContextManager[Any]:
    """A context in which what is compiled keeps its backward graph, in one piece.

    Torch's cache on disk does not keep it. And a module in DistributedDataParallel would be cut at the bounds
    of its buckets, to reduce one while the backward of the next runs; a pipeline has other microbatches to
    run meanwhile.
    """
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    stack = ExitStack()
    stack.enter_context(config.patch(enable_autograd_cache=False))
    stack.enter_context(torch._dynamo.config.patch(optimize_ddp=False))
    return stack


@cache
def has_compiler(device: str) -> bool:
    """Tell whether inductor can compile for a type of device here."""
    try:
        import_module("torch._inductor.cpp_builder").get_cpp_compiler()
    except Exception:
        return False
    return device == "cpu" or has_triton()


def inductor_options(settings: Mapping[str, Any]) -> Options:
    """The options of inductor that ``torch.compile`` derives from its own options."""
    mode, options = settings.get("mode"), settings.get("options")
    return dict(torch._TorchCompileInductorWrapper(mode, options, settings.get("dynamic")).config)


def settings_of(function: Any) -> Options:
    """The settings with which a function was compiled, as options of ``torch.compile``."""
    cells = dict(zip(function.__code__.co_freevars, function.__closure__, strict=True))
    context = cells["self"].cell_contents
    settings = {
        "fullgraph": context.fullgraph,
        "dynamic": context._dynamic,
        "isolate_recompiles": context._isolate_recompiles_id >= 0,
    }
    backend = eval_frame.innermost_backend(context.callback)
    if type(backend) is torch._TorchCompileInductorWrapper:
        return {"backend": "inductor", "options": dict(backend.config), **settings}
    return {"backend": getattr(backend, "compiler_fn", backend), **settings}
