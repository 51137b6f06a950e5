"""Run a module to see what it gives, and leave it as it was."""

from __future__ import annotations

import copy
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.rng import generators_kept
from penstock.values.hooks import isolate_hooks


def copy_without_data(module: nn.Module) -> nn.Module:
    """A copy on the meta device: what forward leaves in it, such as a cache, is not left in the module."""
    return _copy(module, _on_meta)


def copy_as_fakes(module: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """A copy without data whose tensors have a device, as far as a mode's tensors without data can tell."""

    def fake(tensor: Tensor) -> Tensor:
        with mode:
            made = torch.empty_like(tensor, requires_grad=tensor.requires_grad)
        return _as_parameter(made, tensor) if isinstance(tensor, nn.Parameter) else made

    return _copy(module, fake)


def copy_with_data(module: nn.Module) -> nn.Module:
    """A copy with the module's own parameters, which forward reads, and copies of all that it may change."""
    return _copy(module, _of_its_own)


def _copy(module: nn.Module, replace: Callable[[Tensor], Tensor]) -> nn.Module:
    memo: dict[int, Any] = {id(tensor): replace(tensor) for tensor in _tensors(module)}
    copied = copy.deepcopy(module, memo)
    isolate_hooks(copied, memo)
    return copied


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    """Parameters, buffers, and tensors that are attributes; deepcopy would refuse those of a graph."""
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
    """Refuse operands of different types, which these operations take without data and not with it.

    What some device takes may be refused here: whoever asks has to try it for real.

    Raises:
        TypeError: they differ.
    """
    kind = func.overloadpacket
    if kind not in _PRODUCTS and kind not in _NORMS:
        return
    types = {arg.dtype for arg in args if isinstance(arg, Tensor)}
    # Norms take halves with weights in float32.
    if len(types) > 1 and (kind in _PRODUCTS or args[0].dtype.itemsize > 2):
        raise TypeError(f"{kind} of {', '.join(sorted(map(str, types)))}")


class TypesChecked(TorchDispatchMode):
    """Has the types of operands checked on the meta device, where some operations do not look."""

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
    """Puts random numbers back to where they were: of torch, numpy and Python, and of generators given."""
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
    """Call a module that cannot be copied, and undo what it does to its attributes."""
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    with attributes_kept(module):
        isolate_hooks(module, {})
        return functional_call(module, buffers, args, kwargs)


@contextmanager
def attributes_kept(module: nn.Module) -> Iterator[None]:
    """Put a module's attributes back afterwards to what they are now."""
    own = [vars(part) for part in module.modules()]
    kept = [dict(attributes) for attributes in own]
    # The containers stay the same objects, since others may hold them too.
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
