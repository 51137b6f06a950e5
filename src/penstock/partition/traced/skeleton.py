"""The functions and modules that stand in a traced graph."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from penstock.values import TensorSpec

# ---- the functions of torch that do what traced operators do
# A traced graph calls operators; the functions above them are what hooks of torch's function modes, such as
# those that let weight gradients wait, know by name.


_aten = torch.ops.aten


def _embedding(
    weight: Tensor,
    tokens: Tensor,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    padding = None if padding_idx < 0 else padding_idx
    return functional.embedding(
        tokens, weight, padding, scale_grad_by_freq=scale_grad_by_freq, sparse=sparse
    )


_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    _aten.linear.default: functional.linear,
    _aten.embedding.default: _embedding,
    _aten.matmul.default: torch.matmul,
    _aten.mm.default: torch.mm,
    _aten.bmm.default: torch.bmm,
    _aten.addmm.default: torch.addmm,
    _aten.baddbmm.default: torch.baddbmm,
    _aten.conv1d.default: functional.conv1d,
    _aten.conv2d.default: functional.conv2d,
    _aten.conv3d.default: functional.conv3d,
    _aten.conv1d.padding: functional.conv1d,
    _aten.conv2d.padding: functional.conv2d,
    _aten.conv3d.padding: functional.conv3d,
    _aten.conv_transpose1d.default: functional.conv_transpose1d,
    _aten.conv_transpose2d.input: functional.conv_transpose2d,
    _aten.conv_transpose3d.input: functional.conv_transpose3d,
}


def function_of(target: Any) -> Any:
    """What to call for an operator: the function, or the operator itself."""
    return _FUNCTIONS.get(target, target)


# ---- a copy of a model without its data, to trace without touching the model


class Skeleton:
    """A model's code, with fake tensors for its parameters and buffers.

    Args:
        model: any model, also one on the meta device, whose tensors become fake ones of the CPU.

    Attributes:
        model: the copy.
        mode: the mode of its fake tensors.
        device: where the model is taken to live.
    """

    def __init__(self, model: nn.Module) -> None:
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        first = next(_tensors(model), None)
        self.device = torch.device("cpu") if first is None else _home(first)
        replaced = {id(tensor): self.like(tensor) for tensor in _tensors(model)}
        self.model = copy.deepcopy(model, {**_plain_tensors(model), **replaced})
        self._modes = modes_of(self.model)
        # Weak: what other processes hold of it may be let go.
        self._original = weakref.ref(model)

    def changed_modes(self) -> tuple[str, ...]:
        """The modules that the user has put into another mode since, by path."""
        original = self._original()
        now = {} if original is None else modes_of(original)
        return tuple(
            name for name in self._modes if now.get(name, self._modes[name]) != self._modes[name]
        )

    def like(self, tensor: Tensor) -> Tensor:
        """A fake parameter or buffer like a real one."""
        with self.mode:
            fake = _whole_like(tensor) if hasattr(tensor, "full_tensor") else _empty_like(tensor)
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(fake, tensor.requires_grad)
        return fake.requires_grad_(tensor.requires_grad)

    def empty(self, spec: TensorSpec) -> Tensor:
        """A fake argument."""
        with self.mode:
            made = torch.empty(spec.shape, dtype=spec.torch_dtype, device=self.device)
        return made.requires_grad_(spec.requires_grad)

    def set_training(self, training: bool) -> None:
        """Put the copy into a mode; into the one the model was in, each module as it was."""
        if self._modes[""] is not training:
            self.model.train(training)
            return
        for name, module in self.model.named_modules():
            # From the outside in, as train() reaches what is inside.
            module.train(self._modes[name])


def modes_of(model: nn.Module) -> dict[str, bool]:
    """Whether each module is in training, by path."""
    return {name: module.training for name, module in model.named_modules()}


def _empty_like(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device=_home(tensor))


def _whole_like(sharded: Tensor) -> Tensor:
    """What a stage computes with where its parameters were sharded since: the gathered tensor."""
    home = _home(sharded)
    return torch.empty_strided(sharded.shape, sharded.stride(), dtype=sharded.dtype, device=home)


def _home(tensor: Tensor) -> torch.device:
    return torch.device("cpu") if tensor.is_meta else tensor.device


def _tensors(model: nn.Module) -> Iterator[Tensor]:
    yield from model.parameters()
    yield from model.buffers()


def _plain_tensors(model: nn.Module) -> dict[int, Tensor]:
    """Tensors that modules hold as plain attributes: constants, which tracing needs as they are."""
    found = [t for m in model.modules() for t in vars(m).values() if isinstance(t, Tensor)]
    return {id(tensor): tensor.detach() for tensor in found}
