"""One stage of a model: forward and backward of one microbatch, without any communication.

A stage knows nothing of schedules, ranks or transports. What it is called with is made fresh: each tensor is
a new one that nobody else holds, so a stage may begin with an operation in place, and its hooks and changes
touch nothing outside.
"""

from __future__ import annotations

import logging
import sys
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, NoReturn, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from penstock._engine import compiled, parallel
from penstock._engine.values import map_tensors, restrided, tensors_in
from penstock.backward import OffloadedForward, PendingGradients, SharedGradients, SplitBackward
from penstock.backward.nodes import edge_of
from penstock.backward.passes import seeds_of, shapes_text
from penstock.errors import SpecError, StageError, UsageError

if TYPE_CHECKING:
    from penstock._engine.rng import Draws

log = logging.getLogger("penstock")
Compilation: TypeAlias = bool | Mapping[str, Any] | None
Gradients: TypeAlias = Sequence[Tensor | None]
_LEARNS = attrgetter("requires_grad")
_untied_view: Any = torch.ops.aten._unsafe_view.default
"""Gives a leaf's memory as a tensor that is neither a leaf nor a view, so that it may be changed in place."""


class StageCall:
    """What one call of a :class:`StageModule` belongs to.

    Args:
        plan: what the partition's ``plan`` returned for calls of this signature.
        microbatch: which microbatch it is.
        score: what the author's forward does in it; None if it runs as it is, in one stage.
        draws: seeds the random numbers of the step and microbatch; None leaves the generators alone.
        may_cast: whether wrappers may change types, which a plan does not know; by default, none do.
    """

    # Neither a tuple nor a dataclass, which wrappers would look into for tensors.
    __slots__ = ("draws", "may_cast", "microbatch", "plan", "score")

    def __init__(
        self,
        plan: Any,
        microbatch: int,
        score: Any = None,
        draws: Draws | None = None,
        may_cast: Callable[[], bool] = bool,
    ) -> None:
        self.plan, self.microbatch, self.score, self.draws = plan, microbatch, score, draws
        self.may_cast = may_cast


