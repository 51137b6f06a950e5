"""Run one stage's part of an author's forward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.utils.checkpoint import checkpoint

from penstock.errors import PartitionError
from penstock.partition.calls.inference import view_like
from penstock.partition.calls.routing import Part
from penstock.partition.calls.tape import (
    NO_VALUE,
    Change,
    Event,
    Origin,
    Placeholder,
    Region,
    Slot,
    Tape,
    form_of,
    leaves,
    name_of,
    replaced,
    tensors_in,
    without,
)
from penstock.partition.calls.watch import Watch
from penstock.partition.faces import Run, uncheckpointed
from penstock.rng import Streams
from penstock.step.loss import add_loss

PLAIN = (bool, int, float, str)


class Left(BaseException):
    """Ends a forward in which this stage has nothing left to do; no ``except Exception`` catches it."""


class Runner(Watch):
    """One forward pass in one stage: what is not its part is answered from the tape.

    Args:
        tape: what the analysis of this call has found.
        part: the stage's part of it.
        paths: the path of each unit.
        values: the values that arrived, by name.
        device: where the stage is.
        casts: whether something around the stage changes types, so that values must be cast back before
            they are sent.
    """

    def __init__(
        self,
        tape: Tape,
        part: Part,
        paths: Mapping[nn.Module, str],
        values: Mapping[str, Tensor],
        device: torch.device,
        *,
        casts: bool = False,
    ) -> None:
        super().__init__()
        self._casts = casts
        self._tape, self._part, self._paths, self._device = tape, part, paths, device
        # Clones of what is changed here: other stages may use it unchanged.
        self._arrived = {
            number: values[name].clone() if number in part.changes else values[name]
            for number, name in part.takes.items()
        }
        self._given: dict[int, Tensor] = {}
        self._again: dict[int, Callable[[], Tensor]] = {}
        self._regions = iter(zip(tape.regions, part.regions, strict=True))
        self._repeating: Mapping[str, Any] | None = None
        self._at = 0
        self._idle: Counter[int] = Counter()

    def enter(self, tensor_named: Callable[[str], Tensor]) -> None:
        """Follow the parameters that are used between the units."""
        for number, value in enumerate(self._tape.values):
            if value.parameter is not None:
                parameter = tensor_named(value.parameter)
                if number in self._arrived:
                    self.put_instead(parameter, self._arrived[number])
                self._keep(parameter, number)

    def results(self) -> dict[str, Tensor]:
        """The values that other stages use, by name.

        Raises:
            PartitionError: some were not made.
        """
        missing = [name for n, name in self._part.gives.items() if n not in self._given]
        if missing:
            raise PartitionError(
                f"{', '.join(missing)} should have been computed here, but the model's forward ended before "
                f"that; {_DIVERGED}"
            )
        return {name: self._given[number] for number, name in self._part.gives.items()}

    def output(self, output: Any) -> Any:
        """The model's output, with what replaces its tensors.

        Raises:
            PartitionError: it is not what the analysis found.
        """
        output = without(self.current(output), self._tape.kept)
        found, known = tensors_in(output), set(self._tape.outputs)
        strange = [t for t in found if (n := self.numbers_of(t)) and known.isdisjoint(n)]
        if strange or len(found) != self._tape.output_tensors:
            raise PartitionError(
                f"the model's output holds {len(found)} tensors where {self._tape.output_tensors} were "
                f"expected, or not the expected ones: {_DIVERGED}. Values that hooks collect from modules of "
                "other stages, such as hidden states, are not available here; turn that option off"
            )
        return output

    # ---- events

    def call(self, module: nn.Module, run: Run, args: tuple[Any, ...], kwargs: Any) -> Any:
        """A unit is called."""
        path, given = self._paths[module], list(leaves((args, kwargs)))
        event = self._next(path)
        if not self._part.runs[self._at]:
            Streams.left_out(module)
            return self._pass(event, given)
        self._check_inputs(event, given)
        if self._repeating is not None and torch.is_grad_enabled() and not event.changes:
            # Not a unit that changes its arguments: recomputed, it would change them twice.
            run = partial(checkpoint, run, **{**self._repeating, "use_reentrant": False})
        result = run(*args, **kwargs)
        _check_plain(event, result)
        return self._made(event, given, result)

    def operation(self, what: Any, run: Run, args: tuple[Any, ...], kwargs: Any) -> Any:
        """A function uses a value, or asks for something like its shape."""
        event = self._event_of(what)
        if event is None:
            result = run(*args, **kwargs)
            if tensors_in(result) and not _asks_for_graph(what, args):
                self._next(what)
            return result
        self._next(what)
        given = list(leaves((args, kwargs)))
        runs = self._part.runs[self._at]
        if event.effect:
            self._at += 1
            if not runs:
                args = (self._decoy(event, args[0]), *args[1:])
            return run(*args, **kwargs)
        if event.answers:
            return self._answer(event, run(*args, **kwargs) if runs else event.result)
        if not runs:
            return self._view(event, run, args, kwargs)
        self._check_inputs(event, given)
        return self._made(event, given, run(*args, **kwargs))

    def concerns(self, what: Any, args: tuple[Any, ...], kwargs: Any) -> bool:
        """Whether a function uses a value, or draws the random numbers that come next."""
        if super().concerns(what, args, kwargs):
            return True
        event = self._event_of(what)
        if event is None or not event.random:
            return False
        self._idle[self._at] += 1
        return self._idle[self._at] > event.idle

    def region(
        self, run: Run, args: tuple[Any, ...], kwargs: Any, options: Mapping[str, Any]
    ) -> Any:
        """Checkpoint the region if all of it is in this stage, and otherwise each of its units here."""
        region, whole = next(self._regions, (None, False))
        if region is None:
            raise PartitionError(f"the model's forward reached a checkpoint: {_DIVERGED}")
        # Not if tensors were replaced: when it runs again nothing would replace what the author's code holds.
        if whole and not self._instead:
            return self._whole_region(region, partial(run, *args, **kwargs, **options))
        before, self._repeating = self._repeating, options
        try:
            with uncheckpointed(args, options):
                return args[0](*args[1:], **kwargs)
        finally:
            self._repeating = before

    def _whole_region(self, region: Region, run: Callable[[], Any]) -> Any:
        """Run a region as its author has written it, and pass over its events."""
        if self._part.end is not None and self._at > self._part.end:
            raise Left
        if self._at != region.start:
            raise PartitionError(f"the model's forward reached a checkpoint: {_DIVERGED}")
        with self.unseen():
            result = run()
            for tensor, number in zip(tensors_in(result), region.results, strict=False):
                if number is not None:
                    self._keep(tensor, number)
        self._at = region.stop
        for _ in range(region.inner):
            next(self._regions)
        return result

    def inner_loss(self, loss: Tensor) -> Tensor | None:
        """A unit that runs here adds its losses."""
        return loss

    def outer_loss(self, loss: Tensor) -> Tensor | None:
        """A loss between the units is added where it is made."""
        self._next(add_loss)
        self._at += 1
        return loss if self._part.runs[self._at - 1] else None

    def _event_of(self, what: Any) -> Event | None:
        """The next event, if it is a call of this function."""
        if self._at >= len(self._tape.events):
            return None
        event = self._tape.events[self._at]
        return event if event.what == what else None

    def _next(self, what: Any) -> Event:
        """The event whose turn it is.

        Raises:
            Left: there is nothing left to do here.
            PartitionError: something else happens.
        """
        if self._part.end is not None and self._at > self._part.end:
            raise Left
        events = self._tape.events
        if self._at < len(events) and (events[self._at].what == what):
            return events[self._at]
        due = events[self._at].label if self._at < len(events) else "the end"
        raise PartitionError(
            f"the model's forward reached {name_of(what)} where {due} was expected: {_DIVERGED}"
        )

    def _answer(self, event: Event, result: Any) -> Any:
        if result != event.result:
            raise PartitionError(
                f"the model chose its way at random: {event.label} gave {result}, but other stages, which "
                f"cannot know that, assume {event.result}. Turn off what does so, such as layer dropout"
            )
        self._at += 1
        return result

    # ---- what ran here

    def _check_inputs(self, event: Event, given: list[Any]) -> None:
        """Check that what is about to run uses the values that it used in the analysis."""
        if any(isinstance(tensor, FakeTensor) for tensor in given):
            raise PartitionError(_absent(event.label))
        expected = set(event.inputs)
        for tensor in given:
            numbers = self.numbers_of(tensor)
            if numbers and expected.isdisjoint(numbers):
                name = self._tape.values[numbers[-1]].name
                raise PartitionError(
                    f"{event.label} was called with {name}, but with something else when the model was "
                    f"analysed: {_DIVERGED}"
                )

    def _made(self, event: Event, given: list[Any], result: Any) -> Any:
        """Follow what an event has made or changed here, and go on to the next event."""
        found, slots = tensors_in(result), event.slots
        if len(found) != len(slots):
            raise PartitionError(
                f"{event.label} gave {len(found)} tensors where {len(slots)} were expected: {_DIVERGED}"
            )
        for change in event.changes:
            target = self._target(change, given)
            if target is not None:
                if change.old is None:
                    self.follow_views(target)
                self._keep(target, change.new)
        for tensor, slot in zip(found, slots, strict=True):
            if slot.value != NO_VALUE:
                self._keep(tensor, slot.value)
        self._at += 1
        return result

    def _keep(self, tensor: Tensor, number: int) -> None:
        """Follow a value, and hold it for the stages that use it."""
        value = self._tape.values[number]
        if value.origin is not Origin.FOUND:
            self.follow(tensor, number)
        if number not in self._part.gives or number in self._given:
            return
        if self._casts:
            tensor = tensor.to(value.form.dtype)
        if (tensor.shape, tensor.dtype) != (value.form.shape, value.form.dtype):
            raise PartitionError(
                f"{value.name} is {tensor.dtype}{list(tensor.shape)} where {value.form.dtype}"
                f"{list(value.form.shape)} was expected: {_DIVERGED}"
            )
        if number in self._part.changes:
            tensor = tensor.clone()
        elif not value.form.requires_grad:
            # It may require grad all the same: a view of a weight that was made under no_grad() does.
            tensor = tensor.detach()
        elif tensor.is_leaf and tensor.requires_grad:
            # Not the leaf itself, since a gradient for what was sent comes back from another stage.
            tensor = tensor.view_as(tensor)
        self._given[number] = tensor

    # ---- what did not

    def _view(self, event: Event, run: Run, args: tuple[Any, ...], kwargs: Any) -> Any:
        """What a function of another stage returns here; views of what is changed here are made again."""
        given = list(leaves((args, kwargs)))
        if self._at not in self._part.views:
            shown = self._shown(event, run, args, kwargs) if event.shows else {}
            return self._pass(event, given, shown)

        def again(index: int) -> Tensor:
            return tensors_in(run(*self.current(args), **self.current(kwargs)))[index]

        self._again |= {slot.value: partial(again, i) for i, slot in enumerate(event.slots)}
        if any(isinstance(tensor, Placeholder) for tensor in given):
            return self._pass(event, given)
        return self._made(event, given, run(*args, **kwargs))

    def _shown(
        self, event: Event, run: Run, args: tuple[Any, ...], kwargs: Any
    ) -> dict[int, Tensor]:
        """Views of tensors that every stage has: of the other arguments they need the sizes alone."""

        def sizes(leaf: Any) -> Any:
            return form_of(leaf).empty("meta") if isinstance(leaf, Placeholder) else leaf

        found = tensors_in(run(*replaced(args, sizes), **replaced(kwargs, sizes)))
        return {id(slot): made for slot, made in zip(event.slots, found, strict=True)}

    def _pass(
        self, event: Event, given: list[Any], shown: Mapping[int, Tensor] | None = None
    ) -> Any:
        """What an event of another stage returns here."""
        if not isinstance(event.what, str):
            Streams.not_drawn(event.draws)
        changed: dict[int, Tensor] = {}
        for change in event.changes:
            old = self._target(change, given)
            new = self._renewed(change)
            if old is not None:
                if change.old is None:
                    self.follow_views(old)
                self.put_instead(old, new)
                changed[change.new] = old
        self._at += 1
        return replaced(event.result, lambda leaf: self._filled(leaf, given, changed, shown or {}))

    def _renewed(self, change: Change) -> Tensor:
        """What a changed tensor is here: a new view, if what it is a view of has arrived."""
        again = None if change.old is None else self._again.get(change.old)
        if again is not None:
            self._again[change.new] = again
            if self._tape.values[change.new].whole in self._arrived:
                made = again()
                self.follow(made, change.new)
                return made
        return self._stand_in(change.new)

    def _filled(
        self,
        leaf: Any,
        given: list[Any],
        changed: Mapping[int, Tensor],
        shown: Mapping[int, Tensor],
    ) -> Any:
        if not isinstance(leaf, Slot):
            return leaf
        if leaf.same_as is None:
            return shown[id(leaf)] if leaf.value == NO_VALUE else self._stand_in(leaf.value)
        # The author's code gets back the tensor that it holds, even if that is replaced by now.
        known = [one for one in given if self.number_of(one) == leaf.value]
        return changed.get(leaf.value, known[0] if known else given[leaf.same_as])

    def _stand_in(self, number: int) -> Tensor:
        """The value if it has arrived, or else a placeholder."""
        value = self._tape.values[number]
        made = self._arrived.get(number)
        if made is None:
            made = Placeholder.of(value.form, self._device, value.name)
        self.follow(made, number)
        return made

    def _decoy(self, event: Event, tensor: Tensor) -> Tensor:
        """A tensor to set a hook on that belongs to another stage: no gradient ever reaches it."""
        made = form_of(tensor).empty("meta")
        assert event.on is not None
        return made * 1 if self._tape.values[event.on].parameter is None else made

    def view_again(self, view: Tensor, old: Tensor, new: Tensor) -> Tensor:
        """The same view of what replaces its base, if that is here."""
        if isinstance(new, Placeholder):
            return Placeholder.of(form_of(view), self._device, new.label)
        return view_like(view, old, new)

    def _target(self, change: Change, given: list[Any]) -> Tensor | None:
        """The tensor here that an event changes in place."""
        if change.old is not None:
            known = [tensor for tensor in given if self.number_of(tensor) == change.old]
            return known[0] if known else self.tensor_of(change.old)
        found: Tensor | None = None if change.argument is None else given[change.argument]
        return found._base if found is not None and change.base else found


_DIVERGED = (
    "what a model does between its modules may depend on the shapes and types of its arguments, but neither "
    "on the numbers in them nor on chance"
)


def _asks_for_graph(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether this is how hooks of torch find a tensor's place in the graph."""
    return name_of(func) == "view_as" and args[0] is args[1]


def _absent(user: str) -> str:
    return (
        f"{user} uses the data of an argument of the model that this process was not given; pass it to every "
        "rank whose stages use it, or to all"
    )


def _check_plain(event: Event, result: Any) -> None:
    """Check the numbers and strings among a unit's results: other stages know them only from the analysis."""
    for found, expected in zip(leaves(result), leaves(event.result), strict=False):
        if isinstance(expected, PLAIN) and isinstance(found, PLAIN) and found != expected:
            raise PartitionError(
                f"{event.label} returned {found!r}, but the other stages assume {expected!r}; to reach other "
                "stages, a result that depends on the numbers in tensors must be a tensor"
            )
