"""What a Pipeline does with its weights: list them, save and load them, measure and clip their gradients."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from penstock.parallel import Siblings, average_gradients, whole
from penstock.partition import Shared
from penstock.runtime import Runner
from penstock.stage import PipelineStage
from penstock.weights import Init, read_weights
from penstock.weights.folders import save_index, save_stage
from penstock.weights.initialise import initialise
from penstock.weights.norms import all_norms, scale_gradients, total_norm
from penstock.weights.optimizers import named_state_dict, read_states, remember_names
from penstock.weights.sharing import SharedWeights
from penstock.weights.states import (
    LoadResult,
    Names,
    StageWeights,
    check_contents,
    gather_optimizer,
    gather_state,
    load_optimizer,
    load_state,
)

LONG = 300.0
"""Seconds that a rank may take to read or write its weights while the others wait."""


class HeldWeights:
    """The weights of the stages of this process, and those that they share with other stages.

    Args:
        stages: those of this process.
        ranks: how this process reaches the others.
        shared: the table of weights that stages share.
        rank_of: the rank of each stage.
        replicas: the process group over which gradients are averaged, if any.

    Raises:
        AgreementError: a shared weight has different shapes or types on different ranks.
    """

    def __init__(
        self,
        stages: Sequence[PipelineStage],
        ranks: Runner,
        shared: Sequence[Shared],
        rank_of: Sequence[int],
        replicas: Any = None,
    ) -> None:
        self.stages = stages
        self._replicas = replicas
        self.ranks = ranks
        self.stage_count = len(rank_of)
        self.names = Names(shared)
        self._sharing = SharedWeights(stages, shared, rank_of, ranks)
        self.align()
        remember_names(self.weights.named_parameters())

    def align(self, level: int = logging.WARNING) -> None:
        """Make copies of weights that ranks share equal, and log where they differed."""
        self._sharing.align(level)

    @contextmanager
    def training(self) -> Iterator[None]:
        """A context around a training step: gradients are summed over stages, averaged over replicas."""
        self._sharing.prepare()
        yield
        try:
            self._sharing.check_buffers()
            self._sharing.sum_gradients()
            if self._replicas is not None:
                average_gradients([stage.module for stage in self.stages], self._replicas)
        except BaseException as error:
            # One rank alone may find a changed buffer, or lose a replica; the others must hear of it.
            raise self.ranks.fail(error) from error.__cause__

    @property
    def weights(self) -> StageWeights:
        """The parameters and buffers that live in this process."""
        self._sharing.tie_again()
        return StageWeights(self.stages, self.names)

    def check_filled(self) -> None:
        """Check that the stages have memory; their tensors are named only if something is wrong.

        Raises:
            UsageError: a tensor is on the meta device.
        """
        modules = [stage.module for stage in self.stages]
        tensors = [t for module in modules for t in (*module.parameters(), *module.buffers())]
        if True in [tensor.is_meta for tensor in tensors]:
            self.weights.check_filled()
        for stage in self.stages:
            stage.follow_memory()

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
    def leads(self) -> bool:
        """Whether this process writes for all."""
        raise NotImplementedError

    @property
    def siblings(self) -> Siblings:
        """The pipelines beside this one."""
        raise NotImplementedError

    def patient(self, seconds: float) -> AbstractContextManager[None]:
        """Let this rank take longer between two steps."""
        raise NotImplementedError

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
            norms, order, error_if_nonfinite=error_if_nonfinite, steps=self._held.ranks.steps
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
        initialise([(stage.code, stage.device) for stage in self._held.stages], seed, init)
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
        return load_optimizer(self._held.ranks, optimizer, names, state_dict, strict=strict)

    # ---- files

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the weights as safetensors, one file per stage and an index, under the model's names.

        Every rank calls it, of all pipelines that ``mesh=`` and ``replicas=`` tell of; the first writes.

        A weight that has several names or stages is written once. :func:`penstock.read_weights` gives it
        under all its names, so that the unsplit model loads it.
        """
        check_contents(self._held.ranks, self._held.weights)
        path, count, sizes = Path(folder), self._held.stage_count, list[Any]()
        with self.patient(LONG):
            for index, held in self._held.weights.files().items():
                state = {name: whole(tensor) for name, tensor in held.items()}
                if self.siblings.first:
                    sizes.append([index, save_stage(state, path, index, count)])
            of_ranks = self._held.ranks.gather(sizes)
        if self.leads:
            of_stages = {index: size for of_rank in of_ranks for index, size in of_rank}
            save_index(path, of_stages, self._held.names.tied)
        with self.patient(LONG):
            self.siblings.wait()

    def load(self, folder: str | os.PathLike[str], strict: bool = True) -> LoadResult:
        """Load weights from safetensors files; each process reads only those of its stages.

        Args:
            folder: one that :meth:`save` wrote, with however many stages, or one of transformers.
            strict: as for :meth:`load_state_dict`; of a weight's names one is enough.

        Raises:
            InputFileError: there are no such files.
            StateDictError: they hold another model.
        """
        with self.patient(LONG):
            return self._held.load(read_weights(folder), strict=strict, any_name=True)
