"""A model with the stages of its units, and the routes of the calls that were seen so far."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor, FakeTensorMode

from penstock.errors import PartitionError, SpecError
from penstock.partition.base import Description
from penstock.partition.calls.inference import quiet
from penstock.partition.calls.recorder import Recorder, chance_kept
from penstock.partition.calls.routing import Homes, Route, routed
from penstock.partition.calls.tape import Loose, Tape, paths_of
from penstock.rng import noticed
from penstock.values import (
    Family,
    Found,
    ValueSpec,
    attributes_kept,
    autocast_types,
    flatten,
    uncompiled,
)
from penstock.values.trial import copied

# ---- a copy of the model without its data: the analysis runs it, and leaves no trace in the model itself


def home_of(model: nn.Module) -> torch.device:
    """Where a model is; the CPU for one without data."""
    tensors = [*model.parameters(), *model.buffers()]
    devices = [t.device for t in tensors if t.device.type != "meta"]
    return devices[0] if devices else torch.device("cpu")


class Outline:
    """A copy of a model without data.

    Args:
        model: what to copy.
        units: the paths of its units; buffers outside of these keep their data, since code between the
            units may look at it.
    """

    def __init__(self, model: nn.Module, units: Sequence[str]) -> None:
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.device = home_of(model)
        self._original = model
        self._form = _form_of(model)
        self.model = self._copied(model, units)
        self._pairs = list(zip(model.modules(), self.model.modules(), strict=True))
        self._loose = self._find_loose(model, units)
        self._families: dict[Any, dict[Any, Family[Found | None]]] = {}
        # By name: the tensors of other processes are replaced, see `CallStage.release`.
        self._named = [
            (module, name, mine._parameters[name])
            for module, mine in self._pairs
            for name, parameter in module._parameters.items()
            if parameter is not None
        ]

    def _copied(self, model: nn.Module, units: Sequence[str]) -> nn.Module:
        parameters = set(map(id, model.parameters()))
        inside = {id(b) for path in units for b in model.get_submodule(path).buffers()}

        def bare(tensor: Tensor) -> Tensor:
            if id(tensor) in parameters:
                return nn.Parameter(self._fake(tensor), tensor.requires_grad)
            return self._fake(tensor) if id(tensor) in inside else self._real(tensor)

        try:
            return copied(model, bare)
        except Exception as error:
            raise PartitionError(
                f"the {type(model).__name__} cannot be copied without its data ({error}), but that is how "
                "the values between its stages are found; use how='traced'"
            ) from error

    def _find_loose(
        self, model: nn.Module, units: Sequence[str]
    ) -> list[tuple[Loose, nn.Module, nn.Module]]:
        """The modules that are neither inside a unit nor around one."""
        inside = {part for path in units for part in model.get_submodule(path).modules()}
        pairs = zip(model.named_modules(), self.model.modules(), strict=True)
        return [
            (Loose(path), module, mine)
            for (path, module), mine in pairs
            if inside.isdisjoint(module.modules())
        ]

    def _fake(self, tensor: Tensor) -> Tensor:
        with self.mode:
            return torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self.device
            )

    def _real(self, tensor: Tensor) -> Tensor:
        if tensor.is_meta:
            return torch.ones(tensor.shape, dtype=tensor.dtype, device=self.device)
        return tensor.detach().clone()

    def named_tensors(self) -> dict[Tensor, str]:
        """The parameters, and the buffers without data, with their names."""
        named = [*self.model.named_parameters(), *self.model.named_buffers()]
        parameters = {id(p) for p in self.model.parameters()}
        return {t: name for name, t in named if id(t) in parameters or isinstance(t, FakeTensor)}

    # ---- the buffers that every stage has

    def real_buffers(self) -> dict[str, tuple[Tensor, int]]:
        """The buffers outside of the units, each with its version."""
        named = self.model.named_buffers()
        return {n: (b, b._version) for n, b in named if not isinstance(b, FakeTensor)}

    def written(
        self, before: dict[str, tuple[Tensor, int]], is_value: Callable[[Tensor], bool]
    ) -> tuple[str, ...]:
        """The buffers that a call would leave other than a call of the unsplit model does.

        Each stage may write what it makes of the arguments alone into its own copy of a buffer; but buffers
        that are saved are shared by all stages.

        Args:
            before: the buffers before the call.
            is_value: whether what units gave was written into a buffer.
        """
        after, saved = dict(self.model.named_buffers()), self.model.state_dict(keep_vars=True)
        return tuple(
            name
            for name, (buffer, version) in before.items()
            if is_value(buffer)
            or isinstance(after.get(name), FakeTensor)
            or (name in saved and buffer._version != version)
        )

    # ---- what the model may have become since

    def is_outdated(self) -> bool:
        """Whether the model has other modules or parameters by now, as where some were parametrised."""
        return self._form != _form_of(self._original)

    def modes(self) -> tuple[Any, ...]:
        """Which of the model's modules are in training mode, and which loose ones have hooks."""
        hooked = tuple(path for path, *_ in self._hooked())
        return tuple(module.training for module, _ in self._pairs), hooked

    def hooked(self, *, copies: bool = False) -> dict[nn.Module, str]:
        """The loose modules that have hooks by now, or hold modules that do; or their copies here."""
        return {mine if copies else module: path for path, module, mine in self._hooked()}

    def _hooked(self) -> Iterator[tuple[Loose, nn.Module, nn.Module]]:
        return (one for one in self._loose if any(map(_has_hooks, one[1].modules())))

    def traits(self) -> tuple[Any, ...]:
        """The part of the model's state on which values may depend."""
        return self.modes(), tuple(
            module._parameters[name].requires_grad  # type: ignore[union-attr]
            for module, name, _ in self._named
        )

    def families(self, *, training: bool) -> dict[Any, Family[Found | None]]:
        """What the units gave in earlier calls that differ from the next one in sizes alone."""
        key = (training, self.traits(), tuple(autocast_types()))
        return self._families.setdefault(key, {})

    def follow(self, *, training: bool) -> None:
        """Take over the model's state.

        Args:
            training: whether gradients are wanted; without them everything is in evaluation mode.
        """
        for module, mine in self._pairs:
            mine.training = module.training and training
        for module, name, parameter in self._named:
            assert parameter is not None
            parameter.requires_grad_(getattr(module, name).requires_grad)
        for buffer in self.model.buffers():
            # An earlier analysis may have written into it what depends on parameters.
            buffer.detach_()


