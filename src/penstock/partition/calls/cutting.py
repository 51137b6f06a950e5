"""One cut of a model: its units, who has them, and the routes of the calls that were seen."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from penstock.errors import PartitionError, SpecError
from penstock.partition.base import Description
from penstock.partition.calls.inference import quiet
from penstock.partition.calls.outline import Outline
from penstock.partition.calls.recorder import Recorder, chance_kept
from penstock.partition.calls.routing import Homes, Route, routed
from penstock.partition.calls.tape import Tape, paths_of
from penstock.rng import noticed
from penstock.values import ValueSpec, attributes_kept, autocast_types, flatten, uncompiled

_REMEMBERED = 256
"""So many calls; of those that always differ the oldest go first."""


_REGISTRIES = frozenset(vars(nn.Module()))


class Attributes:
    """What the author's code leaves in attributes between the units, such as counters, by stage.

    Every stage runs that code, and each shall find what it has left itself. In the modules stands what was
    left last; what their user puts there is every stage's.

    Args:
        modules: those whose forward is not run by one stage.
        stages: how many there are.
    """

    def __init__(self, modules: Sequence[nn.Module], stages: int) -> None:
        # Those of torch leave nothing.
        self._modules = [m for m in modules if not type(m).__module__.startswith("torch.nn.")]
        self._shown: list[dict[str, Any]] = [{} for _ in self._modules]
        self._own: list[list[dict[str, Any]]] = [[{} for _ in self._modules] for _ in range(stages)]

    @contextlib.contextmanager
    def of(self, stage: int) -> Iterator[None]:
        """A stage's own stand in the modules for as long as the context lasts."""
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
    """What has become of some attributes becomes of others."""
    for name in before.keys() - after.keys():
        to.pop(name, None)
    to.update({n: v for n, v in after.items() if n not in before or before[n] is not v})


def _show(module: nn.Module, attributes: dict[str, Any]) -> None:
    state = vars(module)
    for name in state.keys() - _REGISTRIES - attributes.keys():
        del state[name]
    state.update(attributes)


class Cutting:
    """A model, and which stage has which of its units.

    Args:
        model: the whole.
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
        """The modules that are no units, but are called as a whole for their hooks."""
        return self._outline.hooked()

    def _check_hooks(self) -> None:
        """Refuse hooks that need both ends of a module whose parts are placed, not it as a whole."""
        for path, module in self._opened.items():
            if module._backward_hooks or module._backward_pre_hooks:
                raise PartitionError(
                    f"{path or 'the model'} has backward hooks, and its parts are placed by themselves: "
                    "no stage has its gradients on both ends. Set the hooks on its parts, or place it as a "
                    "whole by naming it in stages="
                )

    def _tensors(self, call: ValueSpec) -> Sequence[torch.Tensor] | None:
        """The example's tensors, if this is such a call."""
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
            they are made up: ones, or where these will not do zeros, or twos.
    """
    outline.follow(training=training)
    if example is not None:
        # Copies: a model may change its input in place. And what it gets is no view of something else.
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
        # What it warns of comes again when it runs.
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
    # No leaf: a model may change its input in place, which a leaf that requires grad would refuse.
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
    """The homes of all tensors by name, those inside of units too."""
    found = dict(homes)
    for unit, path in paths.items():
        for name, _ in (*unit.named_parameters(), *unit.named_buffers()):
            found[f"{path}.{name}"] = homes[path]
    return found
