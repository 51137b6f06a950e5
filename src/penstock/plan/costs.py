"""What the units of a model cost for a microbatch, and from that what the stages of a cut cost."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from itertools import pairwise
from statistics import median
from typing import Any

from penstock.errors import InputFileError, UsageError
from penstock.schedule import Costs, Edge, Op, Placement, Timeline

Cut = tuple[int, ...]
"""The units that stages start with, beginning with unit 0."""
Message = tuple[int, int]
"""The stages that a message goes from and to."""
_KIND = {Op.F: "forward", Op.I: "input", Op.W: "weight", Op.B: "backward"}


def runs_of(cut: Cut, units: int) -> list[range]:
    """The range of units of each stage, for so many units in all."""
    return [range(a, b) for a, b in pairwise((*cut, units))]


AHEAD = 2
"""How many messages per channel a rank has memory ready for before they arrive, as in the runtime."""


@dataclass(frozen=True)
class UnitCost:
    """What one unit costs for one microbatch, in seconds and bytes.

    Args:
        path: the path of its module.
        forward: the time of F.
        input: the time of I, which computes the gradients of its inputs.
        weight: the time of W, which computes the gradients of its weights.
        backward: the time of B, which computes both.
        spread: half of the range between the quartiles of its times, as a share of these; 0 if predicted.
        held: what F leaves until I or B, apart from the values that units hand on.
        around: the part of this that operations around its module leave, which are not computed again.
        stash: what I leaves until W.
        forward_extra: what F needs while it runs, beyond what is held before or after it.
        input_extra: the same for I.
        weight_extra: the same for W.
        backward_extra: the same for B.
        parameters: the bytes of its weights and buffers.
        trained: how many of these bytes get gradients.
        numbers: how many numbers its weights hold.
        flops: the floating-point operations of its forward.
    """

    path: str
    forward: float
    input: float
    weight: float
    backward: float
    spread: float = 0.0
    held: float = 0.0
    around: float = 0.0
    stash: float = 0.0
    forward_extra: float = 0.0
    input_extra: float = 0.0
    weight_extra: float = 0.0
    backward_extra: float = 0.0
    parameters: int = 0
    trained: int = 0
    numbers: int = 0
    flops: float = 0.0


@dataclass(frozen=True)
class ValueCost:
    """A value that units hand on.

    Args:
        name: its name, unique among the values.
        source: the unit that makes it.
        targets: the units that use it, in ascending order.
        bytes: its size.
        gradient: whether a gradient comes back.
        kept: the units whose graphs keep it until backward.
    """

    name: str
    source: int
    targets: tuple[int, ...]
    bytes: float
    gradient: bool = True
    kept: tuple[int, ...] = ()


@dataclass(frozen=True)
class StageCosts:
    """What the stages of a cut cost, including what the simulator does not know.

    Args:
        costs: the costs of actions and messages, for the simulator.
        edges: the values that travel between stages.
        extra: for each op and each stage what an action needs while it runs.
        static: for each stage the bytes of weights, gradients and optimizer states.
        kinds: for each stage the same bytes by kind.
        taken: for each stage the bytes of the values that arrive from other ranks for a microbatch.
        returned: for each stage the bytes of the gradients that arrive from other ranks.
        sent: for each stage the bytes of the gradients that it sends to other ranks.
        left: for each stage the bytes of the gradients that its backward leaves on its rank for other stages
            there, less those that it uses up.
    """

    costs: Costs
    edges: tuple[Edge, ...]
    extra: Mapping[str, Sequence[float]]
    static: tuple[float, ...]
    kinds: tuple[Mapping[str, float], ...]
    taken: tuple[float, ...]
    returned: tuple[float, ...]
    sent: tuple[float, ...]
    left: tuple[float, ...]

    def messages(self, stage: int) -> float:
        """The most bytes that a stage's messages take while they wait to be used or sent."""
        return AHEAD * (self.taken[stage] + self.returned[stage] + self.sent[stage])


