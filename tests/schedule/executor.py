"""A second opinion on the proof: the meaning of a schedule, executed step by step.

It shares nothing with the validator but the rule of what an action needs. Posting and waiting are monotone
(what may run now may run later), so running whatever can run finds out whether everything can.
"""

from __future__ import annotations

from collections import Counter, defaultdict

from penstock.schedule import Action, Dependencies, Op, Schedule
from penstock.schedule.action import COMPUTE_OPS, RECV_OPS, SEND_OPS, STAGE_OPS, WAIT_SEND_OPS
from penstock.schedule.base import flat
from penstock.schedule.dependencies import counterpart

Channel = tuple[int, int, Op]


class Fault(Exception):
    """The schedule did something wrong, or stopped."""


class Executor:
    """Runs a schedule; :meth:`run` raises Fault unless every rank comes to its end with nothing amiss.

    With ``blocking``, a rank goes on after a SEND only when the message is complete.
    """

    def __init__(self, schedule: Schedule, *, blocking: bool) -> None:
        self.schedule, self.blocking = schedule, blocking
        self.rule, self.rank_of = Dependencies(schedule), schedule.placement.rank_of
        self.count = Counter[Action]()
        self.sent: dict[Channel, list[Action]] = defaultdict(list)
        self.received: dict[Channel, list[Action]] = defaultdict(list)
        self.last_sent: dict[int, Action] = {}
        self.gathered: set[int] = set()

    def run(self) -> None:
        left = [[*program] for program in self.schedule.programs]
        moves = True
        while moves:
            moves = False
            for rank, program in enumerate(left):
                while program and self.may_start(rank, [*flat(program[:1])]):
                    self.carry_out(rank, [*flat([program.pop(0)])])
                    moves = True
        if any(left):
            raise Fault(f"these are left: {left}")
        self.check_messages()
        self.check_counts()

    def may_start(self, rank: int, actions: list[Action]) -> bool:
        needed = [each for a in actions if self.waits(a) for each in self.rule.before(a)]
        if self.blocking and rank in self.last_sent and actions[0].op not in STAGE_OPS:
            needed.append(self.last_sent[rank])
        return all(map(self.is_complete, needed))

    def waits(self, action: Action) -> bool:
        return action.op in COMPUTE_OPS or action.op in WAIT_SEND_OPS

    def is_complete(self, action: Action) -> bool:
        """Of a message: both ends have posted it and, by order on the channel, the earlier ones."""
        if action.op not in SEND_OPS | RECV_OPS:
            return action in self.count
        send = action if action.op in SEND_OPS else counterpart(action)
        sent, received = self.sent[self.channel(send)], self.received[self.channel(send)]
        here, there = (sent, received) if send is action else (received, sent)
        return send in here and here.index(send) < len(there)

    def channel(self, send: Action) -> Channel:
        return self.rank_of[send.stage], self.rank_of[send.peer_stage], send.op

    def carry_out(self, rank: int, actions: list[Action]) -> None:
        for action in actions:
            if self.rank_of[action.stage] != rank:
                raise Fault(f"{action} on rank {rank}")
            if not self.waits(action) and action.op not in RECV_OPS:
                missing = [each for each in self.rule.before(action) if each not in self.count]
                if missing:
                    raise Fault(f"{action} before {missing}")
            self.check_shard(action)
            self.count[action] += 1
            if action.op in SEND_OPS:
                self.sent[self.channel(action)].append(action)
                self.last_sent[rank] = action
            if action.op in RECV_OPS:
                self.received[self.channel(counterpart(action))].append(counterpart(action))

    def check_shard(self, action: Action) -> None:
        stage, op = action.stage, action.op
        needs = op is Op.RESHARD or (op in COMPUTE_OPS and self.rule.shards(stage))
        if (op is Op.UNSHARD and stage in self.gathered) or (needs and stage not in self.gathered):
            raise Fault(f"{action} where {self.gathered} are gathered")
        if op in (Op.UNSHARD, Op.RESHARD):
            self.gathered ^= {stage}

    def check_messages(self) -> None:
        """What was sent was received in the same order, and some edge needs it."""
        makers = [Action(s, op, 0) for s in range(self.schedule.stages) for op in (Op.F, Op.B)]
        wanted = {send for maker in makers for send in self.rule.sends(maker)}
        for channel in {*self.sent, *self.received}:
            if self.sent[channel] != self.received[channel]:
                raise Fault(f"channel {channel} ends with messages that do not match")
            if any(send._replace(microbatch=0) not in wanted for send in self.sent[channel]):
                raise Fault(f"channel {channel} carries what no edge needs")

    def check_counts(self) -> None:
        twice = [a for a, n in self.count.items() if n > 1 and a.op not in (Op.UNSHARD, Op.RESHARD)]
        if twice:
            raise Fault(f"more than once: {twice}")
        for stage in range(self.schedule.stages):
            for m in self.schedule.parts:
                f, *backward = (self.count[Action(stage, op, m)] for op in (Op.F, Op.I, Op.W, Op.B))
                out, back = (self.count[Action(stage, op, m)] for op in (Op.OFFLOAD, Op.RELOAD))
                if out > back:
                    raise Fault(f"stage {stage}, microbatch {m}: offloaded and not reloaded")
                if not f or (self.schedule.trains and backward not in ([1, 1, 0], [0, 0, 1])):
                    raise Fault(f"stage {stage}, microbatch {m}: F {f}, I, W and B {backward}")


def fault(schedule: Schedule, *, blocking: bool = False) -> str | None:
    """Why a schedule does not complete, or ``None`` if it does."""
    try:
        Executor(schedule, blocking=blocking).run()
    except Fault as why:
        return str(why)
    return None
