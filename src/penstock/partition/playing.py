"""A stage plays its own lines of a score; it never runs the author's forward."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from penstock._engine.values import map_tensors
from penstock.errors import PlanError
from penstock.partition.functions import may_draw, name_of, reads_numbers
from penstock.partition.interception import BETWEEN, Interceptor, Run
from penstock.partition.names import FakeTensor
from penstock.partition.planning import Homes
from penstock.partition.recomputing import recomputed
from penstock.partition.score import Line, Note
from penstock.partition.snapshot import MISSING, replaced
from penstock.partition.templates import (
    GIVEN,
    VALUE,
    Number,
    bind,
    contents,
    fill,
    known_in,
    put_contents,
    takes_gradient,
)
from penstock.partition.tree import ScoreTree
from penstock.partition.writer import Writer
from penstock.stage import StageCall


class Player:
    """Plays the lines of one stage.

    Args:
        tree: the lines of the author's forward.
        homes: the stages of the units.
        stage: the index of the stage.
        recomputes: the paths of the units that are recomputed.
    """

    def __init__(
        self, tree: ScoreTree, homes: Homes, stage: int, recomputes: Collection[str]
    ) -> None:
        self._tree, self._homes = tree, homes
        self._stage, self._recomputes = stage, recomputes

    def has(self, path: str) -> bool:
        """Tell whether a unit is in this stage."""
        return self._stage in self._homes.get(path, ())

    def play(
        self,
        places: Sequence[int],
        values: Values,
        call: StageCall,
        drops: Mapping[int, Sequence[Number]],
    ) -> dict[str, Any]:
        """Play lines, and note the values that they make.

        Args:
            places: which ones.
            values: the values so far.
            call: the microbatch.
            drops: the values that nothing needs after a line, by its place.

        Returns:
            The values to send, by their edges.
        """
        sends = call.plan.sends[self._stage]
        sent: dict[str, Any] = {}
        notes, draws = call.score.notes, call.score.draws
        # In one loop, and with the commonest values first: this runs for each line of each microbatch.
        for place in places:
            note = notes[place]
            line, given = note.line, note.given
            for target, _ in line.changes:
                if target[0] is GIVEN:
                    # The author's own tensors, such as the batch, stay as they are.
                    given[target[1]] = given[target[1]].clone()
            values.copies_buffers = line.copies_buffers
            args: list[Any] = []
            kwargs: dict[str, Any] = {}
            for template in line.args:
                tag = template[0]
                if tag is VALUE:
                    args.append(values[template[1]])
                elif tag is GIVEN:
                    args.append(given[template[1]])
                else:
                    args.append(fill(template, values, given))
            for name, template in line.kwargs:
                kwargs[name] = fill(template, values, given)
            if line.beside[4]:
                beside = fill(line.beside, values, given)[len(note.context) :]
                for (part, name), value in zip(note.sets, beside, strict=True):
                    vars(part)[name] = value
            values.copies_buffers = False
            if draws is not None and note.draw >= 0:
                draws.enter(line.what if line.unit else BETWEEN, note.draw)
            run, (grad, *others) = line.run, line.modes
            if line.unit and (others[0] or line.what in self._recomputes):
                run = self._recomputed(note, call)
            try:
                if others[1:] or note.context or note.saving or grad is not torch.is_grad_enabled():
                    with torch.set_grad_enabled(grad), _within(others[1:], note):
                        made = run(*args, **kwargs)
                else:
                    made = run(*args, **kwargs)
            except RuntimeError as error:
                if line.unit or not line.varies:
                    raise
                raise self._unlike(line, f"failed ({error})", "went on") from error
            if line.simple and line.checked and isinstance(made, Tensor):
                values[line.result[1]] = made
                given.clear()
            else:
                self._note_made(note, made, values, call)
            for number, look in line.looks.items():
                if number in sends:
                    tensor = self._to_send(line, values[number], look, call)
                    sent[sends[number]] = tensor.clone() if number in call.plan.copied else tensor
            for number in drops.get(place, ()):
                values.pop(number, None)
        return sent

    def _recomputed(self, note: Note, call: StageCall) -> Run:
        """Return what makes a unit's call, to run again in its backward if it can."""
        line, run = note.line, cast("Run", note.line.run)
        if line.changes or line.left or line.index in call.plan.kept:
            return run
        module = self._tree.units[line.what] if line.what in self._recomputes else None
        held = [note.given[known[1]] for of in line.templates() for known in known_in(of)]
        ever_set = self._tree.ever_set.get(line.what, {})
        sets = [
            (vars(part), name, vars(part).get(name, MISSING))
            for (_, name), part in ever_set.items()
        ]
        again = _surroundings(note, sets, held) if sets or note.context or held else None
        return recomputed(run, module, line.what, again)

    def _to_send(self, line: Line, tensor: Any, look: Any, call: StageCall) -> Any:
        """A value for other stages, which takes a gradient only if they expect it."""
        self._check(line, tensor, look, call)
        if not isinstance(tensor, Tensor):
            return tensor
        learns = takes_gradient(tensor)
        if learns is not look[4] and torch.is_grad_enabled():
            what = "requires no gradient", "requires a gradient"
            raise self._unlike(
                line, f"gave a tensor that {what[learns]}", f"gave one that {what[look[4]]}"
            )
        return tensor.detach() if tensor.requires_grad and not learns else tensor

    def _note_made(self, note: Note, made: Any, values: Values, call: StageCall) -> None:
        """Note what a line has made, set and changed."""
        line, given = note.line, note.given
        try:
            bind(line.result, made, line.index, values)
            for template in line.left:
                bind(template, given[template[1]], line.index, values)
            for path, name, template in line.attributes:
                module = self._tree.model.get_submodule(
                    f"{line.what}.{path}" if path else line.what
                )
                bind(template, vars(module)[name], line.index, values)
        except LookupError as error:
            raise self._unlike(line, f"gave {error}", "") from None
        for number in line.belongs:
            values[number] = values[number].clone()
        for target, new in line.changes:
            values[new] = values[target[1]] if target[0] is VALUE else given[target[1]]
        given.clear()
        if not line.checked:
            for number, look in line.looks.items() if line.unit else ():
                self._check(line, values[number], look, call)
            line.checked = True

    def _check(self, line: Line, tensor: Any, look: Any, call: StageCall) -> None:
        """Check that what a line gave looks as its placeholder."""
        shape, _, dtype, *_ = look
        if line.varies or not isinstance(dtype, torch.dtype):
            return
        if not isinstance(tensor, Tensor):
            raise self._unlike(line, f"gave a {type(tensor).__name__}", "gave a tensor")
        if tensor.shape != shape:
            raise self._unlike(
                line,
                f"gave a tensor of shape {tuple(tensor.shape)}",
                f"gave one of shape {tuple(shape)}",
            )
        floats = tensor.dtype.is_floating_point and dtype.is_floating_point
        if tensor.dtype != dtype and not (floats and call.may_cast()):
            raise self._unlike(line, f"gave a tensor of {tensor.dtype}", f"gave {dtype}")

    def _unlike(self, line: Line, did: str, planned: str) -> PlanError:
        self._tree.forget()
        return PlanError(
            f"{line.where}: {line.name} in stage {self._stage} {did} where the run without data "
            f"{planned or 'gave something else'}: what it does depends on the numbers in its tensors, or on "
            "something that has changed since; it is planned anew at the next step. If that does not help, "
            "place what uses it in the same module, or cut the model by a typical batch, pipe.cut(...)"
        )


