"""The weights of the whole model, wherever its stages are: norms, state dicts, files and first values."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn
from torch.optim import Optimizer

from penstock._engine.transport import Job, collective
from penstock._engine.weights import Init, read_weights
from penstock._engine.weights.folders import PipelineSave, files_beside
from penstock._engine.weights.norms import scale_gradients, total_norm
from penstock._engine.weights.optimizers import OptimizerStates, named_state_dict, read_states
from penstock._engine.weights.states import LoadResult, StageWeights, load_optimizer
from penstock.errors import UsageError
from penstock.pipeline.holding import HeldModel

LONG = 300.0
"""Seconds that a rank may take to read or write its weights while the others wait."""


class ModelWeights:
    """The weights of a pipeline's model, under their names in the unsplit model; ``pipe.weights``.

    Every rank calls its methods, unless a method says otherwise.

    Args:
        job: reaches the other processes.
        held: the model, or the stages, in this process.
    """

    def __init__(self, job: Job, held: HeldModel) -> None:
        self.job, self._held = job, held

    @property
    def here(self) -> StageWeights:
        """The parameters and buffers that live in this process."""
        return self._held.weights.weights

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """See :meth:`Pipeline.named_parameters`; one rank may call it alone."""
        return self._held.weights.named_parameters()

    def leave_gradients(self) -> None:
        """Leave placeholders as the gradients of the weights of other ranks, as a step does."""
        self._held.stage_weights.leave_gradients()

    # ---- norms and first values

    @collective
    def grad_norm(self, norm_type: float = 2.0, *, error_if_nonfinite: bool = False) -> float:
        """The norm of all gradients of the whole model, the same on every rank.

        A weight that several stages share counts once, and a DTensor counts whole.

        Args:
            norm_type: which norm; ``float("inf")`` is the largest absolute value.
            error_if_nonfinite: whether a norm that is infinite or ``nan`` is an error.

        Raises:
            NonFiniteError: the norm is not finite.
        """
        order = float(norm_type)
        return total_norm(
            self._held.weights.norms(order), order,
            error_if_nonfinite=error_if_nonfinite, steps=self.job.steps,
        )  # fmt: skip

    @collective
    def grad_norms(self, norm_type: float = 2.0) -> dict[str, float]:
        """The norm of each weight's gradient, by the name of the weight, the same on every rank.

        It has the names of the whole model in their order, and leaves out those without a gradient. Every
        rank calls it; the ranks meet once.

        Args:
            norm_type: as for :meth:`grad_norm`.

        Raises:
            UsageError: different stages have different weights of one name.
        """
        return self._held.weights.norms_by_name(float(norm_type))

    @collective
    def sum(self, of: Mapping[nn.Parameter, Any]) -> Tensor:
        """The sum over the weights of the whole model of a number for each, the same on every rank.

        This is for optimizers that look at all weights at once, such as Prodigy: on each rank they see only
        the weights that live there. A weight that several stages share counts once. The sum is taken in
        float64, in the order of the stages, so it does not depend on the placement.

        Args:
            of: for weights in this process, a number or a tensor each, all of one shape: for several sums at
                once, a tensor of several numbers. What is given for weights of other ranks does not count.

        Returns:
            A tensor of that shape on the CPU; 0 if no rank gave anything.

        Raises:
            UsageError: one of the weights is not the model's.
        """
        return self._held.weights.sum(of)

    @collective
    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
    ) -> float:
        """Scale all gradients so that their norm over the whole model is at most ``max_norm``.

        Args:
            max_norm: the largest norm.
            norm_type: as for :meth:`grad_norm`.
            error_if_nonfinite: as for :meth:`grad_norm`; no gradient is scaled then.

        Returns:
            The norm before scaling, the same on every rank.
        """
        norm = self.grad_norm(norm_type, error_if_nonfinite=error_if_nonfinite)
        scale_gradients([weight for _, weight in self.here.named_parameters()], norm, max_norm)
        return norm

    @collective
    def init_weights(self, seed: int, init: Init | None = None) -> None:
        """Initialise all weights, as :func:`penstock.init_weights` does.

        Before the cut, a model on the meta device gets its values with the cut, each process its stages'.
        """
        uncut = self._held.uncut
        if uncut is None or not uncut.fill_later(seed, init):
            self._held.weights.initialise(seed, init)
        elif not uncut.needs_call:
            self._held.cut_now()

    # ---- state dicts

    @collective
    def state_dict(self, *, full: bool = False) -> dict[str, Any]:
        """Parameters and buffers under their names in the unsplit model.

        Args:
            full: whether to return the tensors of all stages on rank 0, as copies on the CPU, and an empty
                dict on the others; every rank then calls it. By default, only the tensors in this process.

        Raises:
            UsageError: different stages have different weights of one name.
        """
        return self._held.weights.state_dict() if full else self.here.state_dict()

    def stream(
        self, bucket_bytes: int = 1 << 28, *, to: Literal["main", "all"] = "main"
    ) -> Iterator[tuple[str, Tensor]]:
        """Iterate over the whole weights by their names, such as to load them into an inference engine.

        The names are those of the unsplit model, under which ``from_pretrained`` loads it. A weight with
        several names or stages comes once, under its first name; a sharded one comes whole. A process never
        has more than a bucket of what is not its own. Every rank of all pipelines given by ``mesh=`` or
        ``replicas=`` calls it between two steps, and iterates to the end::

            engine.load_weights(pipe.weights.stream())        # in the main process
            for _ in pipe.weights.stream(): pass              # in the others

        Args:
            bucket_bytes: the size of a bucket in bytes; a larger tensor is a bucket of its own.
            to: ``"main"``: :attr:`Pipeline.is_main_process` gets the weights, and the others none.
                ``"all"``: every process gets them.

        Yields:
            Names and tensors, on the device of the stages; do not write into them, and copy what you keep:
            those that live in this process are the model's own.

        Raises:
            UsageError: an argument is invalid, or different stages have different weights of one name.
        """
        if bucket_bytes < 1:
            raise UsageError(f"bucket_bytes={bucket_bytes}: must be at least 1 byte")
        if to not in ("main", "all"):
            raise UsageError(f"to={to!r}: must be 'main' or 'all'")
        return self._streamed(bucket_bytes, to_all=to == "all")

    def _streamed(self, bucket_bytes: int, *, to_all: bool) -> Iterator[tuple[str, Tensor]]:
        try:
            with self.job.calling("stream", LONG):
                yield from self._held.weights.stream(bucket_bytes, to_all=to_all)
        except GeneratorExit:
            if self.job.transport is not None:
                # The other ranks are in the middle of it.
                text = (
                    "pipe.weights.stream() was left before its end on one rank; iterate to the end"
                )
                self.job.fail(UsageError(text))
            raise

    @collective
    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> LoadResult:
        """Load the unsplit model's weights: each process picks those of its stages.

        Args:
            state_dict: the state dict of the unsplit model.
            strict: whether missing and unexpected names are an error. A name is unexpected if no stage of
                any rank has it.

        Returns:
            The names that were missing and unexpected, over all ranks.

        Raises:
            StateDictError: something is missing, unexpected or of another size; nothing is changed then.
        """
        return self._held.weights.load(lambda: state_dict, strict=strict, any_name=False)

    @collective
    def optimizer_state_dict(self, optimizer: Optimizer, *, full: bool = False) -> dict[str, Any]:
        """An optimizer's state dict, in which parameters have their names in the unsplit model.

        An optimizer's own state dict holds positions, which mean other parameters on each rank. This one can
        be loaded with any stages and ranks, by :meth:`load_optimizer_state_dict`, and into an optimizer of
        the unsplit model, by torch's ``set_optimizer_state_dict``.

        Args:
            optimizer: an optimizer of this pipeline's parameters.
            full: whether to return the states of all parameters on rank 0, as copies on the CPU, and an empty
                dict on the others; every rank then calls it. By default, only the states in this process.

        Raises:
            UsageError: the optimizer has parameters that are not this pipeline's, or one state for all.
        """

        def held() -> OptimizerStates:
            return read_states(optimizer, self._held.weights.names_by_identity(), "the optimizer")

        return self._held.weights.optimizer_state_dict(held) if full else named_state_dict(held())

    @collective
    def load_optimizer_state_dict(
        self, optimizer: Optimizer, state_dict: Mapping[str, Any], strict: bool = True
    ) -> LoadResult:
        """Load an optimizer's state dict by names: each process picks the states of its parameters.

        Args:
            optimizer: an optimizer of this pipeline's parameters.
            state_dict: as :meth:`optimizer_state_dict` returns it, with ``full=True`` for other stages or
                ranks.
            strict: whether missing and unexpected names are an error.

        Returns:
            The names of parameters that were missing and unexpected, over all ranks.

        Raises:
            StateDictError: the state does not fit, or holds positions; nothing is changed then.
        """
        names = self._held.weights.names_by_identity()
        loaded = load_optimizer(self.job, optimizer, names, state_dict, strict=strict)
        self.was_loaded(optimizer)
        return loaded

    def was_loaded(self, optimizer: Optimizer) -> None:
        """Note that an optimizer got states: those for weights of other ranks are dropped with the cut."""
        if self._held.uncut is not None:
            self._held.uncut.drop_later(optimizer)

    # ---- files

    @collective
    def save(self, folder: str | os.PathLike[str], processing_class: Any = None) -> None:
        """Write the weights as safetensors, one file per stage and an index, under the model's names.

        A model of transformers gets its ``config.json`` and ``generation_config.json`` too, so that
        ``from_pretrained(folder)`` loads it.

        Every rank of all pipelines given by ``mesh=`` or ``replicas=`` calls it; the first pipeline writes.
        The folder holds the weights that it held before until all new files are there: it is never between
        two saves, whenever a process is killed.

        A weight that has several names or stages is written once. :func:`penstock.read_weights` returns it
        under all its names, so that the unsplit model loads it.

        Args:
            folder: the folder; it is made if necessary.
            processing_class: a tokenizer or processor, whose files are written too: whatever has
                ``save_pretrained(folder)``. Rank 0 calls it.
        """
        with self.job.patient(LONG):
            PipelineSave(
                Path(folder), self.here, self._held.weights.stage_count,
                writes=self.job.is_first_pipeline and self._held.weights.writes(),
                beside=partial(files_beside, self._held.model, processing_class),
            ).run(self.job)  # fmt: skip

    @collective
    def load(self, folder: str | os.PathLike[str], strict: bool = True) -> LoadResult:
        """Load weights from safetensors files; each process reads only those of its stages.

        Args:
            folder: a folder that :meth:`save` wrote, with any number of stages, or one of transformers.
            strict: as for :meth:`load_state_dict`; one of a weight's names is enough.

        Raises:
            InputFileError: there are no such files.
            StateDictError: the files hold another model.
        """
        uncut = self._held.uncut
        if uncut is not None and uncut.load_later(folder, strict=strict):
            if not uncut.needs_call:
                self._held.cut_now()
            return LoadResult([], [])
        with self.job.patient(LONG):
            return self._held.weights.load(
                lambda: read_weights(folder), strict=strict, any_name=True
            )
