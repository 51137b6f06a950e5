"""Rule 1: whatever says what must come before an action lives in this file.

Validator, passes, simulator, drawing and runtime ask it here and nowhere else.

====================  =====================================================================
action                must be complete before it
====================  =====================================================================
F of a stage          the values it uses: F of a source on the same rank, else the RECV_F
I or B of a stage     its F; the gradients owed to it: I or B of a user, else the RECV_B
W of a stage          its I
SEND_F                the F that makes the values
SEND_B                I or B of every stage on the rank that owes the gradient
RECV_F, RECV_B        the SEND at the other end
WAIT_SEND_F/B         the SEND it waits for
REDUCE_GRAD           W or B of every microbatch of the stage
UNSHARD, RESHARD      nothing
====================  =====================================================================

Where the schedule spells out no messages, a value of another rank needs that rank's F, I or B itself.
"""

from __future__ import annotations

from collections.abc import Callable

from penstock.errors import InternalError
from penstock.schedule.action import Action, Op, message
from penstock.schedule.base import Schedule

# The op at the other end of a message.
COUNTERPART = {
    Op.SEND_F: Op.RECV_F,
    Op.RECV_F: Op.SEND_F,
    Op.SEND_B: Op.RECV_B,
    Op.RECV_B: Op.SEND_B,
    Op.WAIT_SEND_F: Op.SEND_F,
    Op.WAIT_SEND_B: Op.SEND_B,
}


def counterpart(action: Action) -> Action:
    """The action at the other end of a message; for a WAIT_SEND, the send it waits for."""
    op = COUNTERPART[action.op]
    if action.op in (Op.WAIT_SEND_F, Op.WAIT_SEND_B):
        return Action(action.stage, op, action.microbatch, action.peer)
    return message(action.peer_stage, op, action.microbatch, action.stage)


class Dependencies:
    """What must come before each action of a schedule, and which messages its values need.

    Args:
        schedule: any schedule, with its messages spelled out or not.
    """

    def __init__(self, schedule: Schedule) -> None:
        self._microbatches = schedule.microbatches
        self._routes = schedule.routes
        self._rank_of = schedule.placement.rank_of
        self._communicates = schedule.communicates
        self._full = _full_backwards(schedule)
        self._rule: dict[Op, Callable[[Action], list[Action]]] = {
            Op.F: self._before_forward,
            Op.I: self._before_gradient,
            Op.B: self._before_gradient,
            Op.W: lambda a: [Action(a.stage, Op.I, a.microbatch)],
            Op.SEND_F: lambda a: [Action(a.stage, Op.F, a.microbatch)],
            Op.SEND_B: self._before_gradient_send,
            Op.RECV_F: lambda a: [counterpart(a)],
            Op.RECV_B: lambda a: [counterpart(a)],
            Op.WAIT_SEND_F: lambda a: [counterpart(a)],
            Op.WAIT_SEND_B: lambda a: [counterpart(a)],
            Op.REDUCE_GRAD: self._before_reduce,
            Op.UNSHARD: lambda _: [],
            Op.RESHARD: lambda _: [],
        }

    def before(self, action: Action) -> list[Action]:
        """The actions that must be complete before ``action`` may start."""
        try:
            rule = self._rule[action.op]
        except KeyError:
            raise InternalError(f"no rule for {action.op!r} of {action}") from None
        return rule(action)

    def gradient(self, stage: int, microbatch: int | None) -> Action:
        """The action that gives a stage's inputs their gradient: its B where it has one, else its I."""
        full = self._full is None or (stage, microbatch) in self._full
        return Action(stage, Op.B if full else Op.I, microbatch)

    def sends(self, action: Action) -> list[Action]:
        """The messages that ``action`` makes possible, as SENDs of its rank.

        A gradient message carries the sum over the stages of the rank that use the value; it is listed
        for each of them, and possible after the last.
        """
        stage, op, microbatch, _ = action
        if op is Op.F:
            return [
                message(stage, Op.SEND_F, microbatch, peer)
                for peer in self._routes.messages_out[stage]
            ]
        if op is Op.I or op is Op.B:
            return [
                message(self._routes.gradient_carrier(source, stage), Op.SEND_B, microbatch, source)
                for source in self._gradient_sources(stage)
                if self._rank_of[source] != self._rank_of[stage]
            ]
        return []

    def receives(self, action: Action) -> list[Action]:
        """The messages that ``action`` needs, as RECVs of its rank."""
        stage, op, microbatch, _ = action
        if op is Op.F:
            home = self._rank_of[stage]
            return [
                message(self._routes.carrier(source, stage), Op.RECV_F, microbatch, source)
                for source in self._routes.sources[stage]
                if self._rank_of[source] != home
            ]
        if op is Op.I or op is Op.B:
            return [
                message(stage, Op.RECV_B, microbatch, peer)
                for peer in self._routes.gradients_in[stage]
            ]
        return []

    def _gradient_sources(self, stage: int) -> list[int]:
        users = self._routes.users
        return [source for source in self._routes.sources[stage] if stage in users[source]]

    def _before_forward(self, action: Action) -> list[Action]:
        stage, _, microbatch, _ = action
        home = self._rank_of[stage]
        sources = self._routes.sources[stage]
        if not self._communicates:
            return [Action(source, Op.F, microbatch) for source in sources]
        local = [Action(s, Op.F, microbatch) for s in sources if self._rank_of[s] == home]
        return local + self.receives(action)

    def _before_gradient(self, action: Action) -> list[Action]:
        stage, _, microbatch, _ = action
        home = self._rank_of[stage]
        users = self._routes.users[stage]
        own = [Action(stage, Op.F, microbatch)]
        if not self._communicates:
            return own + [self.gradient(user, microbatch) for user in users]
        local = [self.gradient(user, microbatch) for user in users if self._rank_of[user] == home]
        return own + local + self.receives(action)

    def _before_gradient_send(self, action: Action) -> list[Action]:
        owing = self._routes.owing(action.peer_stage, action.stage)
        return [self.gradient(stage, action.microbatch) for stage in owing]

    def _before_reduce(self, action: Action) -> list[Action]:
        backwards = (self.gradient(action.stage, m) for m in range(self._microbatches))
        return [b if b.op is Op.B else b._replace(op=Op.W) for b in backwards]


def _full_backwards(schedule: Schedule) -> set[tuple[int, int | None]] | None:
    """Which (stage, microbatch) run B rather than I; ``None`` where all do."""
    if Op.I not in schedule.ops:
        return None
    if Op.B not in schedule.ops:
        return set()
    return {
        (action.stage, action.microbatch)
        for rank in range(schedule.ranks)
        for action in schedule.actions(rank)
        if action.op is Op.B
    }
