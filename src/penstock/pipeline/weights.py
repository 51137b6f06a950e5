"""What a Pipeline does with its weights: list them, save and load them, measure and clip their gradients."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from penstock.errors import UsageError
from penstock.parallel import whole
from penstock.partition import Shared, Watched
from penstock.pipeline.ranks import LocalRanks
from penstock.runtime import Rank, Task, Wait
from penstock.transport import SHARED, Channel
from penstock.values import TensorSpec, version_of
from penstock.weights import (
    Init,
    initialise,
    read_weights,
    save_index,
    save_stage,
    scale_gradients,
    total_norm,
)
from penstock.weights.exchange import exchange
from penstock.weights.norms import all_norms
from penstock.weights.optimizers import (
    NamedStates,
    find_states,
    named_state_dict,
    read_states,
    remember_names,
    write_states,
)
from penstock.weights.sharing import SharedWeights
from penstock.weights.states import (
    LoadResult,
    Names,
    StageWeights,
    check_contents,
    check_fits,
    gather_optimizer,
    gather_state,
    load_state,
)


class RanksHere:
    """How weights reach the other ranks: their ``Ranks``, see ``penstock.weights.exchange``.

    Args:
        local: the ranks that live in this process.
    """

    def __init__(self, local: LocalRanks) -> None:
        self._local = local

    @property
    def rank(self) -> int:
        """The rank that this process is; the first of them if it is all."""
        return self._local.ranks[0].number

    def gather(self, value: Any) -> list[Any]:
        """The JSON values of all processes, by rank."""
        if len(self._local.ranks) > 1:
            return [value]
        values: list[Any] = self._local.each(lambda rank: rank.exchange(value))
        return values

    def open(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Prepare :meth:`swap` from one rank to another, for some pairs."""
        for rank in self._local.ranks if len(self._local.ranks) == 1 else ():
            rank.transport.open([Channel(*pair, SHARED) for pair in pairs])

    def swap(
        self, sends: Mapping[int, Sequence[Tensor]], receives: Mapping[int, Sequence[Tensor]]
    ) -> None:
        """Send tensors to ranks, and fill others with what these send."""

        def task(rank: Rank) -> Task[None]:
            for other, tensors in sends.items():
                rank.transport.post_send(Channel(rank.number, other, SHARED), list(tensors))
            for other, tensors in receives.items():
                specs = [TensorSpec.of(one.detach()) for one in tensors]
                channel = Channel(other, rank.number, SHARED)
                ticket = rank.transport.post_receive(channel, specs, tensors[0].device)
                yield Wait(ticket, rank.number, f"waits on the {channel} for weights")
                for tensor, value in zip(tensors, ticket.take(), strict=True):
                    tensor.copy_(value)
            rank.transport.finish()

        self._local.run([task(self._local.ranks[0])])


class LeftBehind:
    """The weights that a Pipeline trains in other processes, while this process keeps their old values.

    A later Pipeline of the same model, with other stages in this process, would start from the old values.
    That is checked at its first call, since new values may be loaded before.

    Args:
        model: the model that was cut.
        here: the stages of this process.
    """

    def __init__(self, model: nn.Module, here: Sequence[nn.Module]) -> None:
        held = {id(one) for stage in here for one in stage.parameters()}
        named = dict(model.named_parameters())
        now = {id(one): version_of(one) for one in named.values() if not one.is_meta}
        # Only ids and versions are kept, so that no weights stay alive that the model has dropped.
        self._here = {one: version for one, version in now.items() if one in held}
        self._others = {one: version for one, version in now.items() if one not in held}
        earlier = _EARLIER.get(model, [])
        self._suspects = {
            name: (one, now[id(one)])
            for name, one in named.items()
            if id(one) in self._here and any(pipe._has_left(id(one), now) for pipe in earlier)
        }
        if self._others:
            _EARLIER[model] = [*earlier, self]

    def _has_left(self, one: int, now: Mapping[int, int]) -> bool:
        """Whether other processes have trained a weight since, and its values here are still the old ones."""
        if self._others.get(one) != now[one]:
            return False
        return any(now.get(own, version) != version for own, version in self._here.items())

    def check(self) -> None:
        """Check that no weight of the stages here has been trained in another process since.

        Raises:
            UsageError: one has.
        """
        suspects, self._suspects = self._suspects, {}
        old = [name for name, (one, version) in suspects.items() if version_of(one) == version]
        if old:
            raise UsageError(
                f"{', '.join(map(repr, old[:5]))}: an earlier Pipeline of this model has trained these "
                "weights in another process, and this process still has their old values; save a "
                "checkpoint with the earlier Pipeline, and load it with this one before its first call"
            )


