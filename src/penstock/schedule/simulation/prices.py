"""From costs a stage to prices an action."""

from __future__ import annotations

import numpy as np

from penstock.schedule.action import COMPUTE_OPS, GRADIENT_OPS, SEND_OPS, Action, Op
from penstock.schedule.base import Schedule
from penstock.schedule.packed import CODE, NOWHERE, Packed, Wiring
from penstock.schedule.simulation.clock import Numbers, Prices
from penstock.schedule.simulation.costs import Costs

_COST_OF = {Op.F: "forward", Op.I: "input", Op.W: "weight", Op.B: "backward"}


def prices(wiring: Wiring, costs: Costs) -> Prices:
    """What each action of a schedule costs."""
    packed = wiring.packed
    table = np.zeros((len(CODE), packed.schedule.stages))
    for op in COMPUTE_OPS:
        table[CODE[op]] = costs.per_stage(_COST_OF[op], packed.schedule.stages)
    duration = table[packed.op, packed.stage]
    return Prices(
        duration, _transfers(wiring, costs), _hidden(packed, duration, costs), costs.latency
    )


def _hidden(packed: Packed, duration: Numbers, costs: Costs) -> Numbers:
    hidden = np.zeros(len(packed))
    shorter = np.minimum(duration[packed.halves], duration[packed.halves - 1])
    hidden[packed.halves] = costs.overlap * shorter
    return hidden


def _transfers(wiring: Wiring, costs: Costs) -> Numbers:
    """How long each message is under way: at its SEND and its RECV, or at the action that makes its value."""
    packed = wiring.packed
    transfer = np.zeros(len(packed))
    if not costs.message:
        return transfer
    ops = SEND_OPS if packed.schedule.communicates else frozenset({Op.F}) | GRADIENT_OPS
    for lane, at in packed.lanes():
        if lane.op in ops:
            there = at[at != NOWHERE]
            transfer[there] = (
                _bytes(packed, Action(lane.stage, lane.op, 0, lane.peer), costs) / costs.bandwidth
            )
    sends = packed.messages & (wiring.partner != NOWHERE)
    transfer[sends] = np.maximum(transfer[sends], transfer[wiring.partner[sends]])
    return transfer


def _bytes(packed: Packed, action: Action, costs: Costs) -> float:
    """The bytes of a SEND, or of the largest message that an action makes possible."""
    sends = [action] if action.op in SEND_OPS else packed.rule.sends(action)
    return max((_message_bytes(packed.schedule, send, costs) for send in sends), default=0)


def _message_bytes(schedule: Schedule, send: Action, costs: Costs) -> float:
    forward = send.op is Op.SEND_F
    maker, user = (send.stage, send.peer_stage) if forward else (send.peer_stage, send.stage)
    rank_of = schedule.placement.rank_of
    return sum(
        costs.bytes_of(edge.value)
        for edge in schedule.edges
        if edge.source == maker
        and (forward or edge.gradient)
        and rank_of[user] in {rank_of[target] for target in edge.targets}
    )
