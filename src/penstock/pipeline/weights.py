"""The weights of the whole model, wherever its stages are: norms, state dicts, files and first values."""

from __future__ import annotations

import logging
import os
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from penstock._engine.parallel import local_part
from penstock._engine.placeholders import (
    Location,
    Placeholder,
    Steps,
    is_placeholder,
    optimizers_of,
)
from penstock._engine.transport import Job, collective
from penstock._engine.weights import Init, read_weights
from penstock._engine.weights.files import digest
from penstock._engine.weights.folders import PipelineSave, files_beside
from penstock._engine.weights.initialise import initialise
from penstock._engine.weights.norms import (
    all_norms,
    norms_by_name,
    scale_gradients,
    sum_over,
    total_norm,
)
from penstock._engine.weights.optimizers import (
    OptimizerStates,
    named_state_dict,
    read_states,
    shared_settings,
)
from penstock._engine.weights.sharing import SharedWeights
from penstock._engine.weights.states import (
    LoadResult,
    Names,
    StageWeights,
    WholeModel,
    gather_optimizer,
    gather_state,
    load_optimizer,
    load_state,
    stream_state,
)
from penstock.errors import UsageError
from penstock.partition import Shared, find_shared, named_tensors
from penstock.pipeline.uncut import CUT_NOW, UncutModel
from penstock.stage import PipelineStage

LONG = 300.0
"""Seconds that a rank may take to read or write its weights while the others wait."""
Listed = list[tuple[str, Placeholder | None]]
"""All parameters of the model by name, in order: placeholders for those of other ranks, and None for ours."""


