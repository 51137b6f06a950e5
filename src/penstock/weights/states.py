"""The weights of a pipeline by their names in the unsplit model: state dicts, and what all ranks have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn

from penstock.errors import StateDictError, UsageError, quoted
from penstock.parallel import is_sharded, local_part, spread
from penstock.partition import Shared, named_tensors
from penstock.stage import PipelineStage
from penstock.weights.exchange import Ranks, collect
from penstock.weights.files import WeightFiles
from penstock.weights.optimizers import OptimizerStates, merge_groups, named_state_dict
from penstock.weights.trees import decode, encode


class Names:
    """Which weights have several names, and which stage counts and saves each of them.

    Args:
        table: the weights that stages share.
    """

    def __init__(self, table: Sequence[Shared]) -> None:
        self._shared = {
            name: one for one in table for name in {*one.names, *(name for _, name in one.holders)}
        }

    def all(self, name: str) -> tuple[str, ...]:
        """All names of a weight, in the model's order."""
        return self._shared[name].names if name in self._shared else (name,)

    def first(self, name: str) -> str:
        """The name under which a weight is counted and saved."""
        return self.all(name)[0]

    def is_shared(self, name: str) -> bool:
        """Whether stages share a weight, or it has several names."""
        return name in self._shared

    def owns(self, stage: int, name: str) -> bool:
        """Whether this stage, of all that use a weight, is the one that counts and saves it."""
        return name not in self._shared or self._shared[name].stages[:1] in ((), (stage,))

    @property
    def tied(self) -> dict[str, str]:
        """Further names of weights, each with the first name."""
        return {name: of.names[0] for name, of in self._shared.items() if name != of.names[0]}


@dataclass(frozen=True)
class WholeModel:
    """A model that was not cut, with what :class:`StageWeights` needs of a stage."""

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


class StageWeights:
    """Parameters and buffers of some stages.

    Args:
        stages: in order.
        names: what is shared.
    """

    def __init__(self, stages: Sequence[PipelineStage | WholeModel], names: Names) -> None:
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

    def held(self) -> dict[str, tuple[tuple[str, ...], Any]]:
        """The weights that live here, each once by its first name, with all of its names.

        Raises:
            UsageError: stages have different weights under one name.
        """
        held: dict[str, tuple[tuple[str, ...], Any]] = {}
        for stage in self._stages:
            for name, value in stage.state_dict().items():
                first = self._names.first(name)
                if first in held and not _is_same(held[first][1], value):
                    check_apart([name, name])
                names = self._names.all(name) if isinstance(value, Tensor) else (name,)
                held[first] = names, value
        return held

    def state_dict(self) -> dict[str, Any]:
        """The state dict of the stages, with each weight under all of its names in the model.

        Raises:
            UsageError: stages have different weights under one name.
        """
        return {name: value for names, value in self.held().values() for name in names}

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

    def is_shared(self, name: str) -> bool:
        """Whether stages are known to share a weight, by its first name."""
        return self._names.is_shared(name)

    def tensors(self) -> list[Tensor]:
        """The local parts of all parameters and buffers."""
        return [local_part(tensor) for stage in self._stages for _, tensor in stage.named_tensors()]

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
            picked = {}
            for name, tensor in stage.state_dict().items():
                # The last name wins, as in the unsplit model, which copies under one name after the other.
                present = [other for other in self._names.all(name) if other in state]
                if present:
                    value = state[present[-1]]
                    sharded = isinstance(tensor, Tensor) and is_sharded(tensor)
                    picked[name] = spread(tensor, value) if sharded else value
            stage.load_state_dict(picked)


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.data_ptr() == other.data_ptr() and one.shape == other.shape
    return one is other


def check_apart(names: Iterable[str]) -> None:
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


def check_one_rank_each(held: Iterable[tuple[int, Iterable[str]]]) -> None:
    """Check that no two ranks have different weights of the same name.

    Args:
        held: the ranks of processes, of several replicas too, with the names of weights that are not shared.

    Raises:
        UsageError: they have.
    """
    names: dict[int, set[str]] = {}
    for rank, of_process in held:
        names.setdefault(rank, set()).update(of_process)
    check_apart(name for of_rank in names.values() for name in of_rank)


# ---- what all ranks do together


class LoadResult(NamedTuple):
    """What did not fit when weights were loaded.

    Attributes:
        missing_keys: names of the model that were not given.
        unexpected_keys: names that were given, but no stage has.
    """

    missing_keys: list[str]
    unexpected_keys: list[str]


