"""Adapters for replicated and sharded stages: gradients are reduced once a call, not per microbatch.

This is the one place where gradients are averaged over replicas or reduced over shards: each stage's when its
last backward ends, while other stages still compute.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from penstock._engine.faults import Activity
from penstock._engine.parallel.replicas import GradientAverage, copy_from_first, unreduced
from penstock._engine.parallel.wrapping import Spread, spread_parts
from penstock.errors import UsageError

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

Apart = Callable[[], AbstractContextManager[Any]]


class Adapter:
    """Hooks around the calls of a stage; those that are not overridden do nothing.

    Attributes:
        whole_backward: whether a stage's backward must run in one piece; gradients may still be reduced in
            the weights' half.
        casts: whether the wrapper casts the arguments before it calls the module's own code.
    """

    whole_backward = False
    casts = False

    def fits(self, module: nn.Module) -> bool:
        """Tell if this adapter still belongs to a stage's module, which the user may have wrapped since."""
        raise NotImplementedError

    def check_postpones(self) -> None:
        """Check that a training call may leave its gradients to a later one, before any rank begins it.

        Raises:
            UsageError: it may not.
        """

    def begin(self, *, trains: bool = True, gathers: bool = True, finalizes: bool = True) -> None:
        """Prepare for a call.

        Args:
            trains: whether the call runs backward.
            gathers: whether to gather parameters now, rather than when the schedule says or when they are
                used.
            finalizes: whether gradients are averaged and reduced at its end, rather than by a later call.
        """

    def watch(self, adds_to: Collection[int] | None) -> None:
        """Note that the stage's last backward begins: what it completes may be reduced.

        Args:
            adds_to: the parameters to whose gradients it may add, by identity; all by default.
        """

    def done(self, microbatch: int) -> None:
        """Note that a microbatch's backward is over."""

    def unshard(self) -> None:
        """Start to gather the parameters."""

    def reshard(self) -> None:
        """Free gathered parameters."""

    def reduce(self) -> None:
        """Start to reduce the gradients, which are complete for this step."""

    def finish(self) -> None:
        """End the call; when this returns, gradients are reduced."""

    def abandon(self) -> None:
        """Clean up after an interrupted call."""

    @property
    def holds_gradients(self) -> bool:
        """Whether an earlier call has left gradients to be reduced that do not lie in ``.grad``."""
        return False

    def drop(self) -> None:
        """Drop those gradients."""


def adapter_of(
    module: nn.Module, apart: Apart = nullcontext, activity: Activity | None = None
) -> Adapter | None:
    """The adapter of a stage's module; None if no wrapper replicates or shards a part of it.

    Args:
        module: the stage's module, in its wrapper.
        apart: a context that puts gradients that the stage collects elsewhere into ``.grad``.
        activity: where this process notes what it waits for.
    """
    if isinstance(module, DistributedDataParallel):
        return DataParallelStage(module, apart, activity)
    # FSDP2 takes long to import; until it is imported, nothing is sharded.
    sharded = _sharded_parts(module) if "torch.distributed.fsdp" in sys.modules else []
    return Sharded(sharded, apart) if sharded else None


def _collected_elsewhere(apart: Apart) -> Sequence[Tensor]:
    """The weights that other stages share, whose gradients a stage collects elsewhere than in ``.grad``."""
    parameters: Sequence[Tensor] = getattr(apart(), "parameters", ())
    return parameters


