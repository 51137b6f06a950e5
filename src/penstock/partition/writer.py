"""Follow an author's forward along the lines of its tree, and write the score of a microbatch."""

from __future__ import annotations

import hashlib
import logging
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar, copy_context
from functools import partial
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.overrides import TorchFunctionMode

from penstock._engine.devices import kinds as device_kinds
from penstock._engine.rng import Draws
from penstock._engine.values import storage_key, tensors_in
from penstock.errors import PartitionError
from penstock.partition.alike import CallLook
from penstock.partition.functions import (
    AS_SHAPES,
    BY_LENGTHS,
    METADATA,
    NORMS,
    SET_HOOKS,
    TAKE_GRADIENTS,
    is_ours,
    may_draw,
    name_of,
)
from penstock.partition.interception import (
    BETWEEN,
    Interceptor,
    Run,
    attributes_told,
    intercepted,
    is_checkpoint,
    others_seen,
    reads_noted,
    uncheckpointed,
)
from penstock.partition.lines import is_called_by_library, line_of, place_of, running, where
from penstock.partition.names import (
    FAKE_LOGGER,
    FakeTensor,
    Operation,
    forget_operations,
    is_of_dynamo,
    is_wrapped,
    left,
    level_of_transforms,
    saving,
    unwrapped,
    without_functions,
)
from penstock.partition.score import Line, Note
from penstock.partition.snapshot import replaced
from penstock.partition.templates import (
    BATCH,
    CONST,
    GIVEN,
    VALUE,
    Look,
    Number,
    Reader,
    Template,
    fill,
    leaves_of,
    look_of,
    takes_gradient,
    text_of,
    tuple_template,
)
from penstock.partition.tree import ScoreTree
from penstock.partition.trial import IS_LINE, Trial
from penstock.partition.work import Work

_VALUES = dict.values
_MOST_CACHED = 20_000
"""The operations without data that torch may remember."""