@dataclass(frozen=True)
class UnitCosts:
    """The units of a model, in order, and the values between them, for microbatches of one size.

    Args:
        samples: the samples of a microbatch.
        units: what each unit costs.
        values: the values that they hand on.
        between: the seconds that each further unit of a stage saves, in F and in B, since a stage is entered
            only once.
    """

    samples: int
    units: tuple[UnitCost, ...]
    values: tuple[ValueCost, ...]
    between: tuple[float, float] = (0.0, 0.0)

    @cached_property
    def weights(self) -> tuple[float, ...]:
        """The seconds of each unit, forward and backward: what a cut makes equal."""
        return tuple(unit.forward + max(unit.backward, unit.input) for unit in self.units)

    def again(self, unit: int) -> float:
        """The seconds of computing a unit again, for which no stage is entered."""
        return max(self.units[unit].forward - self.between[0], 0.0)

    @property
    def seconds(self) -> float:
        """The seconds of forward and backward of a microbatch on one device."""
        return sum(self.weights)

    def stages(  # noqa: PLR0913 - what lies between the stages, by name
        self,
        cut: Cut,
        placement: Placement,
        *,
        checkpoint: Collection[int] = (),
        states: float = 2.0,
        latency: float = 0.0,
        bandwidth: float = float("inf"),
        handling: float = 0.0,
    ) -> StageCosts:
        """What the stages of a cut cost.

        Args:
            cut: the units that stages start with.
            placement: which rank holds which stage; nothing travels between stages of one rank.
            checkpoint: the units that keep only their inputs, and compute the rest again.
            states: bytes of optimizer state for each byte of trained weights; 2 for AdamW.
            latency: the latency of a message.
            bandwidth: the bytes per second of a channel.
            handling: how long a rank is busy with a message, at either end of it.
        """
        return _Composed(self, cut, placement, frozenset(checkpoint)).all(
            states, latency, bandwidth, handling
        )


