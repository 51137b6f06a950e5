"""Analyse a call: run the author's forward without data and note each event."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor, FakeTensorMode

from penstock.errors import PartitionError
from penstock.partition.calls.inference import (
    Inference,
    Sizes,
    UnitCall,
    hooks_on,
    memory_of,
    run_for_real,
)
from penstock.partition.calls.tape import (
    NO_VALUE,
    Event,
    Loose,
    Origin,
    Region,
    Slot,
    Tape,
    leaves,
    name_of,
    replaced,
    tensors_deep_in,
    tensors_in,
    without,
)
from penstock.partition.calls.watch import Numbering
from penstock.partition.faces import EFFECTS, HOOKS, REQUIRES_GRAD, SET_DATA, Run, uncheckpointed
from penstock.rng import Generators, identity
from penstock.step.loss import add_loss
from penstock.values import Family, Found, randomness_kept, surely_reached, version_of

ANSWERS = {"__bool__", "__int__", "__float__", "__index__", "__contains__"} | {
    *("item", "tolist", "numpy", "equal", "allclose", "is_nonzero")
}
"""Functions whose results depend on the numbers in a tensor."""

_ABOUT = {
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.__len__, Tensor.is_floating_point),
    *(vars(torch._C.TensorBase)[name].__get__ for name in ("shape", "dtype", "device", "ndim")),
}
"""Functions that do not look at data."""

_BACKWARD = {torch.autograd.grad, torch.autograd.backward, Tensor.backward}


class Recorder(Numbering):
    """Notes the events of one forward pass of a model without data.

    Args:
        paths: the path of each unit.
        mode: the mode of the tensors without data.
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
        super().__init__(mode)
        self._paths = paths
        self._parameters = {id(parameter): name for parameter, name in parameters.items()}
        self._inference = Inference(self, mode)
        self._losses: list[Tensor] = []
        self._drawn: set[int] = set()
        self._draws: list[torch.Generator | None] = []
        self._idle: list[Any] = []
        self._generators: dict[int, torch.Generator] = {}
        self._sizes = Sizes(self._inference, mode, families, self._draws, self._losses)

    def drew(self, generator: torch.Generator | None) -> None:
        """An operation has drawn random numbers, see :func:`penstock.rng.noticed`."""
        self._draws.append(generator)

    # ---- events

    def call(self, module: nn.Module, run: Run, args: tuple[Any, ...], kwargs: Any) -> Any:
        """A unit is called: its outputs are values."""
        path, given = self._paths[module], tensors_in((args, kwargs))
        self.check_taken(given)
        self._draws.clear()
        before = [hooks_on(tensor) for tensor in given]
        with self._inference.standing_for(given):
            result = self._run_unit(module, run, args, kwargs)
        hooked = [t for t, was in zip(given, before, strict=True) if hooks_on(t) > was]
        numbers = tuple(n for t in hooked if (n := self.number_of(t)) is not None)
        if isinstance(path, Loose) and self._inference.borrowed:
            raise PartitionError(_hidden(next(iter(self._inference.borrowed))))
        self.tape.hidden.update({(maker, path): None for maker in self._inference.borrowed})
        result = self._note(path, list(leaves((args, kwargs))), result, self._inference.used)
        self.tape.events[-1] = replace(self.tape.events[-1], hooked=numbers)
        return result

    def _run_unit(self, module: nn.Module, run: Run, args: tuple[Any, ...], kwargs: Any) -> Any:
        try:
            return self._sizes.run(UnitCall(self._paths[module], module, run, args, kwargs))
        except PartitionError:
            raise
        except Exception as error:
            try:
                result, written = run_for_real(module, args, kwargs, self._mode)
            except Exception:
                # The first error is the one that the model would raise with these arguments.
                raise error from None
            self._inference.written.update(map(memory_of, written))
            return result

    def operation(self, what: Any, run: Run, args: tuple[Any, ...], kwargs: Any) -> Any:
        """A function is called: it may use a value, or draw random numbers."""
        self._draws.clear()
        if not self._is_about_values(what, args, kwargs):
            return self._without_values(what, run, args, kwargs)
        given = tensors_in((args, kwargs))
        for tensor in given:
            self._find_parameter(tensor)
        self.check_taken(given)
        inputs = [n for t in given if (n := self.number_of(t)) is not None]
        if name_of(what) in ANSWERS:
            return self._answer(what, inputs, args, kwargs)
        if what in _BACKWARD:
            raise PartitionError(self._cannot(what, "asks for gradients"))
        asked = bool(given) and given[0].requires_grad
        result = self._run(run, args, kwargs)
        if what in REQUIRES_GRAD and not isinstance(args[0], nn.Parameter):
            renewed = given[:1] if given[0].requires_grad != asked and inputs else ()
            return self._note(what, list(leaves((args, kwargs))), result, renewed=renewed)
        if what in EFFECTS:
            self._note_effect(what, self.number_of(args[0]))
            return result
        targets = [t for t in [target_of(what, args, kwargs)] if isinstance(t, Tensor)]
        if not targets and not tensors_in(result):
            return result
        self._refuse_hidden(given)
        return self._note(what, list(leaves((args, kwargs))), result, targets=targets)

    def concerns(self, what: Any, args: tuple[Any, ...], kwargs: Any) -> bool:
        """Whether to look at a function: any may draw random numbers, but a custom one draws by others."""
        return not isinstance(what, type) or self._is_about_values(what, args, kwargs)

    def _is_about_values(self, what: Any, args: tuple[Any, ...], kwargs: Any) -> bool:
        given = tensors_in((args, kwargs))
        if torch._C._are_functorch_transforms_active() and any(map(self._is_wrapped, given)):
            raise PartitionError(
                f"between its modules the model calls {name_of(what)} under a transform of torch.func, "
                "such as vmap; other stages cannot see that. Put it into a module, or place the module "
                "that contains that code as a whole by naming it in stages="
            )
        if super().concerns(what, args, kwargs):
            return True
        if what not in _ABOUT:
            self.check_taken(given)
        if what in HOOKS and given and given[0].requires_grad:
            raise PartitionError(
                f"the model calls {name_of(what)} on a tensor that it has made of its arguments alone: each "
                "stage makes its own, so none has all of its gradient. Set the hook on the output of a "
                "module, or put that code into a module of its own"
            )
        return any(id(t) in self._parameters or isinstance(t, FakeTensor) for t in given)

    def _without_values(self, what: Any, run: Run, args: tuple[Any, ...], kwargs: Any) -> Any:
        """A function that uses no value is an event if it draws random numbers."""
        self._inference.forget()
        given = tensors_in((args, kwargs))
        before = [version_of(t) for t in given]
        result = run(*args, **kwargs)
        if not self._draws:
            self._idle.append(what)
            return result
        written = [t for t, v in zip(given, before, strict=True) if version_of(t) != v]
        if not written and not tensors_in(result):
            return result
        return self._note(what, list(leaves((args, kwargs))), result, targets=written)

    def _is_wrapped(self, tensor: Tensor) -> bool:
        """Whether it stands for a followed tensor inside a transform."""
        inner = tensor
        while torch._C._functorch.is_functorch_wrapped_tensor(inner):
            inner = torch._C._functorch.get_unwrapped(inner)
        return inner is not tensor and self._is_followed(inner)

    def _run(self, run: Run, args: tuple[Any, ...], kwargs: Any) -> Any:
        try:
            with self._inference.writes():
                return run(*args, **kwargs)
        except PartitionError:
            raise
        except Exception as error:
            if not depends_on_data(error):
                raise
        self._draws.clear()
        with self._inference.of(""):
            # The shape of the result depends on data. That matters only if it travels: then it is checked.
            return run(*args, **kwargs)

    def _answer(self, what: Any, inputs: Sequence[int], args: tuple[Any, ...], kwargs: Any) -> Any:
        """Answer what depends on the numbers in a tensor: here only random ones have any."""
        refusal = PartitionError(self._cannot(what, "depends on the numbers in a tensor"))
        if not self._drawn.issuperset(inputs):
            raise refusal
        result = what(*args, **kwargs)
        if tensors_in(result) or not isinstance(result, bool | int | float):
            raise refusal
        self._append(Event(what, tuple(dict.fromkeys(inputs)), result, answers=True))
        return result

    def _cannot(self, what: Any, why: str) -> str:
        last = next((e.label for e in reversed(self.tape.events) if e.is_call), "the beginning")
        return (
            f"what the model does after {last} {why} (a call of {name_of(what)}) outside of the modules that "
            "are placed as wholes, so the other stages cannot follow it. Put that code into a module of its "
            "own, place the module that contains it as a whole by naming it in stages=, or turn off the "
            "option that needs it"
        )

    def region(
        self, run: Run, args: tuple[Any, ...], kwargs: Any, options: Mapping[str, Any]
    ) -> Any:
        """Run what is checkpointed as it would run without, and note where it begins and ends."""
        regions, start = self.tape.regions, len(self.tape.events)
        place = len(regions)
        regions.append(None)
        with uncheckpointed(args, options) as twice:
            result = args[0](*args[1:], **kwargs)
        with self.unseen():
            numbers = [self.number_of(t) for t in tensors_in(self.current(result))]
        if twice and self._writes_outside(start):
            raise PartitionError(
                "a checkpoint with use_reentrant=True between the modules changes its input in place, and so "
                "loses the gradient of that change; use use_reentrant=False, or clone the input first"
            )
        inner = len(regions) - place - 1
        regions[place] = Region(start, len(self.tape.events), tuple(numbers), inner)
        return result

    def _writes_outside(self, start: int) -> bool:
        """Whether events from this one on have changed what was there before."""
        changes = [change for event in self.tape.events[start:] for change in event.changes]
        values = self.tape.values
        firsts = [values[values[change.new].memory] for change in changes]
        return any(c.old is None for c in changes) or any((f.maker or 0) < start for f in firsts)

    def inner_loss(self, loss: Tensor) -> Tensor | None:
        """A loss that a unit adds is not an event; the stage that runs the unit adds it."""
        self._losses.append(loss)
        return None

    def outer_loss(self, loss: Tensor) -> Tensor | None:
        """A loss that is added between the units is added by the stage that makes its value."""
        self._find_parameter(loss)
        self._losses.append(loss)
        self._note_effect(add_loss, self.number_of(loss))
        return None

    # ---- notes

    def _note_effect(self, what: Any, on: int | None) -> None:
        self._append(Event(what, (), None, effect=True, on=on))

    def _append(self, event: Event) -> None:
        self.tape.events.append(event)
        self._idle.clear()

    def _note(
        self,
        what: Any,
        given: Sequence[Any],
        result: Any,
        used: Iterable[int] = (),
        targets: Sequence[Tensor] = (),
        renewed: Sequence[Tensor] = (),
    ) -> Any:
        # First of all: whatever is asked of a tensor below is a function too, and may draw.
        draws = self._draws.count(None)
        # They are told apart by their identities, so they must stay alive.
        generators = {identity(g): g for g in self._draws if g is not None}
        self._generators |= generators
        event = len(self.tape.events)
        label = what if isinstance(what, str) else self._operation_label(what)
        inputs = [n for t in given if (n := self.number_of(t)) is not None]
        inputs = list(dict.fromkeys([*inputs, *used]))
        by_chance = not isinstance(what, str) and self._drawn.issuperset(inputs)
        written = {*self._inference.written, *map(memory_of, targets)}
        changes = (
            *self.changed(event, label, given, written, real=by_chance),
            *(self.renewed(event, label, given, tensor) for tensor in renewed),
        )
        if isinstance(what, str):
            self.shows(tensors_in(result), given)
        slots: dict[int, Slot] = {}
        for index, tensor in enumerate(tensors_in(result)):
            slots[id(tensor)] = self._slot(event, what, f"{label}[{index}]", tensor, given)
        recorded = replaced(result, lambda leaf: slots.get(id(leaf), leaf))
        random_source = by_chance and not inputs
        self._append(
            Event(
                what,
                tuple(inputs),
                recorded,
                changes,
                random=random_source,
                draws=draws,
                generators=tuple(generators),
                idle=self._idle.count(what) if random_source else 0,
            )
        )
        if by_chance:
            self._drawn.update(slot.value for slot in slots.values() if slot.value != NO_VALUE)
            self._drawn.update(change.new for change in changes)
        return result

    def _slot(self, event: int, what: Any, name: str, tensor: Tensor, given: Sequence[Any]) -> Slot:
        same = next((i for i, argument in enumerate(given) if argument is tensor), None)
        number = self.number_of(tensor)
        if number is None and (same is not None or self._is_view(what, tensor, given)):
            return Slot(NO_VALUE, same)
        if same is None or number is None:
            origin = Origin.UNIT if isinstance(what, str | type) else Origin.VIEW
            number = self.number(tensor, name, event, origin=origin)
        return Slot(number, same)

    def _is_view(self, what: Any, tensor: Tensor, given: Sequence[Any]) -> bool:
        """Whether a function made a view of a tensor that every stage has, which all can make."""
        return (
            not isinstance(what, str | type)
            and not isinstance(tensor, FakeTensor)
            and any(memory_of(t) == memory_of(tensor) for t in self.everywhere(given))
        )

    def _operation_label(self, what: Any) -> str:
        last = next((e.label for e in reversed(self.tape.events) if e.is_call), "")
        return f"{name_of(what)} after {last}" if last else name_of(what)

    def _refuse_hidden(self, given: Iterable[Tensor]) -> None:
        hidden = [t for t in given if isinstance(t, FakeTensor) and self.number_of(t) is None]
        makers = [maker for t in hidden if (maker := self._inference.maker(t)) is not None]
        if makers:
            raise PartitionError(_hidden(makers[0]))

    def _find_parameter(self, tensor: Tensor) -> None:
        """Make a value of a parameter that is used between the units."""
        name = self._parameters.get(id(tensor))
        if name is not None and self.number_of(tensor) is None:
            self.number(tensor, name, None, name)

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
        tensors = tensors_in(output)
        for tensor in tensors:
            self._find_parameter(tensor)
            number = self.number_of(tensor)
            if number is not None:
                numbers.append(number)
            elif isinstance(tensor, FakeTensor):
                raise PartitionError(_left_inside(self._inference.maker(tensor)))
        self.tape.outputs = tuple(dict.fromkeys(numbers))
        self.tape.output = output
        self.tape.output_tensors = len(tensors)
        self.settle_changes()
        self.tape.sure = frozenset(surely_reached(self.edges, tensors, self._losses))
        return self.tape


