"""One stage of a model: the work of one microbatch, without any communication."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, TypeAlias, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from penstock import compiled, parallel
from penstock.backward import SharedGradients, SplitBackward
from penstock.errors import UsageError
from penstock.stage.entrance import Entrance
from penstock.values import arrived, flatten

T = TypeVar("T")
log = logging.getLogger("penstock")
Compilation: TypeAlias = bool | Mapping[str, Any] | None
Gradients = tuple[Tensor | None, ...]


@dataclass
class _Forward:
    """What forward leaves for backward: the fresh leaves, and the tensors that backward starts from."""

    leaves: list[Tensor]
    roots: list[Tensor]


class PipelineStage:
    """A slice of a model, and the microbatches that are under way in it.

    A stage knows nothing of schedules, ranks or transports. What a microbatch leaves behind is freed at its
    last
    use: after ``backward``, or after ``backward_weight``.

    Args:
        module: the slice.
        index: which stage of the pipeline it is, from 0.
        count: how many stages the pipeline has.
        device: where it lives; by default where its first parameter is, or the CPU if it has none.
        compile: whether to compile the module, or options of ``torch.compile`` to compile it with; see
            docs/compile.md. A module that cannot run compiled runs as it is.

    Attributes:
        own: the slice itself, without wrappers; names of parameters begin there.
        wired: whether the module is called with values by name and with the whole call, see ``Partition``.
        changed: the tensors among its arguments that the module changed in place in the last forward, by
            position as in the gradients that backward returns.

    Raises:
        UsageError: the index is not below the count, or an option was withdrawn.
    """

    spread: ClassVar[tuple[type, ...]] = (tuple,)
    """The types of :attr:`spreads`, unless the module spreads nothing."""

    def __init__(
        self,
        module: nn.Module,
        index: int,
        count: int,
        device: torch.device | str | None = None,
        *,
        compile: Compilation = None,
        **withdrawn: Any,
    ) -> None:
        if not 0 <= index < count:
            raise UsageError(f"stage {index} of {count}: stages count from 0")
        if withdrawn:
            raise UsageError(
                f"a stage has no option {', '.join(sorted(withdrawn))}: there is one way to split a backward "
                "pass, which docs/backward.md describes; leave the option out"
            )
        self.index = index
        self.count = count
        self.device = home_of(module) if device is None else torch.device(device)
        self._module = _moved(module, self.device)
        self.own = parallel.unwrapped(self._module)
        self.wired = bool(getattr(self.own, "wired", False))
        self.changed: Sequence[int] = ()
        self._entrance = Entrance(index)
        self._forwards: dict[int, _Forward] = {}
        self._halves: dict[int, tuple[SplitBackward, Any]] = {}
        self._settings = compilation_of(compile)
        self._compile()
        self._reduced_later, self._apart = False, SharedGradients()
        self._engine = self._new_engine()

    @property
    def module(self) -> nn.Module:
        """The module that is called.

        The slice, or the user's wrapper around it, such as DistributedDataParallel.
        """
        return self._module

    @module.setter
    def module(self, module: nn.Module) -> None:
        if not any(part is self.own for part in module.modules()):
            self.own = parallel.unwrapped(module)
        if module is not self._module:
            if self._compiled is not None:
                self._compiled.undo()
            self._module = module
            self._compile()
        self._engine = self._new_engine()

    def _compile(self) -> None:
        self._call: Callable[..., Any] = self._module
        self._compiled: compiled.CompiledModule | None = None
        if self._settings is not None:
            name, around = f"stage {self.index}", self._module
            made = compiled.CompiledModule(around, self._settings, name, pieces_of=self.own)
            self._compiled = self._call = made

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters under their names in the slice, whatever is wrapped around it or parts of it."""
        return parallel.named_parameters(self._module, self.own)

    def named_tensors(self) -> list[tuple[str, Tensor]]:
        """Parameters and buffers by the same names, each one under every name that it has."""
        return [
            *parallel.named_parameters(self._module, self.own, every_name=True),
            *parallel.named_buffers(self._module, self.own),
        ]

    def state_dict(self) -> dict[str, Any]:
        """The module's state dict, by the same names."""
        found = self._module.state_dict()
        names = parallel.names_without_wrappers(self._module, self.own, list(found))
        return {names[key]: value for key, value in found.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Copy what ``state`` has of the module's state dict, by the same names."""
        own = list(self._module.state_dict())
        names = parallel.names_without_wrappers(self._module, self.own, own).items()
        self._module.load_state_dict({k: state[n] for k, n in names if n in state}, strict=False)

    def parts(self) -> Iterator[parallel.Part]:
        """All modules of the stage, with their paths in the slice."""
        return parallel.parts_of(self._module, self.own)

    def part(self, path: str) -> nn.Module:
        """The module that has a path in the slice."""
        try:
            return self.own.get_submodule(path)
        except AttributeError:
            return next(part.module for part in self.parts() if part.name == path)

    def reduce_later(self) -> None:
        """Expect that sharded gradients are reduced only when the weights' half is done."""
        if not self._reduced_later:
            self._reduced_later = True
            self._engine = self._new_engine()

    def _new_engine(self) -> SplitBackward:
        return SplitBackward(self.module, reduced_later=self._reduced_later)

    @property
    def compiles(self) -> bool:
        """Whether the module is compiled, as a whole or in its pieces."""
        return self._compiled is not None

    def keep_apart(self, parameters: Sequence[Tensor]) -> None:
        """From now on collect the gradients of these parameters beside ``.grad``.

        This is for weights that other stages use too: ``weights/sharing.py`` adds up all stages' shares.
        """
        self._apart = SharedGradients(parameters)

    @property
    def apart(self) -> AbstractContextManager[None]:
        """A context in which those collected gradients are the parameters' ``.grad``, so as to be reduced."""
        return self._apart

    def take_shares(self) -> list[Tensor | None]:
        """The gradients that were so collected since the last call, in the order of the parameters."""
        return self._apart.take()

    @property
    def describe(self) -> Callable[..., Any] | None:
        """How a wired module tells what travels for a call, if it can; see ``Partition``."""
        return getattr(self.own, "describe", None) if self.wired else None

    @property
    def traits(self) -> Any:
        """A value that changes whenever ``describe`` might tell something else."""
        return getattr(self.own, "traits", None) if self.wired else None

    @property
    def spreads(self) -> tuple[type, ...]:
        """The types whose items become several arguments, when another stage gives such a value."""
        return self.spread if getattr(self.own, "spreads", True) else ()

    @property
    def is_first(self) -> bool:
        """Whether the batch enters here."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether the loss is computed here."""
        return self.index == self.count - 1

    @property
    def in_flight(self) -> int:
        """The number of microbatches whose backward is not complete."""
        return len(self._forwards) + len(self._halves)

    def forward(
        self,
        microbatch: int,
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None = None,
        loss: Callable[[Any], Any] | None = None,
        aside: Mapping[str, Any] | None = None,
        restored: Callable[[Any], Any] | None = None,
    ) -> Any:
        """Run the module for a microbatch.

        Args:
            microbatch: its index.
            args: the module's positional arguments. A tensor that requires grad is passed to the module as
                a new tensor over a new leaf, so that hooks and in-place changes touch nothing outside; what
                the module changes is copied for it.
            kwargs: its keyword arguments.
            loss: turns the output into what backward starts from: a scalar loss, or values that gradients
                come back for.
            aside: more keyword arguments, which are passed as they are.
            restored: for a wired module in a wrapper that changes types: gives its values the agreed types.

        Returns:
            The module's output.
        """
        entered = self._entrance.enter(tuple(args), kwargs or {}, training=self._module.training)
        own, named = entered.call
        run = self._first if entered.copied is None else self._call
        try:
            if restored is None:
                output = run(*own, **named, **(aside or {}))
            else:
                with cast("Any", self.own).called_as(*own[1:]):
                    output = restored(run(*own))
        except Exception as error:
            if self._is_refused(error):
                return self.forward(microbatch, args, kwargs, loss, aside, restored)
            if isinstance(error, RuntimeError):
                self._entrance.check_refused(entered, error)
            raise
        self.changed = self._entrance.leave(entered)
        root = output if loss is None else loss(output)
        if entered.learning:
            self._forwards[microbatch] = _Forward(entered.leaves, flatten(root)[0])
        return output

    def _first(self, *args: Any, **kwargs: Any) -> Any:
        """A call with new shapes, which may compile a function whose backward is to be cut in two."""
        with compiled.graphs_kept(), warnings.catch_warnings():
            # Dynamo reads .grad of every argument, also of non-leaves.
            warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
            return self._call(*args, **kwargs)

    def _is_refused(self, error: Exception) -> bool:
        """Whether the error says that the module cannot run compiled; if so, it runs as it is from now on."""
        if self._compiled is None or not isinstance(error, compiled.RefusedError):
            return False
        log.warning("%s; it runs without compilation", error)
        self._compiled.undo()
        self._compiled, self._call = None, self._module
        return True

    def start_from(self, microbatch: int, root: Any) -> None:
        """Let a microbatch's backward start from something that was computed from its output.

        Args:
            microbatch: its index.
            root: a nested value, such as a loss.
        """
        self._left(self._forwards, microbatch, "forward").roots = flatten(root)[0]

    def backward(self, microbatch: int, output_grads: Sequence[Tensor | None] | None) -> Gradients:
        """Full backward of a microbatch: weights get ``.grad``.

        Args:
            microbatch: its index.
            output_grads: a gradient or ``None`` for each tensor of the output, in order, or of what
                ``loss`` made of it; ``None`` if that is a scalar.

        Returns:
            A gradient or ``None`` for each tensor among forward's arguments, in order.
        """
        done = self._taken(self._forwards, microbatch, "forward")
        with self._apart:
            found = self._engine.full(done.roots, output_grads, done.leaves)
        return _arrived(found)

    def backward_input(
        self, microbatch: int, output_grads: Sequence[Tensor | None] | None
    ) -> Gradients:
        """The inputs' half of backward; arguments and result as :meth:`backward`."""
        done = self._taken(self._forwards, microbatch, "forward")
        with self._apart:
            found, state = self._engine.input_half(done.roots, output_grads, done.leaves)
        self._halves[microbatch] = self._engine, state
        return _arrived(found)

    def backward_weight(self, microbatch: int) -> None:
        """The weights' half of backward, after :meth:`backward_input` of the same microbatch."""
        engine, state = self._taken(self._halves, microbatch, "backward_input")
        with self._apart:
            engine.weight_half(state)

    def _taken(self, left: dict[int, T], microbatch: int, by: str) -> T:
        self._left(left, microbatch, by)
        return left.pop(microbatch)

    def _left(self, left: dict[int, T], microbatch: int, by: str) -> T:
        if microbatch not in left:
            raise UsageError(
                f"stage {self.index}: microbatch {microbatch} has no {by} that is still to be used; "
                f"{by} with gradients enabled comes first, and once for each backward"
            )
        return left[microbatch]

    def clear(self) -> None:
        """Drop whatever microbatches have left here."""
        self._forwards.clear()
        self._halves.clear()
        self._apart.take()
        self._engine = self._new_engine()


def without_compilation(model: nn.Module, asked: Compilation) -> tuple[nn.Module, Compilation]:
    """A model without `torch.compile` around it, and how to compile its stages.

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


def _arrived(gradients: Gradients) -> Gradients:
    """Gradients, once any asynchronous collective that they wait for has filled them."""
    return tuple([None if gradient is None else arrived(gradient) for gradient in gradients])


def _moved(module: nn.Module, device: torch.device) -> nn.Module:
    """The module on a device. A module on the meta device stays there until it is given data."""
    tensors = (*module.parameters(), *module.buffers())
    return module if any(tensor.is_meta for tensor in tensors) else module.to(device)


def home_of(module: nn.Module) -> torch.device:
    """The device of a module's first parameter; the CPU for a module without parameters."""
    first = next(module.parameters(), None)
    return torch.device("cpu") if first is None else first.device


# ---- activation checkpointing: some modules' forward is computed again in backward, instead of being kept


class FrugalStage(PipelineStage):
    """A stage that checkpoints some of its modules: they keep only what their forward was given.

    Attributes:
        again: the modules whose forward is computed again in backward.
    """

    again: Sequence[nn.Module] = ()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module for a microbatch, see :meth:`PipelineStage.forward`."""
        with _computed_again(self.again):
            return super().forward(*args, **kwargs)


@contextmanager
def _computed_again(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Checkpoint the modules for the time of a forward; outside they are as they were, for other users."""
    if not torch.is_grad_enabled():
        yield
        return
    own = [vars(module).get("forward") for module in modules]
    for module in modules:
        vars(module)["forward"] = partial(checkpoint, module.forward, use_reentrant=False)
    try:
        yield
    finally:
        for module, forward in zip(modules, own, strict=True):
            if forward is None:
                del vars(module)["forward"]
            else:
                vars(module)["forward"] = forward