class Live(Writer):
    """Runs the author's forward in the last stage, where its code decides by numbers that units make.

    Up to there, calls are those of the score: the stage plays its own lines, and gets the values of
    others. From there on everything is the last stage's, and runs for real. So this code runs once more in
    the process that has the last stage.

    Args:
        player: plays the lines of the last stage.
        tree: the lines of the author's forward.
        values: the values that have arrived.
        call: the score and its plan.
    """

    silent = False

    def __init__(self, player: Player, tree: ScoreTree, values: Values, call: StageCall) -> None:
        super().__init__(tree, tree.interceptors)
        self.begin(call.score.draws, call.score.batch)
        self._player, self._values, self._call = player, values, call
        self._decided = False
        self._kept: list[tuple[Tensor, Number]] = []
        for number, tensor in values.items():
            self.numbers[id(tensor)] = number

    def played(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The model's output."""
        with self.open():
            output = self._real(self.run(args, kwargs))
        self.let_go()
        return output

    def new(self, line: Line, *_: Any) -> Any:
        """Refuse a call that is not in the score."""
        raise PlanError(
            f"the model's code comes to {name_of(line.what)} in the last stage, where it did something else "
            "before: it depends on something that has changed since, such as a random number of Python's"
        )

    def answer(self, note: Note) -> Any:
        """Answer a call with what it gives, if it is one of this stage."""
        line = note.line
        if self._call.plan.owners[line.index] != len(self._call.plan.mine) - 1:
            return super().answer(note)
        # A stage changes a copy of the author's tensor, for which the author's code still has its own.
        changed = [(note.given[t[1]], new) for t, new in line.changes if t[0] is GIVEN]
        self._inside = True
        try:
            self._player.play((line.index,), self._values, self._call, {})
        finally:
            self._inside = False
        for tensor, number in changed:
            self.numbers[id(tensor)] = number
        self._kept += changed
        for number in line.looks:
            self.shown[number] = self._values[number]
            self.numbers[id(self._values[number])] = number
        for template in line.left:
            fill(template, self._values, note.given)
        return fill(line.result, self._values, note.given)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._decided |= not self._inside and reads_numbers(func) and self._follows(args)
        if not self._decided or self._inside:
            return super().__torch_function__(func, types, args, kwargs)
        if may_draw(func):
            self._enter(BETWEEN, self._drawn)
            self._drawn += 1
        args, kwargs = self._real((args, kwargs or {}))
        return func(*args, **kwargs)

    def unit(self, interceptor: Interceptor, run: Run, /, *args: Any, **kwargs: Any) -> Any:
        """Answer for a unit; once numbers have decided, it must be one of this stage."""
        if not self._decided or self._inside:
            return super().unit(interceptor, run, *args, **kwargs)
        if not self._player.has(interceptor.path):
            raise PlanError(
                "the model's code decides by numbers that units make to call "
                f"{interceptor.path}, which is in another stage; put that code into a module that is placed "
                "as a whole, by naming it in stages="
            )
        call = self._calls.get(interceptor.path, 0)
        self._enter(interceptor.path, call)
        self._calls[interceptor.path] = call + 1
        args, kwargs = self._real((args, kwargs))
        self._inside = True
        try:
            return run(*args, **kwargs)
        finally:
            self._inside = False

    def applied(self, function: Any, run: Run, args: Any, kwargs: Any) -> Any:
        """Answer for a custom function."""
        if not self._decided:
            return super().applied(function, run, args, kwargs)
        args, kwargs = self._real((args, kwargs))
        return run(*args, **kwargs)

    def _enter(self, path: str, number: int) -> None:
        if self._draws is not None:
            self._draws.enter(path, number)

    def _real(self, value: Any) -> Any:
        """A value with numbers in place of placeholders."""
        return map_tensors(value, self._of_placeholder)

    def _of_placeholder(self, tensor: Tensor) -> Tensor:
        number = self.numbers.get(id(tensor))
        if number is None:
            return tensor
        real: Tensor = self._values[number]
        if isinstance(real, FakeTensor):
            raise PlanError(
                "the model's code decides by numbers that units make to use a value of another stage, which "
                "it did not use when it was planned; put that code into a module that is placed as a whole"
            )
        return real


class Values(dict[Any, Any]):
    """The values of a stage by number; weights by name; placeholders of what is not read.

    Args:
        tree: has the weights.
        notes: the lines of the microbatch.
    """

    def __init__(self, tree: ScoreTree, notes: Sequence[Note]) -> None:
        super().__init__()
        self._tensor, self._notes = tree.tensor_now, notes
        self.copies_buffers = False

    def __missing__(self, number: Number) -> Any:
        if isinstance(number, str):
            tensor = self._tensor(number)
            if self.copies_buffers and not isinstance(tensor, nn.Parameter):
                # A backward keeps it as it was, whatever the next microbatch writes there.
                return tensor.clone()
            return tensor
        return self._notes[number[0]].line.shown[number]


def _surroundings(
    note: Note, sets: Sequence[tuple[dict[str, Any], str, Any]], held: Sequence[Any]
) -> Callable[[], Any]:
    """Return what makes a context with all that is around a call now, and that others change later.

    Args:
        note: the call, with its context variables.
        sets: the tables, names and values of attributes that the author's code sets in the unit.
        held: the author's lists, dictionaries and objects among its arguments.
    """
    before = [(thing, contents(thing)) for thing in held]

    @contextmanager
    def again() -> Iterator[None]:
        with replaced(sets), ExitStack() as stack:
            _set_variables(stack, note)
            for thing, inside in before:
                stack.callback(put_contents, thing, *contents(thing))
                put_contents(thing, *inside)
            yield

    return again


def _set_variables(stack: ExitStack, note: Note) -> None:
    for variable, value in note.context:
        stack.callback(variable.reset, variable.set(value))


@contextmanager
def _within(casts: Sequence[Any], note: Note) -> Iterator[None]:
    with ExitStack() as stack:
        for kind, dtype in casts:
            stack.enter_context(torch.autocast(kind, dtype))
        if note.saving is not None:
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(*note.saving))
        _set_variables(stack, note)
        yield