class Writer(TorchFunctionMode):
    """Writes the scores of microbatches, one after the other, while the author's forward runs.

    Args:
        tree: the lines that are known.
        interceptors: those of the units.

    Attributes:
        units: the units, by path.
        numbers: the values, by the identity of their placeholders.
        shown: the placeholders of all values so far.
        notes: the lines.
        refused: errors that count, whatever the author's code makes of them.
        decides: whether the author's code has read numbers that units make.
        makers: the lines that have made the placeholders and what units keep, by the identity of its memory.
        at_end: what is to happen when the author's forward has run.
        work: the operations of all new lines.
        inner_work: those of the modules inside units that were counted, by their identity.
    """

    silent = True
    """Whether calls are answered with placeholders alone."""

    def __init__(self, tree: ScoreTree, interceptors: Sequence[Interceptor]) -> None:
        super().__init__()
        self.tree, self.interceptors = tree, interceptors
        self.units = {one.path: one.module for one in interceptors}
        self._tables = {path: _tables_of(unit) for path, unit in self.units.items()}
        self.work = Work()
        self.inner_work: dict[int, float] = {}
        self._settings = tree.settings_now()
        self._before, self._saving = dict(copy_context().items()), saving(False)

    def begin(self, draws: Draws | None, batch: Sequence[Tensor]) -> None:
        """Begin a microbatch.

        Args:
            draws: seeds what functions between units draw; None leaves the generators alone.
            batch: the tensors of the batch that learn.
        """
        tree = self.tree
        self.decides, self._draws, self._drawn = False, draws, 0
        self.root = self._at = tree.start(self._settings, batch)
        self.notes: list[Note] = []
        self.numbers: dict[int, Any] = dict(tree.weights)
        self.shown: dict[Any, Tensor] = dict(tree.tensors)
        for number, tensor in enumerate(batch):
            self.numbers[id(tensor)] = (BATCH, number)
            self.shown[BATCH, number] = tensor
        self.refused: list[Exception] = []
        self.at_end = ExitStack()
        self._reader = Reader(self.numbers.get, self._read_tensor, tree.fixed)
        self._calls: dict[str, int] = {}
        self._as_called: list[tuple[str, list[Any]]] = []
        self._looks: dict[int, tuple[Tensor, Look]] = {}
        self._depth, self._inside = 0, False
        self._trial: Trial | None = None
        self._latest = ""
        self._sets: dict[str, dict[tuple[int, str], nn.Module]] = {}
        self.makers: dict[int, int] = {}
        self._memory: list[Any] = []
        self._overwritten: set[int] = set()

    @contextmanager
    def open(self) -> Iterator[None]:
        """A context in which this answers for all that the author's forward calls, which runs on fakes."""
        tree, logger = self.tree, logging.getLogger(FAKE_LOGGER)
        silent, logger.disabled = logger.disabled, True
        # Its fused kernels give other tensors without data than with data. As of torch 2.13.
        fused = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        tree.mode.refused = self._collective
        padded = [
            module.register_forward_pre_hook(self._check_padding, with_kwargs=True)
            for _, module in tree.outside
            if isinstance(module, nn.TransformerEncoder)
            and getattr(module, "use_nested_tensor", False)
            and not (module.training or torch.is_grad_enabled())
        ]
        try:
            with (
                intercepted(self.interceptors, self.unit, self.units),
                attributes_told(),
                others_seen(self),
            ):
                yield
        finally:
            for hook in padded:
                hook.remove()
            tree.mode.refused = None
            logger.disabled = silent
            torch.backends.mha.set_fastpath_enabled(fused)
            forget_operations(_MOST_CACHED)

    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run the author's forward."""
        try:
            with self.at_end, self:
                output: Any = self.tree.forward(*args, **kwargs)
        except Exception as error:
            if self.refused:
                raise self.refused[0] from None
            self._check_units()
            raise self._explained(error) from error
        if self.refused:
            raise self.refused[0]
        return output

    def _check_padding(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Refuse PyTorch's encoders that drop padding with nested tensors, if their layers are units."""
        if kwargs.get("src_key_padding_mask", args[2] if len(args) > 2 else None) is not None:
            raise PartitionError(
                f"{self.tree.paths.get(id(module)) or 'the model'} (TransformerEncoder) drops padded "
                "positions in evaluation, by nested tensors, which cannot travel between stages; set its "
                "use_nested_tensor = False, or place it as a whole by naming it in stages="
            )

    def _collective(self) -> PartitionError | None:
        """The error of a collective between units, which torch shows nobody; inside of units they may run."""
        if self._inside:
            return None
        return self.refusal(
            "calls a collective of torch.distributed between its units, which no stage would run; call it in "
            "a module that is placed as a whole, or a functional one, as torch.distributed.nn has"
        )

    def let_go(self) -> None:
        """Let go of all tensors: what holds placeholders now is the author's."""
        self._inside = True  # what the author's code keeps of a call is no line
        del self._reader  # it refers back here
        self.shown.clear()
        self._looks.clear()
        self._memory.clear()
        self._as_called.clear()

    # ---- what the author's code calls

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._inside or func in METADATA or func in self.tree.metadata:
            return func(*args, **kwargs)
        if level_of_transforms() is not None and any(map(is_wrapped, tensors_in((args, kwargs)))):
            inside = [unwrapped(tensor) for tensor in tensors_in((args, kwargs))]
            if not any(type(t) is FakeTensor or id(t) in self.numbers for t in inside):
                return func(*args, **kwargs)  # of the arguments alone, as masks are
            raise self.refusal(
                f"calls {name_of(func)} under a transform of torch.func, such as vmap, between its units"
            )
        if isinstance(func, Operation) and _is_dispatched(sys._getframe(1)):
            raise self.refusal(
                "runs compiled code between its units, such as a function of torch.jit"
            )
        follows = self._follows(args) or (bool(kwargs) and self._follows(kwargs.values()))
        if follows and func in AS_SHAPES:
            real = self._only_shaped(func, args)
            if real is not None:
                return self.__torch_function__(func, types, real, kwargs)
        if follows and func in BY_LENGTHS and not self._follows(args[1:]):
            first = BY_LENGTHS[func]
            data = self._line(first, first, 0, args, kwargs, -1)
            # Computed of the lengths now, it can lead the author's code and an LSTM's without data.
            return data, func(torch.zeros(args[0].shape[:2], device="cpu"), *args[1:], **kwargs)[1]
        draw = -1
        if may_draw(func):
            draw, self._drawn = self._drawn, self._drawn + 1
        if not follows and not is_ours(func):
            if draw >= 0 and self._draws is not None:
                self._draws.enter(BETWEEN, draw)
            return func(*args, **kwargs)
        if func is Tensor.__iter__:
            return iter(self._line(Tensor.unbind, Tensor.unbind, 0, args, kwargs, draw))
        if func in SET_HOOKS and (
            isinstance(self.numbers.get(id(args[0])), str) or is_called_by_library()
        ):
            # A weight's own; or a tool of PyTorch's, such as one that counts operations by module.
            return func(*args, **kwargs)
        if func in TAKE_GRADIENTS:
            raise self.refusal("takes gradients between its units, which no stage has whole")
        return self._line(func, func, 0, args, kwargs, draw)

    def unit(self, interceptor: Interceptor, run: Run, /, *args: Any, **kwargs: Any) -> Any:
        """Answer for a unit."""
        if self._inside:
            return run(*args, **kwargs)
        path = interceptor.path
        held = [*chain.from_iterable(map(_VALUES, self._tables[path]))]
        self._as_called.append((path, held))
        call = self._calls.get(path, 0)
        self._calls[path] = call + 1
        is_direct = getattr(run, "__name__", "") == "forward"
        output = self._line(
            path, run, call, args, kwargs, call, (path, "forward") if is_direct else path
        )
        self._latest = path
        return output

    def counted(self, interceptor: Interceptor, run: Run, /, *args: Any, **kwargs: Any) -> Any:
        """Count the operations of a module inside a unit."""
        before = self.work.total
        output = run(*args, **kwargs)
        self._add_inner(interceptor.module, self.work.total - before)
        return output

    def _add_inner(self, module: nn.Module, work: float) -> None:
        self.inner_work[id(module)] = self.inner_work.get(id(module), 0.0) + work

    def applied(self, function: type[Function], run: Run, args: Any, kwargs: Any) -> Any:
        """Answer for a custom function."""
        if self._trial is not None:
            # It may keep what no operation reads.
            self._trial.used |= set(map(id, tensors_in((args, kwargs))))
        if self._inside or is_checkpoint(function) or not self._follows((args, kwargs)):
            return run(*args, **kwargs)
        return self._line(function, run, 0, args, kwargs, -1)

    def checkpointed(self, run: Run, args: Any, kwargs: Any, options: Mapping[str, Any]) -> Any:
        """Answer for a checkpoint of the author's: each unit in it is recomputed by itself."""
        if self._inside:
            if self._trial is not None:
                self._trial.used |= set(map(id, tensors_in((args[1:], kwargs))))
            return args[0](*args[1:], **kwargs)
        with uncheckpointed(args[1:], options):
            self._depth += 1
            try:
                return args[0](*args[1:], **kwargs)
            finally:
                self._depth -= 1

    def _follows(self, values: Any) -> bool:
        """Tell whether there is a value among some arguments."""
        for value in values:
            if isinstance(value, Tensor):
                if id(value) in self.numbers:
                    return True
                if type(value) is FakeTensor or is_wrapped(value):
                    self._check_foreign(value)
                elif self._overwritten and storage_key(value) in self._overwritten:
                    raise self.refusal(
                        "writes what units gave into a tensor, which is read through another that was made "
                        "of it before and shares its memory; write into a clone"
                    )
            elif isinstance(value, list | tuple):
                if self._follows(value):
                    return True
            elif isinstance(value, dict) and self._follows(value.values()):
                return True
        return False

    def _check_foreign(self, tensor: Tensor) -> None:
        tensor = unwrapped(tensor)
        if id(tensor) in self.numbers:
            raise self.refusal(
                "calls a function under a transform of torch.func, such as vmap, between its units"
            )
        if type(tensor) is not FakeTensor:
            return
        maker = self.makers.get(storage_key(tensor))
        if maker is not None:
            raise self.refusal(
                f"uses a tensor that {self.notes[maker].line.name} left in an attribute or a list, which "
                "other stages do not have; return it from there (a loss: penstock.add_loss)"
            )
        raise self.refusal(
            "uses a tensor that came about where no function of PyTorch is seen, such as in a transform, in "
            "compiled code, under another name of a custom function's apply, or in an attribute that an "
            "earlier microbatch has left; put that into a module that is placed as a whole"
        )

    def _only_shaped(self, func: Any, args: Any) -> Any:
        """The arguments of a call that takes only the shape of a placeholder, with a real tensor there."""
        place = AS_SHAPES[func]
        if len(args) <= place or not isinstance(args[place], Tensor):
            return None
        others = [x for at, x in enumerate(args) if at != place]
        if id(args[place]) not in self.numbers or self._follows(others):
            return None
        like = args[place]
        real = torch.empty(like.shape, dtype=like.dtype, device=like.device)
        return (*args[:place], real, *args[place + 1 :])

    # ---- lines

    def _line(
        self,
        what: Any,
        run: Run,
        call: int,
        args: Any,
        kwargs: Any,
        draw: int,
        key: Any = None,
    ) -> Any:
        tree, copies = self.tree, type(what) is not str
        given: list[Any] = []
        read, number_of = self._reader.read, self.numbers.get
        casts = ()
        if torch.is_autocast_enabled() or torch.is_autocast_enabled("cpu"):
            casts = _autocast()
        modes = (torch.is_grad_enabled(), self._depth, *casts)
        # In a loop, and with the commonest values first: this runs for each line of each microbatch.
        looks = self._looks
        templates: list[Template] = []
        for value in [*args, *kwargs.values()]:
            number = number_of(id(value))
            if number is not None:
                templates.append((VALUE, number))
            elif value is None or value is True or value is False:
                templates.append((CONST, type(value), value))
            elif (look := looks.get(id(value))) is not None and look[0] is value:
                templates.append((GIVEN, len(given), look[1]))
                given.append(value)
            else:
                if type(value) is FakeTensor:
                    self._check_foreign(value)
                templates.append(read(value, given, copies=copies))
        context: list[tuple[ContextVar[Any], Any]] = []
        sets: Sequence[tuple[nn.Module, str]] = ()
        beside: list[Template] = []
        if not copies:
            for variable, value in copy_context().items():
                known = isinstance(value, dict | list | int | float | str | Tensor)
                if known and self._before.get(variable) is not value:
                    context.append((variable, value))
                    beside.append(read(value, given))
            if what in self._sets:
                sets = [(module, name) for (_, name), module in self._sets.pop(what).items()]
                beside += [read(vars(module).get(name), given) for module, name in sets]
        numbers = self._numbers_in(given) if what in tree.by_numbers else ()
        what_key = what if key is None else key
        key = (what_key, modes, tuple(templates), tuple(kwargs), tuple(beside), numbers)
        line = self._at.next.get(key)
        if line is None:
            line, output = self._new_line(key, what, run, call, given, len(args))
            if line is None:
                return output
        self._at = line
        packs = saving(False)
        if packs is self._saving:  # none, or those around the step
            packs = None
        note = Note(line, given, draw, context, sets, packs)
        self.notes.append(note)
        if line.simple and self.silent:
            self.numbers.update(line.marks)
            self.shown.update(line.shown)
            self.decides |= line.decides
            return self.shown[line.result[1]]
        return self.answer(note)

    def answer(self, note: Note) -> Any:
        """Answer a call with the placeholders of its line."""
        line, given = note.line, note.given
        self.decides |= line.decides
        self.numbers.update(line.marks)
        self.shown.update(line.shown)
        for target, number in line.changes:
            if target[0] is GIVEN:
                self.numbers[id(given[target[1]])] = number
                self._overwritten.add(storage_key(given[target[1]]))
            else:
                placeholder = self.shown[number] = self.shown[target[1]]
                if line.looks[number][4] and not placeholder.requires_grad:
                    with without_functions():
                        placeholder.requires_grad_()
                for key in [key for key, n in self.numbers.items() if n == target[1]]:
                    self.numbers[key] = number
        for template in line.left:
            fill(template, self.shown, given)
        for path, name, template in line.attributes:
            module = self.units[line.what].get_submodule(path)
            self._put(module, name, fill(template, self.shown, given))
        if line.numbers:
            unit = self.units[line.what]
            noted = []
            for path, name, value in line.numbers:
                module = unit.get_submodule(path)
                self._put(module, name, value)
                noted.append((module, name, (line, name)))
            self.at_end.enter_context(reads_noted(noted, self._used_elsewhere))
        result = line.result
        return self.shown[result[1]] if result[0] is VALUE else fill(result, self.shown, given)

    def _put(self, module: nn.Module, name: str, value: Any) -> None:
        """Set an attribute until the author's forward has run."""
        self.at_end.enter_context(replaced([(vars(module), name, value)]))

    def has_set(self, module: nn.Module, name: str) -> None:
        """Note that the author's code has set an attribute in a unit: the unit gets it with its next call."""
        path = self.tree.unit_of.get(id(module))
        if path is None or self._inside:
            return
        if name == "forward":
            raise self.refusal(
                f"sets the forward of {self.tree.paths[id(module)]}, which its stage would not know; put "
                "that into a module that is placed as a whole"
            )
        if name in vars(module):
            self._sets.setdefault(path, {})[id(module), name] = module
            self.tree.ever_set.setdefault(path, {})[id(module), name] = module

    def _used_elsewhere(self, attribute: tuple[Line, str]) -> None:
        """Refuse to use a number that a unit has set, before it has a value."""
        line, name = attribute
        if self._trial is not None:
            self._trial.foreign.add(line.index)
        elif not self._inside:
            raise self.refusal(
                f"uses the attribute {name!r} of {line.what}, which is set there and which other stages do "
                "not have; return it from there (a loss: penstock.add_loss)"
            )

    def _numbers_in(self, given: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(
            [str(x.tolist()) for x in given if isinstance(x, Tensor) and x.numel() < 10_000]
        )

    def _read_tensor(self, tensor: Tensor, given: list[Any]) -> Template:
        """The template of a tensor that is no value."""
        if type(tensor) is FakeTensor:
            # In a list or an object, where a unit may have left it; nobody may read it.
            return (CONST, FakeTensor, tensor)
        given.append(tensor)
        known = self._looks.get(id(tensor))
        if known is None or known[0] is not tensor:
            with without_functions():
                known = self._looks[id(tensor)] = tensor, look_of(tensor)
        return (GIVEN, len(given) - 1, known[1])

    # ---- a new line

    def _runs_of(self, unit: nn.Module, run: Run) -> tuple[Run, Run]:
        """Return what makes a unit's call on fakes, and what makes it in a stage."""
        if getattr(run, "__name__", "") == "forward":  # the author's code calls it itself
            return run, partial(_run_forward, unit)
        if isinstance(unit, torch.jit.ScriptModule):
            return run, unit
        # A compiled module runs as it was written.
        return getattr(unit, "_orig_mod", unit)._call_impl, unit

    def _new_line(
        self, key: Any, what: Any, run: Run, call: int, given: list[Any], count: int
    ) -> tuple[Line | None, Any]:
        """A line that comes after this one for the first time; or None, and what a function of shapes gave.

        Args:
            key: what tells it from others that come after this one.
            what: as in the line.
            run: makes the call.
            call: as in the line.
            given: what the templates of its arguments leave open.
            count: the number of its positional arguments.
        """
        is_unit, played = type(what) is str, run
        if is_unit:
            run, played = self._runs_of(self.units[what], run)
        _, modes, templates, names, beside, numbers = key
        line = Line(what, played, call, is_unit)
        line.index, line.modes = self._at.index + 1, modes
        line.args = templates[:count]
        line.kwargs = tuple(zip(names, templates[count:], strict=True))
        line.beside = tuple_template(tuple, beside)
        with left(self):
            output = self.new(line, run, given)
        if output is not IS_LINE:
            return None, output
        if what in self.tree.by_numbers and not numbers:
            key = (*key[:-1], self._numbers_in(given))
        line.simple = line.result[0] is VALUE and not (
            line.changes or line.left or line.attributes or line.numbers or line.belongs
        )
        line.copies_buffers = not (is_unit or line.changes or name_of(what) in NORMS)
        text = f"{_key_text(key)}".encode()
        line.digest = hashlib.blake2b(self._at.digest + text, digest_size=16).digest()
        self._at.next[key] = line
        self.tree.lines += 1
        return line, None

    def new(self, line: Line, run: Run, given: list[Any]) -> Any:
        """Find out what a new line does; returns ``IS_LINE``, or what a function of shapes alone gave."""
        self._name(line)
        leaves = (t for of in line.templates() for t in leaves_of(of, inside=False))
        self._check_known([t[1] for t in leaves if t[0] is VALUE])
        alike: CallLook | None = None
        if line.unit and line.what not in self.tree.by_numbers:
            alike = CallLook.of(line, self.units[line.what], self.shown)
        answer = None if alike is None else self.tree.memo.get(alike)
        if alike is None or answer is None:
            return Trial(self, line, run, given, alike).find_out()
        answer.tell(line, alike, self.tree.blank)
        line.varies |= self.varies(line)
        line.writes = self.tree.names_of(alike.unit.parts, answer.writes)
        for position, count in answer.inner.items():
            self._add_inner(alike.unit.parts[position], count)
        return IS_LINE

    @contextmanager
    def trying(self, trial: Trial) -> Iterator[None]:
        """A context in which a new line runs: what is called in it is no line."""
        self._inside, self._trial = True, trial
        try:
            yield
        finally:
            self._inside, self._trial = False, None
            torch.clear_autocast_cache()

    def _name(self, line: Line) -> None:
        paths = self.tree.paths
        if line.unit:
            line.label, line.where = line.what, where(paths, line.what)
            return
        module, text = running(paths)
        line.where = place_of(paths, module, text)
        line.module = "" if module is None else paths[id(module)]
        name = name_of(line.what).strip("_")
        line.label = f"{name} after {self._latest}" if self._latest else name

    def _check_known(self, numbers: Collection[Number]) -> None:
        """Refuse a value on which something has acted that is no function of PyTorch."""
        for number in numbers:
            if isinstance(number, tuple) and number[0] >= 0:
                look = self.notes[number[0]].line.looks.get(number)
                shown = self.shown[number]
                learns = isinstance(shown, Tensor) and takes_gradient(shown)
                if look is not None and look[4] != learns:
                    raise self.refusal(
                        "acts on what units gave by something that is no function of PyTorch, such as a "
                        "function compiled by torch.jit, or the apply of a custom function that was given "
                        "another name; call it as Function.apply, or put it into a module that is placed as "
                        "a whole"
                    )

    def varies(self, line: Line) -> bool:
        """Tell whether numbers decide the shapes of what a line reads."""
        made = (number[0] for number in line.reads if isinstance(number, tuple))
        return any(index >= 0 and self.notes[index].line.varies for index in made)

    def note_makers(self) -> None:
        """Note which lines have made the memory of the placeholders."""
        for number, tensor in self.shown.items():
            if isinstance(number, tuple) and number[0] >= 0 and isinstance(tensor, Tensor):
                self.makers.setdefault(storage_key(tensor), number[0])

    def note_maker(self, tensor: Tensor, line: Line) -> bool:
        """Note that a line has made a tensor, unless its memory was there before."""
        key = storage_key(tensor)
        if key in self.makers:
            return False
        self.makers[key] = line.index
        self._memory.append(tensor.untyped_storage())  # no other gets its identity
        return True

    # ---- the end

    def _check_units(self) -> None:
        """Check that each unit is as it was called: so the stages will call it.

        Raises:
            PartitionError: it has other weights, parts or hooks.
        """
        for path, held in self._as_called:
            now = [*chain.from_iterable(map(_VALUES, self._tables[path]))]
            if len(now) != len(held) or not all(map(is_, now, held)):
                lines = (note.line.where for note in self.notes if note.line.what == path)
                raise PartitionError(
                    f"{next(lines, f'in {path}')}: the model calls {path} with other weights, parts or hooks "
                    "for a while, as functional_call does, which its stage would not know; put that into a "
                    "module that is placed as a whole"
                )

    def ended(self, output: Any) -> tuple[list[Note], Template, list[Any]]:
        """The lines, the template of the output, and what that leaves open."""
        given: list[Any] = []
        self._check_units()
        if hasattr(type(output), "__next__"):
            kind, model = type(output).__name__, type(self.tree.model).__name__
            raise PartitionError(
                f"the {model}'s forward{line_of(self.tree.model)} returns a {kind}, which would run after "
                "the stages have ended; return a tuple or list of what it gives"
            )
        return self.notes, self._reader.read(output, given), given

    # ---- what cannot be written

    def refusal(self, does: str) -> PartitionError:
        """The error that the model does something that cannot be written; it counts in any case."""
        error = PartitionError(
            f"{where(self.tree.paths)}: the model {does}; put that into a module that is placed as a whole"
            if ";" not in does
            else f"{where(self.tree.paths)}: the model {does}"
        )
        self.refused.append(error)
        return error

    def _explained(self, error: Exception) -> Exception:
        """Return what to raise for an error of the author's code."""
        by = "torch.compile" if is_of_dynamo(error) else ""
        if isinstance(error, RuntimeError) and not str(error).strip():
            # A scripted function says nothing on tensors without data.
            by = "torch.jit"
        if not by:
            return error
        after = f"after {self._latest}, " if self._latest else ""
        return PartitionError(
            f"{after}the {type(self.tree.model).__name__} runs code that {by} has compiled between its "
            "units, which cannot be cut; compile modules that are placed as a whole"
        )


def _tables_of(unit: nn.Module) -> list[dict[Any, Any]]:
    """The tables of the weights, parts and hooks of a unit."""
    tables: list[dict[Any, Any]] = []
    for part in unit.modules():
        if not isinstance(part, torch.jit.ScriptModule):
            hooks = part._forward_pre_hooks, part._forward_hooks
            tables += [part._parameters, part._modules, *hooks]
    return tables


def _run_forward(unit: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return unit.forward(*args, **kwargs)


def _is_dispatched(frame: Any) -> bool:
    """Tell if an operation is called from within the dispatcher: no function of PyTorch was seen before."""
    for _ in range(4):
        if frame is None:
            return False
        if "fake_tensor" in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False


def _autocast() -> tuple[Any, ...]:
    return tuple(
        [
            (kind, torch.get_autocast_dtype(kind))
            for kind in device_kinds()
            if torch.is_autocast_enabled(kind)
        ]
    )


def _key_text(key: Any) -> str:
    what, *rest = key
    name = what if isinstance(what, str) else name_of(what) if callable(what) else str(what)
    return f"{name}{''.join(map(text_of, rest))}"
