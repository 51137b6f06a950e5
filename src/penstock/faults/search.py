"""The search for the rank that all wait for: from place to place, up to one that waits for nobody."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from penstock.faults.failure import Failure, of_circle, of_death, of_leaving, of_silence
from penstock.faults.places import Place, in_ranges, ranges

STALE = 2.5
"""Seconds without a heartbeat, sent once a second, after which a process's threads count as stopped."""
CAUSE = 1.9
"""Seconds without a heartbeat after which a rank to which connections broke counts as dead."""

Read = Callable[[Sequence[int]], Mapping[int, Place]]
"""Reads the places of processes, as far as they are readable."""


class Search:
    """A search for a culprit, which looks at places again and again.

    Clocks of machines are never compared: a process is mute if its place has the same number as before.

    Args:
        members: the global ranks of all processes of the job.
        calls: the call of the pipeline that it is for.
        order: how many processes had begun to search before, in this call.

    Attributes:
        next: when to look again, on the monotonic clock.
    """

    def __init__(self, members: Sequence[int], calls: int = -1, order: int = 0) -> None:
        self.calls = calls
        self.order = order
        self.next = 0.0
        self._members = tuple(members)
        self._clock = 0.0
        self._seen: dict[int, tuple[int, float]] = {}

    def look(self, start: Place, read: Read, clock: float) -> list[Place]:
        """Follow the waits from one process to those that wait for nobody.

        Args:
            start: the place of the process that waits. If it notes no wait, as in a wrapper's collective, it
                may wait for anybody.
            read: reads places.
            clock: the seconds in which the store has answered so far.

        Returns:
            The places on the way, in the order in which they were found.
        """
        if start.waits is None:
            start = replace(start, waits="others", awaited=ranges(self._members))
        self._clock = clock
        order, known = [start], {start.process: start}
        for place in order:
            if place.waits is None or place.status == "left" or self.is_mute(place):
                continue
            awaited = in_ranges(place.awaited, self._members)
            answer = read([process for process in awaited if process not in known])
            known |= answer
            for one in answer.values():
                if self._seen.get(one.process, (-1, 0.0))[0] != one.number:
                    self._seen[one.process] = one.number, clock
            places = [known[one] for one in awaited if one in known and one != place.process]
            if place.collective is not None:
                number = place.collective
                late = [one for one in places if not one.has_come_to(place.awaited, number)]
                # If all have come, what they send one another does not arrive.
                places = late or places
            order += [one for one in places if one not in order]
        return order

    def stale(self, place: Place) -> float:
        """Seconds for which a process is known to have written nothing."""
        seen = self._seen.get(place.process)
        return 0.0 if seen is None or seen[0] != place.number else self._clock - seen[1]

    def is_mute(self, place: Place) -> bool:
        """Whether none of a process's threads run, or nothing that it writes arrives."""
        return self.stale(place) > STALE

    def judge(self, places: Sequence[Place], limit: float, *, broken: bool) -> Failure | None:
        """The failure that the places on the way mean, if any.

        Args:
            places: what :meth:`look` found, the one who waits first.
            limit: seconds for which a rank may make no progress, unless it has asked for more.
            broken: whether a connection of the first one broke.
        """
        failure = self._judged(places, limit, broken=broken)
        # A call that one rank alone makes is what keeps it waiting for another that knows nothing of it.
        calls = {place.call: place for place in places if place.call and place.waits}
        culprit = next((one for one in places if failure and one.process == failure.process), None)
        if failure is None or len(calls) != 1 or culprit is None or culprit.call in calls:
            return failure
        (name, caller), *_ = calls.items()
        return replace(
            failure, what=f"{failure.what}; {caller.name} is in {name}, which every rank must call"
        )

    def _judged(self, places: Sequence[Place], limit: float, *, broken: bool) -> Failure | None:
        start, *others = places
        for place in others:
            stale = self.stale(place)
            if place.status == "left" and (place.calls < start.calls or broken):
                return of_leaving(place, start.process)
            if broken and stale > CAUSE:
                return of_death(place, stale, start.process)
            if stale > STALE and start.age > max(limit, place.slack):
                return of_silence(place, stale, start.process)
        alive = [one for one in others if one.status == "runs" and not self.is_mute(one)]
        late = [one for one in alive if one.age > max(limit, one.slack)]
        if ends := [one for one in late if one.waits is None]:
            return of_silence(max(ends, key=lambda place: place.age), 0.0, start.process)
        if late and len(late) == len(others) and not broken:
            return of_circle([start, *late], start.process)
        return None