class _Composed:
    """Adds units up to stages."""

    def __init__(
        self, unit_costs: UnitCosts, cut: Cut, placement: Placement, checkpoint: frozenset[int]
    ) -> None:
        self._of = unit_costs
        self._units = unit_costs.units
        self._again = checkpoint
        self._runs = runs_of(cut, len(self._units))
        self._stage_of = [stage for stage, run in enumerate(self._runs) for _ in run]
        self._rank_of = placement.rank_of
        stages = len(self._runs)
        self._inside, self._enters, self._leaves = ([0.0] * stages for _ in range(3))
        self._returned, self._sent, self._left = ([0.0] * stages for _ in range(3))
        self._messages: tuple[set[Message], set[Message]] = set(), set()
        self._pending = [0.0] * len(self._units)
        """For each unit the bytes of gradients that wait meanwhile for earlier units of its stage."""
        self._edges: list[Edge] = []
        self._bytes: dict[str, float] = {}
        for value in unit_costs.values:
            self._place(value)

    def _place(self, value: ValueCost) -> None:
        """Find where a value is kept until backward, and whether it travels."""
        home = self._stage_of[value.source]
        users = sorted({self._stage_of[target] for target in value.targets} - {home})
        if value.gradient:
            self._let_wait(value)
        if users:
            # The source keeps what it sent, to start backward from.
            self._leaves[home] += value.bytes
            self._edges.append(Edge(value.name, home, tuple(users), value.gradient))
            self._bytes[value.name] = value.bytes
        elif self._keeps(value, home):
            self._inside[home] += value.bytes
        by_rank: dict[int, list[int]] = {}
        for user in users:
            by_rank.setdefault(self._rank_of[user], []).append(user)
        for rank, there in by_rank.items():
            if rank != self._rank_of[home]:
                self._enters[there[0]] += value.bytes
                self._messages[0].add((home, there[0]))
            if value.gradient:
                self._give_back(value.bytes, home, rank, there)

    def _let_wait(self, value: ValueCost) -> None:
        """Count a gradient in each stage: it waits from the last user to the source, or the first unit."""
        latest = {self._stage_of[target]: target for target in value.targets}
        for stage, last in latest.items():
            for number in range(max(value.source, self._runs[stage].start), last):
                self._pending[number] += value.bytes

    def _give_back(self, size: float, home: int, rank: int, users: Sequence[int]) -> None:
        """Count the gradients of a value from its users on a rank, where they wait until all are made."""
        last = home
        if rank != self._rank_of[home]:
            last = users[0]
            self._returned[home] += size
            self._sent[last] += size
            self._messages[1].add((last, home))
        for user in users:
            if user != last:
                self._left[user] += size
                self._left[last] -= size

    def _keeps(self, value: ValueCost, stage: int) -> bool:
        ends = [end for end in (value.source, *value.targets) if self._stage_of[end] == stage]
        kept = any(end in value.kept for end in ends if end not in self._again)
        return kept or any(target in self._again for target in value.targets)

    def all(self, states: float, latency: float, bandwidth: float, handling: float) -> StageCosts:
        """Everything about the stages."""
        kinds = [self._kinds(run, states) for run in self._runs]
        costs = Costs(
            forward=self._times("forward", handling),
            input=self._times("input", handling),
            weight=[sum(self._units[u].weight for u in run) for run in self._runs],
            backward=self._times("backward", handling),
            latency=latency,
            bandwidth=bandwidth,
            message=self._bytes,
            activation=[
                sum(map(self._kept, run))
                + self._inside[stage] + self._enters[stage] + self._leaves[stage]
                for stage, run in enumerate(self._runs)
            ],
            stash=[sum(self._units[u].stash for u in run) for run in self._runs],
            unit="s",
        )  # fmt: skip
        return StageCosts(
            costs,
            tuple(self._edges),
            {op.value: [self._extra(run, op) for run in self._runs] for op in _KIND},
            tuple(sum(kind.values()) for kind in kinds),
            tuple(kinds),
            tuple(self._enters),
            tuple(self._returned),
            tuple(self._sent),
            tuple(self._left),
        )

    def _times(self, kind: str, handling: float) -> list[float]:
        """The seconds of each stage; backward computes again what is not kept."""
        backward = kind != "forward"
        saved = self._of.between[backward]
        found = []
        for stage, run in enumerate(self._runs):
            seconds = sum(getattr(self._units[unit], kind) for unit in run)
            if backward:
                seconds += sum(self._of.again(unit) for unit in run if unit in self._again)
            ends = sum(stage in message for message in self._messages[backward])
            found.append(max(seconds - saved * (len(run) - 1), 0.0) + ends * handling)
        return found

    def _kept(self, number: int) -> float:
        """What a unit keeps after F, apart from the values."""
        unit = self._units[number]
        return unit.around if number in self._again else unit.held

    def _extra(self, run: range, op: Op) -> float:
        """The most that a stage needs in an action beyond what it holds before or after, at any of its units.

        In F the units after that one hold nothing yet. In B they hold nothing any more, but their gradients
        are there. What is computed again is there while it is used.
        """
        kind, backward = f"{_KIND[op]}_extra", op in (Op.I, Op.B)
        most, beyond = 0.0, 0.0
        for number in reversed(run):
            unit = self._units[number]
            need = getattr(unit, kind)
            if backward:
                need += self._pending[number]
                need += unit.held - unit.around if number in self._again else 0.0
            most = max(most, need - beyond)
            # After I the unit still holds what W needs.
            beyond += self._kept(number) if op in (Op.F, Op.B) else 0.0
        return most + (self._returned[self._stage_of[run[0]]] if backward else 0.0)

    def _kinds(self, run: range, states: float) -> dict[str, float]:
        units = [self._units[unit] for unit in run]
        trained = float(sum(unit.trained for unit in units))
        return {
            "weights": float(sum(unit.parameters for unit in units)),
            "gradients": trained,
            "optimizer": trained * states,
        }


