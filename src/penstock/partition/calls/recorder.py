"""Analyse a call: run the author's forward without data and note each event."""

from __future__ import annotations

import contextlib
import random
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor, FakeTensorMode

from penstock.draws import Generators, identity
from penstock.errors import PartitionError
from penstock.partition.calls.faces import Run
from penstock.partition.calls.inference import Inference, Sizes, UnitCall, run_for_real
from penstock.partition.calls.placeholder import Form
from penstock.partition.calls.tape import NO_VALUE, Change, Event, Slot, Tape, Value
from penstock.partition.calls.trees import leaves, replaced, tensors_deep_in, tensors_in, without
from penstock.partition.calls.watch import Watch
from penstock.specs import Family, Found, randomness_kept

ANSWERS = {"__bool__", "__int__", "__float__", "__index__", "__contains__"} | {
    *("item", "tolist", "numpy", "equal", "allclose", "is_nonzero")
}
"""Functions whose results depend on the numbers in a tensor."""


class Recorder(Watch):
    """Notes the events of one forward pass of a model without data.

    Args:
        paths: the path of each unit.
        mode: of the tensors without data.
        parameters: the names of the model's parameters; one that is used between the units is a value.
        families: what units gave in calls that differ from this one in sizes alone.
    """

    def __init__(
        self,
        paths: Mapping[nn.Module, str],
        mode: FakeTensorMode,
        parameters: Mapping[Tensor, str],
        families: dict[Any, Family[Found | None]],
    ) -> None:
        super().__init__()
        self.tape = Tape()
        self._paths = paths
        self._parameters = {id(parameter): name for parameter, name in parameters.items()}
        self._inference = Inference(self, mode)
        self._mode = mode
        self._alive: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        self._drawn: set[int] = set()
        self._draws: list[torch.Generator | None] = []
        self._generators: dict[int, torch.Generator] = {}
        self._sizes = Sizes(self._inference, mode, families, self._draws)
        self._names: dict[str, int] = {}

    def drew(self, generator: torch.Generator | None) -> None:
        """An operation has drawn random numbers, see :func:`penstock.draws.noticed`."""
        self._draws.append(generator)

    # ---- events

    def call(self, module: nn.Module, run: Run, args: tuple[Any, ...], kwargs: Any) -> Any:
        """A unit is called: its outputs are values."""
        path, given = self._paths[module], tensors_in((args, kwargs))
        self._draws.clear()
        with self.unseen():
            result = self._run_unit(module, run, args, kwargs)
        used = [n for t in given if (n := self.number_of(t)) is not None]
        inputs = tuple(dict.fromkeys([*used, *self._inference.used]))
        self.tape.hidden.update({(maker, path): None for maker in self._inference.borrowed})
        return self._note(path, inputs, given, result, [])

    def _run_unit(self, module: nn.Module, run: Run, args: tuple[Any, ...], kwargs: Any) -> Any:
        try:
            return self._sizes.run(UnitCall(self._paths[module], module, run, args, kwargs))
        except PartitionError:
            raise
        except Exception as error:
            try:
                return run_for_real(module, args, kwargs, self._mode)
            except Exception:
                # What it would be with the model's own weights and these arguments.
                raise error from None

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        """A function is called: it may use a value, or draw random numbers."""
        self._draws.clear()
        if not self._is_about_values(func, args, kwargs):
            return self._without_values(func, args, kwargs)
        for tensor in tensors_in((args, kwargs)):
            self._find_parameter(tensor)
        target = target_of(func, args, kwargs)
        args, kwargs = self._without_data(target, args, kwargs)
        given = tensors_in((args, kwargs))
        inputs = tuple(dict.fromkeys(n for t in given if (n := self.number_of(t)) is not None))
        if name_of(func) in ANSWERS:
            return self._answer(func, inputs, args, kwargs)
        result = self._run(func, args, kwargs)
        targets = [] if target is None else [self.current(target)]
        if not targets and not tensors_in(result):
            return result
        self._refuse_hidden(given)
        return self._note(func, inputs, given, result, targets)

    def concerns(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> bool:
        """Any function may draw random numbers."""
        return True

    def _is_about_values(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> bool:
        given = tensors_in((args, kwargs))
        if torch._C._are_functorch_transforms_active() and any(map(self._is_wrapped, given)):
            raise PartitionError(
                f"between its modules the model calls {name_of(func)} under a transform of torch.func, "
                "such as vmap; other stages cannot see that. Put it into a module, or place the module "
                "that contains that code as a whole by naming it in stages="
            )
        return super().concerns(func, args, kwargs) or any(
            id(t) in self._parameters or isinstance(t, FakeTensor) for t in given
        )

    def _without_values(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        """A function that uses no value is an event if it draws random numbers."""
        given = tensors_in((args, kwargs))
        before = [None if t.is_inference() else t._version for t in given]
        result = func(*args, **kwargs)
        if not self._draws:
            return result
        written = [t for t, v in zip(given, before, strict=True) if v not in (None, t._version)]
        targets = [t for w in written for t in (w, w._base) if t is not None]
        if not targets and not tensors_in(result):
            return result
        return self._note(func, (), given, result, targets)

    def _is_wrapped(self, tensor: Tensor) -> bool:
        """Whether it stands for a followed tensor inside of a transform."""
        inner = tensor
        while torch._C._functorch.is_functorch_wrapped_tensor(inner):
            inner = torch._C._functorch.get_unwrapped(inner)
        return inner is not tensor and self._is_followed(inner)

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        try:
            return func(*args, **kwargs)
        except PartitionError:
            raise
        except Exception as error:
            if not depends_on_data(error):
                raise
        with self._inference.of(""):
            # Its shape depends on numbers. That matters only if it travels, where shapes are checked.
            return func(*args, **kwargs)

    def _answer(
        self, func: Any, inputs: tuple[int, ...], args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        """Something that depends on numbers: only what was drawn by chance has any here."""
        if not self._drawn.issuperset(inputs):
            raise PartitionError(self._cannot(func))
        result = func(*args, **kwargs)
        if tensors_in(result) or not isinstance(result, bool | int | float):
            raise PartitionError(self._cannot(func))
        self.tape.events.append(Event(func, inputs, result, answers=True))
        return result

    def _cannot(self, func: Any) -> str:
        last = next((e.label for e in reversed(self.tape.events) if e.is_call), "the beginning")
        return (
            f"what the model does after {last} depends on the numbers in a tensor (a call of "
            f"{name_of(func)}) outside of the modules that are placed as a whole, so the other stages cannot "
            "follow it. Put that code into a module of its own, place the module that contains it as a "
            "whole by naming it in stages=, or turn the option off that makes it necessary"
        )

    # ---- notes

    def _note(
        self, what: Any, inputs: tuple[int, ...], given: list[Tensor], result: Any, targets: Any
    ) -> Any:
        # At once: whatever is asked of a tensor here is a function too.
        draws = self._draws.count(None)
        # Held as long as they are told apart by their identities.
        generators = {identity(g): g for g in self._draws if g is not None}
        self._generators |= generators
        event = len(self.tape.events)
        label = what if isinstance(what, str) else self._operation_label(what)
        by_chance = not isinstance(what, str) and self._drawn.issuperset(inputs)
        changes = tuple(self._changes(event, label, given, targets))
        slots: dict[int, Slot] = {}
        for index, tensor in enumerate(tensors_in(result)):
            slots[id(tensor)] = self._slot(event, f"{label}[{index}]", tensor, given)
        recorded = replaced(result, lambda leaf: slots.get(id(leaf), leaf))
        random_source = by_chance and not inputs
        self.tape.events.append(
            Event(what, inputs, recorded, changes, random_source, False, draws, tuple(generators))
        )
        if by_chance:
            self._drawn.update(slot.value for slot in slots.values())
        return result

    def _slot(self, event: int, name: str, tensor: Tensor, given: list[Tensor]) -> Slot:
        same = next((i for i, argument in enumerate(given) if argument is tensor), None)
        number = self.number_of(tensor)
        if number is None and same is not None:
            return Slot(NO_VALUE, same)
        if same is None or number is None:
            number = self._new(tensor, name, event)
        return Slot(number, same)

    def _new(
        self, tensor: Tensor, name: str, maker: int | None, parameter: str | None = None
    ) -> int:
        number = len(self.tape.values)
        self.tape.values.append(Value(Form.of(tensor), self._unique(name), maker, parameter))
        self.follow(tensor, number)
        self._alive[id(tensor)] = (weakref.ref(tensor), tensor._version)
        return number

    def _unique(self, name: str) -> str:
        name = name.removesuffix("[0]")
        count = self._names[name] = self._names.get(name, 0) + 1
        return name if count == 1 else f"{name}#{count}"

    def _operation_label(self, func: Any) -> str:
        last = next((e.label for e in reversed(self.tape.events) if e.is_call), "")
        return f"{last}>{name_of(func)}" if last else name_of(func)

    def _changes(
        self, event: int, label: str, given: list[Tensor], targets: list[Tensor]
    ) -> Iterator[Change]:
        """Followed tensors that are no longer what they were; they get new numbers."""
        changed = [t for t in targets if isinstance(t, Tensor)]
        for key, (found, version) in list(self._alive.items()):
            tensor = found()
            if tensor is None:
                del self._alive[key]
            elif tensor._version != version and not any(tensor is t for t in changed):
                changed.append(tensor)
        for tensor in changed:
            argument = next((i for i, t in enumerate(given) if t is tensor), None)
            view = next((i for i, t in enumerate(given) if t._base is tensor), None)
            old, new = self.number_of(tensor), self._new(tensor, f"{label}!", event)
            whole = argument is None and old is None and view is not None
            yield Change(view if whole else argument, old, new, whole)

    def _without_data(self, target: Any, args: Any, kwargs: Any) -> Any:
        """What a value is written into has no data any more from then on."""
        if not isinstance(target, Tensor) or isinstance(target, FakeTensor):
            return self.current((args, kwargs))
        number = self.number_of(target)
        if number is None or any(isinstance(t, FakeTensor) for t in tensors_in((args, kwargs))):
            without = self._mode.from_tensor(target.detach())
            self.put_instead(target, without)
            if number is not None:
                self.follow(without, number)
        return self.current((args, kwargs))

    def _refuse_hidden(self, given: list[Tensor]) -> None:
        hidden = [t for t in given if isinstance(t, FakeTensor) and self.number_of(t) is None]
        makers = [maker for t in hidden if (maker := self._inference.maker(t)) is not None]
        if makers:
            raise PartitionError(
                f"between its modules the model uses a tensor that was made inside {makers[0]} and did not "
                "leave it as a result; other stages cannot see it. Place the module that contains that "
                "code as a whole by naming it in stages="
            )

    def _find_parameter(self, tensor: Tensor) -> None:
        """A parameter that is used between the units is a value of the stage that holds it."""
        name = self._parameters.get(id(tensor))
        if name is not None and self.number_of(tensor) is None:
            self._new(tensor, name, None, name)

    # ---- the end

    def _without_kept(self, output: Any) -> Any:
        """The output without the objects that units fill, such as caches: no stage has all of them."""
        kept = [leaf for leaf in leaves(output) if self._is_filled(leaf)]
        self.tape.kept = tuple({type(leaf) for leaf in kept})
        return without(output, self.tape.kept)

    def _is_filled(self, leaf: Any) -> bool:
        return not isinstance(leaf, Tensor) and any(
            self._inference.maker(t) is not None or self.number_of(t) is not None
            for t in tensors_deep_in(leaf)
        )

    def finish(self, output: Any) -> Tape:
        """Note the model's output."""
        output = self._without_kept(self.current(output))
        numbers = []
        for tensor in tensors_in(output):
            self._find_parameter(tensor)
            number = self.number_of(tensor)
            if number is not None:
                numbers.append(number)
            elif isinstance(tensor, FakeTensor):
                raise PartitionError(_left_inside(self._inference.maker(tensor)))
        self.tape.outputs = tuple(dict.fromkeys(numbers))
        self.tape.output = output
        self.tape.output_tensors = len(tensors_in(output))
        return self.tape


def name_of(func: Any) -> str:
    """A function's own name."""
    return getattr(func, "__name__", None) or str(func)


def target_of(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The tensor that a function writes into, as its name tells."""
    name = name_of(func)
    in_place = name.endswith("_") and not name.startswith("_") and name != "requires_grad_"
    operator = name == "__setitem__" or (name.startswith("__i") and name not in _NO_WRITERS)
    if (in_place or operator) and args:
        return args[0]
    return kwargs.get("out")


_NO_WRITERS = {"__invert__", "__index__", "__int__"}


def depends_on_data(error: BaseException) -> bool:
    """Whether an error says that a result depends on numbers that are not there."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    return bool(kinds & {"DataDependentOutputException", "DynamicOutputShapeException"})


def _left_inside(unit: str | None) -> str:
    return (
        f"the model's output holds a tensor that was made inside {unit or 'a module'} and did not leave it "
        "as a result, such as router logits or attentions that transformers collects; other stages cannot "
        "see it. Turn off the option that adds it to the output"
    )


@contextlib.contextmanager
def chance_kept(device: torch.device) -> Iterator[None]:
    """Random numbers drawn inside are the same ones every time, and change nothing outside."""
    with randomness_kept(device):
        random.seed(0)
        np.random.seed(0)
        Generators([device]).seed(0)
        yield
