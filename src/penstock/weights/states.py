"""The weights of a pipeline by their names in the unsplit model.

State dicts, saved parts, what all ranks have.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from penstock.errors import StateDictError, UsageError
from penstock.parallel import is_sharded, local_part, spread, whole
from penstock.partition import Shared, named_tensors
from penstock.runtime import Rank, Task, Wait
from penstock.transport import SHARED, Channel
from penstock.values import TensorSpec
from penstock.weights.optimizers import OptimizerStates, copies, merge_groups, named_state_dict
from penstock.weights.trees import decode, decode_inline, encode, encode_inline


class Names:
    """Which weights have several names, and which stage counts and saves each of them.

    Args:
        table: the weights that stages share.
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
        """All names of a weight, in the model's order."""
        return self._all.get(name, (name,))

    def is_shared(self, name: str) -> bool:
        """Whether stages share a weight, or it has several names."""
        return name in self._owner

    def owns(self, stage: int, name: str) -> bool:
        """Whether this stage, of all that use a weight, is the one that counts and saves it."""
        return self._owner.get(name, stage) == stage

    @property
    def tied(self) -> dict[str, str]:
        """Further names of weights, each with the first name."""
        return {name: first for name, first in self._first.items() if name != first}


class Holds(Protocol):
    """Something that holds weights: a stage, or a whole model."""

    @property
    def index(self) -> int:
        """The index of the stage."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters under their names in the unsplit model, each once."""

    def named_tensors(self) -> list[tuple[str, Tensor]]:
        """Parameters and buffers under all their names."""

    def state_dict(self) -> dict[str, Any]:
        """The state dict, by the same names."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Copy what ``state`` has of it."""


@dataclass(frozen=True)
class WholeModel:
    """A model that was not cut."""

    module: nn.Module
    index: int = 0

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Each once."""
        return self.module.named_parameters()

    def named_tensors(self) -> list[tuple[str, Tensor]]:
        """Parameters and buffers under all their names."""
        return named_tensors(self.module)

    def state_dict(self) -> dict[str, Any]:
        """What there is to save."""
        return self.module.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Copy what is there of it."""
        self.module.load_state_dict(dict(state), strict=False)


class Weights:
    """Parameters and buffers of some stages.

    Args:
        stages: in order.
        names: what is shared.
    """

    def __init__(self, stages: Sequence[Holds], names: Names) -> None:
        self._stages = tuple(stages)
        self._names = names

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Each parameter once, under its first name."""
        seen: set[int] = set()
        for stage in self._stages:
            for name, parameter in stage.named_parameters():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield self._names.first(name), parameter

    def counted(self) -> dict[int, list[nn.Parameter]]:
        """For each stage the parameters that count there, so that each counts once over all stages."""
        return {
            stage.index: [
                parameter
                for name, parameter in stage.named_parameters()
                if self._names.owns(stage.index, name)
            ]
            for stage in self._stages
        }

    def state_dict(self) -> dict[str, Any]:
        """The state dict of the stages, with each weight under all of its names in the model.

        Raises:
            UsageError: stages have different weights under one name.
        """
        found: dict[str, Any] = {}
        for stage in self._stages:
            for name, value in stage.state_dict().items():
                if name in found and not _same(found[name], value):
                    check_apart([name, name])
                found |= dict.fromkeys(self._names_of(name, value), value)
        return found

    def _names_of(self, name: str, value: Any) -> tuple[str, ...]:
        return self._names.all(name) if isinstance(value, Tensor) else (name,)

    def files(self) -> dict[int, dict[str, Any]]:
        """What each stage saves: each weight in the first stage that uses it, under its first name."""
        return {
            stage.index: {
                self._names.first(name): value
                for name, value in stage.state_dict().items()
                if self._names.owns(stage.index, name)
            }
            for stage in self._stages
        }

    def owned(self) -> list[tuple[str, Any]]:
        """What these stages save, see :meth:`files`, as pairs of name and value."""
        return [pair for held in self.files().values() for pair in held.items()]

    def held(self) -> dict[str, tuple[tuple[str, ...], Any]]:
        """The weights that live here, each once by its first name, with all of its names.

        Raises:
            UsageError: stages have different weights under one name.
        """
        found: dict[str, tuple[tuple[str, ...], Any]] = {}
        for stage in self._stages:
            for name, value in stage.state_dict().items():
                first = self._names.first(name)
                if first in found and not _same(found[first][1], value):
                    check_apart([name, name])
                found[first] = self._names.all(name), value
        return found

    def is_shared(self, name: str) -> bool:
        """Whether stages are known to share a weight, by its first name."""
        return self._names.is_shared(name)

    def tensors(self) -> list[Tensor]:
        """The local parts of all parameters and buffers."""
        return [local_part(tensor) for stage in self._stages for _, tensor in stage.named_tensors()]

    def keys(self) -> list[str]:
        """All names of the weights that live here."""
        found = (
            other
            for stage in self._stages
            for name, value in stage.state_dict().items()
            for other in self._names_of(name, value)
        )
        return list(dict.fromkeys(found))

    def check_filled(self) -> None:
        """Check that these stages have memory to copy into.

        Raises:
            UsageError: a tensor is on the meta device.
        """
        tensors = (pair for stage in self._stages for pair in stage.named_tensors())
        empty = [name for name, tensor in tensors if tensor.is_meta]
        if empty:
            raise UsageError(
                f"{', '.join(empty[:5])} are on the meta device, where nothing can be copied to; give the "
                "stages memory with penstock.init_weights(pipe, seed), which also fills what no file holds"
            )

    def load(self, state: Mapping[str, Any]) -> None:
        """Copy what ``state`` has of these stages' weights."""
        for stage in self._stages:
            own = stage.state_dict()
            picked = {name: self._pick(state, name, own[name]) for name in own}
            found = {name: value for name, value in picked.items() if value is not None}
            stage.load_state_dict(found)

    def _pick(self, state: Mapping[str, Any], name: str, own: Any) -> Any:
        # The last name wins, as in the unsplit model, which copies under one name after the other.
        given = [other for other in self._names.all(name) if other in state]
        if not given:
            return None
        value = state[given[-1]]
        return spread(own, value) if isinstance(own, Tensor) and is_sharded(own) else value

    def compare(self, state: Mapping[str, Any], *, any_name: bool) -> dict[str, list[str]]:
        """What keeps ``state`` from being loaded: missing names, and sizes that differ.

        Args:
            state: the state dict to load.
            any_name: whether one of a weight's names is enough.
        """
        held = self.state_dict()
        missing, sizes = [], []
        for name, own in held.items():
            names = self._names.all(name) if any_name else (name,)
            given = [other for other in names if other in state]
            if not given:
                missing.append(name)
            elif isinstance(own, Tensor) and tuple(state[given[-1]].shape) != tuple(own.shape):
                sizes.append(_size_error(name, state[given[-1]], own))
        return {"own": list(held), "missing": missing, "sizes": sizes}


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.data_ptr() == other.data_ptr() and one.shape == other.shape
    return one is other


