"""A pipeline's weights under their names in the unsplit model: state dicts, loaded and gathered."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from penstock._engine.parallel import is_sharded, local_part, spread, whole
from penstock._engine.placeholders import is_placeholder
from penstock._engine.transport import Group, Job
from penstock._engine.weights.files import WeightFiles
from penstock._engine.weights.optimizers import (
    OptimizerStates,
    find_groups,
    fitting_settings,
    merge_groups,
    named_state_dict,
    read_states,
    settings_of,
    warn_of_settings,
    write_states,
)
from penstock._engine.weights.ranks import collect, table_of, travel
from penstock._engine.weights.telling import distinct, tell
from penstock._engine.weights.trees import decode, encode
from penstock.errors import StateDictError, UsageError, quoted
from penstock.partition import Shared, named_tensors
from penstock.stage import PipelineStage

T = TypeVar("T")


class Names:
    """The weights with several names or stages, and the stage that counts and saves each."""

    def __init__(self, table: Sequence[Shared]) -> None:
        self._shared = {
            name: one for one in table for name in {*one.names, *(name for _, name in one.holders)}
        }
        self._clashes: list[str] = []

    def find_clashes(self, stages: Iterable[Iterable[str]]) -> None:
        """Note the names under which stages, each given by the names of its weights, have different ones."""
        counts = Counter(name for of in stages for name in of if name not in self._shared)
        self._clashes = [name for name, count in counts.items() if count > 1]

    def check_apart(self) -> None:
        """Check that each name stands for one weight.

        Raises:
            UsageError: stages have different weights under one name.
        """
        if self._clashes:
            raise UsageError(
                f"several stages have weights named {', '.join(self._clashes[:5])}; use modules with the "
                "names of the unsplit model as stages, or save each stage's module by itself"
            )

    def all(self, name: str) -> tuple[str, ...]:
        """All names of a weight, in the model's order."""
        return self._shared[name].names if name in self._shared else (name,)

    def first(self, name: str) -> str:
        """The name under which a weight is counted and saved."""
        return self.all(name)[0]

    def is_shared(self, name: str) -> bool:
        """Tell whether stages share a weight, or it has several names."""
        return name in self._shared

    def stages(self, name: str) -> tuple[int, ...]:
        """The stages that use a shared weight."""
        return self._shared[name].stages

    def owns(self, stage: int, name: str) -> bool:
        """Tell whether this stage, among all that use a weight, counts and saves it."""
        return name not in self._shared or self._shared[name].stages[:1] in ((), (stage,))

    @property
    def tied(self) -> dict[str, str]:
        """Each further name of a weight, with its first name."""
        return {name: of.names[0] for name, of in self._shared.items() if name != of.names[0]}


