"""The examination of a job's ranks, anomalies among them, and its report."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from penstock._engine.devices import placed_on
from penstock._engine.transport import Transport
from penstock._engine.values import bytes_as_text
from penstock.doctor.checks import Check, SmallPipeline
from penstock.doctor.links import Handling, LinkReport, examine_links, per_message
from penstock.doctor.rates import WINDOW, Facts, Rates, facts_of
from penstock.pipeline import Pipeline
from penstock.plan import Cluster, Device, Link, device_called
from penstock.plan.choice import seconds_as_text
from penstock.plan.cluster import cluster_file
from penstock.train.config import world_size

SLOWER = 0.8
"""A rank below this share of the rate of comparable ranks is an anomaly."""
LESS = 0.1
"""A link below this share of the bandwidth of comparable links is an anomaly."""
LATER = 3.0
"""A link with so many times the latency of comparable links is an anomaly, from so many seconds; within a
machine that is enough if there is no other link."""
NOTICED = 1e-3
LOW = 0.3
"""A share of a device's peak below which its matrix products are odd."""


@dataclass(frozen=True)
class RankReport:
    """What was found out about a rank.

    Args:
        facts: what it is.
        flops: floating-point operations per second in matrix products, by type.
        bandwidth: bytes per second of its memory.
        launch: the least time of an operation.
        pace: the time of a piece of work while all ranks do it.
        alone: its time while the other ranks of the machine wait.
    """

    facts: Facts
    flops: dict[str, float]
    bandwidth: float
    launch: float
    pace: float
    alone: float

    def rates(self) -> dict[str, float]:
        """All that ranks of one kind should have alike, by name; more is better."""
        named = {f"products in {dtype}": rate for dtype, rate in self.flops.items()}
        others = {"copies": self.bandwidth, "a block": 1 / self.pace, "memory": self.facts.memory}
        return {**named, **{what: rate for what, rate in others.items() if rate}}

    def device(self) -> Device:
        """The rank as the planner sees it."""
        known = device_called(self.facts.device)
        return Device(
            known.name if known else self.facts.device,
            self.flops,
            self.facts.memory,
            self.bandwidth,
            launch=self.launch,
            compute_efficiency=1.0,
            memory_efficiency=1.0,
            pace=self.pace,
            alone=self.alone,
        )


@dataclass(frozen=True)
class Examination:
    """What was found out about the ranks of a job.

    Args:
        ranks: the ranks.
        links: the links between neighbours.
        handling: how long a rank is busy with a message, whatever its size, and with each byte of it.
        checks: what was tried.
    """

    ranks: tuple[RankReport, ...]
    links: tuple[LinkReport, ...]
    handling: tuple[float, float]
    checks: tuple[Check, ...]

    @property
    def cluster(self) -> Cluster:
        """The ranks and links as the planner takes them."""
        return Cluster(
            tuple(rank.device() for rank in self.ranks),
            tuple(rank.facts.host for rank in self.ranks),
            tuple(report.link for report in self.links),
            *self.handling,
        )

    def odd(self) -> list[str]:
        """The anomalies, in sentences; empty if there are none."""
        failed = [f"{check.name}: no: {check.problem}" for check in self.checks if check.problem]
        return [*failed, *self._versions(), *self._slow(), *self._links()]

    def _versions(self) -> Iterator[str]:
        for name in dict.fromkeys(name for rank in self.ranks for name in rank.facts.versions):
            several: dict[str, list[int]] = {}
            for number, rank in enumerate(self.ranks):
                several.setdefault(rank.facts.versions.get(name, "none"), []).append(number)
            if len(several) > 1:
                where = "; ".join(f"{version} on {_ranks(of)}" for version, of in several.items())
                yield f"{name} differs: {where}"

    def _slow(self) -> Iterator[str]:
        for number, rank in enumerate(self.ranks):
            like = [one.rates() for one in self.ranks if one.facts.device == rank.facts.device]
            shares = {
                what: rate / median(one[what] for one in like)
                for what, rate in rank.rates().items()
            }
            where = f"rank {number} ({rank.facts.host})"
            if slow := [
                f"{what} at {share:.0%}" for what, share in shares.items() if share < SLOWER
            ]:
                yield f"{where} is slower than comparable ranks: {', '.join(slow)} of their median"
            known = device_called(rank.facts.device)
            for dtype, rate in rank.flops.items() if known else ():
                peak = known.flops.get(dtype, 0.0) if known else 0.0
                if rate < LOW * peak:
                    yield (
                        f"{where} reaches {rate / peak:.0%} of its peak in products of {dtype}; is it "
                        "shared, or too hot?"
                    )

    def _links(self) -> Iterator[str]:
        hosts = [rank.facts.host for rank in self.ranks]
        for report in self.links:
            link = report.link
            near = hosts[link.source] == hosts[link.target]
            like = [
                one
                for one in self.links
                if (hosts[one.link.source] == hosts[one.link.target]) is near
            ]
            where = f"the link between ranks {link.source} and {link.target}"
            usual = median(one.link.bandwidth for one in like)
            least = min(link.bandwidth, report.back)
            if least < LESS * usual:
                yield f"{where} carries {_rate(least)}, {least / usual:.0%} of the median of comparable links"
            delay = max(link.latency, report.tiny)
            others = [max(one.link.latency, one.tiny) for one in like if one is not report]
            if delay > NOTICED and (delay > LATER * median(others) if others else near):
                said = (
                    f"; comparable links take {seconds_as_text(median(others))}" if others else ""
                )
                yield f"{where} delays a message by {seconds_as_text(delay)}{said}"

    def __str__(self) -> str:
        dtypes = list(dict.fromkeys(dtype for rank in self.ranks for dtype in rank.flops))
        head = ["rank", "machine", "device", "memory", *dtypes, "copies", "a block", "alone"]
        rows = [head]
        for number, rank in enumerate(self.ranks):
            facts = rank.facts
            rates = [_flops(rank.flops[dtype]) for dtype in dtypes]
            rows.append(
                [str(number), facts.host, facts.device, bytes_as_text(facts.memory), *rates,
                 _rate(rank.bandwidth), seconds_as_text(rank.pace), seconds_as_text(rank.alone)]
            )  # fmt: skip
        links = [["link", "a few bytes", "latency", "there", "back", "both at once"]]
        for report in self.links:
            link = report.link
            links.append(
                [f"{link.source} - {link.target}", seconds_as_text(report.tiny),
                 seconds_as_text(link.latency), _rate(link.bandwidth), _rate(report.back),
                 _rate(link.both)]
            )  # fmt: skip
        versions = ", ".join(f"{n} {v}" for n, v in self.ranks[0].facts.versions.items())
        tried = [f"{'no ' if check.problem else 'yes'} {check.name}" for check in self.checks]
        odd = self.odd()
        last = ["anomalies:", *(f"- {one}" for one in odd)] if odd else ["no anomalies"]
        tables = [_aligned(rows), *([_aligned(links)] if self.links else []), versions]
        return "\n\n".join([*tables, "\n".join(tried), "\n".join(last)])

    def to_json(self) -> str:
        """The cluster as JSON, with all that was found out."""
        return cluster_file(self.cluster, {**asdict(self), "odd": self.odd()})


