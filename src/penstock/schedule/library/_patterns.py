"""Shapes that several schedules share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from penstock.schedule.action import Action, Op

Turn = tuple[int, int]
"""A stage and a microbatch: what one F, or one backward, is about."""


def run(stage: int, op: Op, microbatches: Iterable[int]) -> list[Action]:
    """One op on one stage for several microbatches in turn."""
    return [Action(stage, op, microbatch) for microbatch in microbatches]


def turns(stage: int, microbatches: int) -> list[Turn]:
    """All microbatches of one stage in order."""
    return [(stage, microbatch) for microbatch in range(microbatches)]


def one_forward_one_backward(
    forwards: Sequence[Turn], backwards: Sequence[Turn], ahead: int, *, lag: int | None = None
) -> tuple[Action, ...]:
    """Some forwards ahead, then one forward and one backward in turn, then the rest of the backwards.

    Args:
        forwards: what to run forward, in order.
        backwards: the same in the order of its backwards.
        ahead: how many forwards come before the first pair.
        lag: ``None`` for full backwards. Otherwise each is an I, followed by the W that is ``lag``
            backwards behind; the last ``lag`` Ws come at the end.
    """
    ahead = min(ahead, len(forwards))
    program = [Action(stage, Op.F, m) for stage, m in forwards[:ahead]]
    op = Op.B if lag is None else Op.I
    for turn, (stage, m) in enumerate(backwards):
        if turn + ahead < len(forwards):
            program.append(Action(forwards[turn + ahead][0], Op.F, forwards[turn + ahead][1]))
        program.append(Action(stage, op, m))
        if lag is not None and turn >= lag:
            program.append(Action(backwards[turn - lag][0], Op.W, backwards[turn - lag][1]))
    if lag is not None:
        program += [
            Action(stage, Op.W, m) for stage, m in backwards[max(0, len(backwards) - lag) :]
        ]
    return tuple(program)


def laps(
    rank: int, ranks: int, microbatches: int, stages_per_rank: int
) -> tuple[list[Turn], list[Turn]]:
    """The forwards and backwards of a rank that takes its stages in laps, a round of microbatches each.

    A round has as many microbatches as there are ranks; what is left over is spread over the rounds.

    Returns:
        Forwards: for each round each stage, for each stage each microbatch of the round; and backwards:
        the same with the last stage first.
    """
    held = range(rank, ranks * stages_per_rank, ranks)
    rounds = _rounds(ranks, microbatches)
    forwards = [(stage, m) for round_ in rounds for stage in held for m in round_]
    backwards = [(stage, m) for round_ in rounds for stage in reversed(held) for m in round_]
    return forwards, backwards


def _rounds(ranks: int, microbatches: int) -> list[range]:
    count = max(1, microbatches // ranks)
    bounds = [microbatches * i // count for i in range(count + 1)]
    return [range(first, last) for first, last in pairwise(bounds)]


def longest_round(ranks: int, microbatches: int) -> int:
    """How many microbatches the longest round of :func:`laps` has."""
    return max(map(len, _rounds(ranks, microbatches)))
