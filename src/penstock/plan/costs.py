"""Profiles, which hold the costs of units by the size of microbatches; and the costs of stages."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from penstock.errors import InputFileError, UsageError
from penstock.partition import choose_cuts
from penstock.plan.devices import Device
from penstock.plan.meter import Operation
from penstock.schedule import Costs, Edge, Op, Placement
from penstock.schedule.passes import AHEAD

Cut = tuple[int, ...]
"""The units that stages start with, beginning with unit 0."""
KINDS = {Op.F: "forward", Op.I: "input", Op.W: "weight", Op.B: "backward"}
Number = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Numbers = tuple[Number, ...]
Rate = Annotated[float, Field(gt=0)]
Wire = tuple[int, int, Number, Rate]
"""Two ranks, and the latency and bandwidth of messages from the first to the second."""
FILE = ConfigDict(extra="forbid", ser_json_inf_nan="strings", arbitrary_types_allowed=True)
"""How pydantic reads and writes dataclasses in files: JSON has no infinity."""


def runs_of(cut: Cut, units: int) -> list[range]:
    """The range of units of each stage; ``units`` is the number of all units."""
    return [range(a, b) for a, b in pairwise((*cut, units))]


def cut_of(units: Sequence[str], stages: Sequence[Sequence[str]]) -> Cut:
    """The units that the stages of a partition start with.

    Raises:
        UsageError: the stages do not hold the units in their order.
    """
    if [path for paths in stages for path in paths] != list(units):
        raise UsageError("these stages do not hold the units of the costs, in their order")
    starts, at = [], 0
    for paths in stages:
        starts.append(at)
        at += len(paths)
    return tuple(starts)


# ---- units


@dataclass(frozen=True)
class UnitCost:
    """The costs of one unit for one microbatch, in seconds and bytes.

    Args:
        path: the path of its module.
        forward: the time of F.
        input: the time of I, which computes the gradients of its inputs.
        weight: the time of W, which computes the gradients of its weights.
        backward: the time of B, which computes both.
        once: the part of these times, by the same names, that a stage spends once, however many units it has.
        spread: half the interquartile range of its times, as a share of their median; 0 if predicted.
        held: the bytes that F leaves until I or B, apart from the values that units pass on.
        around: the part of ``held`` from operations around its module, which checkpointing does not free.
        stash: the bytes that I leaves until W.
        extra: the bytes that each action needs while it runs, beyond those held before or after it.
        parameters: the bytes of its weights and buffers.
        trained: how many of these bytes get gradients.
        numbers: the number of elements in its weights.
        flops: the floating-point operations of its forward.
    """

    path: str
    forward: float
    input: float
    weight: float
    backward: float
    once: Mapping[str, float] = field(default_factory=dict)
    spread: float = 0.0
    held: float = 0.0
    around: float = 0.0
    stash: float = 0.0
    extra: Mapping[str, float] = field(default_factory=dict)
    parameters: int = 0
    trained: int = 0
    numbers: int = 0
    flops: float = 0.0


@dataclass(frozen=True)
class ValueCost:
    """Tensors that one unit makes, and that the same later units use.

    Args:
        name: its name, unique among the values.
        source: the unit that makes it.
        targets: the units that use it, in ascending order.
        bytes: its size in bytes.
        gradient: whether a gradient comes back.
        kept: the units whose graphs keep it until backward.
    """

    name: str
    source: int
    targets: tuple[int, ...]
    bytes: float
    gradient: bool = True
    kept: tuple[int, ...] = ()


Work = Mapping[str, Mapping[Operation, int]]
"""How often each operation runs in a unit's actions, by the name of the action."""


