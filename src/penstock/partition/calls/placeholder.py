"""A tensor that is in another stage: it has a shape, a type and a device, and no data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from penstock.errors import PartitionError


@dataclass(frozen=True)
class Form:
    """What is known of a tensor without its data."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @staticmethod
    def of(tensor: Tensor) -> Form:
        """The form of a tensor."""
        dense = tensor.layout is torch.strided
        strides = tensor.stride() if dense else torch.empty(tensor.shape, device="meta").stride()
        return Form(tuple(tensor.shape), tuple(strides), tensor.dtype, tensor.requires_grad)

    def without_data(self) -> Tensor:
        """A tensor of this form on the meta device."""
        made = torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device="meta")
        return made.requires_grad_(self.requires_grad)

    def fits(self, tensor: Tensor) -> bool:
        """Whether a tensor has this shape and type."""
        return tensor.shape == self.shape and tensor.dtype is self.dtype


_VIEWS = {torch.ops.aten.view.default, torch.ops.aten.alias.default, torch.ops.aten.detach.default}


class Placeholder(Tensor):
    """Stands for a tensor that this stage has not got; whoever asks for its data is told so."""

    label: str

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def of(form: Form, device: torch.device, label: str) -> Placeholder:
        """A placeholder of a form; ``label`` says in errors what it stands for."""
        make = cast("Callable[..., Placeholder]", Tensor._make_wrapper_subclass)
        made = make(
            Placeholder,
            form.shape,
            strides=form.strides,
            dtype=form.dtype,
            device=device,
            requires_grad=form.requires_grad,
        )
        made.label = label
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Placeholder:
        """Refuse whatever needs the data.

        Raises:
            PartitionError: always, but where only another view of it is wanted.
        """
        if func in _VIEWS and isinstance(args[0], Placeholder):
            made = func(Form.of(args[0]).without_data().detach(), *args[1:], **(kwargs or {}))
            return Placeholder.of(Form.of(made), args[0].device, args[0].label)
        found = [a.label for a in (*args, *(kwargs or {}).values()) if isinstance(a, Placeholder)]
        raise PartitionError(
            f"{func} needs the data of {', '.join(found) or 'a value'}, which is in another stage. Either "
            "the model took another way than it did when it was analysed, or the value reached this place in "
            "a way that no argument shows; cut elsewhere, or use how='traced'"
        )

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Placeholder({self.label}, {self.dtype}{list(self.shape)})"
