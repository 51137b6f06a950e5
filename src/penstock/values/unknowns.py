"""Sizes as symbols, the conditions that code asks of them, and the expressions that result.

It is imported when it is first needed, since that takes a second, and most models are called with one or two
sizes only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

# Symbolic shapes are documented by torch, but these have no public names. Seen in torch 2.13.
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._sympy.printers import PythonPrinter

from penstock.values.inference import Form, Found


class Symbols:
    """The sizes of some tensors as torch's symbols.

    Args:
        given: an example of the tensors. Sizes of 0 and 1 stay numbers, since code often treats them
            specially.
    """

    def __init__(self, given: Sequence[Form]) -> None:
        self.given = given
        # Sizes that happen to be equal get different symbols, and code that asks for data of tensors fails.
        self._env = ShapeEnv(
            duck_shape=False, allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False
        )
        self.terms: list[Any] = []

    @contextmanager
    def within(self, mode: FakeTensorMode) -> Iterator[list[Tensor]]:
        """A context in which a mode works with symbols; it gives the tensors, none of which requires grad."""
        before = mode.shape_env
        mode.shape_env = self._env
        try:
            with mode:
                yield [self._made(index, form) for index, form in enumerate(self.given)]
        finally:
            mode.shape_env = before

    def _made(self, index: int, form: Form) -> Tensor:
        dynamic = [DimDynamic.DYNAMIC if size > 1 else DimDynamic.STATIC for size in form.shape]
        with _disable_current_modes():
            sizes, strides, _ = self._env.create_symbolic_sizes_strides_storage_offset(
                form.empty("meta"),
                ConstantSource(f"given{index}"),
                symbolic_context=StatelessSymbolicContext(dynamic_sizes=dynamic),
            )
        self.terms += [*sizes, *strides]
        return torch.empty_strided(sizes, strides, dtype=form.dtype, device=form.device)

    @property
    def conditions(self) -> list[Any]:
        """The conditions that code has asked about."""
        return [guard.expr for guard in self._env.guards]


class Terms:
    """A function's result for all sizes that meet its conditions.

    Args:
        symbols: the sizes, after the function has run.
        found: its result for them.
    """

    def __init__(self, symbols: Symbols, found: Found) -> None:
        self._rest = found.rest
        source = "\n    ".join(_written(symbols, found.leaves))
        names: dict[str, Any] = {"math": math, "torch": torch}
        exec(f"def evaluate(given):\n    {source}", names)
        self._evaluate: Callable[[list[int]], list[Any] | None] = names["evaluate"]
        self._kinds = [form.kind for form in symbols.given]
        # Expressions are dropped here, since they would keep torch's symbolic environment alive.
        self._leaves = [_without_terms(leaf) for leaf in found.leaves]

    def at(self, given: Sequence[Form]) -> Found | None:
        """The function's result for tensors that meet the conditions; None for others."""
        if [form.kind for form in given] != self._kinds:
            return None
        values = self._evaluate([n for form in given for n in (*form.shape, *form.strides)])
        if values is None:
            return None
        return Found(tuple(map(_at, self._leaves, values)), self._rest)


class _Term:
    """Stands for a number that depends on sizes."""


def _without_terms(leaf: Any) -> Any:
    if isinstance(leaf, Form):
        return leaf._replace(shape=(), strides=())
    return _Term() if _is_term(leaf) else leaf


def _at(leaf: Any, value: Any) -> Any:
    if isinstance(leaf, Form):
        return leaf._replace(shape=value[0], strides=value[1])
    return value if isinstance(leaf, _Term) else leaf


def _is_term(value: Any) -> bool:
    return isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool)


def _written(symbols: Symbols, leaves: Sequence[Any]) -> Iterator[str]:
    """The lines of a function from all sizes and strides to those of the leaves, or None."""
    known: set[str] = set()
    conditions: list[str] = []
    for index, term in enumerate(symbols.terms):
        text = _term(term, raw=True)
        if text.isidentifier() and text not in known:
            known.add(text)
            yield f"{text} = given[{index}]"
            conditions.append(f"{text} > 1")
        else:
            conditions.append(f"given[{index}] == {text}")
    conditions += map(_print, symbols.conditions)
    yield "if not (" + " and ".join(f"({condition})" for condition in conditions) + "):"
    yield "    return None"
    yield f"return [{', '.join(map(_leaf, leaves))}]"


def _leaf(leaf: Any) -> str:
    if isinstance(leaf, Form):
        return f"({_tuple(leaf.shape)}, {_tuple(leaf.strides)})"
    return _term(leaf) if _is_term(leaf) else "None"


def _tuple(terms: Sequence[Any]) -> str:
    return "(" + "".join(f"{_term(term)}, " for term in terms) + ")"


def _term(term: Any, *, raw: bool = False) -> str:
    if not _is_term(term):
        return repr(term)
    # The original symbol; if it turned out to equal something else, that is one of the conditions.
    return _print(term.node._expr if raw else term.node.expr)


def _print(term: Any) -> str:
    text: str = PythonPrinter().doprint(term)
    return text