class Units(NamedTuple):
    """What the units of a model do for a microbatch.

    Attributes:
        costs: the costs of each unit; all times are 0 if none were measured.
        values: the values between units.
        works: how often each operation runs in the actions of each unit.
    """

    costs: tuple[UnitCost, ...]
    values: tuple[ValueCost, ...]
    works: tuple[Work, ...]

    def on(self, device: Device) -> tuple[UnitCost, ...]:
        """The costs with the times that a device takes for these operations."""
        seconds = {
            op: device.seconds(*op) for work in self.works for of in work.values() for op in of
        }

        def times(work: Work) -> dict[str, Any]:
            return {k: sum(n * seconds[op] for op, n in of.items()) for k, of in work.items()}

        both = zip(self.costs, self.works, strict=True)
        return tuple(replace(cost, **times(work)) for cost, work in both)


# ---- stages


@dataclass(frozen=True)
class StageCosts:
    """The costs of the stages of a cut for a microbatch, in seconds and bytes; one number per stage.

    Args:
        forward: the time of F.
        input: the time of I.
        weight: the time of W.
        backward: the time of B.
        activation: the bytes that F leaves until I or B.
        stash: the bytes that I leaves until W.
        extra: the further bytes that an action needs while it runs, by op.
        kinds: the bytes of ``weights``, ``gradients`` and ``optimizer`` states, by these names.
        taken: the bytes of the values that arrive from other ranks.
        returned: the bytes of the gradients that arrive from other ranks.
        sent: the bytes of the gradients that it sends to other ranks.
        given: the bytes of the values that it sends to other ranks and keeps no longer than that.
        left: the bytes of the gradients that its backward leaves on its rank for other stages there, less
            those that it uses up.
        edges: the values that travel between stages.
        message: the bytes of each of these values.
        latency: the latency of a message.
        bandwidth: the bytes per second of a channel.
        links: where they differ from these, from rank to rank: two ranks, and the latency and bandwidth.
        host: the bytes per second that a device exchanges with its host, for activations that leave.
    """

    forward: Numbers
    input: Numbers
    weight: Numbers
    backward: Numbers
    activation: Numbers
    stash: Numbers
    extra: Mapping[str, Numbers]
    kinds: tuple[Mapping[str, Number], ...]
    taken: Numbers
    returned: Numbers
    sent: Numbers
    given: Numbers
    left: tuple[float, ...]
    edges: tuple[Edge, ...]
    message: Mapping[str, Number]
    latency: Number = 0.0
    bandwidth: Rate = math.inf
    links: tuple[Wire, ...] = ()
    host: Rate = math.inf

    __pydantic_config__ = FILE

    def __post_init__(self) -> None:
        if not KINDS.keys() <= self.extra.keys():
            raise UsageError("extra= needs the bytes of each op: F, I, W and B")
        numbers = (
            self.input, self.weight, self.backward, self.activation, self.stash, self.kinds, self.taken,
            self.returned, self.sent, self.given, self.left, *self.extra.values(),
        )  # fmt: skip
        if {*map(len, numbers)} != {len(self.forward)}:
            raise UsageError("the costs of stages need one number per stage everywhere")
        if not all(kinds.keys() == {"weights", "gradients", "optimizer"} for kinds in self.kinds):
            raise UsageError(
                "the bytes that a stage holds are weights, gradients and optimizer states"
            )

    @cached_property
    def costs(self) -> Costs:
        """The costs for the simulator."""
        return Costs(
            forward=self.forward,
            input=self.input,
            weight=self.weight,
            backward=self.backward,
            latency=self.latency,
            bandwidth=self.bandwidth,
            links={(source, target): (late, rate) for source, target, late, rate in self.links},
            message=self.message,
            activation=self.activation,
            stash=self.stash,
            host_bandwidth=self.host,
            unit="s",
        )

    @property
    def ahead(self) -> int:
        """For how many forwards of its stage a copy to or from the host is under way, at most."""
        stages = zip(self.activation, self.forward, strict=True)
        return math.ceil(max(size / self.host / time for size, time in stages if time)) or 1

    @cached_property
    def static(self) -> tuple[float, ...]:
        """The bytes that each stage always holds."""
        return tuple(sum(kinds.values()) for kinds in self.kinds)

    def messages(self, stage: int) -> float:
        """The most bytes that a stage's messages take while they wait to be used or sent."""
        of_stage = self.taken[stage], self.returned[stage], self.sent[stage], self.given[stage]
        return AHEAD * sum(of_stage)

    def static_on(self, placement: Placement, rank: int) -> float:
        """The bytes that a rank always holds: weights, gradients and optimizer states."""
        return sum(self.static[stage] for stage in placement.stages_on(rank))


