"""Losses that a model makes on its way: a router's balance, deep supervision.

A model calls :func:`add_loss` anywhere in its forward. A pipeline adds what it is given to the loss of the
microbatch, in whatever stage that is; in a plain loop :func:`collect_losses` does it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.errors import UsageError
from penstock.parallel import gathered

MAIN = "main"
"""The name under which the loss of ``loss_fn`` is reported beside the others."""


class Term(NamedTuple):
    """What was added once."""

    name: str
    value: Tensor
    weight: float


class Losses:
    """What a model added during a forward.

    Attributes:
        differentiable: whether gradients were enabled when it began.
    """

    def __init__(self) -> None:
        self.differentiable = torch.is_grad_enabled()
        self._terms: list[Term] = []

    def __enter__(self) -> Losses:
        """Begin anew to collect what :func:`add_loss` is given."""
        self.differentiable = torch.is_grad_enabled()
        self._terms = []
        self._token = _collected.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        _collected.reset(self._token)

    def add(self, term: Term) -> None:
        """Note a term."""
        self._terms.append(term)

    def total(self) -> Tensor:
        """The sum of all terms, each by its weight; 0 where there are none."""
        # Multiplied only here: a checkpoint that runs again must find the same tensors saved.
        terms = [term.value.reshape(()) * term.weight for term in self._terms]
        return sum(terms[1:], terms[0]) if terms else torch.zeros(())

    def named(self) -> dict[str, Tensor]:
        """For each name the sum of its terms without their weights, detached."""
        found: dict[str, Tensor] = {}
        for name, value, _ in self._terms:
            term = value.detach().reshape(()).clone()
            found[name] = found[name] + term if name in found else term
        return found

    def __iter__(self) -> Iterator[Term]:
        return iter(self._terms)

    def __len__(self) -> int:
        return len(self._terms)


_collected: ContextVar[Losses | None] = ContextVar("penstock_losses", default=None)

Listener = Callable[[Tensor], Tensor | None]
"""Is told of each value before it is added, and says what to add instead; ``None`` adds nothing."""
_listener: ContextVar[Listener | None] = ContextVar("penstock_losses_heard", default=None)


@contextmanager
def losses_heard(listener: Listener) -> Iterator[None]:
    """Ask ``listener`` what becomes of the values that :func:`add_loss` is given inside."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


def collect_losses() -> Losses:
    """Collect what :func:`add_loss` is given inside.

    ::

        with penstock.collect_losses() as losses:
            output = model(x)
        (loss_fn(output, target) + losses.total()).backward()
    """
    return Losses()


def add_loss(name: str, value: Tensor, weight: float = 1.0) -> None:
    """Add ``weight * value`` to the loss that is being computed.

    To be called by a model in its forward. In a pipeline's stages, and where :func:`collect_losses` is
    active, the value is added; elsewhere nothing happens, as when a checkpoint runs a forward again.

    Args:
        name: under which the value is reported, without its weight; those of one name are added up.
        value: a scalar tensor: of one microbatch, as a mean or a sum like the loss itself.
        weight: by what it is multiplied.

    Raises:
        UsageError: the value is no scalar tensor, or gradients are disabled, so that none would come of it.
    """
    listener, losses = _listener.get(), _collected.get()
    if listener is not None and isinstance(value, Tensor):
        heard = listener(value)
        if heard is None:
            return
        value = heard
    if losses is None:
        return
    if not isinstance(value, Tensor) or value.numel() != 1:
        found = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise UsageError(f"add_loss({name!r}, ...) needs a scalar tensor, not {found}")
    if not isinstance(name, str) or name == MAIN:
        raise UsageError(f"add_loss({name!r}, ...): the name must be a text other than {MAIN!r}")
    if losses.differentiable and weight and not torch.is_grad_enabled():
        raise UsageError(
            f"add_loss({name!r}, ...) was called with gradients disabled, so it would train nothing; call it "
            "outside of no_grad() and of a checkpoint with use_reentrant=True, or with weight=0 to report it"
        )
    losses.add(Term(name, gathered(value), float(weight)))