_EARLIER: Any = WeakIdKeyDictionary()
"""For each model, by identity: its Pipelines in this process that have trained weights elsewhere."""


class HeldWeights:
    """The weights of the ranks that live in this process, and those that they share with other ranks.

    Args:
        local: these ranks.
        shared: the table of weights that stages share.
        rank_of: the rank of each stage.
        model: the model that was cut, if it is known.
        parts: all of its stages.

    Raises:
        AgreementError: a shared weight has different shapes or types on different ranks.
    """

    def __init__(
        self,
        local: LocalRanks,
        shared: Sequence[Shared],
        rank_of: Sequence[int],
        model: nn.Module | None = None,
        parts: Sequence[nn.Module] = (),
    ) -> None:
        self.local = local
        self.ranks = RanksHere(local)
        self._rank_of = rank_of
        self.stage_count = len(rank_of)
        self._share(shared)
        here = {stage.index: stage.own for stage in local.stages}
        self._watched = Watched(model, parts or list(here.values()), here)
        self._by_identity = self._watched.table()
        self._left = None if model is None else LeftBehind(model, list(here.values()))
        self.align()
        remember_names(self.weights.named_parameters())

    def _share(self, shared: Sequence[Shared]) -> None:
        self._shared = tuple(shared)
        self.names = Names(shared)
        self._sharing = SharedWeights(self.local.stages, shared, self._rank_of, self.ranks)

    def prepare(self) -> None:
        """Take over what the user has changed in the model before a call, and refuse outdated weights.

        Raises:
            UsageError: a change cannot be taken over, or an earlier Pipeline has trained weights elsewhere.
        """
        if self._left is not None:
            self._left.check()
        self.follow()

    def follow(self) -> None:
        """Take over what the user has changed in the model since the last call.

        Raises:
            UsageError: a change cannot be taken over.
        """
        self._watched.check_modules()
        if not self._watched.is_changed():
            return
        remember_names(StageWeights(self.local.stages, self.names).named_parameters())
        if len(self.local.stages) < self.stage_count:
            self._watched.check_ties(self._shared)
            return
        self._sharing.tie_filled()
        before, self._by_identity = self._by_identity, self._watched.table()
        if self._by_identity != before:
            kept = [one for one in self._shared if one not in before]
            self._share([*self._by_identity, *kept])

    def align(self, level: int = logging.WARNING) -> None:
        """Make copies of weights that ranks share equal, and log where they differed."""
        self._sharing.align(level)

    @contextmanager
    def training(self) -> Iterator[None]:
        """A context around a training step: it adds up the gradients of weights that stages share."""
        self._sharing.prepare()
        before = self._watched.foreign_gradients()
        yield
        self._check_foreign(before)
        if not self._sharing.idle:
            # As a task, so that its error ends the other ranks too.
            self.local.run([self._check_buffers()])
            self._sharing.sum_gradients()

    def _check_buffers(self) -> Task[None]:
        self._sharing.check_buffers()
        yield from ()

    def _check_foreign(self, before: Mapping[nn.Parameter, Tensor]) -> None:
        """Check that a step added no gradient to weights whose stages are in other processes."""
        after = self._watched.foreign_gradients()
        names = self._watched.names_of([p for p, g in after.items() if g is not before.get(p)])
        if names:
            raise UsageError(
                f"the loss uses {', '.join(map(repr, names[:5]))}, whose stages are in other processes: the "
                "copies in this process are not trained. Use such a weight inside the model, where several "
                "stages may share it; the loss may use only weights of the last stage"
            )

    @property
    def weights(self) -> StageWeights:
        """The parameters and buffers that live in this process."""
        self.follow()
        return StageWeights(self.local.stages, self.names)

    def names_by_identity(self) -> dict[int, str]:
        """The name of each parameter that lives in this process, by its ``id``."""
        return {id(parameter): name for name, parameter in self.weights.named_parameters()}

    def load(self, state: Mapping[str, Any], *, strict: bool, any_name: bool) -> LoadResult:
        """Load values by name; with ``any_name``, one of a weight's names is enough."""
        result = load_state(
            self.ranks, self.weights, self.names, state, strict=strict, any_name=any_name
        )
        self.align()
        return result