@dataclass(frozen=True)
class UnitCosts:
    """The units of a model, in order, and the values between them, for microbatches of one size.

    Args:
        samples: the number of samples in a microbatch.
        units: the costs of each unit.
        values: the values that units hand on.
    """

    samples: Annotated[int, Field(ge=1)]
    units: tuple[UnitCost, ...]
    values: tuple[ValueCost, ...]

    __pydantic_config__ = FILE

    def __post_init__(self) -> None:
        named = {unit for of in self.values for unit in (of.source, *of.targets, *of.kept)}
        if not named <= {*range(len(self.units))}:
            raise UsageError(f"a value is of a unit beyond the {len(self.units)} that there are")

    def cut(self, stages: int, *, placement: Placement | None = None) -> list[list[str]]:
        """The stages whose times are most even, as ``stages=`` of a Pipeline takes them.

        Args:
            stages: how many stages to make.
            placement: which rank holds which stage; then ranks are made equal, not stages.

        Raises:
            PartitionError: there are more stages than units.
        """
        times = [unit.forward + unit.backward for unit in self.units]
        starts = choose_cuts(times, stages, placement)
        runs = runs_of(starts, len(self.units))
        return [[self.units[number].path for number in run] for run in runs]

    def stages(  # noqa: PLR0913 - what lies between the stages, by name
        self,
        cut: Cut,
        placement: Placement,
        *,
        recompute: Collection[int] = (),
        states: float = 2.0,
        latency: float = 0.0,
        bandwidth: float = math.inf,
        handling: float = 0.0,
        copying: float = 0.0,
        on: Sequence[UnitCosts] = (),
        wire: Callable[[int, int], tuple[float, float]] | None = None,
    ) -> StageCosts:
        """The costs of the stages of a cut.

        Args:
            cut: the units that stages start with.
            placement: which rank holds which stage; nothing travels between stages of one rank.
            recompute: the units that keep only their inputs, and recompute the rest.
            states: bytes of optimizer state for each byte of trained weights; 2 for AdamW.
            latency: the latency of a message.
            bandwidth: the bytes per second of a channel.
            handling: how long a rank is busy with a message that it sends or receives, whatever its size.
            copying: how long it is busy with each byte of it.
            on: what the units cost on each rank, where ranks differ; only their times count.
            wire: the latency and bandwidth from one rank to another, where links differ.
        """
        again = frozenset(recompute)
        runs = runs_of(cut, len(self.units))
        travel = _Travel(self, runs, placement.rank_of, again)
        units = [on[rank] if on else self for rank in placement.rank_of]

        def seconds(kind: str) -> Numbers:
            handled = travel.handled[kind != "forward"] if kind != "weight" else [{}] * len(runs)
            return tuple(
                units[stage].seconds(kind, run, again)
                + handling * len(handled[stage])
                + copying * sum(handled[stage].values())
                for stage, run in enumerate(runs)
            )

        held = [unit.around if n in again else unit.held for n, unit in enumerate(self.units)]
        return StageCosts(
            forward=seconds("forward"),
            input=seconds("input"),
            weight=seconds("weight"),
            backward=seconds("backward"),
            activation=tuple(
                sum(held[number] for number in run)
                + travel.inside[stage]
                + travel.entering[stage]
                + travel.leaving[stage]
                for stage, run in enumerate(runs)
            ),
            stash=tuple(sum(self.units[number].stash for number in run) for run in runs),
            extra={
                op.value: tuple(
                    self._extra(op, run, held, travel.pending)
                    + (travel.returned[stage] if op in (Op.I, Op.B) else 0.0)
                    for stage, run in enumerate(runs)
                )
                for op in KINDS
            },
            kinds=tuple(self._kinds(run, states) for run in runs),
            taken=tuple(travel.entering),
            returned=tuple(travel.returned),
            sent=tuple(travel.sent),
            given=tuple(travel.given),
            left=tuple(travel.left),
            edges=tuple(travel.edges),
            message=travel.bytes,
            latency=latency,
            bandwidth=bandwidth,
            links=tuple((a, b, *wire(a, b)) for a, b in travel.pairs()) if wire else (),
        )

    def scaled(self, factors: Sequence[Mapping[str, float]]) -> UnitCosts:
        """The same costs with other times.

        Args:
            factors: for each unit, what to multiply the times of its actions with, by their names; if empty,
                nothing changes.
        """

        def scaled(unit: UnitCost, by_kind: Mapping[str, float]) -> UnitCost:
            by = {kind: by_kind.get(kind, 1.0) for kind in KINDS.values()}
            times: dict[str, Any] = {kind: getattr(unit, kind) * by[kind] for kind in by}
            once = {kind: least * by.get(kind, 1.0) for kind, least in unit.once.items()}
            return replace(unit, **times, once=once)

        if not factors:
            return self
        both = zip(self.units, factors, strict=True)
        return replace(self, units=tuple(scaled(unit, by_kind) for unit, by_kind in both))

    def seconds(self, kind: str, run: range, again: Collection[int] = ()) -> float:
        """The time of an action of a stage's units; what is spent once for all of them counts once."""
        once = [self.units[number].once.get(kind, 0.0) for number in run]
        recomputes = again if kind in ("input", "backward") else ()
        more = sum([self.units[number].forward for number in run if number in recomputes])
        whole: float = sum([getattr(self.units[number], kind) for number in run])
        return whole - sum(once) + max(once) + more

    def _extra(self, op: Op, run: range, held: Sequence[float], pending: Sequence[float]) -> float:
        """The most that a stage needs in an action beyond what it holds before or after, at any of its units.

        In F, later units hold nothing yet. In B, they no longer hold anything, but their gradients exist.
        Recomputed values exist while they are used.
        """
        backward = op in (Op.I, Op.B)
        most, freed = 0.0, 0.0
        for number in reversed(run):
            unit = self.units[number]
            need = unit.extra.get(KINDS[op], 0.0)
            if backward:
                need += pending[number] + unit.held - max(held[number], unit.around)
            most = max(most, need - freed)
            # After I the unit still holds what W needs.
            freed += held[number] if op in (Op.F, Op.B) else 0.0
        return most

    def _kinds(self, run: range, states: float) -> dict[str, float]:
        trained = float(sum(self.units[number].trained for number in run))
        weights = float(sum(self.units[number].parameters for number in run))
        return {"weights": weights, "gradients": trained, "optimizer": trained * states}


