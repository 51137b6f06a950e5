"""A second opinion on the proof: the meaning of a schedule, executed step by step.

It shares nothing with the validator but the rule of what an action needs. Posting and waiting are monotone
(what may run now may run later), so running whatever can run finds out whether everything can.
"""

from __future__ import annotations

from collections import Counter, defaultdict

from penstock.schedule import Action, Dependencies, Op, Schedule
from penstock.schedule.action import (
    COMPUTE_OPS,
    MESSAGE_OPS,
    RECV_OPS,
    SEND_OPS,
    STAGE_OPS,
    WAIT_SEND_OPS,
)
from penstock.schedule.base import flat
from penstock.schedule.dependencies import counterpart

Channel = tuple[int, int, str]


class Fault(Exception):
    """The schedule did something wrong, or stopped."""


class Executor:
    """Runs a schedule; :meth:`run` raises Fault unless every rank comes to its end with nothing amiss.

    With ``blocking``, a rank goes on after a SEND only when the message is complete.
    """

    def __init__(self, schedule: Schedule, *, blocking: bool) -> None:
        self.schedule, self.blocking = schedule, blocking
        self.sending: dict[int, Action] = {}
        self.rule = Dependencies(schedule)
        self.at = [0] * schedule.ranks
        self.done: set[tuple[int, Action]] = set()
        self.sent: dict[Channel, list[Action]] = defaultdict(list)
        self.received: dict[Channel, list[Action]] = defaultdict(list)
        self.gathered: set[int] = set()

    def run(self) -> None:
        while any(self.advance(rank) for rank in range(self.schedule.ranks)):
            pass
        for rank, program in enumerate(self.schedule.programs):
            if self.at[rank] < len(program):
                raise Fault(f"rank {rank} stands at {program[self.at[rank]]}")
        self.check_ends()

    def advance(self, rank: int) -> bool:
        program = self.schedule.programs[rank]
        if self.at[rank] == len(program):
            return False
        actions = list(flat((program[self.at[rank]],)))
        if self.blocking and rank in self.sending and actions[0].op not in STAGE_OPS:
            if not self.message_complete(rank, self.sending[rank]):
                return False
            del self.sending[rank]
        if not all(self.may(rank, action) for action in actions):
            return False
        for action in actions:
            self.do(rank, action)
        self.at[rank] += 1
        return True

    def may(self, rank: int, action: Action) -> bool:
        if self.schedule.placement.rank_of[action.stage] != rank:
            raise Fault(f"{action} on rank {rank}")
        if action.op in COMPUTE_OPS or action.op in WAIT_SEND_OPS:
            return all(self.complete(rank, needed) for needed in self.rule.before(action))
        if action.op not in RECV_OPS:
            for needed in self.rule.before(action):
                if (rank, needed) not in self.done:
                    raise Fault(f"{action} before {needed}")
        return True

    def complete(self, rank: int, needed: Action) -> bool:
        if needed.op in MESSAGE_OPS:
            return self.message_complete(rank, needed)
        home = self.schedule.placement.rank_of[needed.stage]
        if home != rank and self.schedule.communicates and needed.op in COMPUTE_OPS:
            raise Fault(f"{needed} is on another rank")
        return (home, needed) in self.done

    def channel(self, action: Action) -> Channel:
        rank_of = self.schedule.placement.rank_of
        ends = rank_of[action.stage], rank_of[action.peer_stage]
        kind = action.op.value[-1]
        return (*ends, kind) if action.op in SEND_OPS else (*ends[::-1], kind)

    def message_complete(self, rank: int, message: Action) -> bool:
        """Both ends have posted it; by order on the channel, so have they the earlier ones."""
        channel = self.channel(message)
        mine = self.sent[channel] if message.op in SEND_OPS else self.received[channel]
        others = self.received[channel] if message.op in SEND_OPS else self.sent[channel]
        if message not in mine:
            return False
        place = mine.index(message)
        if place >= len(others):
            return False
        if others[place] != counterpart(message):
            raise Fault(f"{message} meets {others[place]}")
        return True

    def do(self, rank: int, action: Action) -> None:
        if action.op in (Op.UNSHARD, Op.RESHARD) or self.rule.shards(action.stage):
            self.shard(action)
        if (rank, action) in self.done and action.op not in (Op.UNSHARD, Op.RESHARD):
            raise Fault(f"{action} twice")
        self.done.add((rank, action))
        if action.op in SEND_OPS:
            self.sent[self.channel(action)].append(action)
            self.sending[rank] = action
        if action.op in RECV_OPS:
            self.received[self.channel(action)].append(action)

    def shard(self, action: Action) -> None:
        there = action.stage in self.gathered
        if action.op is Op.UNSHARD:
            if there:
                raise Fault(f"{action} twice")
            self.gathered.add(action.stage)
        elif action.op in COMPUTE_OPS or action.op is Op.RESHARD:
            if not there:
                raise Fault(f"{action} without parameters")
            if action.op is Op.RESHARD:
                self.gathered.discard(action.stage)

    def check_ends(self) -> None:
        wanted = {
            send
            for stage in range(self.schedule.stages)
            for op in (Op.F, Op.B)
            for send in self.rule.sends(Action(stage, op, 0))
        }
        for channel in {*self.sent, *self.received}:
            if [counterpart(a) for a in self.sent[channel]] != self.received[channel]:
                raise Fault(f"channel {channel} ends with messages that do not match")
            if any(send._replace(microbatch=0) not in wanted for send in self.sent[channel]):
                raise Fault(f"channel {channel} carries what no edge needs")
        self.check_counts()

    def check_counts(self) -> None:
        count = Counter(action._replace(peer=None) for _, action in self.done)
        for stage in range(self.schedule.stages):
            for m in range(self.schedule.microbatches):
                f, i, w, b = (count[Action(stage, op, m)] for op in (Op.F, Op.I, Op.W, Op.B))
                backward = (i, w, b) in ((1, 1, 0), (0, 0, 1))
                if f != 1 or (self.schedule.trains and not backward):
                    raise Fault(f"stage {stage}, microbatch {m}: F {f}, I {i}, W {w}, B {b}")


def fault(schedule: Schedule, *, blocking: bool = False) -> str | None:
    """Why a schedule does not complete, or ``None`` if it does."""
    try:
        Executor(schedule, blocking=blocking).run()
    except Fault as found:
        return str(found)
    return None


def wait_for_sends(schedule: Schedule) -> Schedule:
    """A WAIT_SEND for each SEND at the end of its program, as files of others may have them."""
    waits = (
        [a._replace(op=Op(f"WAIT_{a.op}")) for a in flat(program) if a.op in SEND_OPS]
        for program in schedule.programs
    )
    return schedule.with_programs(
        (*program, *wait) for program, wait in zip(schedule.programs, waits, strict=True)
    )
