"""Write the scores of microbatches, or of a call that does not count."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from penstock._engine.rng import Draws, generators_kept
from penstock._engine.values import map_tensors, tensors_in
from penstock.partition.interception import Interceptor, intercepted
from penstock.partition.names import FakeTensor
from penstock.partition.score import Line, Score
from penstock.partition.snapshot import Snapshot, replaced
from penstock.partition.templates import look_of
from penstock.partition.tree import ScoreTree
from penstock.partition.writer import Writer

_HELD_BY_LINE = 3
"""The references to a placeholder that nothing but its line has, and what counts them."""


def write(
    tree: ScoreTree,
    calls: Sequence[tuple[Sequence[Any], Mapping[str, Any], Draws | None]],
    interceptors: Sequence[Interceptor] = (),
    inner: Sequence[Interceptor] = (),
) -> list[Score]:
    """Run the author's forward of microbatches on placeholders, and write down what happens.

    Args:
        tree: the lines that are known.
        calls: for each, the model's arguments, with their numbers; its keyword arguments; and what seeds
            what functions between units draw, or None to leave the generators alone.
        interceptors: the interceptors of other modules to place as a whole, such as those with hooks.
        inner: the interceptors of modules inside units, whose operations are counted too.

    Raises:
        PartitionError: the model cannot be cut this way; the message names the module and the line.
    """
    writer = Writer(tree, [*tree.interceptors, *interceptors])
    with writer.open(), intercepted(inner, writer.counted):
        return [_score(writer, *call) for call in calls]


def _score(
    writer: Writer, args: Sequence[Any], kwargs: Mapping[str, Any], draws: Draws | None
) -> Score:
    tensors = tensors_in((args, kwargs))
    if any([tensor.is_inference() for tensor in tensors]):
        args, kwargs = map_tensors((args, kwargs), _for_autograd)
    batch = [tensor for tensor in tensors if tensor.requires_grad]
    writer.begin(draws, batch)
    output = writer.run(args, kwargs)
    call = (args, kwargs) if writer.decides else None
    score = Score(*writer.ended(output), writer.root, batch, draws, writer.inner_work, call)
    writer.let_go()
    del output
    for note in score.notes:
        for shown in note.line.shown.values():
            if sys.getrefcount(shown) > _HELD_BY_LINE:
                del shown
                _replace_leaked(writer.tree, note.line)

                break
    return score


def _replace_leaked(tree: ScoreTree, line: Line) -> None:
    """Give a line other placeholders in place of those that the author's code has kept somewhere.

    In a later microbatch, or outside of the model, they stand for nothing, and using them is refused.
    """
    for number in list(line.shown):
        tensor = line.shown[number]
        if (
            type(tensor) is FakeTensor
            and tensor.layout is torch.strided
            and sys.getrefcount(tensor) > _HELD_BY_LINE
        ):
            line.first.setdefault(number, tensor)  # its memory says what shares it
            blank = tree.blank((*look_of(tensor)[:4], line.looks[number][4]))
            line.marks = {k: n for k, n in line.marks.items() if n != number}
            line.marks[id(blank)] = number
            line.shown[number] = blank


def rehearse(
    tree: ScoreTree,
    call: tuple[Sequence[Any], Mapping[str, Any]],
    interceptors: Sequence[Interceptor] = (),
    inner: Sequence[Interceptor] = (),
) -> Score:
    """Write a score of a call that does not count; whatever the author's code changes is put back.

    Args:
        tree: the lines that are known.
        call: the model's arguments; ones stand for tensors without data.
        interceptors: as for :meth:`write`.
        inner: as for :meth:`write`.
    """
    tree.refresh()

    def with_data(tensor: Tensor) -> Tensor:
        """A copy of a tensor, of ones where it has no data."""
        if not tensor.is_meta:
            return tensor.detach().clone().requires_grad_(tensor.requires_grad)
        ones = torch.ones(tensor.shape, dtype=tensor.dtype, device=tree.device)
        return ones.requires_grad_(tensor.requires_grad)

    args, kwargs = map_tensors((tuple(call[0]), dict(call[1])), with_data)
    tables: list[Any] = [t for _, m in tree.outside for t in (m._buffers, vars(m))]
    copies = [(t, n, with_data(x)) for t in tables for n, x in t.items() if type(x) is Tensor]
    snapshot = Snapshot(tree.modules, code=True, data=False)
    try:
        with generators_kept([tree.device]), replaced(copies):
            return write(tree, [(args, kwargs, None)], interceptors, inner)[0]
    finally:
        snapshot.restore()


def _for_autograd(tensor: Tensor) -> Tensor:
    return tensor.clone() if tensor.is_inference() else tensor