def _has_hooks(module: nn.Module) -> bool:
    """Whether anybody but this library has set hooks on a module."""
    found = (
        *module._forward_pre_hooks.values(),
        *module._forward_hooks.values(),
        *module._backward_pre_hooks.values(),
        *module._backward_hooks.values(),
    )
    return any(not str(getattr(hook, "__module__", "")).startswith("penstock.") for hook in found)


def _form_of(model: nn.Module) -> list[tuple[int, tuple[str, ...]]]:
    return [
        (id(module), tuple(n for n, p in module._parameters.items() if p is not None))
        for module in model.modules()
    ]


# ---- what the author's code leaves in attributes

_REGISTRIES = frozenset(vars(nn.Module()))


class Attributes:
    """What the author's code leaves in attributes between the units, such as counters, by stage.

    Every stage runs that code, and each must find what it left there itself. Between the runs the modules
    show what was left last; what their user puts there holds for every stage.

    Args:
        modules: those whose forward several stages run.
        stages: how many there are.
    """

    def __init__(self, modules: Sequence[nn.Module], stages: int) -> None:
        # Modules of torch leave nothing there.
        self._modules = [m for m in modules if not type(m).__module__.startswith("torch.nn.")]
        self._shown: list[dict[str, Any]] = [{} for _ in self._modules]
        self._own: list[list[dict[str, Any]]] = [[{} for _ in self._modules] for _ in range(stages)]

    @contextlib.contextmanager
    def of(self, stage: int) -> Iterator[None]:
        """Show a stage's own attributes in the modules for as long as the context lasts."""
        own = self._own[stage]
        for index, module in enumerate(self._modules):
            shown = _plain(module)
            for each in self._own:
                _carry_over(self._shown[index], shown, each[index])
            self._shown[index] = shown
            _show(module, own[index])
        try:
            yield
        finally:
            for index, module in enumerate(self._modules):
                before, own[index] = own[index], _plain(module)
                _carry_over(before, own[index], self._shown[index])
                _show(module, self._shown[index])


