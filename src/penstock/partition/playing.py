"""A stage plays its own lines of a score; it never runs the author's forward."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from penstock._engine.values import map_tensors
from penstock.errors import PlanError
from penstock.partition.forward import Forward
from penstock.partition.functions import NORMS, may_draw, name_of, reads_numbers
from penstock.partition.interception import BETWEEN, Interceptor, Run
from penstock.partition.names import FakeTensor
from penstock.partition.planning import Homes
from penstock.partition.recomputing import recomputed
from penstock.partition.score import Line, Note, Score
from penstock.partition.snapshot import replaced
from penstock.partition.templates import BATCH, GIVEN, VALUE, Number, bind, fill, takes_gradient
from penstock.partition.writer import Writer
from penstock.stage import StageCall


class Player:
    """Plays the lines of one stage.

    Args:
        tree: the lines of the author's forward.
        homes: the stages of the units.
        stage: the index of the stage.
        last: whether it is the last one.
        recomputes: the paths of the units that are recomputed.
    """

    def __init__(
        self,
        tree: Forward,
        homes: Homes,
        stage: int,
        *,
        last: bool,
        recomputes: Collection[str],
    ) -> None:
        self._tree, self._homes, self._stage = tree, homes, stage
        self._last, self._recomputes = last, recomputes
        self._modules = dict(tree.units)

    def play(
        self, call: StageCall, arrived: Mapping[str, Any], batch: Sequence[Tensor]
    ) -> tuple[Any, dict[str, Any]]:
        """Play a microbatch.

        Args:
            call: which score it has, and its plan.
            arrived: the values of other stages, by their edges.
            batch: the tensors of the batch that learn.

        Returns:
            The model's output in the last stage and None in others; and the values to send, by their edges.
        """
        plan, score, stage = call.plan, call.score, self._stage
        values = _Values(self._tree, score)
        for edge, number in plan.arrives[stage].items():
            values[number] = arrived[edge]
        for number, tensor in enumerate(batch):
            values[BATCH, number] = tensor
        sends, sent = plan.sends[stage], dict[str, Any]()
        if self._last and score.call is not None:
            live = Live(self, self._tree, values, call)
            return live.real(self._tree.run(live, *score.call)), sent
        for index in plan.mine[stage]:
            note = score.notes[index]
            line = note.line
            self.play_line(note, values, call)
            for number, look in line.looks.items():
                if number in sends:
                    tensor = values[number]
                    self._check(line, tensor, look, call)
                    if isinstance(tensor, Tensor):
                        learns = takes_gradient(tensor)
                        if learns is not look[4] and torch.is_grad_enabled():
                            what = "requires a gradient", "requires no gradient"
                            raise self._unlike(
                                line,
                                f"gave a tensor that {what[look[4]]}",
                                f"gave one that {what[learns]}",
                            )
                        if tensor.requires_grad and not learns:
                            tensor = tensor.detach()
                        tensor = tensor.clone() if number in plan.copied else tensor
                    sent[sends[number]] = tensor
            for number in plan.drops[stage].get(index, ()):
                values.pop(number, None)
        for number, edge in sends.items():
            if isinstance(number, str):
                # As the stage leaves it: nothing that comes before reads it elsewhere.
                tensor = self._tree.tensor_now(number)
                is_weight = isinstance(tensor, nn.Parameter)
                sent[edge] = tensor.view_as(tensor) if is_weight else tensor.clone()
        output = fill(plan.output, values, score.given) if self._last else None
        if self._last:
            score.given.clear()
        return output, sent

    def _module(self, path: str) -> nn.Module:
        """A unit, or a module between units that has hooks."""
        if path not in self._modules:
            self._modules[path] = self._tree.model.get_submodule(path)
        return self._modules[path]

    def has(self, path: str) -> bool:
        """Whether a unit is in this stage."""
        return self._stage in self._homes.get(path, ())

    def play_line(self, note: Note, values: _Values, call: StageCall) -> None:
        """Play a line, and note the values that it makes."""
        line, given, draws, modules = note.line, note.given, call.score.draws, self._modules
        for target, _ in line.changes:
            if target[0] is GIVEN:
                # The author's own tensors, such as the batch, stay as they are.
                given[target[1]] = given[target[1]].clone()
        if not line.unit:
            values.copies_buffers = not (line.changes or name_of(line.what) in NORMS)
        # In a loop, as in Writer: this runs for each line of each microbatch.
        args, kwargs = list[Any](), dict[str, Any]()
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
        if line.beside[2]:
            beside = fill(line.beside, values, given)[len(note.context) :]
            for (part, name), value in zip(note.sets, beside, strict=True):
                vars(part)[name] = value
        values.copies_buffers = False
        run = line.run
        if line.unit:
            module = modules[line.what] if line.what in modules else self._module(line.what)
            run = module.forward if line.direct else module
        if draws is not None and note.draw >= 0:
            draws.enter(line.what if line.unit else BETWEEN, note.draw)
        grad, depth, *casts = line.modes
        if line.unit:
            once = line.what in self._recomputes
            if (once or depth) and not (line.changes or line.left or line.index in call.plan.kept):
                again = _surroundings(note) if note.sets or note.context else None
                run = recomputed(run, module if once else None, line.what, again)
        try:
            plain = not (casts or note.context or note.saving)
            if plain and grad is torch.is_grad_enabled():
                made = run(*args, **kwargs)
            else:
                with torch.set_grad_enabled(grad), _within(casts, note):
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

    def _note_made(self, note: Note, made: Any, values: _Values, call: StageCall) -> None:
        """Note what a line has made, set and changed."""
        line, given = note.line, note.given
        try:
            bind(line.result, made, line.index, values)
            for template in line.left:
                bind(template, given[template[1]], line.index, values)
            for path, name, template in line.attributes:
                module = self._module(line.what).get_submodule(path)
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

    def __init__(self, player: Player, tree: Forward, values: _Values, call: StageCall) -> None:
        super().__init__(tree, call.score.draws, call.score.batch)
        self._player, self._values, self._call = player, values, call
        self._decided = False
        self._kept: list[tuple[Tensor, Number]] = []
        for number, tensor in values.items():
            self.numbers[id(tensor)] = number

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
            self._player.play_line(note, self._values, self._call)
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
        args, kwargs = self.real((args, kwargs or {}))
        return func(*args, **kwargs)

    def unit(self, interceptor: Interceptor, run: Run, args: Any, kwargs: Any) -> Any:
        """Answer for a unit; once numbers have decided, it must be one of this stage."""
        if not self._decided or self._inside:
            return super().unit(interceptor, run, args, kwargs)
        if not self._player.has(interceptor.path):
            raise PlanError(
                "the model's code decides by numbers that units make to call "
                f"{interceptor.path}, which is in another stage; put that code into a module that is placed "
                "as a whole, by naming it in stages="
            )
        self._enter(interceptor.path, self._calls[interceptor.path])
        self._calls[interceptor.path] += 1
        args, kwargs = self.real((args, kwargs))
        self._inside = True
        try:
            return run(*args, **kwargs)
        finally:
            self._inside = False

    def applied(self, function: Any, run: Run, args: Any, kwargs: Any) -> Any:
        """Answer for a custom function."""
        if not self._decided:
            return super().applied(function, run, args, kwargs)
        args, kwargs = self.real((args, kwargs))
        return run(*args, **kwargs)

    def _enter(self, path: str, number: int) -> None:
        if self._draws is not None:
            self._draws.enter(path, number)

    def real(self, value: Any) -> Any:
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


class _Values(dict[Any, Any]):
    """The values of a stage by number; weights by name; placeholders of what is not read."""

    def __init__(self, tree: Forward, score: Score) -> None:
        super().__init__()
        self._tensor, self._notes = tree.tensor_now, score.notes
        self.copies_buffers = False

    def __missing__(self, number: Number) -> Any:
        if isinstance(number, str):
            tensor = self._tensor(number)
            if self.copies_buffers and not isinstance(tensor, nn.Parameter):
                # A backward keeps it as it was, whatever the next microbatch writes there.
                return tensor.clone()
            return tensor
        return self._notes[number[0]].line.shown[number]


def _surroundings(note: Note) -> Callable[[], Any]:
    """What makes a context with the attributes and context variables of a call; others set them since."""
    sets = [(vars(part), name, vars(part)[name]) for part, name in note.sets]

    @contextmanager
    def again() -> Iterator[None]:
        with replaced(sets), ExitStack() as stack:
            _set_variables(stack, note)
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
