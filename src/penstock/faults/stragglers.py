"""A stage far slower than planned: told, never stopped."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import median
from typing import Any

FACTOR = 3.0
"""So many times the others' median makes a straggler: a plan gives all stages about the same."""
FEWEST = 8
"""Actions of each stage before it is judged."""
SHORTEST = 0.005
"""Seconds below which an action is too short to matter."""


class Stragglers:
    """Compares the stages of a pipeline by how long their actions take, since the last look."""

    def __init__(self) -> None:
        self._before: dict[int, tuple[float, int]] = {}
        self._named: set[int] = set()

    def find(self, beats: Iterable[Mapping[str, Any]]) -> list[str]:
        """What to say about stages that were not named before.

        Args:
            beats: the heartbeats of all ranks.
        """
        now = {
            int(stage): (float(seconds), int(count))
            for beat in beats
            for stage, (seconds, count) in beat.get("busy", {}).items()
        }
        means = self._means(now)
        if len(means) < len(now) or len(means) < 2:
            return []
        self._before = now
        return [text for stage in means if (text := self._judge(stage, means))]

    def _means(self, now: Mapping[int, tuple[float, int]]) -> dict[int, float]:
        means = {}
        for stage, (seconds, count) in now.items():
            seconds_before, count_before = self._before.get(stage, (0.0, 0))
            if count - count_before >= FEWEST:
                means[stage] = (seconds - seconds_before) / (count - count_before)
        return means

    def _judge(self, stage: int, means: Mapping[int, float]) -> str:
        usual = median(mean for other, mean in means.items() if other != stage)
        seen = means[stage]
        if stage in self._named or seen < max(SHORTEST, FACTOR * usual):
            return ""
        self._named.add(stage)
        return (
            f"stage {stage} is a straggler: an action takes {1e3 * seen:.1f} ms there, planned are "
            f"{1e3 * usual:.1f} ms as in the other stages; everybody waits for it: look at its device, "
            "or cut the model so that it holds less"
        )
