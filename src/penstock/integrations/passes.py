"""A pass through a pipeline as a node of autograd's graph, whose backward comes later."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import compress
from typing import Any, cast

import torch
from torch import Tensor, nn

from penstock._engine.parallel import local_part
from penstock._engine.rng import generator_states, generators_kept, set_generator_states
from penstock._engine.values import map_tensors, tensors_in
from penstock.errors import UsageError
from penstock.partition import Snapshot, state_kept
from penstock.pipeline import CallArguments, Pipeline


class Pass:
    """A call of the pipeline in autograd's graph: its loss, its outputs, and their backward.

    The gradients of the loss were computed with it, and wait. If gradients arrive at the outputs, the
    pipeline runs forward and backward for them, in the state in which the forward was called.

    Args:
        pipe: the pipeline.
        batch: the model's arguments, and the target.
        again: whether the forward may have to run again.
        in_half: whether gradients are computed in float16, so that ranks must agree on infinite ones.
        note: is told the factor that the loss's backward came with.
    """

    def __init__(
        self,
        pipe: Pipeline,
        batch: CallArguments,
        *,
        again: bool,
        in_half: bool,
        note: Callable[[float], None],
    ) -> None:
        self.inputs = [t for t in tensors_in(batch) if t.requires_grad]
        self._copies = {id(t): t.detach().requires_grad_() for t in self.inputs}
        self.batch: CallArguments = (
            map_tensors(batch, lambda t: self._copies.get(id(t), t)) if self.inputs else batch
        )
        self.scale = 1.0
        self._pipe, self._in_half, self._note = pipe, in_half, note
        self._weights = dict(pipe.weights.here.named_parameters())
        self._versions = {name: weight._version for name, weight in self._weights.items()}
        self._gradients: list[Tensor | None] = [None] * len(self._weights)
        self._state = _State(pipe) if again else None
        self._done = False

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """A context whose gradients wait here; weights' own hooks are not called in it."""
        weights = list(self._weights.values())
        before = [weight.grad for weight in weights]
        hooks = [
            d for w in weights for d in (w._backward_hooks, w._post_accumulate_grad_hooks) if d
        ]
        kept = [dict(of_one) for of_one in hooks]
        for weight in weights:
            weight.grad = None
        for of_one in hooks:
            of_one.clear()
        try:
            yield
            self._gradients = [weight.grad for weight in weights]
        finally:
            for of_one, saved in zip(hooks, kept, strict=True):
                of_one.update(saved)
            for weight, gradient in zip(weights, before, strict=True):
                weight.grad = gradient

    def applied(self, loss: Tensor | None, outputs: list[Any]) -> tuple[Any, list[Any]]:
        """The loss and the outputs of microbatches, as tensors whose backward comes here."""
        leaves = [tensors_in(output) for output in outputs]
        places = [
            (microbatch, place)
            for microbatch, of in enumerate(leaves)
            for place, leaf in enumerate(of)
            if leaf.is_floating_point() or leaf.is_complex()
        ]
        values = [] if loss is None else [loss]
        nothing: list[list[Tensor | None]] = [[None] * len(of) for of in leaves]
        self._outputs = nothing, places, len(values)
        values += [leaves[microbatch][place] for microbatch, place in places]
        anchor = torch.zeros((), requires_grad=learns(self._pipe), device="cpu")
        # Autograd calls the hooks of a weight that gets no gradient too, with None.
        later = self._state is not None
        self._reached = [later or gradient is not None for gradient in self._gradients]
        weights = compress(self._weights.values(), self._reached)
        sources = (anchor, *weights, *self.inputs)
        if not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in sources):
            return loss, outputs
        results = iter(cast("Any", _Graph).apply(self, values, *sources))
        followed_loss = None if loss is None else next(results)
        followed = {id(leaves[microbatch][place]): next(results) for microbatch, place in places}
        return followed_loss, map_tensors(outputs, lambda t: followed.get(id(t), t))

    def backward(self, arriving: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The gradients of the weights in this process, and of the arguments and the target.

        Raises:
            UsageError: this is the second backward, a derivative of the gradients is asked for, or a weight
                has changed.
        """
        if torch.is_grad_enabled():
            raise UsageError(
                "backward with create_graph=True of a pipeline's loss: its gradients were computed by the "
                "step, and have no derivative; put the term that needs one into loss_fn"
            )
        if self._done:
            raise UsageError(
                "backward was called a second time for one forward of a pipeline; its gradients have been "
                "added to .grad already. Call the model again, or add up the losses before one backward"
            )
        self._done = True
        outputs, places, losses = self._outputs
        gradients: list[Any] = [None] * (len(self._weights) + len(self.inputs))
        if losses and arriving[0] is not None:
            self._check_unchanged(least=2)
            factor = float(arriving[0]) / self.scale
            # If gradients are not finite, a scaler is about to halve its factor too.
            nan = math.isnan(self.scale)
            self._note(float(arriving[0]) / (2.0 if nan else 1.0))
            self._add(gradients, factor)
        of_outputs = list(arriving[losses:])
        if any(gradient is not None for gradient in of_outputs):
            self._check_unchanged(least=0)
            for (microbatch, place), gradient in zip(places, of_outputs, strict=True):
                outputs[microbatch][place] = gradient
            self._run_again(outputs)
            self._add(gradients, 1.0)
        # Loops empty gradients between forward and backward, those of other ranks' weights too.
        self._pipe.weights.leave_gradients()
        return [*compress(gradients, self._reached), *gradients[len(self._weights) :]]

    def _run_again(self, gradients: list[list[Tensor | None]]) -> None:
        if self._state is None:
            raise UsageError(
                "a gradient has arrived at what a step returns besides its loss; add the term that needs it "
                "to the loss in the step"
            )
        for copy in self._copies.values():
            copy.grad = None
        with self._state.restored(), self.collecting():
            self._pipe.engine.backward(gradients, self.batch, self._state.number)
            finite = not self._in_half or math.isfinite(self._pipe.weights.grad_norm())
        for gradient in () if finite else self._gradients:
            if gradient is not None:
                local_part(gradient).fill_(math.nan)

    def _add(self, gradients: list[Any], factor: float) -> None:
        """Add the gradients that wait, times a factor, to those that are known so far."""
        copies = [self._copies[id(tensor)].grad for tensor in self.inputs]
        for place, gradient in enumerate([*self._gradients, *copies]):
            if gradient is None:
                continue
            if factor != 1.0:
                local_part(gradient).mul_(factor)
            gradients[place] = gradient if gradients[place] is None else gradients[place] + gradient
        self._gradients = []

    def _check_unchanged(self, least: int) -> None:
        """Check that no weight of at least so many dimensions was changed in place since the forward."""
        for name, weight in self._weights.items():
            if weight._version != self._versions[name] and weight.dim() >= least:
                raise UsageError(
                    f"{name} was changed in place between a forward of the pipeline and its backward, so the "
                    "gradients would be those of other weights: call backward before optimizer.step()"
                )


def learns(pipe: Pipeline) -> bool:
    """Tell whether any weight of the whole model learns."""
    if pipe.model is not None:
        return any(parameter.requires_grad for parameter in pipe.model.parameters())
    # Of stages that were made by hand, only the other ranks know.
    few = len(pipe.local_ranks) < pipe.job.ranks
    return few or any(weight.requires_grad for _, weight in pipe.weights.here.named_parameters())


class _State:
    """What a forward depends on besides its arguments and weights, so that it can run again."""

    def __init__(self, pipe: Pipeline) -> None:
        self._pipe, self.number = pipe, pipe.randomness.step
        modules = [module for stage in pipe.stages for module in stage.called_modules()]
        self._modes = [(module, module.training) for module in modules]
        self._kept = Snapshot(modules)
        kinds = {"cpu", pipe.device.type}
        self._autocast = [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
            for kind in kinds
        ]
        self._drawn = generator_states([pipe.device]) if pipe.randomness.seed == "off" else None

    @contextmanager
    def restored(self) -> Iterator[None]:
        """A context in which everything is as it was; what it changes is undone in the end."""
        modes = [(module, module.training) for module, _ in self._modes]
        with ExitStack() as stack:
            stack.enter_context(state_kept([module for module, _ in self._modes]))
            for kind, dtype, enabled in self._autocast:
                stack.enter_context(torch.autocast(kind, dtype, enabled=enabled))
            if self._drawn is not None:
                stack.enter_context(generators_kept([self._pipe.device]))
                set_generator_states(self._drawn, [self._pipe.device])
            self._kept.restore()
            try:
                _set(self._modes)
                yield
            finally:
                _set(modes)


def _set(modes: Sequence[tuple[nn.Module, bool]]) -> None:
    for module, training in modes:
        module.training = training


class _Graph(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Pass, values: list[Tensor], *sources: Tensor) -> Any:
        ctx.run = run
        ctx.set_materialize_grads(False)
        return tuple(values)

    @staticmethod
    def backward(ctx: Any, *arriving: Any) -> Any:
        # The anchor gets no gradient; it only makes autograd come here.
        return None, None, None, *ctx.run.backward(arriving)
