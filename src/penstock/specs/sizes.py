"""What a function gives for tensors of any sizes: worked out once, with the conditions under which it holds.

A model that is called with ever new sequence lengths would have to be looked at for each of them. Here it is
for the first two; for the third it runs on tensors without data whose sizes are unknowns, which notes every
question that the code asks about them. The answers are the conditions, and what comes out has sizes that are
terms in the unknowns. For later lengths that meet the conditions the same way through the code is certain,
and only the terms are evaluated.
"""

from __future__ import annotations

import logging
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

# The documented home of fake tensors; torch has no public name for them. Seen in torch 2.13.
from torch._subclasses.fake_tensor import FakeTensorMode

T = TypeVar("T")
log = logging.getLogger("penstock")

_BEFORE = 2
"""So many sizes are looked at one by one: a batch and its rest are two."""

_RULES = 4
"""So many ways through the code are followed with unknown sizes; what takes others is looked at each time."""


class Form(NamedTuple):
    """A tensor without its data."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    @staticmethod
    def of(tensor: Tensor) -> Form:
        """The form of a tensor.

        Raises:
            NotGeneral: it is none of a plain layout.
        """
        if tensor.layout is not torch.strided:
            raise NotGeneral(f"a tensor is {tensor.layout}")
        shape, strides = tuple(tensor.shape), tuple(tensor.stride())
        return Form(shape, strides, tensor.dtype, tensor.device, tensor.requires_grad)

    def empty(self, device: str | torch.device | None = None) -> Tensor:
        """A tensor of this form."""
        where = self.device if device is None else device
        made = torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=where)
        return made.requires_grad_(self.requires_grad)

    @property
    def kind(self) -> tuple[Any, ...]:
        """All but the sizes."""
        return len(self.shape), self.dtype, self.device, self.requires_grad


class Found(NamedTuple):
    """What a function gave.

    Args:
        leaves: the forms of its tensors, numbers that may follow from sizes, and what else it gave.
        rest: what does not depend on sizes.
    """

    leaves: tuple[Any, ...]
    rest: Any = None


class NotGeneral(Exception):
    """What a function gives cannot be told for unknown sizes."""


class Family(Generic[T]):
    """What one function gives for calls that differ in nothing but the sizes of their tensors.

    Args:
        same: whether two results of it are equal.
    """

    def __init__(self, same: Callable[[T, T], bool] = operator.eq) -> None:
        self._same = same
        self._seen: dict[tuple[Form, ...], T] = {}
        self._rules: list[_Rule] = []
        self._tried = 0

    def find(
        self,
        given: Sequence[Form],
        look: Callable[[], T],
        follow: Callable[[Unknowns], Found],
        build: Callable[[Found], T],
    ) -> T:
        """What the function gives.

        Args:
            given: the tensors of the call.
            look: works it out for these sizes.
            follow: works it out for unknown sizes; where it raises, they cannot be.
            build: makes the result of what was found so, for these sizes.
        """
        sizes = tuple(given)
        found = self._by_rule(sizes)
        if found is None and len(self._seen) >= _BEFORE and self._tried < _RULES:
            self._tried += 1
            self._follow(sizes, follow, build)
            found = self._by_rule(sizes)
        if found is not None:
            return build(found)
        made = look()
        if len(self._seen) < _BEFORE:
            self._seen[sizes] = made
        return made

    def _by_rule(self, given: tuple[Form, ...]) -> Found | None:
        return next((found for rule in self._rules if (found := rule.at(given)) is not None), None)

    def _follow(
        self,
        given: tuple[Form, ...],
        follow: Callable[[Unknowns], Found],
        build: Callable[[Found], T],
    ) -> None:
        unknowns = Unknowns(given)
        try:
            rule = _Rule(unknowns, follow(unknowns))
            if rule.at(given) is None:
                raise NotGeneral("its conditions do not hold for the sizes that they come from")
            for sizes, seen in self._seen.items():
                found = rule.at(sizes)
                if found is not None and not self._same(build(found), seen):
                    raise NotGeneral("it gives something else for sizes that were looked at")
        except Exception as error:  # whatever a model's code raises that asks for more than sizes
            log.debug("what a module gives is found for each size anew: %s", error)
            self._tried = _RULES
        else:
            self._rules.append(rule)


class Unknowns:
    """The sizes of some tensors as unknowns.

    Args:
        given: an example of the tensors. Sizes of 0 and 1 are no unknowns, since they often matter.
    """

    def __init__(self, given: Sequence[Form]) -> None:
        # Here, since it takes a second: most models are called with one or two sizes. Seen in torch 2.13.
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

        self.given = given
        # Sizes that happen to agree are unknowns of their own, and what asks for numbers in tensors fails.
        self._env = ShapeEnv(
            duck_shape=False, allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False
        )
        self.terms: list[Any] = []

    @contextmanager
    def within(self, mode: FakeTensorMode) -> Iterator[list[Tensor]]:
        """The tensors, in a mode that works with unknowns while the context lasts; none requires grad."""
        before = mode.shape_env
        mode.shape_env = self._env
        try:
            with mode:
                yield [self._made(index, form) for index, form in enumerate(self.given)]
        finally:
            mode.shape_env = before

    def _made(self, index: int, form: Form) -> Tensor:
        from torch._dynamo.source import ConstantSource
        from torch.fx.experimental.symbolic_shapes import (
            DimDynamic,
            StatelessSymbolicContext,
        )

        dynamic = [DimDynamic.DYNAMIC if size > 1 else DimDynamic.STATIC for size in form.shape]
        with torch.utils._python_dispatch._disable_current_modes():
            sizes, strides, _ = self._env.create_symbolic_sizes_strides_storage_offset(
                form.empty("meta"),
                ConstantSource(f"given{index}"),
                symbolic_context=StatelessSymbolicContext(dynamic_sizes=dynamic),
            )
        self.terms += [*sizes, *strides]
        return torch.empty_strided(sizes, strides, dtype=form.dtype, device=form.device)

    @property
    def conditions(self) -> list[Any]:
        """What was asked about them."""
        return [guard.expr for guard in self._env.guards]


class _Rule:
    """What holds for all sizes that meet some conditions.

    Args:
        unknowns: the sizes, after the function has run.
        found: what it gave for them.
    """

    def __init__(self, unknowns: Unknowns, found: Found) -> None:
        self._rest = found.rest
        source = "\n    ".join(_written(unknowns, found.leaves))
        names: dict[str, Any] = {"math": math, "torch": torch}
        exec(f"def evaluate(given):\n    {source}", names)
        self._evaluate: Callable[[list[int]], list[Any] | None] = names["evaluate"]
        self._kinds = [form.kind for form in unknowns.given]
        # Without what the terms are made of.
        self._leaves = [_without_terms(leaf) for leaf in found.leaves]

    def at(self, given: Sequence[Form]) -> Found | None:
        """What the function gives for tensors, if these meet the conditions."""
        if [form.kind for form in given] != self._kinds:
            return None
        values = self._evaluate([n for form in given for n in (*form.shape, *form.strides)])
        if values is None:
            return None
        return Found(tuple(map(_at, self._leaves, values)), self._rest)


class _Term:
    """Stands for a number that follows from sizes."""


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


def _written(unknowns: Unknowns, leaves: Sequence[Any]) -> Iterator[str]:
    """The lines of a function that takes all sizes and strides, and gives those of the leaves or None."""
    known: set[str] = set()
    conditions: list[str] = []
    for index, term in enumerate(unknowns.terms):
        text = _term(term, raw=True)
        if text.isidentifier() and text not in known:
            known.add(text)
            yield f"{text} = given[{index}]"
            conditions.append(f"{text} > 1")
        else:
            conditions.append(f"given[{index}] == {text}")
    conditions += map(_print, unknowns.conditions)
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
    # As it was made: what it turned out to be equal to is one of the conditions.
    return _print(term.node._expr if raw else term.node.expr)


def _print(term: Any) -> str:
    from torch.utils._sympy.printers import PythonPrinter

    text: str = PythonPrinter().doprint(term)
    return text