def _size_error(name: str, given: Any, own: Tensor) -> str:
    return f"size mismatch for {name}: {list(given.shape)} was given, but the model has {list(own.shape)}"


# ---- what all ranks do together


class LoadResult(NamedTuple):
    """What did not fit when weights were loaded.

    Attributes:
        missing_keys: names of the model that were not given.
        unexpected_keys: names that were given, but no stage has.
    """

    missing_keys: list[str]
    unexpected_keys: list[str]


def compare_state(
    rank: Rank, names: Names, state: Mapping[str, Any], *, any_name: bool = False
) -> Task[tuple[LoadResult, list[str]]]:
    """What does not fit if each rank loads its part of a state dict, over the stages of all ranks.

    Args:
        rank: this rank.
        names: the names of shared weights.
        state: the state dict to load.
        any_name: whether one of a weight's names is enough.

    Returns:
        The names that do not fit, and messages about sizes that differ.
    """
    mine = Weights(list(rank.stages.values()), names).compare(state, any_name=any_name)
    told = yield from rank.exchange(mine)
    known = {name for one in told for name in one["own"]} | names.tied.keys()
    unexpected = yield from rank.exchange([name for name in state if name not in known])
    result = LoadResult(_union(one["missing"] for one in told), _union(unexpected))
    return result, _union(one["sizes"] for one in told)


def check_fits(
    result: LoadResult, sizes: Sequence[str], *, strict: bool, what: str = "weights"
) -> None:
    """Check that a state dict can be loaded.

    Raises:
        StateDictError: it cannot; the message lists every problem.
    """
    problems = list(sizes)
    if strict:
        problems = [*_listed("Missing", result.missing_keys), *problems]
        problems = [*_listed("Unexpected", result.unexpected_keys), *problems]
    if problems:
        raise StateDictError(
            f"the {what} do not fit, and none were loaded:\n\t" + "\n\t".join(problems)
        )


def _union(lists: Any) -> list[str]:
    return list(dict.fromkeys(name for one in lists for name in one))


def _listed(what: str, names: Sequence[str]) -> list[str]:
    shown = ", ".join(f'"{name}"' for name in names)
    return [f"{what} key(s) in state_dict: {shown}."] if names else []


class Contents(NamedTuple):
    """What a rank has to save, as JSON data.

    Attributes:
        tensors: the name, shape and type of each tensor that this rank saves.
        others: the names of other values.
        keys: all names of the weights that live on the rank.
    """

    tensors: list[list[Any]]
    others: list[str]
    keys: list[str]


