"""What a stage does in each of its compute actions, as plain functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from penstock.parallel import gathered, replicated
from penstock.runtime.describing import OUTPUT
from penstock.runtime.exchange import Arguments, Exchange, Gradients, Inputs, chosen
from penstock.runtime.instrumentation import Health, Recorder
from penstock.runtime.program import RankProgram
from penstock.stage import PipelineStage
from penstock.step import Loss, Tally, Weights, nothing
from penstock.step.loss import Losses
from penstock.values import Microbatch, ValueSpec, flatten, unflatten
from penstock.values.structure import mapped, tensors_of

# ---- what is told of a stage's work, such as random streams and adapters


class Companion(Protocol):
    """Is told of each piece of a stage's work, just before it begins."""

    def forward(self, microbatch: int) -> None:
        """A microbatch's forward begins."""

    def loss(self, microbatch: int) -> None:
        """Its loss begins, on the last stage."""

    def backward(self, microbatch: int) -> None:
        """Its backward begins, or a half of it."""

    def done(self, microbatch: int) -> None:
        """Its backward is over."""


# ---- the functions, in rows
# A row is made once, when a program is bound, and holds only what the call needs: nothing is asked again for
# each microbatch. Its functions pass on what they work with through the stage's :class:`Desk`.


Part = Callable[[int], Any]
"""One part of an action, as a function of the microbatch."""


@dataclass
class StepData:
    """What one step brings to a rank, and where the rank puts its results.

    Args:
        parts: the microbatches of the batch.
        loss: computes the loss, if the call has one.
        targets: for each microbatch, what the loss compares with.
        weights: how much each microbatch counts.
        tally: collects losses and metrics.
        recorder: notes when each action ran, if that was asked for.
        health: notes whether what leaves the stages is finite, if that was asked for.
        outputs: of the last stage by microbatch, if they were asked for.
        owed: tensors of the batch that require grad, with their gradients.
    """

    parts: Sequence[Microbatch] = ()
    loss: Loss | None = None
    targets: Sequence[Any] = ()
    weights: Weights = field(default_factory=Weights)
    tally: Tally = field(default_factory=lambda: Tally(Weights(), {}))
    recorder: Recorder | None = None
    health: Health | None = None
    outputs: dict[int, Any] = field(default_factory=dict)
    owed: list[tuple[Tensor, Tensor]] = field(default_factory=list)


class Desk:
    """What one part of an action hands to the next; empty between actions."""

    __slots__ = ("arguments", "found", "grads", "microbatch", "output")

    def __init__(self) -> None:
        self.microbatch = 0
        self.clear()

    def clear(self) -> None:
        """Drop everything."""
        self.arguments: Arguments = ((), {})
        self.output: Any = None
        self.grads: Gradients = ()
        self.found: Gradients = ()


SEEDS_KEPT = 256
"""Seeds of backward that are kept from step to step, where steps have the same ones."""