class _Travel:
    """Which stages hold the values between units, and which values travel between stages.

    Attributes:
        inside: the bytes of values that each stage's own graphs keep.
        entering: the bytes of values that each stage gets from other ranks.
        leaving: the bytes of values that each stage hands on, and that its rank keeps until backward.
        returned, sent, given, left: As in ``StageCosts``.
        pending: the bytes of gradients that wait, while a unit runs, for earlier units of its stage.
        handled: in forward and in backward, the bytes of each stage's messages, by the stage at the other
            end and whether it sends.
        edges: the values that travel.
        bytes: their sizes.
    """

    def __init__(
        self, of: UnitCosts, runs: Sequence[range], rank_of: Sequence[int], again: frozenset[int]
    ) -> None:
        self._runs, self._rank_of, self._again = runs, rank_of, again
        self._stage_of = [stage for stage, run in enumerate(runs) for _ in run]
        self.inside, self.entering, self.leaving = ([0.0] * len(runs) for _ in range(3))
        self.given = [0.0] * len(runs)
        self.returned, self.sent, self.left = ([0.0] * len(runs) for _ in range(3))
        self.pending = [0.0] * len(of.units)
        self.handled: list[list[dict[tuple[int, bool], float]]] = [
            [defaultdict(float) for _ in runs] for _ in range(2)
        ]
        self.edges: list[Edge] = []
        self.bytes: dict[str, float] = {}
        for value in of.values:
            self._place(value)

    def pairs(self) -> list[tuple[int, int]]:
        """The ranks that send to each other: values from the first, or gradients."""
        ends = {
            (self._rank_of[edge.source], self._rank_of[target])
            for edge in self.edges
            for target in edge.targets
        }
        return sorted({pair for a, b in ends if a != b for pair in ((a, b), (b, a))})

    def _place(self, value: ValueCost) -> None:
        home = self._stage_of[value.source]
        users = sorted({self._stage_of[target] for target in value.targets} - {home})
        if value.gradient:
            self._let_gradients_wait(value)
        if users:
            # What no graph on this rank has saved is free once its message has been used.
            inside = [n for n in (value.source, *value.targets) if self._stage_of[n] == home]
            kept = any(n in self._again or n in value.kept for n in inside if n != value.source)
            kept |= value.source in value.kept and value.source not in self._again
            kept |= any(self._rank_of[user] == self._rank_of[home] for user in users)
            (self.leaving if kept else self.given)[home] += value.bytes
            self.edges.append(Edge(value.name, home, tuple(users), value.gradient))
            self.bytes[value.name] = value.bytes
        elif self._is_kept(value):
            self.inside[home] += value.bytes
        by_rank: dict[int, list[int]] = {}
        for user in users:
            by_rank.setdefault(self._rank_of[user], []).append(user)
        for rank, there in by_rank.items():
            away = rank != self._rank_of[home]
            if away:
                self.entering[there[0]] += value.bytes
                self._send(0, home, there[0], value.bytes)
            if value.gradient:
                self._give_back(value.bytes, home, there, away=away)

    def _let_gradients_wait(self, value: ValueCost) -> None:
        """Count a gradient while it waits: in each stage from the last user to the source or first unit."""
        latest = {self._stage_of[target]: target for target in value.targets}
        for stage, last in latest.items():
            for number in range(max(value.source, self._runs[stage].start), last):
                self.pending[number] += value.bytes

    def _give_back(self, size: float, home: int, users: Sequence[int], *, away: bool) -> None:
        """Count the gradients of a value from its users on one rank, which wait there until all are made."""
        last = users[0] if away else home
        if away:
            self.returned[home] += size
            self.sent[last] += size
            self._send(1, last, home, size)
        for user in users:
            if user != last:
                self.left[user] += size
                self.left[last] -= size

    def _send(self, backward: int, source: int, target: int, size: float) -> None:
        self.handled[backward][source][target, True] += size
        self.handled[backward][target][source, False] += size

    def _is_kept(self, value: ValueCost) -> bool:
        """Tell whether a value that stays in its stage lives until backward."""
        kept = any(end not in self._again for end in value.kept)
        return kept or any(target in self._again for target in value.targets)


