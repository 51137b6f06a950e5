"""Run a module as a trial that leaves no trace: not in data, hooks, attributes or random numbers."""

from __future__ import annotations

import copy
import dis
import random
import sys
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.rng import generators_kept

# ---- forward hooks in a trial: what they change counts, what they record does not


_KINDS = ("_forward_hooks", "_forward_pre_hooks")
_LIBRARIES = {*sys.stdlib_module_names, "numpy", "penstock", "torch"} - {"__main__"}
Memo = dict[int, Any]


def isolate_hooks(module: nn.Module, memo: Memo) -> None:
    """Separate the hooks of a module from everything outside.

    A function that can change neither arguments nor outputs is removed: it only records something, and
    would record it twice. Other functions are replaced by copies that work on copies of what they refer to.
    Objects and methods stay, since they are copied with the module.

    Args:
        module: a copy of the user's module; or the user's module, whose hooks are restored later.
        memo: what has been copied already, as for ``copy.deepcopy``.
    """
    for hooks in [vars(part)[kind] for part in module.modules() for kind in _KINDS]:
        own = {key: _isolated(hook, memo) for key, hook in hooks.items()}
        hooks.clear()
        hooks.update((key, hook) for key, hook in own.items() if hook is not None)


def _isolated(hook: Any, memo: Memo) -> Callable[..., Any] | None:
    if isinstance(hook, partial):
        inner = _isolated(hook.func, memo)
        return None if inner is None else partial(inner, *hook.args, **hook.keywords)
    if isinstance(hook, types.BuiltinFunctionType):
        return None
    if not isinstance(hook, types.FunctionType):
        return hook  # type: ignore[no-any-return] # whatever a user registers
    if not _may_change(hook.__code__):
        return None
    try:
        return _function(hook, memo)
    except Exception:  # what cannot be copied is not called at all, rather than twice
        return None


def _may_change(code: types.CodeType) -> bool:
    """Whether a function returns something, assigns to items, or calls something with an in-place name."""
    if any(name.endswith("_") and not name.endswith("__") for name in code.co_names):
        return True
    before = None
    for step in dis.get_instructions(code):
        if step.opname == "STORE_SUBSCR" or (
            step.opname == "RETURN_CONST" and step.argval is not None
        ):
            return True
        if step.opname == "RETURN_VALUE" and not _loads_none(before):
            return True
        before = step
    return False


def _loads_none(step: dis.Instruction | None) -> bool:
    return step is not None and step.opname == "LOAD_CONST" and step.argval is None


def _function(function: types.FunctionType, memo: Memo) -> Callable[..., Any]:
    """A function with the same code, over copies of its closure and of the globals that it uses."""
    if id(function) in memo:
        return memo[id(function)]  # type: ignore[no-any-return]
    names = dict(function.__globals__)
    cells = tuple(types.CellType() for _ in function.__closure__ or ())
    made = types.FunctionType(
        function.__code__, names, function.__name__, function.__defaults__, cells
    )
    made.__kwdefaults__ = function.__kwdefaults__
    memo[id(function)] = made  # before the globals are copied, since they may refer to it
    for name in _named(function.__code__) & set(names):
        names[name] = _own(names[name], memo)
    for cell, theirs in zip(cells, function.__closure__ or (), strict=True):
        cell.cell_contents = _own(theirs.cell_contents, memo)
    return made


def _named(code: types.CodeType) -> set[str]:
    inside = [const for const in code.co_consts if isinstance(const, types.CodeType)]
    return set(code.co_names).union(*map(_named, inside))


def _own(value: Any, memo: Memo) -> Any:
    """A copy of anything that a call could change; modules, classes and library functions stay."""
    if isinstance(value, types.FunctionType) and not _is_of_library(value):
        return _function(value, memo)
    return value if isinstance(value, types.ModuleType | type) else copy.deepcopy(value, memo)


def _is_of_library(function: types.FunctionType) -> bool:
    return function.__module__.partition(".")[0] in _LIBRARIES


# ---- copies of modules, and running a module itself


def copy_without_data(module: nn.Module) -> nn.Module:
    """A copy on the meta device. What forward leaves behind, such as a cache, stays in the copy."""
    return copied(module, _on_meta)


