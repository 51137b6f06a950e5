"""A bound program as a table: what each action of a rank reads and writes, and what travels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from penstock.runtime.bind import BoundAction, BoundProgram
from penstock.runtime.exchange import Specs
from penstock.runtime.program import RankProgram
from penstock.schedule import Edge, Op
from penstock.schedule.action import MESSAGE_OPS, RECV_OPS, SEND_OPS, WAIT_SEND_OPS
from penstock.values import TensorSpec


class Row(NamedTuple):
    """One line of the table.

    Attributes:
        position: in the rank's list, from 0.
        action: what is done; ``take`` and ``await`` name the receive or send whose message they complete.
        reads: the values and gradients that it uses.
        writes: the values and gradients that it makes.
        channel: where a message travels; empty for anything else.
        size: the bytes of the message; 0 for anything else.
    """

    position: int
    action: str
    reads: str
    writes: str
    channel: str
    size: int


def explain(bound: BoundProgram) -> list[Row]:
    """The rows of a rank's bound program, in the order in which they run."""
    return [
        _row(bound.program, position, action, bound.specs[action.microbatch])
        for position, action in enumerate(bound.actions)
    ]


def table(rows: Sequence[Row]) -> str:
    """The rows as text, in columns."""
    lines = [("", "action", "reads", "writes", "channel", "bytes")]
    lines += [(str(r.position), *r[1:5], str(r.size) if r.channel else "") for r in rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if at in (0, 5) else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def _row(program: RankProgram, position: int, bound: BoundAction, specs: Specs) -> Row:
    action, mb = bound.action, bound.microbatch
    if action.op in MESSAGE_OPS:
        return _message(program, position, bound, specs)
    if action.op in WAIT_SEND_OPS:
        return Row(position, str(action), "", "", "", 0)
    given = [edge.value for edge in program.given(action.stage)]
    taken = [edge.value for edge in program.taken(action.stage)]
    last = action.stage == program.schedule.stages - 1
    values = _named(taken or ["batch"], mb)
    reads, writes = {
        Op.F: (values, _named(given or ["output"], mb)),
        Op.B: (_grads(given, mb, last=last), _grads(taken, mb, weights=action.stage)),
        Op.I: (_grads(given, mb, last=last), _grads(taken, mb)),
        Op.W: (f"what {action.stage}I{mb} kept", f"grad(weights of stage {action.stage})"),
    }.get(action.op, (f"weights of stage {action.stage}",) * 2)
    return Row(position, str(action), reads, writes, "", 0)


def _message(program: RankProgram, position: int, bound: BoundAction, specs: Specs) -> Row:
    action, mb = bound.action, bound.microbatch
    wire = program.wire(action)
    forward = action.op in (Op.SEND_F, Op.RECV_F)
    size = sum(_bytes(tensor) for tensor in _travelling(wire.edges, specs, forward=forward))
    what = (_named if forward else _grads)([edge.value for edge in wire.edges], mb)
    name, reads, writes = str(action), "", ""
    if action.op in RECV_OPS and bound.lack is not None:
        name, writes = f"take {action}", what
    elif bound.lack is not None:
        name = f"await {action}"
    elif action.op in SEND_OPS:
        reads = what
    channel = f"{wire.channel.source} -> {wire.channel.target}"
    return Row(position, name, reads, writes, channel, size)


def _travelling(edges: Sequence[Edge], specs: Specs, *, forward: bool) -> Iterator[TensorSpec]:
    for edge in edges:
        for tensor in specs[edge.value].tensors if edge.value in specs else ():
            if forward or tensor.requires_grad:
                yield tensor


def _bytes(tensor: TensorSpec) -> int:
    size = tensor.torch_dtype.itemsize
    for length in tensor.shape:
        size *= length
    return size


def _named(values: Sequence[str], microbatch: int) -> str:
    return ", ".join(f"{value}[{microbatch}]" for value in values)


def _grads(
    values: Sequence[str], microbatch: int, *, last: bool = False, weights: int | None = None
) -> str:
    found = [f"grad({value}[{microbatch}])" for value in values]
    if last:
        found.append(f"loss[{microbatch}]")
    if weights is not None:
        found.append(f"grad(weights of stage {weights})")
    return ", ".join(found)
