"""One order for the actions of all ranks: what a single process runs."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from penstock.errors import ScheduleError
from penstock.schedule.action import MESSAGE_OPS, WAIT_SEND_OPS, Action, Entry, Overlap
from penstock.schedule.base import Schedule, flat, paused_collection
from penstock.schedule.dependencies import Dependencies

_BETWEEN_RANKS = MESSAGE_OPS | WAIT_SEND_OPS


@paused_collection()
def merged(schedule: Schedule) -> list[Action]:
    """All ranks' actions in one order that respects every dependency, in time linear in their number.

    Each rank's own order is kept. The two halves of an overlapped pair follow each other, the forward first.

    Args:
        schedule: with or without its messages; these are left out, since one process needs none.

    Raises:
        ScheduleError: a deadlock, or an action that needs one which no rank runs; the message says for each
            rank that is stuck where it stands and what it waits for.
    """
    silent = schedule.with_programs(
        (e for e in program if isinstance(e, Overlap) or e.op not in _BETWEEN_RANKS)
        for program in schedule.programs
    )
    rule = Dependencies(silent)
    done: set[Action] = set()
    order: list[Action] = []
    places = [0] * silent.ranks
    asleep: dict[Action, list[int]] = {}
    ready = deque(range(silent.ranks))
    while ready:
        rank = ready.popleft()
        program = silent.programs[rank]
        while places[rank] < len(program):
            entry = program[places[rank]]
            missing = next((need for need in _needs(rule, entry) if need not in done), None)
            if missing is not None:
                asleep.setdefault(missing, []).append(rank)
                break
            for action in flat((entry,)):
                done.add(action)
                order.append(action)
                ready.extend(asleep.pop(action, ()))
            places[rank] += 1
    if asleep:
        raise ScheduleError(_deadlock(silent, places, asleep))
    return order


def _needs(rule: Dependencies, entry: Entry) -> Iterator[Action]:
    """What must be done before an entry starts, but for what the entry does itself."""
    if isinstance(entry, Overlap):
        needs = (*rule.before(entry.forward), *rule.before(entry.backward))
        return (need for need in needs if need not in entry)
    return iter(rule.before(entry))


def _deadlock(schedule: Schedule, places: list[int], asleep: dict[Action, list[int]]) -> str:
    """Where each stuck rank stands, and what it waits for."""
    where = {a: rank for rank in range(schedule.ranks) for a in schedule.actions(rank)}
    lines = []
    for missing, ranks in asleep.items():
        runs = f" of rank {where[missing]}" if missing in where else ", which no rank runs"
        for rank in ranks:
            stands = schedule.programs[rank][places[rank]]
            lines.append((rank, f"rank {rank} at {stands} waits for {missing}{runs}"))
    waits = "; ".join(line for _, line in sorted(lines))
    return f"{schedule.name}: deadlock: {waits}"
