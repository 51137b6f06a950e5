"""Give tensors of the meta device memory elsewhere, and find out which of them nobody filled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from penstock.errors import UsageError


class Blanks:
    """The tensors that were on the meta device, filled with what no initialiser leaves there.

    Each stays the object it was, so that ties, optimizers and whoever else holds it go on with it.

    Args:
        modules: whose parameters and buffers get memory, each with where.
    """

    def __init__(self, modules: Sequence[tuple[nn.Module, torch.device]]) -> None:
        self._places = [place for module, _ in modules for place in _places(module)]
        self._blanks: dict[int, tuple[Tensor, int]] = {}
        for module, device in modules:
            for tensor in (*module.parameters(), *module.buffers()):
                if tensor.is_meta:
                    _give_memory(tensor, device)
                    self._blanks[id(tensor)] = tensor, tensor._version

    def check_filled(self) -> None:
        """Check that all have been filled.

        Raises:
            UsageError: some have not; the message names them and their modules.
        """
        left = {
            path: f"{path} ({type(owner).__name__})"
            for path, owner, name in self._places
            if self._is_blank(getattr(owner, name))
        }
        if left:
            raise UsageError(
                f"nobody gave a value to {', '.join(left.values())}: these were on the meta device, and "
                "their modules have no reset_parameters() that fills them, nor has the model an "
                "_init_weights(module) that does; give init= a function of a module that fills them, or "
                "build these modules on a real device"
            )

    def _is_blank(self, tensor: Tensor) -> bool:
        found = self._blanks.get(id(tensor))
        if found is None or not tensor.numel():
            return False
        if tensor.is_floating_point() or tensor.is_complex():
            return bool(tensor.isnan().any())
        return tensor._version == found[1] and bool((tensor == _mark(tensor.dtype)).all())


def _places(module: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Of each parameter and buffer the path, the module that holds it and the name there."""
    for path, owner in module.named_modules():
        held = [*owner.named_parameters(recurse=False), *owner.named_buffers(recurse=False)]
        for name, _ in held:
            yield f"{path}.{name}" if path else name, owner, name


@torch.no_grad()
def _give_memory(tensor: Tensor, device: torch.device) -> None:
    made = torch.empty_like(tensor, device=device, requires_grad=False)
    made.fill_(_mark(tensor.dtype))
    if isinstance(tensor, nn.Parameter):
        made = nn.Parameter(made, tensor.requires_grad)
    made.__dict__.update(tensor.__dict__)
    torch.utils.swap_tensors(tensor, made)


def _mark(dtype: torch.dtype) -> float | int | bool:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return True if dtype is torch.bool else torch.iinfo(dtype).min