@dataclass(frozen=True)
class WholeModel:
    """An uncut model, with the part of a stage's interface that :class:`StageWeights` needs.

    Args:
        module: the model.
        index: stands for that of its stage.
        only_here: whether to leave out the weights of other ranks, if it is an average or another copy of a
            model that a pipeline has cut.
    """

    module: nn.Module
    index: int = 0
    only_here: bool = False

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Each parameter once."""
        return self._listed(self.module.named_parameters())

    def named_tensors(self) -> list[tuple[str, Tensor]]:
        """Parameters and buffers under all their names."""
        return [*self._listed(named_tensors(self.module))]

    def state_dict(self) -> dict[str, Any]:
        """The model's state dict."""
        return dict(self._listed(self.module.state_dict().items()))

    def _listed(self, named: Iterable[tuple[str, T]]) -> Iterator[tuple[str, T]]:
        return ((n, value) for n, value in named if not (self.only_here and is_placeholder(value)))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Copy the entries that the model has too; ignore the others."""
        self.module.load_state_dict(dict(state), strict=False)


class StageWeights:
    """The parameters and buffers of some stages."""

    def __init__(self, stages: Sequence[PipelineStage | WholeModel], names: Names) -> None:
        self._stages = tuple(stages)
        self.names = names

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Each parameter once, under its first name."""
        seen: set[int] = set()
        for stage in self._stages:
            for name, parameter in stage.named_parameters():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield self.names.first(name), parameter

    def counted(self) -> dict[int, dict[str, nn.Parameter]]:
        """For each stage, by name, the parameters to count there: over all stages each counts once."""
        return {
            stage.index: {
                self.names.first(name): parameter
                for name, parameter in stage.named_parameters()
                if self.names.owns(stage.index, name)
            }
            for stage in self._stages
        }

    def held(self) -> dict[str, tuple[tuple[str, ...], Any]]:
        """Each weight that lives here, by its first name: all its names, and its value.

        Raises:
            UsageError: stages have different weights under one name.
        """
        self.names.check_apart()
        return {
            self.names.first(name): (
                self.names.all(name) if isinstance(value, Tensor) else (name,),
                value,
            )
            for stage in self._stages
            for name, value in stage.state_dict().items()
        }

    def state_dict(self) -> dict[str, Any]:
        """The state dict of the stages, with each weight under all of its names in the model."""
        return {name: value for names, value in self.held().values() for name in names}

    def files(self) -> dict[int, dict[str, Any]]:
        """Return what each stage saves: each weight in the first stage that uses it, under its first name."""
        self.names.check_apart()
        return {
            stage.index: {
                self.names.first(name): value
                for name, value in stage.state_dict().items()
                if self.names.owns(stage.index, name)
            }
            for stage in self._stages
        }

    def memory(self) -> set[int]:
        """The addresses of all parameters and buffers."""
        tensors = (one for stage in self._stages for _, one in stage.named_tensors())
        return {local_part(tensor).data_ptr() for tensor in tensors}

    def check_filled(self) -> None:
        """Check that these stages have memory to copy into.

        Raises:
            UsageError: a tensor is on the meta device.
        """
        tensors = [pair for stage in self._stages for pair in stage.named_tensors()]
        if absent := [name for name, tensor in tensors if is_placeholder(tensor)]:
            raise UsageError(
                f"{', '.join(absent[:5])} are on other ranks: an earlier Pipeline has cut this model, or "
                "that of which it is a copy or an average, and left each process the weights of its own "
                "stages; make one Pipeline of a model, or another of a copy from before the cut, "
                "copy.deepcopy(model)"
            )
        empty = [name for name, tensor in tensors if tensor.is_meta]
        if empty:
            raise UsageError(
                f"{', '.join(empty[:5])} are on the meta device, where nothing can be copied to; give the "
                "stages memory with penstock.init_weights(pipe, seed), which also fills what no file holds"
            )

    def load(self, state: Mapping[str, Any]) -> None:
        """Copy these stages' weights from ``state``, as far as it has them."""
        for stage in self._stages:
            picked = {}
            for name, tensor in stage.state_dict().items():
                # The last name wins, as in the unsplit model, which copies name by name.
                present = [other for other in self.names.all(name) if other in state]
                if present:
                    value = state[present[-1]]
                    sharded = isinstance(tensor, Tensor) and is_sharded(tensor)
                    picked[name] = spread(tensor, value) if sharded else value
            stage.load_state_dict(picked)


# ---- load


class LoadResult(NamedTuple):
    """The names that did not match when weights were loaded.

    Attributes:
        missing_keys: names in the model that were not given.
        unexpected_keys: names that were given, but that no stage has.
    """

    missing_keys: list[str]
    unexpected_keys: list[str]


class Offer(NamedTuple):
    """What a process has, and what it was given to load.

    Attributes:
        here: the names that this process has.
        loaded: the names that it was given.
        problems: what does not fit, by kind: ``"missing"`` names, and others.
        about: further JSON data for the check.
    """

    here: Sequence[str]
    loaded: Sequence[str]
    problems: Mapping[str, Sequence[str]]
    about: Any = None


Refuse = Callable[[LoadResult, Mapping[str, list[str]], list[dict[str, Any]]], None]
"""Raises if something does not fit: given the result, the problems of all processes, and their offers."""