def target_of(what: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The tensor that a function changes according to its name; other writes are seen as they happen."""
    name = name_of(what)
    in_place = name.endswith("_") and not name.startswith("_") and name != "requires_grad_"
    operator = name == "__setitem__" or (name.startswith("__i") and name not in _NO_WRITERS)
    if args and (in_place or operator or what == SET_DATA):
        return args[0]
    return kwargs.get("out")


_NO_WRITERS = {"__invert__", "__index__", "__int__"}


def depends_on_data(error: BaseException) -> bool:
    """Whether an error says that a result depends on data that are not there."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    return bool(kinds & {"DataDependentOutputException", "DynamicOutputShapeException"})


def _hidden(maker: str) -> str:
    return (
        f"between its modules the model uses a tensor that was made inside {maker} and did not leave it as a "
        "result; other stages cannot see it. Place the module that contains that code as a whole by naming "
        "it in stages="
    )


def _left_inside(unit: str | None) -> str:
    return (
        f"the model's output holds a tensor that was made inside {unit or 'a module'} and did not leave it "
        "as a result, such as router logits or attentions that transformers collects; other stages cannot "
        "see it. Turn off the option that adds it to the output"
    )


@contextlib.contextmanager
def chance_kept(device: torch.device) -> Iterator[None]:
    """Draw the same random numbers inside every time, and leave the generators as they were."""
    with randomness_kept(device):
        random.seed(0)
        np.random.seed(0)
        Generators([device]).seed(0)
        yield