def _plain(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name not in _REGISTRIES}


def _carry_over(before: dict[str, Any], after: dict[str, Any], to: dict[str, Any]) -> None:
    """Apply the difference between two states of attributes to a third."""
    for name in before.keys() - after.keys():
        to.pop(name, None)
    to.update({n: v for n, v in after.items() if n not in before or before[n] is not v})


def _show(module: nn.Module, attributes: dict[str, Any]) -> None:
    state = vars(module)
    for name in state.keys() - _REGISTRIES - attributes.keys():
        del state[name]
    state.update(attributes)


# ---- a cut


_REMEMBERED = 256
"""How many calls are remembered; then the oldest are forgotten."""


class Cutting:
    """A model, and which stage has which of its units.

    Args:
        model: the whole model.
        homes: the stages of each unit by path, and of each parameter outside of them by name.
        units: the paths of the units.
        stages: how many there are.
        outline: the model without data, if it was made already.
        example: the arguments of a call, as ``(args, kwargs)``.
    """

    def __init__(
        self,
        model: nn.Module,
        homes: Homes,
        units: Sequence[str],
        stages: int,
        outline: Outline | None = None,
        example: Any = None,
    ) -> None:
        self.model = model
        self.stages = stages
        self.units = tuple(units)
        self.paths = paths_of(model, units)
        self._homes = _with_parameters(model, homes, self.paths)
        self._opened = {
            path: module
            for path, module in model.named_modules()
            if module not in self.paths and any(inner in self.paths for inner in module.modules())
        }
        inside = {part for unit in self.paths for part in unit.modules()}
        self.attributes = Attributes([m for m in model.modules() if m not in inside], stages)
        self._outline = outline or Outline(model, units)
        self._example = None if example is None else flatten(example)
        self._routes: dict[Any, Route] = {}
        self._latest: dict[Any, Route] = {}

    def describe(self, call: ValueSpec, training: bool) -> Description:
        """What travels between the stages for a call.

        Args:
            call: the spec of ``(args, kwargs)``.
            training: whether gradients are wanted.
        """
        return self._route(call, training).description

    def route(self, args: Any, kwargs: Any) -> Route:
        """What the stages do in this call."""
        call = ValueSpec.of((args, kwargs))
        training = torch.is_grad_enabled()
        self._check_hooks()
        known = self._latest.get((_digest(call), training, self._outline.modes()))
        return known or self._route(call, training)

    def hooked(self) -> dict[nn.Module, str]:
        """The modules that are not units, but are called as wholes because of their hooks."""
        return self._outline.hooked()

    def _check_hooks(self) -> None:
        """Refuse backward hooks of a module that is in several stages: no stage has both of its ends."""
        for path, module in self._opened.items():
            if module._backward_hooks or module._backward_pre_hooks:
                raise PartitionError(
                    f"{path or 'the model'} has backward hooks, and its parts are placed by themselves: "
                    "no stage has its gradients on both ends. Set the hooks on its parts, or place it as a "
                    "whole by naming it in stages="
                )

    def _tensors(self, call: ValueSpec) -> Sequence[torch.Tensor] | None:
        """The example's tensors, if the call has arguments like it."""
        if self._example is None:
            return None
        tensors, structure = self._example
        return tensors if call.fits(tensors, structure, gradients=False) else None

    def tensor(self, name: str) -> torch.Tensor:
        """A parameter or buffer of the model by name."""
        path, _, last = name.rpartition(".")
        found: torch.Tensor = getattr(self.model.get_submodule(path), last)
        return found

    def _route(self, call: ValueSpec, training: bool) -> Route:
        if self._outline.is_outdated():
            self._outline = Outline(self.model, self.units)
            self._routes.clear()
            self._latest.clear()
        digest = _digest(call)
        key = (digest, training, self._outline.traits(), tuple(autocast_types()))
        if key not in self._routes:
            tape = analysed(
                self._outline, self.units, call, training=training, example=self._tensors(call)
            )
            if tape.written and self.stages > 1:
                raise PartitionError(_changes_buffers(tape.written))
            self._routes[key] = routed(tape, self._homes, self.stages, _spec_of(tape.output))
        found = self._latest[digest, training, self._outline.modes()] = self._routes[key]
        for memory in (self._routes, self._latest):
            if len(memory) > _REMEMBERED:
                del memory[next(iter(memory))]
        return found


