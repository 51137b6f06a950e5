"""The cut of a model, which waits for the first call: all ranks of the job make the same one, or none."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from penstock._engine.runtime.calls import exchange_or_refuse
from penstock._engine.runtime.job import refusal_in_job
from penstock._engine.transport import DifferentCalls, Transport
from penstock.errors import MessageError, PeerFailed, PenstockError

Product = TypeVar("Product")
Example = tuple[Sequence[Any], Mapping[str, Any]]
BROKEN = (MessageError, PeerFailed, DifferentCalls)
"""Errors of an exchange itself: they refuse nothing, but end the pipeline."""


class LateCut(Protocol):
    """A model that is not cut yet."""

    def decide(self, call: Example | None, target: Any, *, plans: bool) -> Any:
        """Where to cut, as JSON data; with it the stages are made, but nothing is moved or freed.

        Args:
            call: the arguments of the model for a microbatch.
            target: the target of the loss for it, ``MISSING`` without one.
            plans: whether this rank measures the model, where that decides the schedule.
        """

    def adopt(self, where: Any) -> None:
        """Make the stages where another rank has decided to cut."""

    def carry_out(self) -> None:
        """Take the stages of this process, and free the others."""


def make_together(
    transport: Transport | None,
    make: Callable[[], Product],
    describe: Callable[[Product], Any] = lambda product: product,
) -> tuple[Product, list[Any]]:
    """What this rank makes, and how each rank describes its own; if one cannot, all raise its error."""
    try:
        product = make()
    except PenstockError as error:
        exchange_or_refuse(transport, None, error)
        raise
    return product, exchange_or_refuse(transport, describe(product), None)


def agree_on_cut(
    transport: Transport | None,
    cut: LateCut,
    bring: Callable[[], tuple[int, Example | None, Any]],
    step: int,
) -> PenstockError | None:
    """Let all ranks of the job cut at the same places: where the first rank with arguments would.

    Args:
        transport: this rank's end; None if all ranks share this process.
        cut: the model.
        bring: returns the first rank that was given arguments, and a microbatch's arguments and target.
        step: the number of the step that this pipeline begins.

    Returns:
        The error with which all ranks refuse, and the model is not cut; None if the stages are made.
    """

    def decide() -> Any:
        first, call, target = bring()
        plans = transport is None or transport.rank == first
        _, of_ranks = make_together(transport, lambda: cut.decide(call, target, plans=plans))
        return adopted(of_ranks, of_ranks[first])

    def adopted(decisions: Sequence[Any], where: Any) -> Any:
        if any(one != where for one in decisions):
            make_together(transport, lambda: cut.adopt(where))
        return where

    def refused(make: Callable[[], Any]) -> tuple[Any, PenstockError | None]:
        product = refusal = None
        try:
            product = make()
        except BROKEN:
            raise
        except PenstockError as error:
            refusal = error
        return product, refusal_in_job(transport, refusal, step, whole=True)

    where, refusal = refused(decide)
    if refusal is None and transport is not None and transport.beside.size > 1:
        of_replicas = transport.beside.exchange(where)
        if any(one != of_replicas[0] for one in of_replicas):
            _, refusal = refused(lambda: adopted([where], of_replicas[0]))
    return refusal