def describe_state(rank: Rank, names: Names) -> Task[list[Contents]]:
    """What each rank has to save."""
    weights = Weights(list(rank.stages.values()), names)
    mine = weights.owned()
    tensors = [[n, list(t.shape), TensorSpec.of(t).dtype] for n, t in mine if _is_tensor(t)]
    others = [name for name, value in mine if not _is_tensor(value)]
    told = yield from rank.exchange([tensors, others, weights.keys()])
    return [Contents(*one) for one in told]


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def check_contents(contents: Sequence[Contents]) -> None:
    """Check that everything can go into one state dict.

    Raises:
        UsageError: stages have different weights of one name, or something is not a tensor.
    """
    check_apart([name for one in contents for name, *_ in one.tensors])
    others = _union(one.others for one in contents)
    if others:
        raise UsageError(
            f"{', '.join(others[:5])} are not tensors, so they cannot be gathered or saved; "
            "use state_dict() without full=True on each rank"
        )


def gather_state(rank: Rank, names: Names, contents: Sequence[Contents]) -> Task[dict[str, Any]]:
    """The whole state dict on rank 0, as copies on the CPU; empty on other ranks.

    Args:
        rank: this rank.
        names: the names of shared weights.
        contents: what :func:`describe_state` returned.
    """
    mine = Weights(list(rank.stages.values()), names).owned()
    found = yield from _gather(rank, mine, [one.tensors for one in contents])
    if rank.number:
        return {}
    return {key: found[names.first(key)] for key in _union(one.keys for one in contents)}


def gather_states(rank: Rank, names: Names, held: OptimizerStates) -> Task[dict[str, Any]]:
    """The states of all ranks' optimizers as one state dict on rank 0, on the CPU; empty on other ranks.

    Args:
        rank: this rank.
        names: the names of shared weights.
        held: the state of its optimizer.

    Raises:
        UsageError: stages have different weights of one name.
    """
    tensors: dict[str, dict[str, Tensor]] = {name: {} for name in held.states}
    mine = [
        {name: encode(state, name, tensors[name]) for name, state in held.states.items()},
        [
            [{key: encode_inline(value, key) for key, value in settings.items()}, members]
            for settings, members in zip(held.settings, held.groups, strict=True)
        ],
        {
            name: [[k, list(t.shape), TensorSpec.of(t).dtype] for k, t in of.items()]
            for name, of in tensors.items()
        },
    ]
    told = yield from rank.exchange(mine)
    members = [name for one in told for _, of in one[1] for name in of]
    check_apart([name for name in members if not names.is_shared(name)])
    owner = {name: number for number, one in reversed(list(enumerate(told))) for name in one[0]}
    given = [
        pair for name, of in tensors.items() if owner[name] == rank.number for pair in of.items()
    ]
    sent = [
        [one for name, of in about.items() if owner[name] == number for one in of]
        for number, (_, _, about) in enumerate(told)
    ]
    found = yield from _gather(rank, given, sent)
    if rank.number:
        return {}
    groups = merge_groups([one[1] for one in told])
    states = {name: decode(told[owner[name]][0][name], found.__getitem__) for name in owner}
    decoded = [{k: decode_inline(v, None) for k, v in of.items()} for of in groups.settings]
    return named_state_dict(
        OptimizerStates(held.kind, decoded, groups.members, states, copies(held.rest))
    )


def check_apart(names: Sequence[str]) -> None:
    """Check that no name occurs twice.

    Raises:
        UsageError: one does, so different stages have different weights of that name.
    """
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise UsageError(
            f"several stages have weights named {', '.join(twice[:5])}; use modules with the names of the "
            "unsplit model as stages, or save each stage's module by itself"
        )


def _gather(
    rank: Rank, given: Sequence[tuple[str, Any]], sent: Sequence[Any]
) -> Task[dict[str, Any]]:
    """The tensors of all ranks on rank 0, whole, as copies on the CPU; nothing on other ranks.

    Args:
        rank: this rank.
        given: the tensors of this rank, with their names.
        sent: for each rank, the name, shape and type of each tensor that it sends.
    """
    transport = rank.transport
    transport.open([Channel(other, 0, SHARED) for other in range(1, transport.ranks)])
    if rank.number:
        for _, value in given:
            transport.post_send(Channel(rank.number, 0, SHARED), [whole(value)])
        transport.finish()
        return {}
    found = {name: whole(value).cpu().clone() for name, value in given}
    for other, tensors in list(enumerate(sent))[1:]:
        yield from _receive(rank, other, tensors, found)
    return found


def _receive(rank: Rank, other: int, sent: Any, found: dict[str, Any]) -> Task[None]:
    """Receive another rank's tensors one by one."""
    device = next(iter(rank.stages.values())).device
    for name, shape, dtype in sent:
        spec = TensorSpec(tuple(shape), dtype, requires_grad=False)
        ticket = rank.transport.post_receive(Channel(other, 0, SHARED), [spec], device)
        yield Wait(ticket, rank.number, f"waits for {name!r} from rank {other}")
        found[name] = ticket.take()[0].cpu().clone()