class Averaging(Adapter):
    """A stage of which each replica has whole weights, whose gradients are averaged once per step.

    Args:
        module: the stage's module, in its wrapper.
        apart: a context that puts gradients that the stage collects elsewhere into ``.grad``.
        group: the process group of the replicas.
        activity: where this process notes what it waits for.
        dims: the groups of the dimensions that the replicas form, if there are several.
    """

    def __init__(
        self,
        module: Any,
        apart: Apart,
        group: Any,
        activity: Activity | None,
        dims: Sequence[Any] = (),
    ) -> None:
        self._module = module
        self._group = group
        self._average = GradientAverage(group, activity, dims)
        self._apart = apart
        self._reduced = True
        self._buffers: Iterable[Tensor] = ()
        self._averages = False
        self._summed: set[int] = set()
        """The parameters that have learned since the last average, by identity: some may be frozen now."""

    def fits(self, module: nn.Module) -> bool:
        """Tell whether this is the adapter of the module."""
        return module is self._module

    def _tensors(self) -> tuple[Iterable[nn.Parameter], Iterable[Tensor]]:
        """The parameters whose gradients are averaged, and the buffers that are copied."""
        raise NotImplementedError

    def begin(self, *, trains: bool = True, gathers: bool = True, finalizes: bool = True) -> None:
        """Prepare for a call."""
        self._reduced, self._averages = not trains, trains and finalizes
        every, self._buffers = self._tensors() if trains else ((), ())
        parameters = [p for p in every if p.requires_grad or id(p) in self._summed]
        if not finalizes:
            self._summed.update(map(id, parameters))
            # The shares of stages are added up after each call, and are averaged before.
            apart = set(map(id, _collected_elsewhere(self._apart)))
            parameters = [p for p in parameters if id(p) in apart]
        self._average.take(parameters)

    def watch(self, adds_to: Collection[int] | None) -> None:
        """Start the all-reduces as backward completes the gradients."""
        self._average.watch(adds_to)

    def reduce(self) -> None:
        """Start those that have not begun."""
        if not self._reduced:
            self._reduced = True
            with self._apart():
                self._average.start()

    def finish(self) -> None:
        """Wait for the all-reduces, and copy buffers from the first replica."""
        self.reduce()
        with self._apart():
            self._average.finish()
        if self._averages:
            self._summed.clear()
        # A step that changes buffers is known by their versions, and this is no such change.
        copy_from_first([buffer.data for buffer in self._buffers], self._group)
        self.abandon()

    def abandon(self) -> None:
        """Forget what an interrupted call has started."""
        self._average.forget()

    def drop(self) -> None:
        """Forget which parameters have learned."""
        self._summed.clear()


class ReplicatedStage(Averaging):
    """A stage under ``replicas=``; what its wrappers reduce is left to them."""

    def _tensors(self) -> tuple[Iterable[nn.Parameter], Iterable[Tensor]]:
        return unreduced(self._module)


class DataParallelStage(Averaging):
    """A stage in ``DistributedDataParallel``.

    DDP's own reducer expects a single backward that reaches every parameter. A step has many, so the reducer
    is switched off, and all-reduces run once the last gradient is complete.
    """

    def __init__(
        self, module: DistributedDataParallel, apart: Apart, activity: Activity | None
    ) -> None:
        super().__init__(module, apart, module.process_group, activity)
        self._stack = ExitStack()

    def begin(self, *, trains: bool = True, gathers: bool = True, finalizes: bool = True) -> None:
        """Switch the module's own reduction off."""
        super().begin(trains=trains, finalizes=finalizes)
        self._stack.enter_context(self._module.no_sync())

    def _tensors(self) -> tuple[Iterable[nn.Parameter], Iterable[Tensor]]:
        ignored = self._module.parameters_to_ignore
        named = self._module.module.named_buffers() if self._module.broadcast_buffers else ()
        buffers = [buffer for name, buffer in named if name not in ignored]
        return Spread("", "", self._module).parameters, buffers

    def abandon(self) -> None:
        """Switch the module's own reduction on again."""
        super().abandon()
        self._stack.close()


