"""What a function gives for tensors of any sizes: worked out once, with the conditions under which it holds.

A model that is called with ever new sequence lengths would have to be looked at for each of them. Here it is
for the first two; for the third it runs on tensors without data whose sizes are unknowns, which notes every
question that the code asks about them. The answers are the conditions, and what comes out has sizes that are
terms in the unknowns. For later lengths that meet the conditions the same way through the code is certain,
and only the terms are evaluated.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from importlib import import_module
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

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


class Unknowns(Protocol):
    """Some tensors' sizes as unknowns."""

    def within(self, mode: FakeTensorMode) -> AbstractContextManager[list[Tensor]]:
        """The tensors, in a mode that works with unknowns while the context lasts; none requires grad."""


class _Rule(Protocol):
    def at(self, given: Sequence[Form]) -> Found | None:
        """What the function gives for tensors, if these meet the conditions."""


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
        try:
            symbolic: Any = import_module("penstock.values.unknowns")
            unknowns = symbolic.Symbols(given)
            rule = symbolic.Terms(unknowns, follow(unknowns))
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
