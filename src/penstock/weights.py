"""The weights of a pipeline, under the names that they have in the unsplit model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock.errors import StateDictError, UsageError
from penstock.parallel import is_sharded, spread, whole
from penstock.partition import Shared
from penstock.runtime import Rank, Task, Wait
from penstock.specs import TensorSpec
from penstock.stage import PipelineStage
from penstock.step import gradient_norms
from penstock.transport import SHARED, Channel, Transport


class Names:
    """Which weights have several names, and which stage counts and saves them.

    Args:
        table: what stages share.
    """

    def __init__(self, table: Sequence[Shared]) -> None:
        self._first: dict[str, str] = {}
        self._all: dict[str, tuple[str, ...]] = {}
        self._owner: dict[str, int] = {}
        for one in table:
            for name in {*one.names, *(name for _, name in one.holders)}:
                self._first[name] = one.names[0]
                self._all[name] = one.names
                self._owner[name] = one.stages[0] if one.stages else 0

    def first(self, name: str) -> str:
        """The name under which a weight is counted and saved."""
        return self._first.get(name, name)

    def all(self, name: str) -> tuple[str, ...]:
        """All names of a weight in the model's order."""
        return self._all.get(name, (name,))

    def owns(self, stage: int, name: str) -> bool:
        """Whether it is this of the stages that use a weight which counts and saves it."""
        return self._owner.get(name, stage) == stage

    @property
    def tied(self) -> dict[str, str]:
        """Further names of weights, each with the first."""
        return {name: first for name, first in self._first.items() if name != first}


class Weights:
    """Parameters and buffers of some stages.

    Args:
        stages: in order.
        names: what is shared.
    """

    def __init__(self, stages: Sequence[PipelineStage], names: Names) -> None:
        self._stages = tuple(stages)
        self._names = names

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Each parameter once, under its first name."""
        seen: set[int] = set()
        for stage in self._stages:
            for name, parameter in stage.module.named_parameters():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield self._names.first(name), parameter

    def counted(self) -> dict[int, list[nn.Parameter]]:
        """For each stage the parameters that count there, so that each counts once over all stages."""
        return {
            stage.index: [
                parameter
                for name, parameter in stage.module.named_parameters()
                if self._names.owns(stage.index, name)
            ]
            for stage in self._stages
        }

    def state_dict(self) -> dict[str, Any]:
        """What the stages' modules have to save, under every name that it has in the model.

        Raises:
            UsageError: stages have different things under one name.
        """
        found: dict[str, Any] = {}
        for stage in self._stages:
            for name, value in stage.module.state_dict().items():
                if name in found and not _same(found[name], value):
                    check_apart([[name], [name]])
                found |= dict.fromkeys(self._names_of(name, value), value)
        return found

    def _names_of(self, name: str, value: Any) -> tuple[str, ...]:
        return self._names.all(name) if isinstance(value, Tensor) else (name,)

    def files(self) -> dict[int, dict[str, Any]]:
        """For each stage what it saves: each weight in the first stage that uses it, under its first name."""
        return {
            stage.index: {
                self._names.first(name): value
                for name, value in stage.module.state_dict().items()
                if self._names.owns(stage.index, name)
            }
            for stage in self._stages
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Copy from ``state`` what it has of these stages' weights."""
        for stage in self._stages:
            own = stage.module.state_dict()
            picked = {name: self._pick(state, name, own[name]) for name in own}
            found = {name: value for name, value in picked.items() if value is not None}
            stage.module.load_state_dict(found, strict=False)

    def _pick(self, state: Mapping[str, Any], name: str, own: Any) -> Any:
        # As the unsplit model would: it copies under one name after the other.
        given = [other for other in self._names.all(name) if other in state]
        if not given:
            return None
        value = state[given[-1]]
        return spread(own, value) if isinstance(own, Tensor) and is_sharded(own) else value

    def compare(self, state: Mapping[str, Any], *, any_name: bool) -> dict[str, list[str]]:
        """What stands against loading ``state``: names that are missing, and sizes that differ.

        Args:
            state: what to load.
            any_name: whether one of a weight's names is enough.
        """
        missing, sizes = [], []
        for name, own in self.state_dict().items():
            names = self._names.all(name) if any_name else (name,)
            given = [other for other in names if other in state]
            if not given:
                missing.append(name)
            elif isinstance(own, Tensor) and tuple(state[given[-1]].shape) != tuple(own.shape):
                sizes.append(_size_error(name, state[given[-1]], own))
        return {"own": list(self.state_dict()), "missing": missing, "sizes": sizes}


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.data_ptr() == other.data_ptr() and one.shape == other.shape
    return one is other


def _size_error(name: str, given: Any, own: Tensor) -> str:
    return (
        f"size mismatch for {name}: {list(given.shape)} was given, the model has {list(own.shape)}"
    )


# ---- what all ranks do together


class LoadResult(NamedTuple):
    """What did not fit when weights were loaded.

    Attributes:
        missing_keys: weights of the model that were not given.
        unexpected_keys: what was given and no stage has.
    """

    missing_keys: list[str]
    unexpected_keys: list[str]