class Sharded(Adapter):
    """A stage with modules under FSDP2's ``fully_shard`` or ``replicate``.

    Gradients stay unreduced until the weights' half of the last microbatch is done. Torch would reduce them
    as soon as the inputs' gradients are complete; here torch's callback for the end of a backward runs once
    more, at the right time.

    Parameters are gathered once, at the beginning of a call, and freed at its end, since every microbatch in
    flight needs them. There are two exceptions: a schedule with UNSHARD and RESHARD decides itself, and with
    the user's ``reshard_after_forward=True`` parameters are gathered again for each microbatch.
    """

    whole_backward = True

    def __init__(self, modules: Sequence[FSDPModule], apart: Apart) -> None:
        self._modules = modules
        self._apart = apart
        # There is no public way to read a module's policy (torch 2.13).
        self.casts = any(m._get_fsdp_state()._mp_policy.param_dtype for m in modules)
        self._held = [module for module in modules if _may_be_held(module)]
        for module in self._held:
            module.set_reshard_after_forward(False, recurse=False)
        self._reduced = True
        self._has_run = False

    def fits(self, module: nn.Module) -> bool:
        """Tell whether the sharded modules are still the same."""
        parts = _sharded_parts(module)
        return len(parts) == len(self._modules) and all(map(operator.is_, parts, self._modules))

    def check_postpones(self) -> None:
        """Refuse where stages share weights: torch would have to add their shares up unreduced."""
        if _collected_elsewhere(self._apart):
            raise UsageError(
                "pipe.no_sync() cannot leave gradients of weights that stages share unreduced where "
                "fully_shard has sharded them; call step outside of it"
            )

    def begin(self, *, trains: bool = True, gathers: bool = True, finalizes: bool = True) -> None:
        """Postpone the reduction, and start to gather parameters."""
        self._reduced = not (trains and finalizes)
        if trains:
            self._reduce_next(False)
        # In their first forward, modules learn which of them is outermost and which streams they share;
        # before that, they cannot gather ahead.
        if gathers and self._has_run:
            for module in self._held:
                module.unshard(async_op=True)
        self._has_run = True

    def done(self, microbatch: int) -> None:
        """Add up a microbatch's gradients, if the wrapper casts them."""
        if self.casts:
            self._add_up()

    def _add_up(self) -> None:
        """Add up a microbatch's gradients in the type of the reduction, unless torch does so at once."""
        for parameter in self._gathered():
            for step in _SUMS:
                getattr(parameter, step, _nothing)()

    def _gathered(self) -> list[Any]:
        """Torch's records of the parameters that have been gathered once."""
        groups = [g for m in self._modules for g in m._get_fsdp_state()._fsdp_param_groups]
        parameters = [parameter for group in groups for parameter in group.fsdp_params]
        return [parameter for parameter in parameters if hasattr(parameter, "_unsharded_param")]

    @property
    def holds_gradients(self) -> bool:
        """Whether a gathered parameter has a gradient or, up to torch 2.14, a sum of them."""
        return any(
            parameter._unsharded_param.grad is not None
            or parameter.unsharded_accumulated_grad is not None
            for parameter in self._gathered()
        )

    def drop(self) -> None:
        """Drop gradients of gathered parameters, and sums of them."""
        for parameter in self._gathered():
            parameter._unsharded_param.grad = None
            if parameter.unsharded_accumulated_grad is not None:
                parameter.unsharded_accumulated_grad = None

    def reduce(self) -> None:
        """Reduce the gradients, once, and free the gathered parameters.

        Not module by module within a backward: torch would prefetch modules that other microbatches need.
        """
        if self._reduced:
            return
        self._reduced = True
        self._reduce_next(True)
        with self._apart():
            for module in self._outermost():
                # As in torch.distributed.pipelining; there is no public way.
                module._get_fsdp_state()._root_post_backward_final_callback()
        self.reshard()

    def _outermost(self) -> Iterable[FSDPModule]:
        """The root modules, whose forward runs first and which manage the others."""
        return [module for module in self._modules if module._get_fsdp_state()._is_root]

    def unshard(self) -> None:
        """Start to gather the parameters."""
        for module in self._modules:
            module.unshard(async_op=True)

    def reshard(self) -> None:
        """Free the gathered parameters."""
        for module in self._modules:
            module.reshard()

    def finish(self) -> None:
        """Leave the modules as they were before the call, with their parameters sharded."""
        self.reduce()
        self._reduce_next(True)
        self.reshard()

    def abandon(self) -> None:
        """Leave the modules as they were before an interrupted call."""
        self._reduced = True
        self._reduce_next(True)
        for module in self._outermost():
            module.reset_iter_state()
        self.reshard()

    def _reduce_next(self, wanted: bool) -> None:
        for module in self._modules:
            module.set_requires_gradient_sync(wanted, recurse=False)
            module.set_is_last_backward(wanted)
            module.set_reshard_after_backward(module not in self._held, recurse=False)