class WeightMethods:
    """The methods of a Pipeline that deal with weights."""

    _held: HeldWeights

    @property
    def held_weights(self) -> StageWeights:
        """The parameters and buffers that live in this process."""
        return self._held.weights

    # ---- parameters

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters that live in this process, each once, under their names in the unsplit model."""
        return self._held.weights.named_parameters()

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters that live in this process, each once."""
        return (parameter for _, parameter in self.named_parameters())

    def zero_grad(self) -> None:
        """Drop the gradients of the parameters that live in this process."""
        for parameter in self.parameters():
            parameter.grad = None

    def grad_norm(self, norm_type: float = 2.0, *, error_if_nonfinite: bool = False) -> float:
        """The norm of all gradients of the whole model, the same on every rank.

        A weight that several stages share counts once, and of a DTensor the whole.

        Args:
            norm_type: which norm; ``float("inf")`` is the largest absolute value.
            error_if_nonfinite: whether a norm that is infinite or ``nan`` is an error.

        Raises:
            NonFiniteError: the norm is not finite.
        """
        order = float(norm_type)
        norms = all_norms(self._held.ranks, self._held.weights.counted(), order)
        return total_norm(
            norms, order, error_if_nonfinite=error_if_nonfinite, steps=self._held.local.steps
        )

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
    ) -> float:
        """Scale all gradients so that their norm over the whole model is at most ``max_norm``.

        Args:
            max_norm: the largest norm.
            norm_type: as for :meth:`grad_norm`.
            error_if_nonfinite: as for :meth:`grad_norm`; no gradient is scaled then.

        Returns:
            The norm before, the same on every rank.
        """
        norm = self.grad_norm(norm_type, error_if_nonfinite=error_if_nonfinite)
        scale_gradients(self.parameters(), norm, max_norm)
        return norm

    def init_weights(self, seed: int, init: Init | None = None) -> None:
        """Give all weights their first values, as :func:`penstock.init_weights` does. Every rank calls it."""
        initialise([(stage.own, stage.device) for stage in self._held.local.stages], seed, init)
        # A shared weight may have been filled differently in each process.
        self._held.align(logging.DEBUG)

    # ---- state dicts

    def state_dict(self, *, full: bool = False) -> dict[str, Any]:
        """Parameters and buffers under their names in the unsplit model.

        Args:
            full: whether to give rank 0 those of all stages, as copies on the CPU, and the other ranks an
                empty dict; every rank calls it then. By default those that live in this process.

        Raises:
            UsageError: different stages have different weights of one name.
        """
        if not full:
            return self._held.weights.state_dict()
        return gather_state(self._held.ranks, self._held.weights, self._held.names)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> LoadResult:
        """Load the unsplit model's weights: each process picks those of its stages.

        Every rank calls it.

        Args:
            state_dict: of the unsplit model.
            strict: whether missing and unexpected names are an error. A name is unexpected if no stage of
                any rank has it.

        Returns:
            The names that were missing and unexpected, over all ranks.

        Raises:
            StateDictError: something is missing, unexpected or of another size; nothing is changed then.
        """
        return self._held.load(state_dict, strict=strict, any_name=False)

    # ---- optimizers

    def optimizer_state_dict(self, optimizer: Optimizer, *, full: bool = False) -> dict[str, Any]:
        """An optimizer's state dict, in which parameters have their names in the unsplit model.

        Its own state dict holds positions, which mean other parameters on each rank. This one can be loaded
        with any stages and ranks, by :meth:`load_optimizer_state_dict`, and into an optimizer of the unsplit
        model, by torch's ``set_optimizer_state_dict``.

        Args:
            optimizer: of parameters that live in this process.
            full: whether to give rank 0 the states of all parameters, as copies on the CPU, and the other
                ranks an empty dict; every rank calls it then. By default those that live in this process.

        Raises:
            UsageError: it has parameters that are not this pipeline's, or keeps one state for all.
        """
        held = read_states(optimizer, self._held.names_by_identity(), "the optimizer")
        if not full:
            return named_state_dict(held)
        return gather_optimizer(self._held.ranks, self._held.names, held)

    def load_optimizer_state_dict(
        self, optimizer: Optimizer, state_dict: Mapping[str, Any], strict: bool = True
    ) -> LoadResult:
        """Load an optimizer's state dict by names: each process picks those of its parameters.

        Every rank calls it.

        Args:
            optimizer: of parameters that live in this process.
            state_dict: as :meth:`optimizer_state_dict` gives it, with ``full=True`` for other stages or
                ranks.
            strict: whether what is missing or unexpected is an error.

        Returns:
            The names of parameters that were missing and unexpected, over all ranks.

        Raises:
            StateDictError: it does not fit, or holds positions; nothing is changed then.
        """
        names = self._held.names_by_identity()
        states, fits, problems = find_states(self._held.ranks, optimizer, names, state_dict)
        result = LoadResult(*fits)
        check_fits(result, problems, strict=strict, what="optimizer's states")
        write_states(optimizer, names, states, "the optimizer")
        return result

    def optimizer_state(self, optimizer: Optimizer) -> NamedStates:
        """An optimizer as ``torch.distributed.checkpoint`` saves and loads it beside the pipeline.

        ::

            state = {"model": pipe, "optimizer": pipe.optimizer_state(opt)}
            torch.distributed.checkpoint.save(state, checkpoint_id=folder)
            torch.distributed.checkpoint.load(state, checkpoint_id=folder)

        Args:
            optimizer: of parameters that live in this process.
        """
        return NamedStates(optimizer, self._held.names_by_identity)

    # ---- files

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the weights as safetensors, one file per stage and an index, under the model's names.

        Every rank calls it, of all pipelines that ``mesh=`` and ``replicas=`` tell of; the first writes.

        A weight that has several names or stages is written once. :func:`penstock.read_weights` gives it
        under all its names, so that the unsplit model loads it.
        """
        check_contents(self._held.ranks, self._held.weights)
        path, count, sizes = Path(folder), self._held.stage_count, list[Any]()
        with self._held.local.patient():
            for index, held in self._held.weights.files().items():
                state = {name: whole(tensor) for name, tensor in held.items()}
                if self._held.local.siblings.first:
                    sizes.append([index, save_stage(state, path, index, count)])
            of_ranks = exchange(self._held.ranks, sizes)
        if self._held.local.leads:
            of_stages = {index: size for of_rank in of_ranks for index, size in of_rank}
            save_index(path, of_stages, self._held.names.tied)
        with self._held.local.patient():
            self._held.local.siblings.wait()

    def load(self, folder: str | os.PathLike[str], strict: bool = True) -> LoadResult:
        """Load weights from safetensors files; each process reads only those of its stages.

        Args:
            folder: one that :meth:`save` wrote, with however many stages, or one of transformers.
            strict: as for :meth:`load_state_dict`; of a weight's names one is enough.

        Raises:
            InputFileError: there are no such files.
            StateDictError: they hold another model.
        """
        with self._held.local.patient():
            return self._held.load(read_weights(folder), strict=strict, any_name=True)