# ---- the costs of a model, for every size of a microbatch that is asked for


Coster = Callable[[int], UnitCosts]


@dataclass
class Profile:
    """What the units of a model cost, found for each size of a microbatch when it is first asked for.

    Args:
        device: the device: a name of the table of devices, or what it was measured on.
        known: the costs that are known, by samples.
        memory: bytes of the device; 0 if that is not known.
        latency: the latency of a message between ranks.
        bandwidth: bytes per second of a channel between ranks.
        handling: how long a rank is busy with a message, at either end of it.
        node: for how many devices ``latency`` and ``bandwidth`` hold; 0 for any number.
        network: the latency and bandwidth where there are more.
        tokens: positions in a sample, by which tokens are counted; with 0 samples are counted.
        measured: whether the times were measured.
        model: the name of the model.
        coster: finds costs that are not known.
    """

    device: str
    known: dict[int, UnitCosts] = field(default_factory=dict)
    memory: float = 0.0
    latency: float = 0.0
    bandwidth: float = float("inf")
    handling: float = 0.0
    node: int = 0
    network: tuple[float, float] = (0.0, float("inf"))
    tokens: int = 0
    measured: bool = False
    model: str = ""
    coster: Coster | None = field(default=None, repr=False, compare=False)

    def at(self, samples: int) -> UnitCosts:
        """What a microbatch of so many samples costs.

        Raises:
            UsageError: that is not known, and there is no model to find it.
        """
        if samples not in self.known:
            if self.coster is None:
                raise UsageError(
                    f"the costs are known for microbatches of {sorted(self.known)} samples, not of "
                    f"{samples}; ask for microbatches of such a size, or measure or predict them again"
                )
            self.known[samples] = self.coster(samples)
        return self.known[samples]

    def wire(self, devices: int) -> tuple[float, float]:
        """The latency and bandwidth between ranks that use so many devices."""
        if self.node and devices > self.node:
            return self.network
        return self.latency, self.bandwidth

    def corrected(self, factors: Mapping[str, Sequence[float]]) -> Profile:
        """The same profile with the times of each unit multiplied by its own factors, for every size.

        Args:
            factors: one for each unit, by ``forward``, ``input``, ``weight`` and ``backward``.
        """

        def multiplied(of: UnitCosts) -> UnitCosts:
            units = (
                replace(unit, **{k: getattr(unit, k) * f[n] for k, f in factors.items()})
                for n, unit in enumerate(of.units)
            )
            return replace(of, units=tuple(units))

        known = {samples: multiplied(of) for samples, of in self.known.items()}
        ask = self.coster
        coster = None if ask is None else lambda samples: multiplied(ask(samples))
        return replace(self, known=known, coster=coster)

    def to_json(self) -> str:
        """The known costs as JSON, without the model."""
        data = {name: getattr(self, name) for name in _PLAIN}
        data["bandwidth"] = bandwidth_to_json(self.bandwidth)
        data["network"] = [self.network[0], bandwidth_to_json(self.network[1])]
        data["known"] = [asdict(costs) for costs in self.known.values()]
        return json.dumps({"format": "penstock-costs", "version": 1, **data}, indent=1)

    @staticmethod
    def from_json(text: str) -> Profile:
        """Read what :meth:`to_json` wrote.

        Raises:
            InputFileError: the text is not that.
        """
        try:
            data = json.loads(text)
            if (data.pop("format"), data.pop("version")) != ("penstock-costs", 1):
                raise ValueError("it is not a file of costs, version 1")
            known = [_costs_read(one) for one in data.pop("known")]
            latency, bandwidth = data.pop("network")
            data["bandwidth"] = bandwidth_from_json(data["bandwidth"])
            made = Profile(
                **data,
                network=(latency, bandwidth_from_json(bandwidth)),
                known={c.samples: c for c in known},
            )
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise InputFileError(
                f"not costs as penstock.plan writes them: {error}; write them with Profile.to_json"
            ) from error
        return made