def analysed(
    outline: Outline,
    units: Sequence[str],
    call: ValueSpec,
    *,
    training: bool,
    example: Sequence[torch.Tensor] | None = None,
) -> Tape:
    """Run a model without data and note what happens.

    Args:
        outline: the model.
        units: the paths of its units.
        call: the spec of ``(args, kwargs)``.
        training: whether gradients are wanted.
        example: the tensors of such a call, for code between the units that looks into them. By default
            they are made up: ones or, where the model fails with these, zeros or twos.
    """
    outline.follow(training=training)
    if example is not None:
        # Clones: a model may change its input in place, and must not be given a view of something else.
        made = [_entered(tensor.detach().clone(), tensor) for tensor in example]
        return _recorded(outline, units, call.fill(made), training)
    errors: list[Exception] = []
    for number in (1, 0, 2):
        made = [_filled(spec, number, outline.device) for spec in call.tensors]
        try:
            return _recorded(outline, units, call.fill(made), training)
        except PartitionError:
            raise
        except Exception as error:
            errors.append(error)
    errors[0].add_note(
        "raised where the model was run without data, to see what travels between its stages; if its code "
        "needs arguments that make sense, give example=(args, kwargs) to penstock.partition.partition"
    )
    raise errors[0]


def _recorded(outline: Outline, units: Sequence[str], call: Any, training: bool) -> Tape:
    args, kwargs = call
    paths = paths_of(outline.model, units) | outline.hooked(copies=True)
    families = outline.families(training=training)
    recorder = Recorder(paths, outline.mode, outline.named_tensors(), families)
    before = outline.real_buffers()
    with (
        attributes_kept(outline.model),
        uncompiled(),
        quiet(),
        chance_kept(outline.device),
        torch.set_grad_enabled(training),
        warnings.catch_warnings(action="ignore"),
    ):
        # What it warns of here it will warn of again when it runs.
        with noticed(recorder.drew), recorder.watching(list(paths)):
            output = outline.model(*args, **kwargs)
        recorder.tape.written = outline.written(before, recorder.has_become_a_value)
        return recorder.finish(output)


def _changes_buffers(names: Sequence[str]) -> str:
    return (
        f"between its modules the model changes its buffers ({', '.join(names)}): other stages, which use "
        "them too, would not see it, or would do it again. Put the buffer and the code that changes it "
        "into a module of their own, or place the module that holds both as a whole by naming it in stages="
    )


def _filled(spec: Any, number: int, device: torch.device) -> torch.Tensor:
    return _entered(torch.full(spec.shape, number, dtype=spec.torch_dtype, device=device), spec)


def _entered(made: torch.Tensor, like: Any) -> torch.Tensor:
    # Not a leaf: a model may change its input in place, which autograd forbids for leaves.
    return made.requires_grad_() * 1 if like.requires_grad else made


def _digest(call: ValueSpec) -> str:
    shapes = [(tuple(tensor.shape), tensor.dtype) for tensor in call.tensors]
    return f"{shapes} {call.structure}"


def _spec_of(output: Any) -> ValueSpec | None:
    try:
        return ValueSpec.of(output)
    except SpecError:
        return None


def _with_parameters(
    model: nn.Module, homes: Homes, paths: Mapping[nn.Module, str]
) -> dict[str, tuple[int, ...]]:
    """The homes of all tensors by name, including those inside units."""
    found = dict(homes)
    for unit, path in paths.items():
        for name, _ in (*unit.named_parameters(), *unit.named_buffers()):
            found[f"{path}.{name}"] = homes[path]
    return found
