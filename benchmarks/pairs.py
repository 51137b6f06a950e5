"""Compare two ways to do a thing, in turn, so that a machine whose speed drifts is fair to both."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter, process_time


@dataclass(frozen=True)
class Ratios:
    """Paired times in seconds: how long ours took over how long the peer took, round by round.

    Args:
        ours: a time a round.
        peers: likewise, of the same rounds.
    """

    ours: Sequence[float]
    peers: Sequence[float]

    @property
    def each(self) -> list[float]:
        """The ratio of each round."""
        return [a / b for a, b in zip(self.ours, self.peers, strict=True)]

    @property
    def median(self) -> float:
        """The middle ratio."""
        return statistics.median(self.each)

    @property
    def quartiles(self) -> tuple[float, float]:
        """Half of the rounds lie between these."""
        low, _, high = statistics.quantiles(self.each, n=4)
        return low, high

    def to_json(self) -> dict[str, object]:
        """The figures, with the times they come from."""
        return {
            "ratio": {"median": self.median, "quartiles": self.quartiles},
            "ours_seconds": statistics.median(self.ours),
            "peer_seconds": statistics.median(self.peers),
            "rounds": [{"ours": a, "peer": b} for a, b in zip(self.ours, self.peers, strict=True)],
        }

    def told(self, base: str) -> str:
        """The figures in a line.

        Args:
            base: what ours is compared with.
        """
        low, high = self.quartiles
        return (
            f"{self.median:.3f} x {base} (quartiles {low:.3f} to {high:.3f}, {len(self.ours)} rounds; "
            f"medians {1e3 * statistics.median(self.ours):.2f} ms "
            f"and {1e3 * statistics.median(self.peers):.2f} ms)"
        )


def bytes_to_json(ours: int, peers: int) -> dict[str, object]:
    """The figures of a ratio of memory, which has no spread."""
    ratio = ours / peers
    return {
        "ratio": {"median": ratio, "quartiles": (ratio, ratio)},
        "ours_bytes": ours,
        "peer_bytes": peers,
    }


@dataclass(frozen=True)
class Times:
    """What each repeat of something took, round by round, in seconds.

    Args:
        elapsed: by the clock.
        cpu: of this process's CPU, all threads.
    """

    elapsed: Sequence[float]
    cpu: Sequence[float]


def take_turns(
    ways: Mapping[str, Callable[[], object]], rounds: int, repeats: int
) -> dict[str, Times]:
    """Time several things in turn, each round in another order.

    Args:
        ways: each runs one repeat.
        rounds: how many times of each.
        repeats: how many repeats make one time.
    """
    names = list(ways)
    found: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in names}
    for index in range(rounds):
        turn = index % len(names)
        for name in names[turn:] + names[:turn]:
            before = process_time()
            found[name][0].append(_time(ways[name], repeats))
            found[name][1].append((process_time() - before) / repeats)
    return {name: Times(*times) for name, times in found.items()}


def _time(run: Callable[[], object], repeats: int) -> float:
    start = perf_counter()
    for _ in range(repeats):
        run()
    return (perf_counter() - start) / repeats