_SUMS = ("accumulate_unsharded_grad_if_needed", "to_accumulated_grad_if_needed")
"""What a sharded parameter does after each backward, up to torch 2.14; later it has no such methods:
https://github.com/pytorch/pytorch/blob/v2.13.0/torch/distributed/fsdp/_fully_shard/_fsdp_param.py#L802"""


def _nothing() -> None: ...


def _sharded_parts(module: nn.Module) -> list[FSDPModule]:
    return [part.module for part in spread_parts(module) if part.how == "fully_shard"]


def _may_be_held(module: FSDPModule) -> bool:
    """Tell if its parameters may stay gathered through a call: the user has not asked to free them earlier.

    There is no public way to read this choice. A replicated module gathers nothing. Of torch 2.13:
    https://github.com/pytorch/pytorch/blob/v2.13.0/torch/distributed/fsdp/_fully_shard/_fsdp_state.py#L67
    """
    state = module._get_fsdp_state()
    if any(not hasattr(group.mesh_info, "shard_mesh_size") for group in state._fsdp_param_groups):
        return False
    asked = any(group.post_forward_mesh_info for group in state._fsdp_param_groups)
    return state._auto_reshard_after_forward is not False or not asked


class Adapters:
    """The adapters of the stages of this process during one call.

    A stage's gradients are reduced when its last backward has ended. Collectives must start in one order on
    all replicas, whose batches may have different numbers of microbatches; so a stage also waits for its
    turn, and the last stage comes first.

    Args:
        of_stage: the adapters of each stage.
        microbatches: the number of microbatches.
        trains: whether the call runs backward.
        finalizes: see :meth:`Adapter.begin`.
    """

    def __init__(
        self,
        of_stage: Mapping[int, Sequence[Adapter]],
        microbatches: int,
        *,
        trains: bool,
        finalizes: bool = True,
    ) -> None:
        self._of_stage = of_stage
        self._turns = sorted(of_stage)
        self._left = dict.fromkeys(of_stage, microbatches)
        self._trains, self._finalizes = trains, finalizes

    def begin(self, *, gathers: bool) -> None:
        """Begin the call; see :meth:`Adapter.begin`."""
        for adapters in self._of_stage.values():
            for adapter in adapters:
                adapter.begin(trains=self._trains, gathers=gathers, finalizes=self._finalizes)

    def watch(self, stage: int, adds_to: Callable[[], Collection[int] | None]) -> None:
        """Note that a backward begins, which may be the last one of the stage that has its turn.

        Args:
            stage: the stage.
            adds_to: returns the parameters to whose gradients it may add, see :meth:`Adapter.watch`.
        """
        if self._turns[-1:] == [stage] and self._left[stage] == 1:
            for adapter in self._of_stage[stage]:
                adapter.watch(adds_to())

    def done(self, stage: int, microbatch: int) -> None:
        """Note that a microbatch's backward through a stage is over."""
        if stage not in self._left:
            return
        for adapter in self._of_stage[stage]:
            adapter.done(microbatch)
        self._left[stage] -= 1
        while self._turns and not self._left[self._turns[-1]]:
            self.tell(self._turns.pop(), "reduce")

    def tell(self, stage: int, method: Literal["unshard", "reshard", "reduce"]) -> None:
        """Call a method of a stage's adapters."""
        for adapter in self._of_stage.get(stage, ()):
            getattr(adapter, method)()

    def finish(self) -> None:
        """End the call; when this returns, all gradients are reduced."""
        stages = sorted(self._of_stage, reverse=True)
        for stage in stages if self._trains else ():
            self.tell(stage, "reduce")
        for adapter in [adapter for stage in stages for adapter in self._of_stage[stage]]:
            adapter.finish()

    def abandon(self) -> None:
        """Clean up after an interrupted call."""
        for adapters in self._of_stage.values():
            for adapter in adapters:
                adapter.abandon()
