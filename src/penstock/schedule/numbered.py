"""A schedule as the clock takes it: programs of numbers, and what each number needs.

Messages have this meaning. SEND and RECV *post* and return. A message is complete when both ends have posted
it and the earlier ones on its channel are complete; there is one first-in first-out channel per ordered pair
of ranks and kind of message. A compute action waits for what it needs, WAIT_SEND for its message. An
overlapped pair starts when both halves may. OFFLOAD and RELOAD start a copy and return; a rank and its host
make one copy at a time in each direction, beside what the rank computes.

An action that may run now may also run later. So one run shows for all runs whether they complete.

The validator and the simulator handle millions of actions, so each entry of a program is a number. The
actions of one stage, op and peer form a *lane*; the rule of ``dependencies.py`` is the same for all of them,
so it is evaluated once per lane.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import chain, islice

from penstock.schedule.action import (
    RECV_OPS,
    STAGE_OPS,
    Action,
    Entry,
    Op,
    Slice,
    halves,
    message,
)
from penstock.schedule.base import Schedule
from penstock.schedule.clock import Costs, Link, Ran, run, transfer_of
from penstock.schedule.dependencies import Dependencies, Either, Need

Lane = tuple[int, Op, int | None]
"""A stage, an op, and the peer of a message that does not go to the neighbour."""


def lane_of(action: Action) -> Lane:
    """The lane of an action, which may name its peer although that is the neighbour."""
    stage, op, microbatch, peer = action
    return stage, op, None if peer is None else message(stage, op, microbatch, peer).peer


class Numbered:
    """A schedule as the clock takes it.

    The entries of the programs are numbered rank by rank. Beside the ranks run the channels, as programs of
    *transfers*, whose numbers follow; a transfer needs both ends of its message posted. Copies between a rank
    and its host are transfers too. So the clock knows neither messages nor pairs nor copies.

    Args:
        schedule: any schedule, with or without messages.
        costs: what it costs.

    Attributes:
        rule: what must come before each action.
        entries: the entry of each number.
        rank: the rank of each entry.
        programs: the numbers that each rank, and then each channel, runs; last the channels to hosts.
        lanes: for each lane, the number of each of its microbatches.
        repeated: the actions that an entry before has too, each after its number.
        channels: the SEND and the RECV of each message that has both, by channel, in the order of the SENDs.
        copies: the transfer of each OFFLOAD and RELOAD, by its number.
        arrival: for each of these ends, and for each RELOAD, the transfer and how long after that it has
            arrived.
        lengths: how long each transfer takes.
        needs: what each number needs that other programs run. What no program runs counts as met.
        unmet: what does not come before an action, though it must: the action after its number, what it
            needs, and the number of that, if its rank runs it later.
    """

    def __init__(self, schedule: Schedule, costs: Costs | None = None) -> None:
        self.schedule, self.costs = schedule, costs or Costs()
        self._size_of = self.costs.per_slice("slice_sizes", schedule)
        self.rule = Dependencies(schedule)
        self.entries: list[Entry] = [*chain.from_iterable(schedule.programs)]
        self.rank: list[int] = []
        self.programs: list[range] = []
        for rank, program in enumerate(schedule.programs):
            self.programs.append(range(len(self.rank), len(self.rank) + len(program)))
            self.rank += [rank] * len(program)
        self.lanes: dict[Lane, dict[int | Slice | None, int]] = defaultdict(dict)
        self.repeated: list[tuple[int, Action]] = []
        self._fill_lanes()
        self.needs: list[list[Link]] = [[] for _ in self.entries]
        self.unmet: list[tuple[int, Action, Action, int | None]] = []
        self.channels: list[list[tuple[int, int]]] = []
        self.arrival: dict[int, Link] = {}
        self.lengths: list[float] = []
        self._open_channels()
        self.copies: dict[int, int] = {}
        self._open_host_channels()
        for lane in [lane for lane in self.lanes if lane[1] not in RECV_OPS]:
            for need in self.rule.needs(*lane):
                self._link(lane, need)

    def _fill_lanes(self) -> None:
        lanes = self.lanes
        for number, entry in enumerate(self.entries):
            for action in halves(entry):
                lane = lanes[lane_of(action)]
                if lane.setdefault(action[2], number) != number:
                    self.repeated.append((number, action))

    def _open_channels(self) -> None:
        """Make a transfer of each message that has both ends."""
        rank_of, size_of = self.schedule.placement.rank_of, self._size_of
        channels: dict[tuple[int, Op, int], list[tuple[int, int]]] = defaultdict(list)
        takes: dict[int, float] = {}
        for lane in [lane for lane in self.lanes if lane[1] in RECV_OPS]:
            (need,) = self.rule.needs(*lane)
            send = self.rule.settle(need, 0)
            ends = [(sent, number) for number, _, sent in self._met(lane, need) if sent is not None]
            transfer = transfer_of(self.schedule, send, self.costs)
            posts = self.lanes.get(lane_of(send), {}).items()
            takes |= {number: transfer * size_of(m) if transfer else 0.0 for m, number in posts}
            channels[rank_of[send.stage], send.op, rank_of[lane[0]]] += ends
        for (source, _, target), messages in channels.items():
            latency, _ = self.costs.wire(source, target)
            messages.sort()
            first = len(self.needs)
            for number, (sent, received) in enumerate(messages, first):
                self.arrival[sent] = self.arrival[received] = (number, latency)
                self.lengths.append(takes[sent])
                self.needs.append([(sent, 0.0), (received, 0.0)])
            self.programs.append(range(first, len(self.needs)))
            self.channels.append(messages)

    def _open_host_channels(self) -> None:
        """Make a transfer of each copy; what comes back must have left before."""
        sizes = self.costs.per_stage("activation", self.schedule.stages)
        for op in (Op.OFFLOAD, Op.RELOAD):
            posts: list[list[tuple[int, int, int | Slice | None]]] = [
                [] for _ in range(self.schedule.ranks)
            ]
            for (stage, kind, _), numbers in self.lanes.items():
                for m, number in numbers.items() if kind is op else ():
                    posts[self.rank[number]].append((number, stage, m))
            for each in filter(None, posts):
                first = len(self.needs)
                for transfer, (number, stage, m) in enumerate(sorted(each), first):
                    left = self.lanes[stage, Op.OFFLOAD, None].get(m) if op is Op.RELOAD else None
                    self.copies[number] = transfer
                    moved = sizes[stage] * self._size_of(m)
                    self.lengths.append(self.costs.host_latency + moved / self.costs.host_bandwidth)
                    self.needs.append([(number, 0.0)])
                    if op is Op.RELOAD:
                        self.arrival[number] = (transfer, 0.0)
                    if left in self.copies:
                        self.needs[transfer].append((self.copies[left], 0.0))
                self.programs.append(range(first, len(self.needs)))

    def _met(self, lane: Lane, need: Need) -> list[tuple[int, int | Slice | None, int | None]]:
        """Each number of a lane, a microbatch of which it needs something, and the number of that."""
        stage, op, peer, after = need
        lanes, numbers = self.lanes, self.lanes[lane]
        known: dict[int | Slice | None, int | None] = {
            **lanes.get((stage, need.split_op, peer), {})
        }
        if op is Either.ACTIVATIONS:
            reloads = lanes.get((stage, Op.RELOAD, None), {})
            known |= {m: reloads.get(m) for m in lanes.get((stage, Op.OFFLOAD, None), ())}
        elif isinstance(op, Either):
            known |= lanes.get((stage, Op.B, None), {})
        elif op in STAGE_OPS:
            known = dict.fromkeys(numbers, known.get(None))
        if lane[1] is Op.REDUCE_GRAD:
            every = self.schedule.parts
            return [(number, m, known.get(m)) for number in numbers.values() for m in every]
        if after:
            there = [m for m in numbers if self.rule.has(need, m)]
            return [(numbers[m], m, known.get(self.rule.settle(need, m)[2])) for m in there]
        return [(number, m, known.get(m)) for m, number in numbers.items()]

    def _link(self, lane: Lane, need: Need) -> None:
        """Hold a lane against one of its needs, and link what meets it in another program."""
        stage, op, peer = lane
        rank, arrival, needs = self.rank, self.arrival, self.needs
        lag = self._under_way(need, stage)
        for number, m, met in self._met(lane, need):
            if met is None or (rank[met] == rank[number] and met >= number):
                action = Action(stage, op, None if op in STAGE_OPS else m, peer)
                self.unmet.append((number, action, self.rule.settle(need, m), met))
            elif met in arrival:
                needs[number].append(arrival[met])
            elif lag is not None:
                latency, transfer = lag
                needs[number].append((met, latency + transfer * self._size_of(m)))

    def _under_way(self, need: Need, user: int) -> tuple[float, float] | None:
        """The latency of a result that no message carries, and how long that of a whole microbatch travels.

        ``None`` if it does not change ranks.
        """
        rank_of = self.schedule.placement.rank_of
        source, target = rank_of[need.stage], rank_of[user]
        if source == target:
            return None
        transfers = (
            transfer_of(self.schedule, send, self.costs)
            for send in self.rule.sends(Action(need.stage, need.split_op, 0))
            if rank_of[send.peer_stage] == target
        )
        return self.costs.wire(source, target)[0], max(transfers, default=0.0)

    def run(self, duration: Sequence[float] = (), *, blocking_sends: bool = False) -> Ran:
        """Run it, to its end or as far as it comes.

        Args:
            duration: how long each entry keeps its rank busy; by default none takes time.
            blocking_sends: whether each SEND keeps its rank until the message is complete.
        """
        takes = [*(duration or [0.0] * len(self.entries)), *self.lengths]
        return run(self.programs, takes, self._blocking() if blocking_sends else self.needs)

    def _blocking(self) -> list[list[Link]]:
        """The needs, if what follows a SEND waits for its message."""
        needs = list(self.needs)
        for send, _ in chain.from_iterable(self.channels):
            following = range(send + 1, self.programs[self.rank[send]].stop)
            waiting = (number for number in following if self.entries[number][1] not in STAGE_OPS)
            for number in islice(waiting, 1):
                needs[number] = [*needs[number], self.arrival[send]]
        return needs

    def find(self, action: Action) -> int | None:
        """The number of an action, or ``None`` if no program has it; if it recurs, the first."""
        return self.lanes.get(lane_of(action), {}).get(action.microbatch)

    def action(self, number: int, user: int | None = None) -> Action:
        """The action of a number; of a pair the half that a user needs, by default the forward."""
        entry = self.entries[number]
        if isinstance(entry, Action):
            return entry
        users = () if user is None else halves(self.entries[user])
        needed = [before for half in users for before in self.rule.before(half)]
        return next((half for half in entry if half in needed), entry.forward)

    def position(self, number: int) -> int:
        """The place of an entry in the program of its rank."""
        return number - self.programs[self.rank[number]].start