def load_state(
    ranks: Ranks,
    weights: StageWeights,
    names: Names,
    state: Mapping[str, Any],
    *,
    strict: bool,
    any_name: bool,
) -> LoadResult:
    """Load the stages here from a state dict, after all ranks have compared theirs with it.

    Args:
        ranks: how this process reaches the others.
        weights: of the stages here.
        names: of shared weights.
        state: the state dict to load.
        strict: whether missing and unexpected names are an error.
        any_name: whether one of a weight's names is enough.

    Raises:
        StateDictError: something is missing, unexpected or of another size; nothing is changed then.
    """
    weights.check_filled()
    held, missing, stored = weights.state_dict(), [], []
    look = state.entry if isinstance(state, WeightFiles) else state.__getitem__
    for name, tensor in held.items():
        present = [one for one in (names.all(name) if any_name else (name,)) if one in state]
        if not present:
            missing.append(name)
        elif isinstance(tensor, Tensor):
            stored.append((name, tensor, look(present[-1])))
    sizes = list(size_problems(stored))
    replies = ranks.gather([list(held), missing, sizes])
    known = {name for one in replies for name in one[0]} | names.tied.keys()
    unexpected = ranks.gather([name for name in state if name not in known])
    result = LoadResult(_union(one[1] for one in replies), _union(unexpected))
    check_fits(result, _union(one[2] for one in replies), strict=strict)
    weights.load(state)
    return result


def size_problems(stored: Iterable[tuple[str, Tensor, Any]]) -> Iterator[str]:
    """What is wrong with shapes: of names, the model's tensors, and what is stored of them."""
    for name, tensor, one in stored:
        if tuple(one.shape) != tuple(tensor.shape):
            sizes = f"{list(one.shape)} was given, but the model has {list(tensor.shape)}"
            yield f"size mismatch for {name}: {sizes}"


def check_fits(
    result: LoadResult, problems: Sequence[str], *, strict: bool, what: str = "weights"
) -> None:
    """Check that a state dict can be loaded.

    Raises:
        StateDictError: it cannot; the message lists every problem.
    """
    lines = list(problems)
    for kind, names in (("Missing", result[0]), ("Unexpected", result[1])):
        if strict and names:
            lines.insert(0, f"{kind} key(s) in state_dict: {quoted(names, 1000)}.")
    if lines:
        raise StateDictError(
            f"the {what} do not fit, and none were loaded:\n\t" + "\n\t".join(lines)
        )


def _union(lists: Iterable[Sequence[str]]) -> list[str]:
    return list(dict.fromkeys(name for one in lists for name in one))


def check_contents(ranks: Ranks, weights: StageWeights) -> None:
    """Check that everything that all ranks have can go into one state dict.

    Raises:
        UsageError: stages have different weights of one name, or something is not a tensor.
    """
    mine = [pair for of_stage in weights.files().values() for pair in of_stage.items()]
    tensors = [name for name, value in mine if isinstance(value, Tensor)]
    replies = ranks.gather([tensors, [n for n, value in mine if not isinstance(value, Tensor)]])
    check_apart(name for one in replies for name in one[0])
    if others := _union(one[1] for one in replies):
        raise UsageError(
            f"{', '.join(others[:5])} are not tensors, so they cannot be gathered or saved; "
            "use state_dict() without full=True on each rank"
        )


def gather_state(ranks: Ranks, weights: StageWeights, names: Names) -> dict[str, Any]:
    """The unsplit model's state dict on rank 0, as copies on the CPU; empty on other ranks.

    Raises:
        UsageError: see :func:`check_contents`.
    """
    check_contents(ranks, weights)
    keys = _union(ranks.gather(list(weights.state_dict())))
    mine = {name: one for of_stage in weights.files().values() for name, one in of_stage.items()}
    collected = collect(ranks, mine)
    return {key: collected[names.first(key)] for key in keys} if collected else {}


def gather_optimizer(ranks: Ranks, names: Names, held: OptimizerStates) -> dict[str, Any]:
    """The states of all ranks' optimizers as one state dict on rank 0, on the CPU; empty on other ranks.

    Args:
        ranks: how this process reaches the others.
        names: of shared weights.
        held: the state of its optimizer.

    Raises:
        UsageError: stages have different weights of one name.
    """
    tensors: dict[str, dict[str, Tensor]] = {name: {} for name in held.states}
    trees = {name: encode(state, name, tensors[name]) for name, state in held.states.items()}
    groups = list(zip(encode(held.settings, "settings", None), held.groups, strict=True))
    replies = ranks.gather([trees, groups])
    members = [name for one in replies for _, of_group in one[1] for name in of_group]
    check_apart(name for name in members if not names.is_shared(name))
    owner = {name: number for number, one in reversed(list(enumerate(replies))) for name in one[0]}
    mine = (of for name, of in tensors.items() if owner[name] == ranks.rank or len(replies) == 1)
    collected = collect(ranks, {key: tensor for of in mine for key, tensor in of.items()})
    if ranks.rank:
        return {}
    merged = merge_groups([one[1] for one in replies])
    states = {name: decode(replies[n][0][name], collected.__getitem__) for name, n in owner.items()}
    settings = decode([of for of, _ in merged])
    return named_state_dict(OptimizerStates(held.kind, settings, [of for _, of in merged], states))