def copy_as_fakes(module: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """A copy whose tensors are the mode's fake tensors: without data, but with a device."""

    def fake(tensor: Tensor) -> Tensor:
        with mode:
            made = torch.empty_like(tensor, requires_grad=tensor.requires_grad)
        return _as_parameter(made, tensor) if isinstance(tensor, nn.Parameter) else made

    return copied(module, fake)


def copy_with_data(module: nn.Module) -> nn.Module:
    """A copy that shares the parameters, which forward reads, and has copies of everything it may change."""
    return copied(module, _of_its_own)


def copied(
    module: nn.Module, replace: Callable[[Tensor], Tensor], *, isolated: bool = True
) -> nn.Module:
    """A copy with every tensor replaced: parameters, buffers and plain attributes.

    Args:
        module: the module.
        replace: returns the replacement of a tensor.
        isolated: whether to separate its hooks from everything outside, see :func:`isolate_hooks`.
    """
    memo: dict[int, Any] = {id(tensor): replace(tensor) for tensor in _tensors(module)}
    made = copy.deepcopy(module, memo)
    if isolated:
        isolate_hooks(made, memo)
    return made


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    """Parameters, buffers, and tensors in attributes, since deepcopy would refuse non-leaves."""
    yield from module.parameters()
    yield from module.buffers()
    for part in module.modules():
        yield from (value for value in vars(part).values() if isinstance(value, Tensor))


def _on_meta(tensor: Tensor) -> Tensor:
    made = torch.empty_like(tensor, device="meta", requires_grad=tensor.requires_grad)
    return _as_parameter(made, tensor) if isinstance(tensor, nn.Parameter) else made


def _as_parameter(made: Tensor, like: Tensor) -> nn.Parameter:
    parameter = nn.Parameter(made.detach(), like.requires_grad)
    vars(parameter).update(vars(like))
    return parameter


def _of_its_own(tensor: Tensor) -> Tensor:
    if isinstance(tensor, nn.Parameter):
        return tensor
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


_ATEN = torch.ops.aten
_PRODUCTS = {_ATEN.mm, _ATEN.addmm, _ATEN.mv, _ATEN.addmv, _ATEN.convolution}
_NORMS = {_ATEN.native_layer_norm, _ATEN.native_group_norm, _ATEN.native_batch_norm}


def check_types(func: Any, args: Sequence[Any]) -> None:
    """Refuse operands of different types, which these operations accept on the meta device alone.

    This may also refuse what some device accepts: then the module has to be tried with data.

    Raises:
        TypeError: they differ.
    """
    kind = func.overloadpacket
    if kind not in _PRODUCTS and kind not in _NORMS:
        return
    types = {arg.dtype for arg in args if isinstance(arg, Tensor)}
    # Norms accept 16-bit inputs with weights in float32.
    if len(types) > 1 and (kind in _PRODUCTS or args[0].dtype.itemsize > 2):
        raise TypeError(f"{kind} of {', '.join(sorted(map(str, types)))}")


class TypesChecked(TorchDispatchMode):
    """A mode that checks the types of operands on the meta device, where some operations do not."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """An operation."""
        check_types(func, args)
        return func(*args, **(kwargs or {}))


@contextmanager
def randomness_kept(device: torch.device) -> Iterator[None]:
    """Restore random number generators afterwards.

    Of torch, numpy and Python, and any passed to operations.
    """
    state, legacy = random.getstate(), np.random.get_state()
    devices = [] if device.type in ("cpu", "meta") else [_number(device)]
    try:
        kind = device.type if devices else "cuda"
        with torch.random.fork_rng(devices, device_type=kind), generators_kept():
            yield
    finally:
        random.setstate(state)
        np.random.set_state(legacy)


def _number(device: torch.device) -> int:
    return torch.accelerator.current_device_index() if device.index is None else device.index


def run_itself(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call a module that cannot be copied, and undo what it does to its buffers and attributes."""
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    with attributes_kept(module):
        isolate_hooks(module, {})
        return functional_call(module, buffers, args, kwargs)


def uncompiled() -> AbstractContextManager[Any]:
    """A context in which compiled code runs uncompiled.

    If `torch.compile` met code with tensors without data, it would give up compiling that code for good.
    """
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    return cast("AbstractContextManager[Any]", torch.compiler.set_stance("force_eager"))


@contextmanager
def attributes_kept(module: nn.Module) -> Iterator[None]:
    """Restore a module's attributes afterwards."""
    own = [vars(part) for part in module.modules()]
    kept = [dict(attributes) for attributes in own]
    # Containers are refilled rather than replaced, since others may hold them too.
    filled = [(c, copy.copy(c)) for attributes in kept for c in _containers(attributes)]
    tensors = [(t, t.detach().clone(), t._version) for a in kept for t in _plain_tensors(a)]
    try:
        yield
    finally:
        for attributes, before in zip(own, kept, strict=True):
            attributes.clear()
            attributes.update(before)
        for container, content in filled:
            container.clear()
            (container.extend if isinstance(container, list | deque) else container.update)(content)
        for tensor, numbers, version in tensors:
            if tensor._version != version:
                tensor.detach().copy_(numbers)


def _containers(attributes: dict[str, Any]) -> list[Any]:
    kinds = (dict, OrderedDict, list, set, deque)
    return [value for value in attributes.values() if isinstance(value, kinds)]


def _plain_tensors(attributes: dict[str, Any]) -> list[Tensor]:
    found = (value for value in attributes.values() if isinstance(value, Tensor))
    return [tensor for tensor in found if not tensor.is_inference()]