class StageModule(nn.Module):
    """A stage of a model that was cut, as the runtime calls it.

    Attributes:
        index: which stage it is.
    """

    index: int

    @abstractmethod
    def scores(
        self, calls: Sequence[tuple[Sequence[Any], Mapping[str, Any], Draws | None]]
    ) -> Sequence[Any]:
        """Run the author's forward of microbatches without the work in it, and write down what happens.

        Args:
            calls: for each, the model's arguments, with their numbers; its keyword arguments; and what seeds
                the author's draws between units, or None to leave the generators alone.

        Returns:
            For each something with a ``digest``, which is equal for microbatches of one call signature, in
            all processes; and ``batch``, the tensors among the arguments that learn. None if the model is
            one stage.
        """

    @abstractmethod
    def settings(self) -> str:
        """A hash of the modes, hooks and flags of modules, and of which weights learn, in this process."""

    @abstractmethod
    def plan(self, score: Any) -> Any:
        """Return what all stages of the model do in microbatches of a call signature.

        Args:
            score: one of what :meth:`scores` gave.

        Returns:
            Something with ``edges``, the values that travel; ``with_output(function, counts)``, which calls
            a function with the model's output without data, and puts back what an object counts; and
            ``apart(function, *args)``, which calls one that may not see what units of other stages keep.
        """

    @abstractmethod
    def given(self, score: Any, plan: Any) -> list[Tensor]:
        """The tensors of the batch, and those made of it alone, that this stage uses, for a wrapper to cast.

        Args:
            score: one of what :meth:`scores` gave.
            plan: its plan.
        """

    @abstractmethod
    def kept(self, score: Any) -> Callable[[], None]:
        """Keep what playing a score uses up; returns a function that puts it back, to play it once more.

        Args:
            score: one of what :meth:`scores` gave.
        """

    @abstractmethod
    def flops(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> float:
        """The floating-point operations of products, convolutions and attention in the model's forward.

        Args:
            args: the model's arguments for a microbatch; only their shapes count.
            kwargs: its keyword arguments, likewise.
        """

    @property
    @abstractmethod
    def units(self) -> list[nn.Module]:
        """The modules that run here as a whole: what can be compiled by itself."""

    @property
    @abstractmethod
    def around(self) -> list[nn.Module]:
        """The author's modules outside of the units, which all stages call and none holds."""

    @property
    @abstractmethod
    def initialisers(self) -> dict[str, Callable[[nn.Module], Any]]:
        """The ``_init_weights`` of the models around this stage's modules, by their paths."""

    @abstractmethod
    def forward(
        self, call: StageCall, values: Mapping[str, Any], *args: Any, **kwargs: Any
    ) -> tuple[Any, dict[str, Any]]:
        """Run this stage's part of the model.

        Args:
            call: what the model does in it, and for which microbatch.
            values: what other stages have made for this one, by the name of the edge.
            args: the tensors of the batch that learn; without a score, the model's arguments.
            kwargs: without a score, the model's keyword arguments; with one, what a wrapper has made of
                :meth:`given`, as ``given``.

        Returns:
            The model's output in the last stage and None in others; and the values that this stage makes
            for others, by the name of the edge.
        """


Bound: TypeAlias = tuple[tuple[StageCall, ...], Sequence[Any], Mapping[str, Any]]
"""What a stage is called with: what belongs to the call, then arguments, then keyword arguments."""


CHANGED = (
    "the stage changed a tensor in place that it was called with, and did not when it was first called with "
    "arguments that look so; it was not copied. Let the module change a clone() of it"
)
LEAF_CHANGED = "leaf Variable that requires grad is being used in an in-place operation"
"""What autograd says of a leaf that is changed in place, or a view of one."""


class Entrance:
    """Makes what one call of a stage uses its own, as :func:`enter` does, or later only where it must.

    In the first call everything may be changed in place: what others hold too is copied. The versions of
    tensors show what the stage has changed. In later calls all else is passed as it lies in memory; who
    changes it then hears so, by autograd from a leaf, and by :meth:`Binding.leave` from others.

    Args:
        writes: the numbers of the values that the stage changes, in the order in which they enter; None in
            the first call.

    Attributes:
        leaves: the leaves of all tensors that require grad.
        of_batch: the tensors of the batch for which some of them stand.
        versions: tensors that show changes: the number of the value, and the version with which it entered.
    """

    def __init__(self, writes: set[int] | None) -> None:
        self.leaves: list[Tensor] = []
        self.of_batch: list[Tensor] = []
        self.versions: list[tuple[int, Tensor, int]] = []
        self._writes, self._count = writes, 0

    def take(
        self,
        value: Any,
        shared: bool = True,
        originals: list[Tensor] | None = None,
        number: int | None = None,
    ) -> Any:
        """A value.

        Args:
            value: the value, or a tensor in it.
            shared: whether others hold it too: the user, its maker, or other stages that use it.
            originals: gets the tensors for which there are leaves.
            number: of a tensor in a value, that of the value.
        """
        if number is None:
            number, self._count = self._count, self._count + 1
        if self._writes is None or number in self._writes:
            entered = enter(value, self.leaves, copies=shared, originals=originals)
            for tensor in tensors_in(entered) if self._writes is None else ():
                # Nothing counts the changes of some tensors.
                counts = type(tensor) is Tensor and not tensor.is_inference()
                self.versions.append((number, tensor, tensor._version if counts else -1))
            return entered
        if not isinstance(value, Tensor):
            return map_tensors(value, lambda part: self.take(part, shared, originals, number))
        if type(value) is not Tensor or value.is_inference():
            return enter(value, self.leaves, copies=shared, originals=originals)
        tensor = value.detach()
        if value.requires_grad and torch.is_grad_enabled():
            self.leaves.append(tensor.requires_grad_())
            if originals is not None:
                originals.append(value)
        elif shared:
            self.versions.append((number, tensor, tensor._version))
        return tensor

    def bring(self, value: Any) -> Any:
        """A value of the batch."""
        return self.take(value, True, self.of_batch)


def uncompiled() -> AbstractContextManager[Any]:
    """A context in which compiled code runs as it was written."""
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    stance: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance


class PairForward(NamedTuple):
    """The forward of an overlapped pair, for the function that runs both halves.

    Attributes:
        module: the module of the stage that runs it.
        args: the positional arguments of the module's forward. For a stage of a model that was cut, the first
            ones say what the stage plays, and only ``run`` reads them.
        kwargs: its keyword arguments.
        run: calls the module with them and returns its output, for functions that do not take it apart.
    """

    module: nn.Module
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    run: Callable[[], Any]


class PairBackward(NamedTuple):
    """The backward of an overlapped pair: another microbatch's, mostly of another stage of the rank.

    Attributes:
        module: the module of the stage whose backward it is.
        outputs: where backward starts: the gradient edge of each tensor that the forward returned and that a
            gradient came for, or of the loss. ``torch.autograd.backward`` takes edges as it takes tensors.
        output_grads: a gradient for each, of its shape.
        inputs: the tensors that require grad among the forward's arguments, in order; they are leaves.
        run: runs the whole backward as usual, and returns the gradients of ``inputs``.
    """

    module: nn.Module
    outputs: Sequence[GradientEdge]
    output_grads: Sequence[Tensor]
    inputs: Sequence[Tensor]
    run: Callable[[], Gradients]


OverlapFunction: TypeAlias = Callable[[PairForward, PairBackward], tuple[Any, Gradients]]
"""Runs both halves of an overlapped pair; returns the forward's output and the gradients of the inputs."""


class Binding(ABC):
    """How a stage is called for microbatches of one call signature, and what its output holds.

    Args:
        stage: the stage.
    """

    def __init__(self, stage: PipelineStage) -> None:
        self._stage = stage
        self.writes: set[int] | None = None
        """The numbers of the values that the stage changes; None before the first call."""

    def leave(self, entrance: Entrance) -> None:
        """Note after a call what it has changed.

        Raises:
            StageError: another value than in the first call, which was not copied.
        """
        written: set[int] = set()
        for number, tensor, before in entrance.versions:
            if before < 0 or tensor._version != before:
                written.add(number)
        if self.writes is None:
            self.writes = written
        elif written:
            raise StageError(CHANGED)

    @abstractmethod
    def bind(
        self,
        microbatch: int,
        values: dict[str, Any],
        part: Any,
        score: Any,
        draws: Draws | None,
        entrance: Entrance,
    ) -> Bound:
        """Return what the stage is called with.

        Args:
            microbatch: which microbatch it is.
            values: the values that have come, by their edges.
            part: its part of the batch.
            score: what the author's forward does in it, for stages that were cut from a model.
            draws: seeds its random numbers.
            entrance: makes what the stage gets of the batch its own.
        """

    @abstractmethod
    def take_apart(self, output: Any) -> tuple[Any, Mapping[str, Any]]:
        """The model's output, which the last stage gives; and the values for others, by their edges."""


class CutBinding(Binding):
    """A stage of a model that was cut takes the values, and what its score does not have of the batch.

    Args:
        stage: the stage.
        plan: what the partition plans for calls of the signature.
    """

    def __init__(self, stage: PipelineStage, plan: Any) -> None:
        super().__init__(stage)
        self._plan = plan

    def bind(
        self,
        microbatch: int,
        values: dict[str, Any],
        part: Any,
        score: Any,
        draws: Draws | None,
        entrance: Entrance,
    ) -> Bound:
        """Of the batch only what learns; all of it if the model runs as it is, in one stage."""
        call = StageCall(self._plan, microbatch, score, draws, self._stage.may_cast)
        if score is None:
            kwargs = {
                name: entrance.bring(value) for name, value in part.kwargs.items()
            } | part.local
            return (call,), [values, *map(entrance.bring, part.args)], kwargs
        code: Any = self._stage.code
        given = {"given": code.given(score, self._plan)} if self._stage.casts else {}
        return (call,), [values, *map(entrance.bring, score.batch)], given

    def take_apart(self, output: Any) -> tuple[Any, Mapping[str, Any]]:
        """The two that :meth:`StageModule.forward` returns."""
        result: tuple[Any, Mapping[str, Any]] = output
        return result


class HandBinding(Binding):
    """A stage placed by hand takes the value of the stage before, or the batch, or several values by name.

    Args:
        stage: the stage.
        takes: the names of the edges that lead to it.
        gives: the names of those that start from it.
        keywords: the names of the batch's keyword arguments that it gets.
    """

    def __init__(
        self,
        stage: PipelineStage,
        takes: Sequence[str],
        gives: Sequence[str],
        keywords: Sequence[str],
    ) -> None:
        super().__init__(stage)
        self._takes, self._gives, self._keywords = takes, gives, keywords
        self._path = f"stage {stage.index}"

    def bind(
        self,
        microbatch: int,
        values: dict[str, Any],
        part: Any,
        score: Any,
        draws: Draws | None,
        entrance: Entrance,
    ) -> Bound:
        """The batch enters where no value comes from another stage."""
        if draws is not None:
            draws.enter(self._path, 0)
        kwargs: dict[str, Any] = {}
        for name in self._keywords:
            kwargs[name] = entrance.bring(part.kwargs[name])
        for name, value in part.local.items():
            kwargs[name] = entrance.bring(value)
        if not self._takes:
            return (), tuple(map(entrance.bring, part.args)), kwargs
        if len(self._takes) > 1:
            return (), (), values | kwargs
        value = values[self._takes[0]]
        return (), value if type(value) in self._stage.spread else (value,), kwargs

    def take_apart(self, output: Any) -> tuple[Any, Mapping[str, Any]]:
        """One value is the whole output; several are items of a dict."""
        if len(self._gives) < 2:
            return output, dict.fromkeys(self._gives, output)
        if not isinstance(output, dict) or not output.keys() >= set(self._gives):
            returned = list(output) if isinstance(output, dict) else f"a {type(output).__name__}"
            raise SpecError(
                f"stage {self._stage.index} must return a dict with {list(self._gives)}, but it returned "
                f"{returned}"
            )
        return output, output


class PipelineStage:
    """A slice of a model, and the microbatches that are under way in it.

    What a microbatch leaves behind is freed at its last use: after :meth:`backward`, or after
    :meth:`backward_weight`.

    Args:
        module: the slice.
        index: which stage of the pipeline it is, from 0.
        count: how many stages the pipeline has.
        device: where it lives; by default where its first parameter is, or the CPU if it has none.
        compile: whether to compile the module, or options of ``torch.compile`` to compile it with; see
            docs/compile.md. A module that cannot run compiled runs as it is.

    Attributes:
        code: the slice itself, without wrappers; names of parameters begin there.
        call: calls the module with arguments that have been entered already, see :func:`enter`.
        casts: whether wrappers may change the types of what it is given and gives in this step.
        is_first: whether the batch enters here.
        is_last: whether the loss is computed here.
        shared_context: a context in which the gradients that :meth:`share_gradients` collects are ``.grad``.
        on_undo: called after a forward that failed compiled, before the module runs again as it is.

    Raises:
        UsageError: the index is not below the count.
    """

    spread: ClassVar[tuple[type, ...]] = (tuple,)
    """The types whose items become several arguments, where the stage before returned such a value."""

    def __init__(
        self,
        module: nn.Module,
        index: int,
        count: int,
        device: torch.device | str | None = None,
        *,
        compile: Compilation = None,
    ) -> None:
        if not 0 <= index < count:
            raise UsageError(f"stage {index} of {count}: stages count from 0")
        self.index = index
        self.count = count
        self.is_first, self.is_last = index == 0, index == count - 1
        self.device = device_of(module) if device is None else torch.device(device)
        self._module = _moved(module, self.device)
        self.code = parallel.unwrapped(self._module)
        self._forwards: dict[int, tuple[list[GradientEdge], list[Tensor]]] = {}
        self._pending: dict[int, Any] = {}
        self._offloaded: dict[int, OffloadedForward] = {}
        self._settings = compilation_of(compile)
        self._reduces_later = False
        self.casts = False
        self.on_undo: Callable[[], object] | None = None
        self.share_gradients(())
        self._set_up()

    def _set_up(self) -> None:
        """Make what depends on the module: what is called, and the engine of its backward."""
        self.call: Callable[..., Any] = self._module
        self._compiled: compiled.CompiledModule | None = None
        if self._settings is not None:
            name = f"stage {self.index}"
            self._compiled = compiled.CompiledModule(
                self._module, self._settings, name, units_of=self.code
            )
        if self._compiled is not None or any(map(is_compiled, self._module.modules())):
            self.call = self._call_compiled
        self._engine = SplitBackward(self._module, reduced_later=self._reduces_later)

    # ---- the module

    @property
    def module(self) -> nn.Module:
        """The module that is called.

        The slice, or the user's wrapper around it, such as DistributedDataParallel.
        """
        return self._module

    @module.setter
    def module(self, module: nn.Module) -> None:
        if not any(part is self.code for part in module.modules()):
            self.code = parallel.unwrapped(module)
        if module is not self._module and self._compiled is not None:
            self._compiled.undo()
        self._module = module
        self._set_up()

    @property
    def compiles(self) -> bool:
        """Whether the module is compiled, as a whole or in its pieces."""
        return self._compiled is not None

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters under their names in the slice, whatever is wrapped around it or parts of it."""
        return parallel.named_parameters(self._module, self.code)

    def named_tensors(self) -> list[tuple[str, Tensor]]:
        """Parameters and buffers by the same names, each one under every name that it has."""
        return [
            *parallel.named_parameters(self._module, self.code, every_name=True),
            *parallel.named_buffers(self._module, self.code),
        ]

    def state_dict(self) -> dict[str, Any]:
        """The module's state dict, by the same names."""
        state = self._module.state_dict()
        names = parallel.names_without_wrappers(self._module, self.code, list(state))
        return {names[key]: value for key, value in state.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Copy what ``state`` has of the module's state dict, by the same names."""
        keys = list(self._module.state_dict())
        names = parallel.names_without_wrappers(self._module, self.code, keys).items()
        self._module.load_state_dict({k: state[n] for k, n in names if n in state}, strict=False)

    def may_cast(self) -> bool:
        """Tell whether wrappers may change the types of what the stage is given and gives."""
        return parallel.may_cast(self._module, self.code)

    def follow_wrappers(self, *, adapted: bool) -> None:
        """At the beginning of a step, look whether wrappers cast; ``adapted`` says that some part has one."""
        self.casts = (adapted or self._module is not self.code) and self.may_cast()

    def binding(
        self, plan: Any, takes: Sequence[str], gives: Sequence[str], keywords: Sequence[str]
    ) -> Binding:
        """How the stage is called in a call signature; see :class:`CutBinding` and :class:`HandBinding`."""
        if isinstance(self.code, StageModule):
            return CutBinding(self, plan)
        return HandBinding(self, takes, gives, keywords)

    def parts(self) -> Iterator[parallel.Member]:
        """All modules of the stage, with their paths in the slice."""
        return parallel.parts_of(self._module, self.code)

    def part(self, path: str) -> nn.Module:
        """The module that has a path in the slice."""
        try:
            return self.code.get_submodule(path)
        except AttributeError:
            return next(part.module for part in self.parts() if part.name == path)

    def follow_memory(self) -> None:
        """Live where the module was given memory, if it was made on the meta device."""
        if self.device.type == "meta":
            self.device = device_of(self._module)

    def follow_mode(self, *, training: bool) -> None:
        """Be in the mode of the author's model, if the slice was made while that was in another one."""
        self.code.training = training

    def called_modules(self) -> Iterator[nn.Module]:
        """All modules that the stage may call: its own, and those of the author around them."""
        yield from self._module.modules()
        yield from self.around

    @property
    def around(self) -> Sequence[nn.Module]:
        """The author's modules around the units of a model that was cut."""
        return self.code.around if isinstance(self.code, StageModule) else ()

    def reduce_later(self) -> None:
        """Expect that sharded gradients are reduced only when the weights' half is done."""
        if not self._reduces_later:
            self._reduces_later = True
            self._set_up()

    def share_gradients(self, parameters: Sequence[Tensor]) -> None:
        """From now on collect the gradients of weights that other stages use too beside ``.grad``."""
        self._shared = SharedGradients(parameters)
        self.shared_context: AbstractContextManager[Any] = (
            self._shared if parameters else nullcontext()
        )

    def take_shares(self) -> Gradients:
        """Those collected gradients since the last call, in the order of the parameters."""
        return self._shared.take()

    # ---- one microbatch

    @property
    def in_flight(self) -> int:
        """The number of microbatches whose backward is not complete."""
        return len(self._forwards) + len(self._pending)

    def forward(
        self,
        microbatch: int,
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None = None,
        loss: Callable[[Any], Any] | None = None,
        call: StageCall | None = None,
    ) -> Any:
        """Run the module for a microbatch.

        Args:
            microbatch: its index.
            args: the module's positional arguments; each tensor is copied, so the module may change it.
            kwargs: its keyword arguments, likewise.
            loss: turns the output into what backward starts from: a scalar loss, or values that gradients
                come back for.
            call: for a :class:`StageModule`, what it is called for; it is passed first.

        Returns:
            The module's output.
        """
        leaves: list[Tensor] = []
        entered = [enter(value, leaves, copies=True) for value in args]
        named = {n: enter(value, leaves, copies=True) for n, value in (kwargs or {}).items()}
        output = self.call(*entered if call is None else (call, *entered), **named)
        if torch.is_grad_enabled():
            self.keep(microbatch, tensors_in(output if loss is None else loss(output)), leaves)
        return output

    def keep(self, microbatch: int, roots: Iterable[Tensor], leaves: list[Tensor]) -> None:
        """Keep what a microbatch's backward goes from and to, until it comes.

        Of the roots only their edges in the graph stay: their memory is free unless the graph has saved it.

        Args:
            microbatch: its index.
            roots: where backward starts; those that require no grad are left out.
            leaves: the leaves of the arguments, from :func:`enter`.
        """
        edges = list(map(edge_of, filter(_LEARNS, roots)))
        self._forwards[microbatch] = edges, leaves

    def offloading(self, microbatch: int, batch: Iterable[Tensor]) -> OffloadedForward:
        """A context for a microbatch's forward whose activations :meth:`offload` then moves to the host.

        Args:
            microbatch: its index.
            batch: tensors that stay where they are, beside the stage's own.
        """
        own = (tensor for _, tensor in self.named_tensors())
        forward = OffloadedForward((*own, *batch), self.device)
        self._offloaded[microbatch] = forward
        return forward

    def offload(self, microbatch: int) -> None:
        """Move what the microbatch's forward has saved for backward to the host."""
        if microbatch not in self._forwards:
            self._lacks("forward", microbatch)
        self._offloaded[microbatch].offload(self._forwards[microbatch][1])

    def reload(self, microbatch: int) -> None:
        """Bring it back."""
        self._offloaded[microbatch].reload()

    def _take_forward(self, microbatch: int) -> tuple[list[GradientEdge], list[Tensor]]:
        """Take what a microbatch's backward goes from and to, once it can run."""
        if microbatch not in self._forwards:
            self._lacks("forward", microbatch)
        if microbatch in self._offloaded:
            self._offloaded.pop(microbatch).wait()
        return self._forwards.pop(microbatch)

    def _call_compiled(self, *args: Any, **kwargs: Any) -> Any:
        """Call a module that may compile now, with what its backward in halves needs."""
        put_back: Callable[[], None] | None = None
        if self._compiled is not None and not self._compiled.has_passed:
            call = args[0] if args else None
            if isinstance(self.code, StageModule) and isinstance(call, StageCall) and call.score:
                put_back = self.code.kept(call.score)
        try:
            with compiled.graphs_kept(), warnings.catch_warnings():
                # Dynamo reads .grad of every argument, also of non-leaves.
                warnings.filterwarnings(
                    "ignore", "The .grad attribute of a Tensor that is not a leaf"
                )
                return (self._compiled or self._module)(*args, **kwargs)
        except compiled.RefusedError as error:
            if self._compiled is None:
                raise
            log.warning("%s; it runs without compilation", error)
            self._compiled.undo()
            if self.on_undo is not None:
                self.on_undo()
            self._settings = None
            self._set_up()
            if put_back is not None:
                put_back()
            return self.call(*args, **kwargs)

    def start_from(self, microbatch: int, root: Any) -> None:
        """Let a microbatch's backward start from something that was computed from its output.

        Args:
            microbatch: its index.
            root: a nested value, such as a loss.
        """
        if microbatch not in self._forwards:
            self._lacks("forward", microbatch)
        _, leaves = self._forwards.pop(microbatch)
        self.keep(microbatch, tensors_in(root), leaves)

    def backward(self, microbatch: int, output_grads: Gradients | None) -> Gradients:
        """Full backward of a microbatch: weights get ``.grad``.

        Args:
            microbatch: its index.
            output_grads: a gradient or ``None`` for each tensor that requires grad among the output, or
                what ``loss`` made of it; ``None`` if that is a scalar.

        Returns:
            A gradient or ``None`` for each tensor that requires grad among forward's arguments, in order.
        """
        roots, leaves = self._take_forward(microbatch)
        with self.shared_context:
            return self._engine.full(roots, output_grads, leaves)

    def backward_input(self, microbatch: int, output_grads: Gradients | None) -> Gradients:
        """The inputs' half of backward; arguments and result as :meth:`backward`."""
        roots, leaves = self._take_forward(microbatch)
        with self.shared_context:
            gradients, self._pending[microbatch] = self._engine.input_half(
                roots, output_grads, leaves
            )
        return gradients

    def backward_weight(self, microbatch: int) -> None:
        """The weights' half of backward, after :meth:`backward_input` of the same microbatch."""
        if microbatch not in self._pending:
            self._lacks("backward_input", microbatch)
        pending = self._pending.pop(microbatch)
        with self.shared_context:
            self._engine.weight_half(pending)

    def weights_of_half(self, microbatch: int) -> Collection[int] | None:
        """The weights whose gradients :meth:`backward_weight` computes, by identity; None if nobody knows."""
        pending = self._pending.get(microbatch)
        return pending.weights if isinstance(pending, PendingGradients) else None

    # ---- overlapped pairs

    @property
    def overlapping(self) -> OverlapFunction | None:
        """The module's own ``overlapped_forward_backward``; None if it has none.

        Nor has it one while a wrapper must see each call of the module.
        """
        return getattr(self._module, OVERLAPPING, None) if not self._reduces_later else None

    def backward_of_pair(self, microbatch: int, output_grads: Gradients) -> PairBackward:
        """A microbatch's backward, for a function that runs it; arguments as of :meth:`backward`."""
        roots, leaves = self._take_forward(microbatch)
        edges, seeds = seeds_of(roots, output_grads)
        run = partial(self._engine.full, roots, output_grads, leaves)
        return PairBackward(self._module, edges, cast("list[Tensor]", seeds), leaves, run)

    def _lacks(self, what: str, microbatch: int) -> NoReturn:
        raise UsageError(
            f"stage {self.index}: microbatch {microbatch} has no {what} that is still to be used; "
            f"{what} with gradients enabled comes first, and once for each backward"
        )

    def clear(self) -> None:
        """Drop whatever microbatches have left here."""
        self._forwards.clear()
        self._pending.clear()
        self._offloaded.clear()
        self._shared.take()
        self._engine = SplitBackward(self._module, reduced_later=self._reduces_later)


def looks_of(value: Any) -> str:
    """The types and shapes of the tensors in a nested value, and which of them require grad."""
    return shapes_text(tensors_in(value))


OVERLAPPING = "overlapped_forward_backward"
"""The name of the function with which a stage's module overlaps pairs."""


def run_pair(
    function: OverlapFunction, forward: PairForward, backward: PairBackward
) -> tuple[Any, Gradients]:
    """Let a function run an overlapped pair.

    Returns:
        The forward's output; and a gradient or None for each of the backward's inputs.

    Raises:
        StageError: the function returned something else, or has not run both halves.
    """
    calls, nodes = 0, {edge.node for edge in backward.outputs}
    left = set(nodes)

    def run() -> Any:
        nonlocal calls
        calls += 1
        if calls > 1:
            raise StageError(
                "it ran the forward twice; call forward.run() once and keep its output"
            )
        return forward.run()

    hooks = [node.register_prehook(lambda grads, node=node: left.discard(node)) for node in nodes]
    try:
        returned, inputs = function(forward._replace(run=run), backward), backward.inputs
    finally:
        for hook in hooks:
            hook.remove()
    if not isinstance(returned, tuple) or len(returned) != 2:
        raise StageError(
            f"it returned {shapes_text(returned)}; return the output of the forward, and a list with the "
            "gradients of backward.inputs"
        )
    output, gradients = returned
    count = len(gradients) if isinstance(gradients, list | tuple) else shapes_text(gradients)
    if count != len(inputs):
        raise StageError(
            f"it returned {count} as gradients of {len(inputs)} backward.inputs; return a list with one, or "
            "None, for each"
        )
    for place, (gradient, leaf) in enumerate(zip(gradients, inputs, strict=True)):
        alike = isinstance(gradient, Tensor) and (gradient.shape, gradient.dtype) == (
            leaf.shape,
            leaf.dtype,
        )
        if gradient is not None and not alike:
            raise StageError(
                f"it returned {shapes_text(gradient)} as the gradient of backward.inputs[{place}], which is "
                f"{shapes_text(leaf.detach())}"
            )
    if left:
        raise StageError(
            f"it has not run the backward from {len(left)} of {len(nodes)} backward.outputs, so that weights "
            "lack gradients; call backward.run(), or torch.autograd.backward(backward.outputs, "
            "backward.output_grads)"
        )
    return output, [None if gradient is None else gradient.detach() for gradient in gradients]


def enter(
    value: Any, leaves: list[Tensor], *, copies: bool, originals: list[Tensor] | None = None
) -> Any:
    """A value whose tensors are new: no hooks, no history, nobody else's memory.

    Args:
        value: a nested value.
        leaves: gets a leaf for each tensor that requires grad, in order; backward leaves the gradient there.
        copies: whether to copy the data, because somebody else holds them too.
        originals: gets the tensors for which there are leaves.

    Returns:
        The value with tensors that may be changed in place.
    """
    if not isinstance(value, Tensor):
        if not tensors_in(value):
            return value
        return map_tensors(
            value, lambda tensor: enter(tensor, leaves, copies=copies, originals=originals)
        )
    data = value.detach()
    if copies and type(data) is not Tensor:
        # torch's clone of a DTensor would carry out a sum that is pending.
        data, copies = parallel.with_local(data, parallel.local_part(data).clone()), False
    learns = value.requires_grad and torch.is_grad_enabled()
    if learns:
        leaves.append(data.requires_grad_())
        if originals is not None:
            originals.append(value)
    if copies and not value.is_meta:
        # The copy is neither a leaf nor a view, so it may be changed in place.
        data = data.clone()
        return data if data.stride() == value.stride() else restrided(data, value.stride())
    if not learns:
        return data
    plain = type(data) is Tensor or parallel.is_sharded(data)
    return _untied_view(data, data.shape) if plain else data.clone()


# ---- what a module is


def device_of(module: nn.Module) -> torch.device:
    """The device of a module's first parameter; the CPU for a module without parameters."""
    first = next(module.parameters(), None)
    return torch.device("cpu") if first is None else first.device


def _moved(module: nn.Module, device: torch.device) -> nn.Module:
    """The module on a device. A module on the meta device stays there until it is given data."""
    tensors = (*module.parameters(), *module.buffers())
    return module if any(tensor.is_meta for tensor in tensors) else module.to(device)


def is_compiled(module: nn.Module) -> bool:
    """Tell whether ``torch.compile`` is around a module, or was applied to it or to a function of it."""
    if isinstance(module, torch.jit.ScriptModule):
        return False
    # What compiles in place keeps what it calls on the module, too.
    functions = (type(module).forward, *vars(module).values())
    return hasattr(module, "_orig_mod") or any(
        callable(f) and hasattr(f, "_torchdynamo_orig_callable") for f in functions
    )


def without_compilation(model: nn.Module, asked: Compilation) -> tuple[nn.Module, Compilation]:
    """A model without ``torch.compile`` around it, and how to compile its stages.

    Args:
        model: the model, which may be compiled as a whole. If it was compiled in place, that is undone,
            since its stages are compiled instead.
        asked: what the caller asks for, which takes precedence over how the model was compiled.
    """
    inner = getattr(model, "_orig_mod", None)
    function = model._compiled_call_impl if inner is None else vars(model).get("forward")
    if function is None:
        return model, asked
    model._compiled_call_impl = None
    settings = compiled.settings_of(function) if asked is None else asked
    return model if inner is None else inner, settings


def compilation_of(asked: Compilation) -> Mapping[str, Any] | None:
    """The options to compile with, or None not to compile.

    Raises:
        UsageError: ``compile=`` is neither a bool nor options.
    """
    if asked is None or isinstance(asked, bool):
        return {} if asked else None
    if not isinstance(asked, Mapping):
        raise UsageError(f"compile={asked!r}: must be True, False, or options of torch.compile")
    return dict(asked)