_PLAIN = [each.name for each in fields(Profile) if each.name not in ("coster", "known", "network")]


def bandwidth_to_json(bandwidth: float) -> float | None:
    """A bandwidth for JSON, which has no infinity."""
    return None if bandwidth == float("inf") else bandwidth


def bandwidth_from_json(bandwidth: float | None) -> float:
    """The bandwidth that :func:`bandwidth_to_json` was given."""
    return float("inf") if bandwidth is None else float(bandwidth)


def _costs_read(data: dict[str, Any]) -> UnitCosts:
    return UnitCosts(
        int(data["samples"]),
        tuple(UnitCost(**unit) for unit in data["units"]),
        tuple(
            ValueCost(**{**value, "targets": tuple(value["targets"]), "kept": tuple(value["kept"])})
            for value in data["values"]
        ),
        (float(data["between"][0]), float(data["between"][1])),
    )


# ---- the costs that a recorded step shows


@dataclass(frozen=True)
class MeasuredStages:
    """What the actions of a recorded step took.

    Args:
        seconds: for each stage its median times, by ``forward``, ``input``, ``weight`` and ``backward``.
        makespan: how long the step took.
        timeline: when each action ran.
    """

    seconds: tuple[Mapping[str, float], ...]
    makespan: float
    timeline: Timeline

    def correct(self, profile: Profile, samples: int, cut: Cut) -> Profile:
        """Correct costs by what was measured: each unit's times are scaled as its stage's are.

        Args:
            profile: the costs so far.
            samples: the samples of a microbatch of the step.
            cut: the units that the step's stages started with.

        Raises:
            UsageError: the cut has another number of stages than the step.
        """
        if len(cut) != len(self.seconds):
            raise UsageError(
                f"the step had {len(self.seconds)} stages and the cut has {len(cut)}; give the cut that ran"
            )
        of = profile.at(samples)
        stages = of.stages(cut, Placement(tuple(range(len(cut))))).costs
        runs = runs_of(cut, len(of.units))
        factors = {
            kind: [r for r, run in zip(self._ratios(stages, kind), runs, strict=True) for _ in run]
            for kind in _KIND.values()
        }
        return profile.corrected(factors)

    def _ratios(self, stages: Costs, kind: str) -> list[float]:
        """For each stage the measured over the expected time; if the kind did not run, by those that did."""
        said = {each: stages.per_stage(each, len(self.seconds)) for each in _KIND.values()}
        found: list[float] = []
        for stage, measured in enumerate(self.seconds):
            shown = [kind] if kind in measured else list(measured)
            expected = sum(said[each][stage] for each in shown)
            found.append(sum(measured[each] for each in shown) / expected if expected else 1.0)
        return found


def costs_from(result: Any) -> MeasuredStages:
    """The costs that a recorded step shows.

    Args:
        result: what ``pipe.step(..., record=True)`` returned, or its timeline.

    Raises:
        UsageError: the step was not recorded.
    """
    timeline = result if isinstance(result, Timeline) else result.timeline
    if timeline is None:
        raise UsageError("the step was not recorded; make it with pipe.step(..., record=True)")
    found: dict[int, dict[str, list[float]]] = {}
    for span in timeline.spans:
        if span.action.op in _KIND:
            kinds = found.setdefault(span.action.stage, {})
            kinds.setdefault(_KIND[span.action.op], []).append(span.duration)
    seconds = tuple(
        {kind: median(times) for kind, times in found[stage].items()} for stage in sorted(found)
    )
    return MeasuredStages(seconds, timeline.makespan, timeline)


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
