"""The search for the rank that all wait for: from place to place, up to one that waits for nobody."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from penstock._engine.faults.failure import Failure, at_place
from penstock._engine.faults.places import Place, in_ranges

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
    """

    def __init__(self, members: Sequence[int]) -> None:
        self._members = tuple(members)
        self._clock = 0.0
        self._seen: dict[int, tuple[int, float]] = {}

    def look(self, start: Place, read: Read, clock: float) -> list[Place]:
        """Follow the waits from one process to those that wait for nobody.

        Args:
            start: the place of the process that waits.
            read: reads places.
            clock: the seconds in which the store has answered so far.

        Returns:
            The places on the way, in the order in which they were found.
        """
        self._clock = clock
        order, known = [start], {start.process: start}
        for place in order:
            ends = place.waits is None and place is not start
            if ends or place.status == "left" or self.is_mute(place):
                continue
            awaited = in_ranges(place.awaited, self._members) or self._members
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
        """Tell whether none of a process's threads run, or nothing that it writes arrives."""
        return self.stale(place) > STALE

    def judge(self, places: Sequence[Place], limit: float, *, broken: bool) -> Failure | None:
        """The failure that the places on the way mean, if any.

        Args:
            places: what :meth:`look` returned, the one who waits first.
            limit: seconds for which a rank may make no progress, unless it has asked for more.
            broken: whether a connection of the first one broke.
        """
        culprit = self._culprit(places, limit, broken=broken)
        if culprit is None:
            return None
        place, kind, what = culprit
        # A call that one rank alone makes is what keeps it waiting for another that knows nothing of it.
        calls = {one.call: one for one in places if one.call and one.waits}
        blamed = places if kind == "lost" else [place]
        if len(calls) == 1 and any(one.call not in calls for one in blamed):
            ((name, caller),) = calls.items()
            what += f"; {caller.name} is in {name}, which every rank must call"
        return at_place(place, kind, what, by=places[0].process)

    def _culprit(
        self, places: Sequence[Place], limit: float, *, broken: bool
    ) -> tuple[Place, str, str] | None:
        """The process to blame, the kind of its failure, and what is known of it."""
        start, *others = places
        for place in others:
            stale = self.stale(place)
            if place.status == "left" and (place.calls < start.calls or broken):
                plural = "" if place.step == 1 else "s"
                # Where it was before it left says nothing.
                alone = replace(place, stage=None, microbatch=None, action=None)
                return alone, "left", f"left after {place.step} training step{plural}, {LEFT}"
            if broken and stale > CAUSE:
                what = f"{DEAD}; it {place.doing}, by its last heartbeat at least {stale:.1f} s ago"
                return place, "died", what
            if stale > STALE and start.age > max(limit, place.slack):
                what = f"it {place.doing}, by its last heartbeat {stale:.1f} s ago; {MUTE}"
                return place, "silent", f"makes no progress: {what}"
        alive = [one for one in others if one.status == "runs" and not self.is_mute(one)]
        late = [one for one in alive if one.age > max(limit, one.slack)]
        if ends := [one for one in late if one.waits is None]:
            place = max(ends, key=lambda one: one.age)
            what = f"it {place.doing} for {place.age:.1f} s, and waits for nobody{_remedy(place)}"
            return place, "silent", f"makes no progress: {what}"
        if late and start.age > limit and len(late) == len(others) and not broken:
            listed = "; ".join(map(str, [start, *late][:4]))
            return start, "lost", f"{len(late) + 1} ranks wait for each other: {listed}: {CIRCLE}"
        return None


def _remedy(place: Place) -> str:
    """Return what helps a rank that is only slow."""
    if place.setup is not None:
        return "; if it needs that long, raise timeout=penstock.Timeouts(rendezvous=)"
    return (
        "" if place.inside else "; if it needs that long, say so by pipe.job.patient() or timeout="
    )


LEFT = (
    "while others go on; every rank must make the same calls of the pipeline: look for a loop that ends "
    "earlier there"
)
DEAD = (
    "its process died without reporting an error, its machine is down, or the network to it is cut"
)
MUTE = (
    "its process has ended or is stopped by a signal, its interpreter is held by code that does not let "
    "other threads run, its machine is down, or the network to it is cut"
)
CIRCLE = "they call different things, the network between them is cut, or messages were lost"