def load_state(
    rank: Rank, names: Names, state: Mapping[str, Any], *, strict: bool, any_name: bool = False
) -> Task[LoadResult]:
    """Load each rank's part of a state dict; nothing is changed where that fails on any rank.

    Raises:
        StateDictError: what is missing, unexpected or of another size, over all stages of all ranks.
    """
    weights = Weights(list(rank.stages.values()), names)
    mine = weights.compare(state, any_name=any_name)
    told = yield from rank.exchange(mine)
    known = {name for one in told for name in one["own"]} | names.tied.keys()
    unexpected = yield from rank.exchange([name for name in state if name not in known])
    result = LoadResult(_union(one["missing"] for one in told), _union(unexpected))
    problems = _union(one["sizes"] for one in told)
    if strict:
        problems = [*_listed("Missing", result.missing_keys), *problems]
        problems = [*_listed("Unexpected", result.unexpected_keys), *problems]
    if problems:
        raise StateDictError(
            "the weights cannot be loaded, and none were:\n\t" + "\n\t".join(problems)
        )
    weights.load(state)
    return result


def _union(lists: Any) -> list[str]:
    return list(dict.fromkeys(name for one in lists for name in one))


def _listed(what: str, names: Sequence[str]) -> list[str]:
    shown = ", ".join(f'"{name}"' for name in names)
    return [f"{what} key(s) in state_dict: {shown}."] if names else []


def gather_state(rank: Rank, names: Names) -> Task[dict[str, Any]]:
    """The whole state dict on rank 0, as copies on the CPU; empty on the others.

    Raises:
        UsageError: something in it is no tensor.
    """
    weights = Weights(list(rank.stages.values()), names)
    mine = {name: value for one in weights.files().values() for name, value in one.items()}
    described = [[name, *_describe(name, value)] for name, value in mine.items()]
    told = yield from rank.exchange([described, list(weights.state_dict())])
    check_apart([[name for name, *_ in sent] for sent, _ in told])
    transport = rank.transport
    transport.open([Channel(other, 0, SHARED) for other in range(1, transport.ranks)])
    if rank.number:
        for value in mine.values():
            transport.post_send(Channel(rank.number, 0, SHARED), [whole(value)])
        transport.finish()
        return {}
    found = {name: whole(value).cpu().clone() for name, value in mine.items()}
    for other, (sent, _) in enumerate(told):
        if other:
            yield from _receive(rank, other, sent, found)
    return {key: found[names.first(key)] for key in _union(keys for _, keys in told)}


def check_apart(lists: Sequence[Sequence[str]]) -> None:
    """Check that no name stands in two of the lists.

    Raises:
        UsageError: one does: different stages have different weights of one name.
    """
    seen: set[str] = set()
    for one in lists:
        both = sorted(seen.intersection(one))
        if both:
            raise UsageError(
                f"several stages have weights named {', '.join(both[:5])}; give the stages modules with the "
                "names of the unsplit model, or save each stage's module by itself"
            )
        seen |= set(one)


def _describe(name: str, value: Any) -> list[Any]:
    if not isinstance(value, Tensor):
        raise UsageError(
            f"{name!r} is a {type(value).__name__}, which cannot be gathered; "
            "use state_dict() without full=True on each rank"
        )
    spec = TensorSpec.of(value)
    return [list(spec.shape), spec.dtype]


def _receive(rank: Rank, other: int, sent: Any, found: dict[str, Any]) -> Task[None]:
    """Take another rank's tensors one by one."""
    device = next(iter(rank.stages.values())).device
    for name, shape, dtype in sent:
        spec = TensorSpec(tuple(shape), dtype, requires_grad=False)
        ticket = rank.transport.post_receive(Channel(other, 0, SHARED), [spec], device)
        yield Wait(ticket, rank.number, f"waits for {name!r} from rank {other}")
        found[name] = ticket.take()[0].cpu().clone()


def all_norms(
    transport: Transport,
    counted: Mapping[int, Sequence[Tensor]],
    counts: Mapping[int, int],
    order: float,
) -> Task[Tensor]:
    """The norms of all gradients of the pipeline, stage by stage; see :func:`penstock.step.gradient_norms`.

    Args:
        transport: this rank's end.
        counted: the parameters that count, by stage of this rank.
        counts: how many there are in each stage of the pipeline.
        order: which norm.
    """
    parameters = [parameter for stage in sorted(counted) for parameter in counted[stage]]
    own = gradient_norms(parameters, order)
    values = torch.zeros(2, sum(counts.values()), dtype=torch.float64)
    start = taken = 0
    for stage in sorted(counts):
        if stage in counted:
            values[:, start : start + counts[stage]] = own[:, taken : taken + counts[stage]]
            taken += counts[stage]
        start += counts[stage]
    ticket = transport.sum(values)
    yield Wait(ticket, transport.rank, "waits for the norm of all gradients")
    found: Tensor = ticket.take()
    return found
