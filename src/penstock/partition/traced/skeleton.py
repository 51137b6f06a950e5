"""A copy of a model without its data, to trace without touching the model."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from torch import Tensor, nn

# The documented home of fake tensors; torch has no public name for them. Seen in torch 2.13.
from torch._subclasses.fake_tensor import FakeTensorMode

from penstock.values import TensorSpec


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
        self._modes = {name: module.training for name, module in self.model.named_modules()}

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