def agree_to_load(
    job: Job, among: Group, bring: Callable[[], Offer], refuse: Refuse, further: Iterable[str] = ()
) -> LoadResult:
    """Compare what all processes have with what they load; nothing is changed.

    Args:
        job: this process among the others.
        among: the processes that load.
        bring: compares what this process has with what it loads.
        refuse: called in the leader.
        further: names that are not unexpected either.

    Raises:
        StateDictError: it does not fit; the message lists every problem.
    """
    judge = partial(judged, refuse, further)
    return LoadResult(*tell(job, among, "load", lambda: (None, bring()._asdict()), judge))


def judged(refuse: Refuse, further: Iterable[str], parts: list[dict[str, Any]]) -> list[Any]:
    """Return what is missing and unexpected in the offers of all processes; for the arguments see above."""
    known = {*further}.union(*distinct(parts, "here"))
    unexpected = [one for one in _union(distinct(parts, "loaded")) if one not in known]
    every = distinct(parts, "problems")
    problems = {kind: _union(of[kind] for of in every) for kind in every[0]}
    result = LoadResult(problems["missing"], unexpected)
    refuse(result, problems, parts)
    return [[*result]] * len(parts)


def load_state(
    job: Job,
    weights: StageWeights,
    read: Callable[[], Mapping[str, Any]],
    *,
    strict: bool,
    any_name: bool,
) -> LoadResult:
    """Load the stages here from a state dict, once all ranks have compared their stages with it.

    Args:
        job: the processes that load.
        weights: the weights of the stages here.
        read: returns the state dict to load.
        strict: whether missing and unexpected names are an error, before anything is changed.
        any_name: whether any one of a weight's names is enough.
    """
    state: Mapping[str, Any] = {}

    def bring() -> Offer:
        nonlocal state
        weights.check_filled()
        state, here = read(), weights.state_dict()
        missing, problems = compare(here, weights.names if any_name else Names(()), state)
        return Offer([*here], [*state], {"missing": missing, "hard": problems})

    agreed = agree_to_load(
        job, job.pipeline, bring, partial(_refuse, strict, "weights"), weights.names.tied
    )
    weights.load(state)
    return agreed


def load_optimizer(
    job: Job,
    optimizer: Optimizer,
    names: Mapping[int, str],
    state: Mapping[str, Any],
    *,
    strict: bool,
) -> LoadResult:
    """Load an optimizer from a state dict by names, once all ranks have compared theirs with it."""
    saved: list[Any] = []
    settings: list[dict[str, Any]] = []

    def bring() -> Offer:
        if not {"state", "param_groups"} <= state.keys():
            raise StateDictError(
                f"an optimizer's state dict has 'state' and 'param_groups', not {sorted(map(str, state))}; "
                "pass what pipe.weights.optimizer_state_dict(optimizer) returned"
            )
        saved.extend((settings_of(group), group["params"]) for group in state["param_groups"])
        listed = [name for _, of in saved for name in of]
        if not all(isinstance(name, str) for name in [*state["state"], *listed]):
            raise StateDictError(
                "this optimizer's state dict holds positions, which mean different parameters on each rank; "
                "save what pipe.weights.optimizer_state_dict(optimizer, full=True) returns, or use "
                "penstock.Checkpoints"
            )
        groups = [of for _, of in read_states(optimizer, names, "the optimizer").groups]
        continued, missing, problems = find_groups(groups, saved)
        here = [name for of in groups for name in of]
        of_groups = [{} if number is None else saved[number][0] for number in continued]
        fitting, unfit = fitting_settings(optimizer, of_groups)
        settings.extend(fitting)
        return Offer(here, listed, {"missing": missing, "hard": problems + unfit * strict})

    agreed = agree_to_load(job, job.pipeline, bring, partial(_refuse, strict, "optimizer's states"))
    here = {*names.values()}
    states = {name: _copies(of) for name, of in state["state"].items() if name in here}
    write_states(optimizer, names, _copies(settings), states)
    return agreed


def _copies(state: Any) -> Any:
    return tree_map_only(Tensor, lambda tensor: whole(tensor).cpu().clone(), state)