# ---- profiles


Coster = Callable[[int, Device | None], UnitCosts]
"""Finds what units cost for so many samples: on the device of the profile, or as predicted for another."""


@dataclass
class Profile:
    """The costs of a model's units, found for each size of microbatch on its first use.

    Args:
        device: the device: a name in the table of devices, or the device of the measurement.
        known: the known costs, by the number of samples in a microbatch.
        memory: bytes of the device; 0 if unknown.
        latency: the latency of a message between ranks.
        bandwidth: bytes per second of a channel between ranks.
        handling: how long a rank is busy with a message that it sends or receives.
        node: the most devices for which ``latency`` and ``bandwidth`` hold; 0 for any number.
        network: the latency and bandwidth for more devices.
        tokens: tokens in a sample; 0 to count samples instead of tokens.
        measured: whether the times were measured.
        model: the name of the model.
        factors: how many times as long the actions of each unit take as was measured or predicted, by the
            names of the actions; empty if that is not known.
        coster: a function that finds unknown costs.
    """

    device: str
    known: dict[int, UnitCosts] = field(default_factory=dict)
    memory: Number = 0.0
    latency: Number = 0.0
    bandwidth: Rate = math.inf
    handling: Number = 0.0
    node: Annotated[int, Field(ge=0)] = 0
    network: tuple[Number, Rate] = (0.0, math.inf)
    tokens: Annotated[int, Field(ge=0)] = 0
    measured: bool = False
    model: str = ""
    factors: tuple[Mapping[str, Number], ...] = ()
    coster: Coster | None = field(default=None, repr=False, compare=False)

    __pydantic_config__ = FILE

    def at(self, samples: int) -> UnitCosts:
        """The costs of a microbatch of so many samples.

        Raises:
            UsageError: the costs are unknown, and there is no model to find them with.
        """
        if samples not in self.known:
            if self.coster is None:
                raise UsageError(
                    f"the costs are known for microbatches of {sorted(self.known)} samples, not of "
                    f"{samples}; ask for microbatches of such a size, or measure or predict them again"
                )
            self.known[samples] = self.coster(samples, None)
        return self.known[samples].scaled(self.factors)

    def on(self, samples: int, device: Device, alone: float) -> UnitCosts:
        """The costs of a microbatch of so many samples on a device.

        Args:
            samples: the number of samples.
            device: the device.
            alone: how long the device of the profile took, by itself, for the work of ``Device.pace``.

        Raises:
            UsageError: nobody knows how fast the device is, beside that of the profile.
        """
        beside = self.measured or device.name == self.device
        if self.coster is not None and not (self.measured or (beside and device.pace)):
            return self.coster(samples, device).scaled(self.factors)
        if beside and device.pace and alone:
            of = self.at(samples)
            pace = dict.fromkeys(KINDS.values(), device.pace / alone)
            return of.scaled([pace] * len(of.units))
        if device.name == self.device:
            return self.at(samples)
        raise UsageError(
            f"the costs are those of {self.device}, and nothing says how fast {device.name} is beside it; "
            "measure both with penstock doctor, or predict the costs of the model"
        )

    def on_all(self, samples: int, devices: Sequence[Device]) -> tuple[UnitCosts, ...]:
        """The costs of a microbatch on each of several devices; equal devices share their costs.

        Args:
            samples: the number of samples.
            devices: the devices. If the profile was measured, then on the first, while the others waited.
        """
        firsts = [devices.index(device) for device in devices]
        costs = {first: self.on(samples, devices[first], devices[0].alone) for first in {*firsts}}
        return tuple(costs[first] for first in firsts)

    def wire(self, devices: int) -> tuple[float, float]:
        """The latency and bandwidth between ranks that use so many devices."""
        if self.node and devices > self.node:
            return self.network
        return self.latency, self.bandwidth

    def to_json(self) -> str:
        """The known costs as JSON, without the model."""
        return write_json(_ProfileFile(replace(self, coster=None)))

    @staticmethod
    def from_json(text: str) -> Profile:
        """Read what ``to_json`` wrote.

        Raises:
            InputFileError: the text is not a profile.
        """
        return read_json(_ProfileFile, text, "costs", "Profile.to_json").profile


@dataclass
class _ProfileFile:
    profile: Profile
    format: Literal["penstock-costs"] = "penstock-costs"
    version: Literal[3] = 3

    __pydantic_config__ = FILE


T = TypeVar("T")


def write_json(value: Any) -> str:
    """A dataclass as JSON."""
    adapter: TypeAdapter[Any] = TypeAdapter(type(value))
    return adapter.dump_json(value, indent=1, exclude_none=True).decode()


def read_json(kind: type[T], text: str, what: str, writer: str) -> T:
    """Read what ``write_json`` wrote.

    Raises:
        InputFileError: the text is not of that kind; the message names the first error.
    """
    try:
        return TypeAdapter(kind).validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise InputFileError(
            f"not {what} as penstock.plan writes them: {where + ': ' if where else ''}{first['msg']}; "
            f"write them with {writer}"
        ) from error
