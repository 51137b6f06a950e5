"""Clusters: the device of each rank, and the links between them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import median
from typing import Annotated, Any, Literal

from pydantic import Field

from penstock.errors import UsageError
from penstock.plan.choice import LARGEST
from penstock.plan.costs import FILE, Number, Rate, read_json, write_json
from penstock.plan.devices import Device, device_named


@dataclass(frozen=True)
class Link:
    """The speed of messages from one rank to another; the same in the other direction, if that is not given.

    Args:
        source: the rank that sends.
        target: the rank that receives.
        latency: the seconds after which an empty message has arrived.
        bandwidth: the bytes per second in one direction.
        both: the bytes per second in each direction while both carry messages; 0 if unknown.
    """

    source: Annotated[int, Field(ge=0)]
    target: Annotated[int, Field(ge=0)]
    latency: Number
    bandwidth: Rate
    both: Number = 0.0

    __pydantic_config__ = FILE


@dataclass(frozen=True)
class Cluster:
    """The devices that ranks can have, and their links.

    Args:
        devices: the device of each rank.
        machines: the machine of each rank; by default devices of one kind fill machines of ``Device.node``.
        links: what is known of links. An unknown one is like the median of those that are as near, or as
            the devices say.
        handling: how long a rank is busy with a message that it sends or receives, whatever its size.
        copying: how long it is busy with each byte of it.
    """

    devices: tuple[Device, ...]
    machines: tuple[str, ...] = ()
    links: tuple[Link, ...] = ()
    handling: Number = 0.0
    copying: Number = 0.0

    __pydantic_config__ = FILE

    def __post_init__(self) -> None:
        if not self.devices:
            raise UsageError("a cluster needs at least one device")
        if not self.machines:
            object.__setattr__(self, "machines", tuple(_machines(self.devices)))
        if len(self.machines) != len(self.devices):
            raise UsageError(f"{len(self.machines)} machines for {len(self.devices)} devices")
        beyond = [link for link in self.links if max(link.source, link.target) >= len(self.devices)]
        if beyond:
            raise UsageError(
                f"a link joins ranks {beyond[0].source} and {beyond[0].target}, but there are only "
                f"{len(self.devices)} devices, counted from 0"
            )

    def __len__(self) -> int:
        return len(self.devices)

    def wire(self, source: int, target: int) -> tuple[float, float]:
        """The latency and bandwidth of messages from one rank to another."""
        for pair in ((source, target), (target, source)):
            if pair in self._known:
                return self._known[pair]
        near = self.machines[source] == self.machines[target]
        if near in self._usual:
            return self._usual[near]
        ends = [self.devices[source], self.devices[target]]
        wires = [device.wire(1 if near else device.node + 1) for device in ends]
        return max(latency for latency, _ in wires), min(bandwidth for _, bandwidth in wires)

    @cached_property
    def _known(self) -> dict[tuple[int, int], tuple[float, float]]:
        """The latency and bandwidth of the links, by their ends."""
        return {(link.source, link.target): (link.latency, link.bandwidth) for link in self.links}

    @cached_property
    def _usual(self) -> dict[bool, tuple[float, float]]:
        """The latency and bandwidth that are usual inside a machine, and between machines."""
        alike: dict[bool, list[Link]] = {}
        for link in self.links:
            near = self.machines[link.source] == self.machines[link.target]
            alike.setdefault(near, []).append(link)
        return {
            near: (median(link.latency for link in of), median(link.bandwidth for link in of))
            for near, of in alike.items()
        }

    def only(self, ranks: Sequence[int]) -> Cluster:
        """The cluster of some of the ranks, in this order."""
        place = {rank: index for index, rank in enumerate(ranks)}
        links = (
            replace(link, source=place[link.source], target=place[link.target])
            for link in self.links
            if link.source in place and link.target in place
        )
        return replace(
            self,
            devices=tuple(self.devices[rank] for rank in ranks),
            machines=tuple(self.machines[rank] for rank in ranks),
            links=tuple(links),
        )

    def __str__(self) -> str:
        groups: list[list[str]] = []
        for device in self.devices:
            if groups and groups[-1][0] == device.name:
                groups[-1].append(device.name)
            else:
                groups.append([device.name])
        return ", ".join(f"{len(group)} x {group[0]}" for group in groups)

    def to_json(self) -> str:
        """The cluster as JSON."""
        return write_json(_ClusterFile(self))

    @staticmethod
    def from_json(text: str) -> Cluster:
        """Read what ``to_json`` or ``penstock doctor`` wrote.

        Raises:
            InputFileError: the text is not a cluster.
        """
        return read_json(_ClusterFile, text, "a cluster", "penstock doctor --out").cluster

    @staticmethod
    def parse(ranks: str) -> Cluster:
        """Read a cluster from words.

        Args:
            ranks: devices of the table, such as ``4xh100-80GB,4xa100-40GB``; without a size, a device has
                the memory of the table.

        Raises:
            UsageError: a word cannot be read, or a device is not in the table.
        """
        words = filter(None, map(str.strip, ranks.split(",")))
        return Cluster(tuple(device for word in words for device in _devices(word)))


@dataclass
class _ClusterFile:
    cluster: Cluster
    facts: Any = None
    format: Literal["penstock-cluster"] = "penstock-cluster"
    version: Literal[1] = 1

    __pydantic_config__ = FILE


def cluster_file(cluster: Cluster, facts: Any) -> str:
    """A cluster as JSON, with what else was found out about it."""
    return write_json(_ClusterFile(cluster, facts))


def _machines(devices: Sequence[Device]) -> Iterator[str]:
    """The machine of each device: neighbours of one kind share one, as many as it holds."""
    number, left, before = -1, 0, ""
    for device in devices:
        if device.name != before or not left:
            number, left, before = number + 1, device.node, device.name
        left -= 1
        yield str(number)


# ---- clusters in words


_DEVICE = re.compile(r"(?:(\d+)\s*x\s*)?([a-z][a-z0-9-]*?)(?:-(\d+(?:\.\d+)?\s*[kmgt]?i?b))?", re.I)
_SIZE = re.compile(r"(\d+(?:\.\d+)?(?:e\d+)?)\s*([kmgt]?)(i?)b?", re.I)


def bytes_of(text: str) -> float | None:
    """The bytes of a size such as ``80GB``, ``512MiB`` or ``1000``; None if it is none."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        return None
    number, prefix, binary = match.groups()
    return float(number) * (1024.0 if binary else 1000.0) ** " kmgt".index(prefix.lower() or " ")


def _devices(word: str) -> list[Device]:
    match = _DEVICE.fullmatch(word)
    if match is None:
        raise UsageError(
            f"ranks={word!r}: must be a number of devices, such as 4xh100 or 4xa100-40GB"
        )
    count, name, size = match.groups()
    if int(count or 1) > LARGEST:
        raise UsageError(f"ranks={word!r}: at most {LARGEST} devices can be planned")
    device = device_named(name, memory=bytes_of(size) if size else None)
    if size:
        device = replace(device, name=f"{device.name}-{size.replace(' ', '')}")
    return [device] * int(count or 1)
