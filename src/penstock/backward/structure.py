"""Pair the tensors of a nested stage output with their gradients, and describe them in errors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

from torch import Tensor

from penstock.errors import PenstockError, StageError, UsageError

Pair: TypeAlias = tuple[Tensor, Tensor | None]


def pair_with_gradients(output: Any, gradient: Any, path: str = "output") -> Iterator[Pair]:
    """Yields each tensor in ``output`` that requires a gradient, with the gradient at its place.

    Args:
        output: A tensor, or tuples, lists and dicts of tensors and other values, nested.
        gradient: The same structure. None in place of a tensor or of a whole container says that
            no gradient flows there. Tuples and lists may stand for each other.
        path: How messages call ``output``.

    Raises:
        UsageError: The structures differ; the message names the place.
    """
    if isinstance(output, Tensor):
        yield from _pair_tensor(output, gradient, path)
    elif gradient is None:
        return
    elif isinstance(output, Mapping):
        _check_keys(output, gradient, path)
        for key, value in output.items():
            yield from pair_with_gradients(value, gradient[key], f"{path}[{key!r}]")
    elif isinstance(output, (tuple, list)):
        _check_length(output, gradient, path)
        for index, value in enumerate(output):
            yield from pair_with_gradients(value, gradient[index], f"{path}[{index}]")


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yields the tensors that require a gradient from a nested value, in order."""
    if isinstance(value, Tensor):
        if value.requires_grad:
            yield value
    elif isinstance(value, Mapping):
        yield from tensors_in(list(value.values()))
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)


def describe(value: Any) -> str:
    """Returns a short text for a nested value that shows shapes instead of numbers."""
    if isinstance(value, Tensor):
        grad = ", requires_grad" if value.requires_grad else ""
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}{grad}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key!r}: {describe(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (tuple, list)):
        return "(" + ", ".join(map(describe, value)) + ")"
    return type(value).__name__


def explained(call: str, **values: Any) -> contextlib.AbstractContextManager[None]:
    """Turns what autograd raises inside into a StageError that shows the values of the call."""
    return _Explained(call, values)


class _Explained:
    def __init__(self, call: str, values: dict[str, Any]) -> None:
        self._call = call
        self._values = values

    def __enter__(self) -> None:
        """Nothing to do before something fails."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception) and not isinstance(error, PenstockError):
            shown = ", ".join(f"{name}={describe(value)}" for name, value in self._values.items())
            raise StageError(f"{self._call} failed for {shown}: {error}") from error


def _pair_tensor(output: Tensor, gradient: Any, path: str) -> Iterator[Pair]:
    if not output.requires_grad:
        return
    if not isinstance(gradient, Tensor | None):
        raise UsageError(
            f"{path} is a tensor, but its gradient is a {type(gradient).__name__}; "
            "give a tensor, or None where no gradient flows"
        )
    yield output, gradient


def _check_keys(output: Mapping[Any, Any], gradient: Any, path: str) -> None:
    if not isinstance(gradient, Mapping):
        raise UsageError(f"{path} is a dict, but its gradient is a {type(gradient).__name__}")
    if output.keys() != gradient.keys():
        raise UsageError(
            f"{path} has the keys {sorted(map(str, output))}, "
            f"but its gradient has {sorted(map(str, gradient))}"
        )


def _check_length(output: tuple[Any, ...] | list[Any], gradient: Any, path: str) -> None:
    if not isinstance(gradient, (tuple, list)):
        raise UsageError(
            f"{path} is a {type(output).__name__}, but its gradient is a {type(gradient).__name__}"
        )
    if len(output) != len(gradient):
        raise UsageError(f"{path} has {len(output)} entries, but its gradient has {len(gradient)}")