def compare(
    here: Mapping[str, Any], names: Names, state: Mapping[str, Any]
) -> tuple[list[str], list[str]]:
    """The weights here that a state dict lacks, and the size mismatches of the others."""
    missing, problems = [], []
    look = state.entry if isinstance(state, WeightFiles) else state.__getitem__
    for name, tensor in here.items():
        present = [one for one in names.all(name) if one in state]
        if not present:
            missing.append(name)
        elif isinstance(tensor, Tensor):
            shape = list(look(present[-1]).shape)
            if shape != list(tensor.shape):
                sizes = f"{shape} was given, but the model has {list(tensor.shape)}"
                problems.append(f"size mismatch for {name}: {sizes}")
    return missing, problems


def check_fits(
    result: LoadResult, problems: Sequence[str], strict: bool = True, what: str = "weights"
) -> None:
    """Refuse a state dict that cannot be loaded; the message lists every problem."""
    lines = list(problems)
    for kind, names in (("Missing", result[0]), ("Unexpected", result[1])):
        if strict and names:
            lines.insert(0, f"{kind} key(s) in state_dict: {quoted(names, 1000)}.")
    if lines:
        raise StateDictError(
            f"the {what} do not fit, and none were loaded:\n\t" + "\n\t".join(lines)
        )


def _refuse(
    strict: bool, what: str, result: LoadResult, problems: Mapping[str, list[str]], parts: Any
) -> None:
    del parts
    check_fits(result, problems["hard"], strict, what)


def _union(lists: Iterable[Sequence[str]]) -> list[str]:
    return list(dict.fromkeys(name for one in lists for name in one))


# ---- gather


def check_saveable(weights: Mapping[str, Any]) -> None:
    """Check that weights are tensors.

    Raises:
        UsageError: some are not.
    """
    if others := [name for name, value in weights.items() if not isinstance(value, Tensor)]:
        raise UsageError(
            f"{', '.join(others[:5])} are not tensors, so they cannot be gathered or saved; "
            "use state_dict() without full=True on each rank"
        )


def saveable(weights: StageWeights) -> dict[str, Tensor]:
    """The weights that this process counts, each once over all stages, by their first names.

    Raises:
        UsageError: some are not tensors, or stages have different weights under one name.
    """
    mine = {name: one for of_stage in weights.files().values() for name, one in of_stage.items()}
    check_saveable(mine)
    return mine


def gather_state(job: Job, weights: StageWeights) -> dict[str, Any]:
    """The unsplit model's state dict on rank 0, as copies on the CPU; empty on other ranks."""
    keys, states = collect(job, lambda: (list(weights.state_dict()), saveable(weights)))
    collected = {name: one for of_rank in states for name, one in of_rank.items()}
    return {key: collected[weights.names.first(key)] for key in _union(keys)}


def stream_state(
    job: Job, weights: StageWeights, *, bucket_bytes: int, to_all: bool, is_wanted: bool
) -> Iterator[tuple[str, Tensor]]:
    """Yield the unsplit model's weights, each once, a bucket at a time; see :func:`travel`."""
    mine: dict[str, Tensor] = {}

    def tell() -> Any:
        mine.update(saveable(weights))
        return table_of(mine)

    tables = job.meet(tell, doing="stream", among=job.pipeline)
    for _, bucket in travel(
        job, mine, tables, bucket_bytes=bucket_bytes, to_all=to_all, is_wanted=is_wanted
    ):
        yield from bucket.items()


def gather_optimizer(job: Job, names: Names, held: Callable[[], OptimizerStates]) -> dict[str, Any]:
    """The states of all ranks' optimizers as one state dict on rank 0, on the CPU; empty on other ranks."""

    def bring() -> tuple[Any, Mapping[str, Any]]:
        names.check_apart()
        _, groups, states, shared = held()
        encoded = [(encode(of, "settings", None), members) for of, members in groups]
        return [encoded, dict(shared)], states

    heads, collected = collect(job, bring)
    if job.rank:
        return {}
    groups = [of_rank for of_rank, _ in heads]
    warn_of_settings([shared for _, shared in heads], job.pipeline.names.__getitem__)
    # A state that several ranks have is the same on each; the first rank's counts.
    states = {name: one for of_rank in reversed(collected) for name, one in of_rank.items()}
    merged = [(decode(of), members) for of, members in merge_groups(groups)]
    return named_state_dict(OptimizerStates("", merged, states))