class ModelWeights:
    """The weights of a pipeline's model, under their names in the unsplit model; ``pipe.weights``.

    Until the cut each process has all of them, and after it those of its stages. Every rank calls its
    methods, unless a method says otherwise.

    Args:
        job: reaches the other processes.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self._uncut: UncutModel | None = None
        self._model: nn.Module | None = None
        self._sharing: SharedWeights | None = None
        self._stages: Sequence[PipelineStage] = ()
        self._listed: Listed = []
        self._absent: list[Placeholder] = []
        self._steps = Steps(self._norms_if_all)
        self._is_filled = False
        self._averaged = True

    # ---- before and after the cut

    def wait(self, uncut: UncutModel) -> None:
        """Take a whole model, which waits for its cut."""
        self._uncut, self._model = uncut, uncut.model
        self._rank_of: Sequence[int] = [0]
        self._names = Names(find_shared(uncut.model, [uncut.model]))
        self._here = StageWeights([WholeModel(uncut.model)], self._names)
        # Each process has all weights, so that they count once in it alone.
        self._counting = Job()

    def hold(
        self,
        stages: Sequence[PipelineStage],
        shared: Sequence[Shared],
        rank_of: Sequence[int],
        model: nn.Module | None,
    ) -> None:
        """Take the stages of this process.

        Args:
            stages: the stages of this process.
            shared: the table of weights that stages share.
            rank_of: the rank of each stage.
            model: the model that was cut; without one, the ranks tell each other their parameters.

        Raises:
            AgreementError: a shared weight has different shapes or types on different ranks.
        """
        self._uncut, self._model = None, model
        self._stages, self._rank_of = stages, rank_of
        self._names, self._counting = Names(shared), self.job
        self._here = StageWeights(stages, self._names)
        self._sharing = SharedWeights(stages, shared, rank_of, self.job)
        self._sharing.align()
        if model is None:
            self._listed = self._list_by_hand()
        else:
            named = model.named_parameters()
            self._listed = [(name, one if is_placeholder(one) else None) for name, one in named]
        self._absent = [absent for _, absent in self._listed if absent is not None]
        for absent in self._absent:
            absent.follow(self._steps)

    # ---- the parameters of the whole model

    @property
    def here(self) -> StageWeights:
        """The parameters and buffers that live in this process."""
        if self._uncut is not None and (waiting := self._uncut.waiting):
            raise UsageError(f"{waiting}, with the first batch; {CUT_NOW}")
        if self._sharing is not None:
            self._sharing.tie_again()
        return self._here

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """See :meth:`Pipeline.named_parameters`; one rank may call it alone."""
        if self._uncut is not None:
            yield from self._uncut.model.named_parameters()
            return
        here = defaultdict[str, deque[nn.Parameter]](deque)
        for name, parameter in self.here.named_parameters():
            here[name].append(parameter)
        for name, absent in self._listed:
            if absent is not None:
                yield name, absent  # type: ignore[misc]  # it passes as an nn.Parameter
            elif here[name]:
                yield name, here[name].popleft()
        for name, added in here.items():
            yield from ((name, parameter) for parameter in added)

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
            UsageError: the last step was inside :meth:`Pipeline.no_sync`, so gradients are not averaged yet.
        """
        order = float(norm_type)
        return total_norm(
            self._norms(order), order,
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
        self._names.check_apart()
        norms = norms_by_name(
            self._counting, self.here.counted(), float(norm_type), averaged=self._averaged
        )
        return {name: norms[name] for name, _ in self.named_parameters() if name in norms}

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
        here = self._names_by_identity()
        if any(id(weight) not in here and not is_placeholder(weight) for weight in of):
            raise UsageError(
                "a sum over weights has one that is not the model's; take them from pipe.parameters(), or "
                "from the model's, after they were last replaced"
            )
        return sum_over(self._counting, self.here.counted(), of)

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
        uncut = self._uncut
        if uncut is not None and uncut.fill_later(seed, init):
            if not uncut.needs_call:
                uncut.cut_now()
            return
        whole = None if uncut is None else [(uncut.model, uncut.device)]
        initialise(whole or [(stage.code, stage.device) for stage in self._stages], seed, init)
        if self._sharing is not None:
            # A shared weight may have been filled differently in each process.
            self._sharing.align(logging.DEBUG)

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
        here = self.here
        if not full:
            return here.state_dict()
        self._check_equal()
        state = gather_state(self._counting, here)
        return {} if self.job.rank else state

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
                here = self.here
                self._check_equal()
                is_first = self.job.is_first_pipeline and (self._uncut is None or not self.job.rank)
                yield from stream_state(
                    self._counting, here,
                    bucket_bytes=bucket_bytes, to_all=to_all, is_wanted=to_all or is_first,
                )  # fmt: skip
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
        return self._load(lambda: state_dict, strict=strict, any_name=False)

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
            return read_states(optimizer, self._names_by_identity(), "the optimizer")

        if not full:
            return named_state_dict(held())
        state = gather_optimizer(self._counting, self._names, held)
        return {} if self.job.rank else state

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
        names = self._names_by_identity()
        loaded = load_optimizer(self.job, optimizer, names, state_dict, strict=strict)
        self.was_loaded(optimizer)
        return loaded

    def was_loaded(self, optimizer: Optimizer) -> None:
        """Note that an optimizer got states: those for weights of other ranks are dropped with the cut."""
        if self._uncut is not None:
            self._uncut.drop_later(optimizer)

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
            here = self.here
            self._check_equal()
            is_first = self.job.is_first_pipeline and (self._uncut is None or not self.job.rank)
            PipelineSave(
                Path(folder), here, len(self._rank_of), writes=is_first,
                beside=partial(files_beside, self._model, processing_class),
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
        uncut = self._uncut
        if uncut is not None and uncut.load_later(folder, strict=strict):
            if not uncut.needs_call:
                uncut.cut_now()
            return LoadResult([], [])
        with self.job.patient(LONG):
            return self._load(lambda: read_weights(folder), strict=strict, any_name=True)

    def _load(
        self, read: Callable[[], Mapping[str, Any]], *, strict: bool, any_name: bool
    ) -> LoadResult:
        result = load_state(self.job, self.here, read, strict=strict, any_name=any_name)
        if self._sharing is not None:
            self._sharing.align()
        return result

    # ---- a step

    def check_filled(self) -> None:
        """Check that the weights here have memory, or will get it with the cut.

        Raises:
            UsageError: a tensor is on the meta device.
        """
        if self._uncut is not None:
            if not self._uncut.waiting:
                self._here.check_filled()
            return
        if not self._is_filled:
            # Tensors are looked up by name only on failure.
            modules = [stage.module for stage in self._stages]
            tensors = [t for module in modules for t in (*module.parameters(), *module.buffers())]
            if True in [tensor.is_meta for tensor in tensors]:
                self.here.check_filled()
            self._is_filled = True
            for stage in self._stages:
                stage.follow_memory()

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """A context for a training step.

        Before it, shared weights are tied again; after it, their gradients are summed over stages.
        """
        assert self._sharing is not None
        self._sharing.prepare()
        yield
        try:
            self._sharing.finish()
        except BaseException as error:
            # One rank alone may find a changed buffer, or lose a peer; the others must learn of it.
            raise self.job.fail(error) from error.__cause__

    def leave_gradients(self, *, averaged: bool = True) -> None:
        """After a training step: leave placeholders as the gradients of the weights of other ranks.

        Args:
            averaged: whether the gradients here are those of all replicas, or still to be averaged by a later
                step.
        """
        self._averaged = averaged
        self._steps.leave_gradients()

    def zero_grad(self) -> None:
        """Drop all gradients; one rank may call it alone."""
        whole = None if self._uncut is None else [self._uncut.model]
        for module in whole or [stage.module for stage in self._stages]:
            for parameter in module.parameters():
                parameter.grad = None
        self._steps.drop_gradients()
        self._averaged = True

    def shared_settings(self) -> dict[str, list[float]]:
        """The numbers in optimizers' groups that all ranks must have alike, of those that have stepped."""
        names = self._names_by_identity()
        each = [shared_settings(one, names) for one in optimizers_of(self._absent)]
        return {name: numbers for of_one in each for name, numbers in of_one.items()}

    # ---- what several of these need

    def _names_by_identity(self) -> dict[int, str]:
        """The name of each parameter that lives in this process, by its ``id``."""
        return {id(parameter): name for name, parameter in self.here.named_parameters()}

    def _norms(self, order: float) -> Tensor:
        """The norms of all gradients of the model."""
        return all_norms(
            self._counting, self.here.counted(), len(self._rank_of), order, averaged=self._averaged
        )

    def _check_equal(self) -> None:
        """Check that ranks that have the same weights have them equal; all ranks call it.

        Raises:
            UsageError: they do not.
        """
        if self._uncut is None:
            return  # each rank has its own weights, and those that stages share are kept equal
        tensors = [digest(local_part(tensor)) for _, tensor in named_tensors(self._uncut.model)]
        mine = sha256(repr(tensors).encode()).hexdigest()
        of_ranks = self.job.meet(lambda: mine, among=self.job.pipeline)
        if len({*of_ranks}) > 1:
            raise UsageError(
                "the ranks have made the model with different weights, and only the cut says which rank's "
                f"count: build it with the same seed on every rank, or {CUT_NOW}"
            )

    def _list_by_hand(self) -> Listed:
        """The parameters of stages placed by hand, in the order of the stages."""
        rows = [
            [stage.index, self._names.first(name), list(p.shape), str(p.dtype), p.requires_grad]
            for stage in self._stages
            for name, p in stage.named_parameters()
        ]
        device, listed, seen = self._stages[0].device, Listed(), set[str]()
        saved = [[*stage.state_dict()] for stage in self._stages]
        gathered = self.job.meet(lambda: [rows, saved], among=self.job.pipeline)
        of_ranks = [rows for rows, _ in gathered]
        self._names.find_clashes(names for _, of_rank in gathered for names in of_rank)
        held = {name for _, name, *_ in rows} if len(of_ranks) > 1 else ()
        for index, name, shape, dtype, learns in sorted(row for rows in of_ranks for row in rows):
            rank, shared = self._rank_of[index], self._names.is_shared(name)
            if shared and name in seen:
                continue
            seen.add(name)
            if len(of_ranks) == 1 or rank == self.job.rank or (shared and name in held):
                listed.append((name, None))
                continue
            kind = getattr(torch, dtype.removeprefix("torch."))
            bare = torch.empty(shape, dtype=kind, device="meta", requires_grad=learns)
            listed.append(
                (name, Placeholder.of(bare, Location(name, rank, device), parameter=True))
            )
        return listed

    def _norms_if_all(self, order: float, present: int, absent: Sequence[str]) -> Tensor | None:
        """The norms of all gradients, where all ranks ask for them."""
        learning = [
            (name, weight) for name, weight in self.named_parameters() if weight.requires_grad
        ]
        expected = [
            name for name, weight in learning if is_placeholder(weight) and weight.grad is not None
        ]
        here = [w for _, w in learning if not is_placeholder(w) and w.grad is not None]
        if not order or present != len(here) or sorted(absent) != sorted(expected):
            return None
        homes = [self._ranks_with(name, weight) for name, weight in learning]
        # A rank that has all weights which learn computes the norm by itself, and would not join.
        if any(all(rank in home for home in homes) for rank in {*self._rank_of}):
            return None
        return self._norms(order)

    def _ranks_with(self, name: str, weight: Tensor) -> set[int]:
        if self._names.is_shared(name):
            return {self._rank_of[stage] for stage in self._names.stages(name)}
        return {weight.location.rank if is_placeholder(weight) else self.job.rank}