class StageWork:
    """The functions of one stage that rows are made of.

    Args:
        stage: the stage.
        program: of its rank.
        exchange: of its rank.
        inputs: which of the model's arguments each stage is given.
        companions: are told of the stage's work.
        with_loss: whether the call computes a loss.
        casts: whether a wrapper of the stage's module changes the types of its arguments.
    """

    def __init__(  # noqa: PLR0913 - what a row may need, by name
        self,
        stage: PipelineStage,
        program: RankProgram,
        exchange: Exchange,
        inputs: Inputs,
        companions: Sequence[Companion],
        *,
        with_loss: bool,
        casts: bool = False,
    ) -> None:
        self.desk = Desk()
        self.data = StepData()
        self.stage = stage
        self._given = program.given(stage.index)
        self._taken = program.taken(stage.index)
        self._exchange = exchange
        self._inputs = inputs
        self._companions = tuple(companions)
        self._casts = casts
        self._added = Losses()
        self._seeds: dict[int, Tensor] = {}
        self._made: dict[Any, Tensor] = {}
        self._roots = self._roots_with_loss() if with_loss else self._roots_of_values()
        self.gather = self._gather()
        self.compute = self._compute()
        self.keep = self._keep()
        self.owed = self._owed()
        self.backward = self._running(stage.backward)
        self.backward_input = self._running(stage.backward_input)
        self.hand_back = self._handing_back()

    @property
    def recorder(self) -> Any:
        """The recorder of the running step, when it is timed."""
        return self.data.recorder

    def clear(self) -> None:
        """Drop the data of a step that is over or was interrupted."""
        self.data = StepData()
        self.desk.clear()
        self._seeds.clear()
        # Weights of microbatches that are counted anew in every step make new seeds without end.
        if len(self._made) > SEEDS_KEPT:
            self._made.clear()

    # ---- forward

    def _gather(self) -> Part:
        """Puts the arguments of the stage's module on the desk."""
        desk, stage, taken = self.desk, self.stage, self._taken
        read, inputs = self._exchange.reader(stage.index), self._inputs
        names = [edge.value for edge in taken]

        def gather(microbatch: int) -> None:
            values = dict(zip(names, read(microbatch), strict=True))
            desk.arguments = inputs.arguments(stage, taken, values, self.data.parts[microbatch])

        def gather_one(microbatch: int) -> None:
            """The common case, in which nothing has to be chosen: one value, and no keyword arguments."""
            if self.data.parts[microbatch].kwargs:
                gather(microbatch)
                return
            (value,) = read(microbatch)
            desk.arguments = (tuple(value) if type(value) in spreads else (value,)), {}

        spreads = stage.spreads
        return gather_one if len(taken) == 1 and not stage.wired else gather

    def _compute(self) -> Part:
        """Runs the stage's module, and the loss on the last stage."""
        desk, run, roots, added = self.desk, self.stage.forward, self._roots, self._added
        if self._casts and self.stage.wired:
            return self._compute_restored()

        def compute(microbatch: int) -> None:
            args, kwargs = desk.arguments
            desk.microbatch = microbatch
            with added:
                desk.output = run(
                    microbatch, args, kwargs, roots, self.data.parts[microbatch].aside
                )

        return compute

    def _compute_restored(self) -> Part:
        """Runs a wired module in a wrapper that changes types.

        The module itself is told the call in the types of the plain model, and other stages get its values
        in the types of the plain model.
        """
        desk, run, names = self.desk, self.stage.forward, [edge.value for edge in self._given]

        def compute(microbatch: int) -> None:
            args, kwargs = desk.arguments
            specs = self._exchange.specs[microbatch]

            def restored(output: Any) -> Any:
                if self.stage.is_last:
                    return _as_agreed(output, specs.get(OUTPUT))
                return {**output, **{n: _as_agreed(output[n], specs[n]) for n in names}}

            desk.microbatch = microbatch
            aside = self.data.parts[microbatch].aside
            with self._added:
                desk.output = run(microbatch, args, kwargs, self._roots, aside, restored)

        return compute

    def _keep(self) -> Part:
        """Keeps the values that other stages need of the output."""
        desk, stage, check = self.desk, self.stage, self._exchange.check_unchanged
        keep = self._exchange.keeper(stage.index, wired=stage.wired) if self._given else None

        def keep_values(microbatch: int) -> None:
            if stage.changed:
                check(stage.index, microbatch, stage.changed)
            if keep is not None:
                keep(microbatch, desk.output)

        return keep_values

    def keep_output(self, microbatch: int) -> None:
        """Keeps the whole output, for a call that returns outputs."""
        self.data.outputs[microbatch] = self.desk.output

    def end_forward(self, microbatch: int) -> None:
        """Clears the desk, so that tensors live on only where they are still needed."""
        self.desk.arguments = _NO_ARGUMENTS
        self.desk.output = None

    # ---- what backward starts from

    def _roots_of_values(self) -> Callable[[Any], tuple[Any, ...]]:
        given, wired = self._given, self.stage.wired
        return lambda output: tuple(chosen(given, output, wired=wired))

    def _roots_with_loss(self) -> Callable[[Any], tuple[Any, ...]]:
        """The values that other stages use, and the stage's part in the loss.

        A loss that a stage in the middle adds is one more root, beside the values that the stage gives. On
        the last stage it is added to the loss.
        """
        given, stage, added = self._given, self.stage, self._added
        main = self._main if stage.is_last else None

        def roots(output: Any) -> tuple[Any, ...]:
            values = chosen(given, output, wired=stage.wired)
            own = None if main is None else main(output)
            if added:
                self.data.tally.add_losses(self.desk.microbatch, stage.index, added)
                own = added.total() if own is None else own + added.total()
            if own is None:
                return tuple(values)
            self._seeds[self.desk.microbatch] = self._seed(own)
            return (*values, own)

        return roots

    def _main(self, output: Any) -> Tensor:
        """The loss of a microbatch."""
        data, microbatch = self.data, self.desk.microbatch
        for companion in self._companions:
            companion.loss(microbatch)
        if data.loss is not None and data.weights.shares[microbatch]:
            target = _saveable(data.targets[microbatch])
            found = replicated(data.loss.of_microbatch(output, target))
            data.tally.measure(microbatch, self.stage.index, output, target)
        else:
            # A microbatch of weight 0: a mean over nothing is nan, and so is its gradient.
            found = replicated(nothing(output))
        data.tally.add_main(microbatch, self.stage.index, found)
        # Backward starts from the whole loss as a plain tensor, with a plain seed.
        return gathered(found)

    def _seed(self, root: Tensor) -> Tensor:
        """The gradient that backward starts with at the loss.

        Microbatches of the same weight share one tensor.
        """
        seed = self.data.weights.seeds[self.desk.microbatch]
        key = (seed, root.dtype, root.device, root.shape)
        if key not in self._made:
            self._made[key] = torch.full_like(root.detach(), seed)
        return self._made[key]

    # ---- backward

    def _owed(self) -> Part:
        """Puts the gradients that backward starts with on the desk."""
        desk, seeds = self.desk, self._seeds
        total = self._exchange.owed(self.stage.index)

        def owed(microbatch: int) -> None:
            grads = total(microbatch)
            if microbatch in seeds:
                grads.append(seeds.pop(microbatch))
            desk.grads = grads

        return owed

    def _running(self, half: Callable[[int, Gradients], Gradients]) -> Part:
        desk = self.desk

        def run(microbatch: int) -> None:
            desk.found = half(microbatch, desk.grads)

        return run

    def _handing_back(self) -> Part:
        """Hands the gradients of the arguments to the stages that made them."""
        desk, hand_back = self.desk, self._exchange.handing_back(self.stage.index)

        def hand(microbatch: int) -> None:
            rest = hand_back(microbatch, desk.found)
            for gradient in rest:
                if gradient is not None:
                    self._owe(microbatch, rest)
                    break

        return hand

    def _owe(self, microbatch: int, gradients: Gradients) -> None:
        """Notes the gradients of the batch's own tensors, for those that require grad."""
        part = self.data.parts[microbatch]
        tensors, _ = flatten(self._inputs.batch_part(self.stage, self._taken, part))
        pairs = zip(tensors, gradients, strict=True)
        self.data.owed.extend((tensor, found) for tensor, found in pairs if found is not None)

    def end_backward(self, microbatch: int) -> None:
        """Clears the desk."""
        self.desk.grads = self.desk.found = ()

    # ---- what goes along

    def told(self, name: str) -> list[Part]:
        """A method of every companion, by its name."""
        return [getattr(companion, name) for companion in self._companions]

    # ---- health

    def note_output(self, microbatch: int) -> None:
        """Notes whether the output is finite."""
        if self.data.health is not None:
            self.data.health.forward(self.stage.index, microbatch, self.desk.output)

    def note_gradients(self, microbatch: int) -> None:
        """Notes whether the gradients of the arguments are."""
        if self.data.health is not None:
            self.data.health.backward(self.stage.index, microbatch, self.desk.found)


def _as_agreed(value: Any, spec: ValueSpec | None) -> Any:
    """A value whose tensors have the agreed types."""
    tensors, structure = flatten(value)
    if spec is None or len(spec.tensors) != len(tensors):
        return value
    pairs = zip(tensors, spec.tensors, strict=True)
    return unflatten(structure, [tensor.to(one.torch_dtype) for tensor, one in pairs])


_NO_ARGUMENTS: Arguments = ((), {})


def _saveable(target: Any) -> Any:
    """A target that autograd can save for backward, which it refuses for tensors made in inference mode."""
    if torch.is_grad_enabled() and any(tensor.is_inference() for _, tensor in tensors_of(target)):
        return mapped(target, torch.clone)
    return target
