"""Which stage runs what happens between the units: where the fewest bytes travel for it.

At first it is the earliest stage that can know all it uses: of a residual sum the sum travels and not its
summands. What makes more of less, such as an upsampling, a concatenation or a cast, moves on to the stage
that uses it, if then fewer bytes travel.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from penstock.partition.calls.tape import Event, Tape


class Placing:
    """The stage of each event, to be improved.

    Args:
        tape: the events.
        owners: the earliest stage of each.
        makers: the stage of each parameter among the values, by number.
        stages: how many there are.
    """

    def __init__(
        self, tape: Tape, owners: Sequence[int], makers: Mapping[int, int], stages: int
    ) -> None:
        self._tape = tape
        self._parameters = makers
        self.owners = list(owners)
        self._users: dict[int, list[int]] = {}
        for index, event in enumerate(tape.events):
            for number in event.inputs:
                self._users.setdefault(number, []).append(index)
        self._last = stages - 1
        changed = {tape.values[c.new].memory for event in tape.events for c in event.changes}
        self._fixed = {n for n, value in enumerate(tape.values) if value.memory in changed}

    def improve(self) -> list[int]:
        """Move events to later stages, from the last event to the first."""
        for index in reversed(range(len(self.owners))):
            target = self._target(index)
            if target is not None and self._gain(index, target) > 0:
                self.owners[index] = target
        for index, event in enumerate(self._tape.events):
            if event.on is not None:
                self.owners[index] = self.stage_of(event.on)
        return self.owners

    def stage_of(self, number: int) -> int:
        """The stage that makes a value."""
        maker = self._tape.values[number].maker
        return self._parameters[number] if maker is None else self.owners[maker]

    def _target(self, index: int) -> int | None:
        """The first stage that uses what an event makes, if it is a later one and the event may move."""
        event = self._tape.events[index]
        if not self._may_move(event):
            return None
        stages = [s for n in self._made(index) for s in self._used_in(n)]
        first = min(stages, default=self.owners[index])
        return first if first > self.owners[index] else None

    def _may_move(self, event: Event) -> bool:
        if event.is_call or event.changes or event.random or event.answers or event.effect:
            return False
        if event.generators:
            return False
        return self._fixed.isdisjoint(event.inputs) and all(
            slot.same_as is None and slot.value not in self._fixed for slot in event.slots
        )

    def _made(self, index: int) -> list[int]:
        return [slot.value for slot in self._tape.events[index].slots]

    def _used_in(self, number: int, but: int | None = None) -> set[int]:
        """The stages that use a value, apart from event ``but``."""
        found = {self.owners[i] for i in self._users.get(number, ()) if i != but}
        return found | ({self._last} if number in self._tape.outputs else set())

    def _gain(self, index: int, target: int) -> int:
        """How many bytes fewer travel if an event moves."""
        owner = self.owners[index]
        gain = sum(self._bytes(n) for n in self._made(index) if target in self._used_in(n))
        for number in self._tape.events[index].inputs:
            home, others = self.stage_of(number), self._used_in(number, but=index)
            gain += self._bytes(number) * (home != owner and owner not in others)
            gain -= self._bytes(number) * (home != target and target not in others)
        return gain

    def _bytes(self, number: int) -> int:
        form = self._tape.values[number].form
        return math.prod(form.shape) * form.dtype.itemsize
