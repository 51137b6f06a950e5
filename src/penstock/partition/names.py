"""The private names of torch that the score needs, all in this file. They hold for torch 2.13 to 2.15.

There is no public way to run code on tensors without data, to leave a mode from inside, or to look into the
tensors that transforms of ``torch.func`` wrap.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor as FakeTensor
from torch._subclasses import FakeTensorMode as FakeTensorMode
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

NEED_DATA = (DataDependentOutputException, DynamicOutputShapeException)
"""The errors of operations that need the numbers of a fake tensor."""
COLLECTIVES = {"c10d", "_c10d_functional", "_c10d_functional_autograd"}
"""The namespaces of operations that communicate with other processes."""


class Fakes(FakeTensorMode):
    """A mode for tensors without data that asks before a collective of torch.distributed runs on them.

    Attributes:
        refused: returns the error of such a collective, or None if it may run.
    """

    refused: Callable[[], Exception | None] | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation."""
        if func.namespace == "c10d" and self.refused is not None:
            error = self.refused()
            if error is not None:
                raise error
        return super().__torch_dispatch__(func, types, args, kwargs)


FAKE_LOGGER = "torch._subclasses.fake_tensor"
"""The logger that warns of each operation that fails without data."""
PROPERTIES = torch._C.TensorBase
"""The class that has the properties of tensors."""
Operation, Operations = torch._ops.OpOverload, torch._ops.OpOverloadPacket
"""An operation of the dispatcher, and all of a name."""
without_functions: Any = torch._C.DisableTorchFunction
"""A context, without arguments, in which function modes and subclasses see no function."""
pack: Any = torch._VF._pack_padded_sequence
"""What ``nn.utils.rnn.pack_padded_sequence`` calls: gives rows and their counts."""
pad: Any = torch._VF._pad_packed_sequence
"""What ``nn.utils.rnn.pad_packed_sequence`` calls: gives sequences and their lengths."""
is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
"""Tells whether a transform of torch.func, such as vmap, has wrapped a tensor."""
level_of_transforms = torch._C._functorch.maybe_current_level
"""Counts the transforms of torch.func that are active; None if there are none."""


saving: Any = torch._C._autograd._top_saved_tensors_default_hooks
"""Returns the innermost pair of saved_tensors_hooks; None if there is none. False as its argument asks while
a graph is traced, too."""


def without_modes() -> AbstractContextManager[Any]:
    """A context in which no dispatch mode is active, so that tensors have numbers."""
    return _disable_current_modes()


@contextlib.contextmanager
def left(mode: TorchFunctionMode) -> Iterator[None]:
    """Leave a function mode for a while, if it is the innermost one."""
    top = torch._C._len_torch_function_stack()
    if not top or torch._C._get_function_stack_at(top - 1) is not mode:
        yield
        return
    mode.__exit__(None, None, None)
    try:
        yield
    finally:
        mode.__enter__()


def unwrapped(tensor: Tensor) -> Tensor:
    """The tensor in those that transforms of torch.func put around it."""
    while is_wrapped(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def is_of_dynamo(error: Exception) -> bool:
    """Tell whether ``torch.compile`` raised an error."""
    return type(error).__module__.startswith("torch._dynamo")


def forget_operations(most: int) -> None:
    """Drop what fake tensors remember of operations, if it is more; nothing else ever drops it (2.13)."""
    if FakeTensorMode.cache_info().size > most:
        FakeTensorMode.cache_clear()
