"""What can be wrong with a schedule, a function a kind. Each yields its findings.

A finding is the number of an action (or ``NOWHERE`` and the action that is missing), what is wrong with it,
and what to change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.schedule.action import (
    COMPUTE_OPS,
    GRADIENT_OPS,
    MESSAGE_OPS,
    SEND_OPS,
    Action,
    Op,
)
from penstock.schedule.dependencies import Half, Need, counterpart
from penstock.schedule.packed import NOWHERE, OPS, Packed
from penstock.schedule.wiring import Block, Wiring


class Finding(NamedTuple):
    """Something wrong: with an action that is there, or with one that is not."""

    number: int
    action: Action | None
    what: str
    remedy: str


Check = Callable[[Wiring], Iterator[Finding]]


def missing(wiring: Wiring) -> Iterator[Finding]:
    """Each stage runs each microbatch forward, and where the schedule trains, backward once."""
    packed = wiring.packed
    schedule = packed.schedule
    for stage in range(schedule.stages):
        yield from _absent(packed, Need(stage, Op.F))
        if schedule.trains:
            yield from _absent(packed, Need(stage, Half.INPUT))
            yield from _absent(packed, Need(stage, Half.WEIGHT))


def _absent(packed: Packed, need: Need) -> Iterator[Finding]:
    found = packed.find(need)
    if need.op is Half.WEIGHT:
        # Without I and B the input half is missing, which is said already.
        found = np.where(packed.find(Need(need.stage, Half.INPUT)) == NOWHERE, 0, found)
    for microbatch in np.flatnonzero(found == NOWHERE).tolist():
        action = packed.rule.settle(need, microbatch)
        rank = packed.schedule.placement.rank_of[need.stage]
        remedy = f"add {action} to the program of rank {rank}"
        yield Finding(NOWHERE, action, "missing", remedy)


def duplicate(wiring: Wiring) -> Iterator[Finding]:
    """No action occurs twice but UNSHARD and RESHARD; no microbatch has both B and I or W."""
    packed = wiring.packed
    first = packed.first
    again = (first != np.arange(len(first))) & ~packed.having(frozenset({Op.UNSHARD, Op.RESHARD}))
    for number in np.flatnonzero(again).tolist():
        there = packed.position(int(first[number]))
        rank = packed.rank[first[number]]
        what = f"stands already at position {there} of rank {rank}"
        yield Finding(number, None, what, "remove one of the two")
    yield from _both_backwards(packed)


def _both_backwards(packed: Packed) -> Iterator[Finding]:
    if not {Op.B, Op.I} <= packed.schedule.ops and not {Op.B, Op.W} <= packed.schedule.ops:
        return
    for stage in range(packed.schedule.stages):
        full = packed.find(Need(stage, Op.B))
        for op in (Op.I, Op.W):
            half = packed.find(Need(stage, op))
            for number in half[(full != NOWHERE) & (half != NOWHERE)].tolist():
                what = f"the microbatch has a full backward as well ({Op.B.value} = I and W)"
                yield Finding(number, None, what, "keep either B, or I and W")


def wrong_rank(wiring: Wiring) -> Iterator[Finding]:
    """Every action stands on the rank that holds its stage."""
    packed = wiring.packed
    rank_of = np.array(packed.schedule.placement.rank_of, np.int32)
    for number in np.flatnonzero(rank_of[packed.stage] != packed.rank).tolist():
        home = int(rank_of[packed.stage[number]])
        what = f"stage {packed.stage[number]} is on rank {home}"
        yield Finding(number, None, what, f"move it to rank {home}")


def order(wiring: Wiring) -> Iterator[Finding]:
    """What an action needs on its own rank stands before it; a message that it needs is posted there."""
    packed = wiring.packed
    for block in wiring.blocks:
        late = wiring.late(block)
        if late.any():
            for after, before in zip(
                block.after[late].tolist(), block.before[late].tolist(), strict=True
            ):
                needed = packed.action(before)
                what = f"needs {needed}, which stands later, at position {packed.position(before)}"
                yield Finding(after, None, what, f"move {needed} before it")
        yield from _unmet(packed, block)


def _unmet(packed: Packed, block: Block) -> Iterator[Finding]:
    """Needs that nothing meets, but for computing actions that are reported as missing already."""
    lacking = np.flatnonzero(block.before == NOWHERE)
    computes = isinstance(block.need.op, Half) or block.need.op in COMPUTE_OPS
    if computes and (packed.schedule.trains or block.need.op is Op.F):
        return
    for i in lacking.tolist():
        action = packed.rule.settle(block.need, int(block.microbatch[i]))
        if block.lane.op in MESSAGE_OPS:
            what = f"no rank has the {action.op.value} at its other end"
        else:
            what = f"needs {action}, which nowhere stands"
        home = packed.schedule.placement.rank_of[action.stage]
        yield Finding(int(block.after[i]), None, what, f"add {action} to rank {home}")


def unreceived(wiring: Wiring) -> Iterator[Finding]:
    """Every SEND has its RECV."""
    packed = wiring.packed
    lonely = packed.having(SEND_OPS) & (wiring.partner == NOWHERE)
    for number in np.flatnonzero(lonely).tolist():
        receive = counterpart(packed.action(number))
        home = packed.schedule.placement.rank_of[receive.stage]
        what = f"no rank has the {receive.op.value} at its other end"
        yield Finding(number, None, what, f"add {receive} to rank {home}, or remove it")


def purposeless(wiring: Wiring) -> Iterator[Finding]:
    """Every message carries a value of the edge table to another rank."""
    packed = wiring.packed
    known = _messages(packed)
    for lane, at in packed.lanes():
        if lane.op in SEND_OPS and (lane.stage, lane.op, lane.peer) not in known:
            for number in at[at != NOWHERE].tolist():
                what = "no edge carries such a message between these stages' ranks"
                yield Finding(
                    number, None, what, "remove it and its RECV, or give the schedule the edge"
                )


def _messages(packed: Packed) -> set[tuple[int, Op, int | None]]:
    sends = (
        send
        for stage in range(packed.schedule.stages)
        for op in (Op.F, *GRADIENT_OPS)
        for send in packed.rule.sends(Action(stage, op, 0))
    )
    return {(send.stage, send.op, send.peer) for send in sends}


def channels(wiring: Wiring) -> Iterator[Finding]:
    """Both ends of a channel have its messages in the same order."""
    packed = wiring.packed
    sends = np.flatnonzero(packed.having(SEND_OPS) & (wiring.partner != NOWHERE))
    received = wiring.partner[sends]
    key = (
        packed.rank[sends].astype(np.int64) * packed.schedule.ranks + packed.rank[received]
    ) * len(OPS)
    key += packed.op[sends]
    grouped = np.argsort(key, kind="stable")
    sends, received, key = sends[grouped], received[grouped], key[grouped]
    crossed = (key[1:] == key[:-1]) & (received[1:] < received[:-1])
    for i in np.flatnonzero(crossed).tolist():
        earlier, later = packed.action(int(received[i])), packed.action(int(received[i + 1]))
        rank = packed.rank[received[i]]
        what = (
            f"is sent after {packed.action(int(sends[i]))}, but rank {rank} posts {later} "
            f"(position {packed.position(int(received[i + 1]))}) before {earlier} "
            f"(position {packed.position(int(received[i]))})"
        )
        yield Finding(int(sends[i + 1]), None, what, "give both ends of the channel the same order")


def shards(wiring: Wiring) -> Iterator[Finding]:
    """Stages that are gathered and freed are gathered where they compute."""
    packed = wiring.packed
    if Op.UNSHARD not in packed.schedule.ops:
        return
    by_stage = np.argsort(packed.stage, kind="stable")
    ends = np.searchsorted(packed.stage[by_stage], np.arange(packed.schedule.stages + 1))
    for stage in range(packed.schedule.stages):
        if packed.rule.shards(stage):
            yield from _shard_states(packed, by_stage[ends[stage] : ends[stage + 1]])


def _shard_states(packed: Packed, numbers: NDArray[np.int64]) -> Iterator[Finding]:
    gathered = False
    for number in numbers.tolist():
        op = OPS[packed.op[number]]
        if op is Op.UNSHARD and gathered:
            yield Finding(number, None, "the stage is unsharded already", "remove it")
        needs = op in COMPUTE_OPS or op is Op.RESHARD
        if needs and not gathered:
            what = "stands where the stage is not unsharded"
            yield Finding(number, None, what, f"put {packed.stage[number]}UNSHARD before it")
        if op in (Op.UNSHARD, Op.RESHARD):
            gathered = op is Op.UNSHARD


CHECKS: tuple[Check, ...] = (
    missing,
    duplicate,
    wrong_rank,
    order,
    unreceived,
    purposeless,
    channels,
    shards,
)