def _ranks(numbers: Sequence[int]) -> str:
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def _flops(number: float) -> str:
    scale, unit = (1e12, "TFLOP/s") if number >= 1e12 else (1e9, "GFLOP/s")
    return f"{number / scale:.3g} {unit}"


def _rate(number: float) -> str:
    return f"{bytes_as_text(number)}/s"


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


# ---- the examination


def examine(
    device: torch.device | str = "cpu",
    *,
    folder: str | Path = ".",
    dtypes: Sequence[str] = (),
    group: Any = None,
    window: float = WINDOW,
    say: Callable[[str], None] = lambda _: None,
) -> Examination:
    """Examine the ranks of a job: all its processes call this together.

    Args:
        device: where ranks compute; ``"cuda"`` is the device of ``LOCAL_RANK``.
        folder: the folder of the run, which all ranks are to see.
        dtypes: the types of matrix products; by default those that a device of this kind is used with.
        group: the process group of the ranks; by default all processes.
        window: the seconds of each of the windows in which a rate is measured.
        say: told what is measured next.

    Raises:
        UsageError: there is no such device.
        PeerFailed: A rank has died or does not come.
    """
    ranks = group.size() if group is not None else world_size() or 2
    chosen = torch.device("cpu") if device is None else placed_on(device)
    say("makes a small pipeline")
    numbers = SmallPipeline(ranks, chosen, group)
    with numbers.pipe as pipe:
        home = pipe.device
        checks = [numbers.step(), numbers.folder(Path(folder))]
        if not checks[-1].problem:
            checks.append(numbers.save(Path(folder)))
        report = _examine_rank(pipe, Rates(home, window), dtypes or _dtypes(home), say)
        transport = _transport_of(pipe)
        links, handlings = list[LinkReport](), list[Handling]()
        if transport is not None:
            links, handlings = examine_links(transport, home, window, say)
        parts = [
            asdict(report),
            *([asdict(one) for one in several] for several in (links, handlings)),
        ]
        rows = pipe.job.meet(lambda: parts)
    reports = [LinkReport(**{**one, "link": Link(**one["link"])}) for row in rows for one in row[1]]
    return Examination(
        tuple(RankReport(**{**row[0], "facts": Facts(**row[0]["facts"])}) for row in rows),
        tuple(reports),
        per_message(Handling(**one) for row in rows for one in row[2]),
        tuple(checks),
    )


def _transport_of(pipe: Pipeline) -> Transport | None:
    """The transport of this rank; None if all ranks share a process."""
    transports: list[Transport] = []

    def as_it_is(transport: Transport) -> Transport:
        transports.append(transport)
        return transport

    pipe.job.wrap_transport(as_it_is)
    return transports[0] if transports else None


def _dtypes(device: torch.device) -> tuple[str, ...]:
    few = ("float32", "bfloat16")
    return few if device.type == "cpu" else (*few, "float16")


def _examine_rank(
    pipe: Pipeline, rates: Rates, dtypes: Sequence[str], say: Callable[[str], None]
) -> RankReport:
    """Return what a rank is and does, while all others do the same; and then by itself on its machine."""
    facts = facts_of(rates.device)
    say("measures all ranks at once")
    hosts = pipe.job.meet(lambda: facts.host)
    flops = {}
    for dtype in dtypes:
        # All ranks measure the same at the same time.
        pipe.job.meet(lambda: None)
        flops[dtype] = rates.products(dtype)
    pipe.job.meet(lambda: None)
    bandwidth, launch = rates.copies(), rates.least()
    pipe.job.meet(lambda: None)
    pace = alone = rates.block()
    if len(pipe.local_ranks) == 1:
        say("measures the ranks of each machine in turn")
        beside = [rank for rank, host in enumerate(hosts) if host == facts.host]
        for turn in range(max(map(hosts.count, hosts))):
            pipe.job.meet(lambda: None)
            if len(beside) > 1 and beside.index(pipe.rank) == turn:
                alone = rates.block()
    pipe.job.meet(lambda: None)
    return RankReport(facts, flops, bandwidth, launch, pace, alone)
