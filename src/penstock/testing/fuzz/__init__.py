"""Random models and runs, each compared with a plain loop; see docs/fuzzing.md.

This file holds what the program of a case imports: how it tells what a run gave, what a plain loop needs to
split a batch, and how two runs are compared. It does not use the library, since the numbers of a Pipeline
must not be judged by its own code.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

__all__ = ["Told", "check", "differences", "merged", "parts", "tensors"]


class Told(dict[str, Any]):
    """All that a run gave, by name: numbers, tensors, ``None``, and lists of what hooks have seen."""

    def number(self, step: object, name: str, value: float) -> None:
        """Tell a number of a step, such as its loss."""
        self[f"{name}, step {step}"] = float(value)

    def gradients(self, step: object, named: Iterable[tuple[str, Tensor]]) -> None:
        """Tell all gradients, including those that are ``None``."""
        for name, weight in named:
            found = None if weight.grad is None else weight.grad.detach().to_dense().clone()
            self[f"gradient of {name}, step {step}"] = found

    def output(self, step: object, value: Any) -> None:
        """Tell the tensors of an output."""
        for index, found in enumerate(tensors(value)):
            self[f"output {index}, step {step}"] = found.detach().clone()

    def inputs(self, step: object, batch: Any) -> None:
        """Tell the gradients of the arguments."""
        self.gradients(
            step, ((f"input {i}", x) for i, x in enumerate(tensors(batch)) if x.requires_grad)
        )

    def state(self, found: Mapping[str, Tensor]) -> None:
        """Tell the parameters and buffers at the end."""
        self.update({f"state of {name}": value.detach().clone() for name, value in found.items()})

    def hooks(self, seen: list[tuple[str, Sequence[Tensor]]]) -> None:
        """Tell what hooks have seen, and empty the list; a tensor without data counts as infinite."""
        for name, values in seen:
            numbers = [float(value) if _has_data(value) else math.inf for value in values]
            self.setdefault(f"hook {name}", []).append(numbers)
        seen.clear()


def _has_data(value: Tensor) -> bool:
    return type(value) in (Tensor, torch.nn.Parameter) and not value.is_meta


def tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in a value."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors(item)
    elif dataclasses.is_dataclass(value):
        yield from tensors(list(vars(value).values()))


def parts(value: Any, sizes: Sequence[int]) -> Iterator[Any]:
    """A batch that is cut along dimension 0: all its tensors, whatever holds them."""
    start = 0
    for size in sizes:
        yield _mapped(value, lambda x, at=start, n=size: x[at : at + n] if x.dim() else x)
        start += size


def merged(outputs: Sequence[Any]) -> Any:
    """Outputs of microbatches put together along dimension 0."""
    rows = [iter(list(tensors(output))) for output in outputs]
    return _mapped(outputs[0], lambda _: torch.cat([next(row) for row in rows]))


def _mapped(value: Any, change: Any) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        make: Any = type(value)
        return make({key: _mapped(item, change) for key, item in value.items()})
    if type(value) in (list, tuple):
        return type(value)(_mapped(item, change) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.replace(value, **{k: _mapped(v, change) for k, v in vars(value).items()})
    return value


# ---- how two runs are compared


def differences(
    expected: Mapping[str, Any], found: Mapping[str, Any], tolerance: float
) -> list[str]:
    """The differences between two runs, one per line, which begins with the name of what differs.

    Args:
        expected: what the plain loop gave.
        found: what the Pipeline gave.
        tolerance: the difference that is allowed, relative to the largest number of a tensor if that is above
            1.
    """
    lines = [f"{name}: not there" for name in expected if name not in found]
    lines += [f"{name}: should not be there" for name in found if name not in expected]
    for name in (name for name in expected if name in found):
        said = _difference(expected[name], found[name], tolerance)
        lines += [f"{name}: {said}"] if said else []
    return lines


def _difference(expected: Any, found: Any, tolerance: float) -> str:
    if expected is None or found is None:
        return "" if expected is found else f"{_word(found)} instead of {_word(expected)}"
    if isinstance(expected, list):
        return _of_hooks(expected, found, tolerance)
    one, other = torch.as_tensor(expected), torch.as_tensor(found)
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return f"{other.dtype} {list(other.shape)} instead of {one.dtype} {list(one.shape)}"
    gap = _gap(one.double(), other.double())
    return f"differs by {gap:.2g}" if not gap <= tolerance else ""


def _gap(one: Tensor, other: Tensor) -> float:
    if not one.numel():
        return 0.0
    gap = (one - other).abs()
    gap[one == other] = 0.0  # also where both are infinite
    gap[one.isnan() & other.isnan()] = 0.0
    return float(gap.max() / max(1.0, float(one.abs().max())))


def _of_hooks(expected: list[Any], found: list[Any], tolerance: float) -> str:
    if len(expected) != len(found):
        return f"called {len(found)} times instead of {len(expected)}"
    one, other = (
        torch.tensor(list(chain(*sorted(calls))), dtype=torch.float64)
        for calls in (expected, found)
    )
    if other.isinf().any():
        return "called without data"
    if one.shape != other.shape:
        return "other values"
    gap = _gap(one, other)
    return f"differs by {gap:.2g}" if not gap <= tolerance else ""


def _word(value: Any) -> str:
    return "None" if value is None else "zeros" if not torch.as_tensor(value).any() else "numbers"


def check(expected: Mapping[str, Any], found: Mapping[str, Any], tolerance: float = 1e-10) -> None:
    """Check that a Pipeline gave what the plain loop did; one of several processes has only its share.

    Raises:
        AssertionError: something differs; the message lists it.
    """
    alone = not (torch.distributed.is_available() and torch.distributed.is_initialized())
    same = expected if alone else {name: expected[name] for name in found if name in expected}
    wrong = differences(same, found, tolerance)
    if wrong:
        raise AssertionError("the Pipeline differs from the plain loop:\n" + "\n".join(wrong))
