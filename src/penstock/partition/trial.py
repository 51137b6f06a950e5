"""What a new line does: it runs once on fake tensors, and what it reads, makes, changes and leaves is noted.

Where its code needs numbers, it goes on with ones: an operation that fails without data runs on ones, and a
call whose Python code fails runs on ones as a whole. The author's own tensors, such as masks, keep their
numbers.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from penstock._engine.values import map_tensors, storage_key, tensors_in
from penstock.errors import PartitionError
from penstock.partition.alike import Answer, CallLook, filled, without_data
from penstock.partition.functions import SET_HOOKS, is_ours, reads_numbers
from penstock.partition.interception import Run, alone_and_silent, reads_noted
from penstock.partition.names import COLLECTIVES, NEED_DATA, FakeTensor, without_modes
from penstock.partition.score import Line
from penstock.partition.snapshot import Snapshot, attributes_of, holds_fakes, put_back, replaced
from penstock.partition.templates import (
    AGAIN,
    BUILT,
    CONST,
    GIVEN,
    KNOWN,
    VALUE,
    Number,
    Reader,
    Template,
    contents,
    fill,
    is_leaf,
    known_in,
    leaves_of,
    look_of,
    put_contents,
    takes_gradient,
    written_outside,
)
from penstock.partition.tree import ScoreTree
from penstock.partition.work import Work
from penstock.stage import uncompiled

IS_LINE = object()
"""Says that a call is a line, whose placeholders answer it."""
_OPAQUE = (set, np.ndarray)
_PATIENCE = 64
"""The number of answers with ones after which a line gets zeros."""


class Writing(Protocol):
    """What a trial knows of the score that is being written."""

    tree: ScoreTree
    units: dict[str, nn.Module]
    numbers: dict[int, Any]
    shown: dict[Any, Tensor]
    makers: dict[int, int]
    work: Work
    inner_work: dict[int, float]
    at_end: ExitStack

    def trying(self, trial: Trial) -> AbstractContextManager[None]:
        """A context in which calls belong to a trial."""

    def varies(self, line: Line) -> bool:
        """Tell whether numbers decide the shapes of what a line reads."""

    def note_makers(self) -> None:
        """Note which lines have made the memory of the placeholders so far."""

    def note_maker(self, tensor: Tensor, line: Line) -> bool:
        """Note that a line has made a tensor; returns whether its memory is new."""

    def refusal(self, does: str) -> PartitionError:
        """The error for what cannot be written, which counts whatever the author's code makes of it."""


class Trial:
    """A new line, which runs now.

    Args:
        writer: writes the score in which the line stands.
        line: what is called, and with what.
        run: makes the call.
        given: what the templates of its arguments leave open.
        alike: how the call looks, if it is a unit's.

    Attributes:
        used: the identities of the tensors that its operations have read.
        foreign: the lines whose tensors it has read, though they were no arguments.
    """

    def __init__(
        self, writer: Writing, line: Line, run: Run, given: list[Any], alike: CallLook | None
    ) -> None:
        self.used, self.foreign = set[int](), set[int]()
        self._writer, self._tree, self._line = writer, writer.tree, line
        self._call, self._given, self._alike = run, given, alike
        self._unit = writer.units[line.what] if line.unit else nn.Module()
        templates = list(line.templates())
        self._lists = [template for of in templates for template in known_in(of)]
        leaves = [leaf for of in templates for leaf in leaves_of(of)]
        self._direct = {
            t[1] for of in templates for t in leaves_of(of, inside=False) if t[0] is VALUE
        }
        self._hidden = {leaf[1] for leaf in leaves if leaf[0] is VALUE} - self._direct
        self._fixed = [t[2] for t in leaves if t[0] is CONST and id(t[2]) in self._tree.fixed]
        self._borrowed = set[str]()
        places = [leaf[1] for leaf in leaves if leaf[0] is GIVEN]
        reals: dict[int, Tensor] = {
            place: given[place] for place in places if isinstance(given[place], Tensor)
        }
        self._fakes = {place: self._faked(tensor) for place, tensor in reals.items()}
        self._values = {number: self._fake_of(number) for number in self._direct | self._hidden}
        self._originals = {id(fake): reals[place] for place, fake in self._fakes.items()}
        tensors = [
            t for t in (*self._fakes.values(), *self._values.values()) if isinstance(t, Tensor)
        ]
        self._versions = {id(tensor): _version(tensor) for tensor in tensors}
        self._arguments = {*map(storage_key, tensors)}
        # What was seen while it ran.
        self._needs_data = self._is_guessed = self._by_numbers = self._stays = False
        self._on_numbers, self._tried = False, 0
        self._reads = set[Any]()
        self._made: list[weakref.ref[Tensor]] = []
        self._own = set[int]()
        self._writes: list[tuple[int, str]] = []
        self._set_in: dict[tuple[str, str], Any] = {}
        # What it has made: the number of each new tensor.
        self._new: dict[int, Number] = {}
        self._alive: list[Tensor] = []

    def _faked(self, tensor: Tensor) -> Tensor:
        if type(tensor) is Tensor and tensor.layout is torch.strided:
            return without_data(self._tree.mode, look_of(tensor))
        fake = self._tree.mode.from_tensor(tensor.detach())
        return fake.requires_grad_(tensor.requires_grad) if tensor.requires_grad else fake

    def _fake_of(self, number: Number) -> Tensor:
        tensor = self._writer.shown[number]
        if type(tensor) is FakeTensor or not isinstance(tensor, Tensor):
            return tensor
        if isinstance(number, str) or id(tensor) in self._tree.weights:
            return self._tree.twin(tensor)
        return self._faked(tensor)

    def find_out(self) -> Any:
        """Note in the line what it does; returns ``IS_LINE``, or what a function of shapes alone gave."""
        line, given, writer, values = self._line, self._given, self._writer, self._values
        tree = self._tree
        alike, shelf = self._alike, {id(values[number]): number for number in self._hidden}
        before = writer.work.counts
        if line.unit:
            writer.note_makers()
        layers = [] if alike is None else alike.unit.layers()
        with reads_noted(layers, self._reads.add):
            output = self._run()
        if self._by_numbers:
            self._tree.by_numbers.add(line.what)
        line.work, line.flops, line.nbytes = map(float.__sub__, writer.work.counts, before)
        if not line.unit and line.what not in SET_HOOKS and not is_ours(line.what):
            tensors = (*self._fakes.values(), *values.values())
            acts = self._needs_data or line.what in self._tree.by_numbers
            acts = acts or any(isinstance(t, Tensor) and self._has_changed(t) for t in tensors)
            if not acts and not tensors_in(output):
                self._tree.metadata.add(line.what)
                return output
        lent = {
            name for name in tree.lent(line.what) if id(tree.twin(tree.tensors[name])) in self.used
        }
        line.borrowed = frozenset((self._borrowed | lent) - self._direct)
        if line.borrowed:
            tree.borrowed[line.what] = tree.lent(line.what) | line.borrowed
        used = {n for key, n in shelf.items() if key in self.used}
        line.reads = frozenset(self._direct | used | line.borrowed)
        line.varies = self._needs_data or writer.varies(line)
        line.foreign |= self.foreign
        if not line.unit:
            line.decides = reads_numbers(line.what) or (self._needs_data and not self._by_given())
        self._note_changes()
        self._note_result(output)
        for template in self._lists:
            fill(template, writer.shown, given)
        if alike is not None and not self._is_guessed and not self._stays:
            self._alive.clear()
            del output
            self._set_in.clear()
            if all(made() is None for made in self._made):
                # Nothing else holds what the unit has made, as a list does that a hook fills.
                self._teach(alike)
        return IS_LINE

    def _has_changed(self, tensor: Tensor) -> bool:
        return bool(_version(tensor) != self._versions[id(tensor)])

    def _by_given(self) -> bool:
        """Tell whether the numbers that a function needs are given, as a mask of the arguments is."""
        of_values = [self._writer.shown[number] for number in self._line.reads]
        floats = all(t.dtype.is_floating_point for t in of_values if isinstance(t, Tensor))
        return floats and any(isinstance(one, Tensor) for one in self._given)

    def _teach(self, alike: CallLook) -> None:
        """Remember what a unit gave, if all it did was to give new tensors."""
        line = self._line
        does_more = (
            line.changes
            or line.left
            or line.attributes
            or line.numbers
            or line.foreign
            or line.generators
            or line.belongs
        )
        if does_more or not alike.unit.is_as_before():
            return
        counted, parts = self._writer.inner_work, alike.unit.parts
        inner = {at: counted[id(part)] for at, part in enumerate(parts) if id(part) in counted}
        alone = replace(line, next={}, plans={}, digests={})
        answer = Answer(alone, alike.tensors, inner, self._writes, self._needs_data)
        if answer.can_repeat():
            self._tree.memo.put(alike, self._reads, answer)

    # ---- the call

    def _run(self) -> Any:
        """Make the call on fake tensors; or on made-up numbers, if it needs some."""
        line, given, writer = self._line, self._given, self._writer
        mutable = [(one, copy.deepcopy(one)) for one in given if isinstance(one, _OPAQUE)]
        if any(hasattr(type(one), "__next__") for one in given):
            raise writer.refusal(
                f"gives {line.name} an iterator, which every stage would take from; give a list"
            )
        written = next((names for one in given if (names := written_outside(one))), ())
        if written:
            raise writer.refusal(
                f"gives {line.name} a function that sets {written[0]!r} in the code around it, which runs "
                "before the stages do; return what it sets from the module, or keep it in an attribute of one"
            )
        inside = [self._fakes.get(place, one) for place, one in enumerate(given)]
        args, kwargs = self._arguments_of(self._values, inside)
        lists = [(given[t[1]], contents(given[t[1]])) for t in self._lists]
        with writer.trying(self), self._left_alone() if line.unit else contextlib.nullcontext():
            try:
                with self._tree.mode, _Operations(self._operation):
                    output = self._call(*args, **kwargs)
            except PartitionError:
                raise
            except Exception as error:
                for thing, before in lists:
                    put_contents(thing, *before)
                return self._on_ones(error)
            for one, was in mutable:
                if _differ(one, was):
                    raise writer.refusal(
                        f"gives {line.name} a {type(one).__name__} that it changes, which other stages "
                        "would not see; return what it makes of it, or use a list"
                    )
            return output

    def _arguments_of(
        self, values: Mapping[Number, Any], given: Sequence[Any]
    ) -> tuple[list[Any], dict[str, Any]]:
        line = self._line
        args = [fill(of, values, given) for of in line.args]
        kwargs = {name: fill(of, values, given) for name, of in line.kwargs}
        fill(line.beside, values, given)
        return args, kwargs

    @contextmanager
    def _left_alone(self) -> Iterator[None]:
        """Fake tensors in place of the unit's weights; whatever its code keeps is put back."""
        line, parts = self._line, list(self._unit.modules())
        with ExitStack() as stack:
            stack.enter_context(alone_and_silent())
            kept = Snapshot(parts, self._fixed, code=True, data=False)
            # Dynamo cannot compile on fake tensors, and would not try again on real ones.
            stack.enter_context(uncompiled())
            stack.enter_context(replaced(self._tree.stand_ins(line.what, self._unit)))
            attributes = [(part, dict(vars(part))) for part in parts]
            weights = [
                (at, name, tensor, _version(tensor))
                for at, part in enumerate(parts)
                if not isinstance(part, torch.jit.ScriptModule)
                for table in (part._parameters, part._buffers, vars(part))
                for name, tensor in table.items()
                if isinstance(tensor, FakeTensor)
            ]
            fakes = [tensor for _, _, tensor, _ in weights]
            self._own = {storage_key(t) for t in fakes if not getattr(t, "_is_param", False)}
            numbers = self._writer.numbers
            self._arguments |= {storage_key(one) for one in fakes if id(one) not in numbers}
            lent = [self._tree.twin(self._tree.tensors[n]) for n in self._tree.lent(line.what)]
            self._arguments |= {*map(storage_key, lent)}
            for hooks in (of for p in parts for of in (p._forward_pre_hooks, p._forward_hooks)):
                for key in [key for key, hook in hooks.items() if _is_distributed(hook)]:
                    del hooks[key]  # it gathers weights
            try:
                yield
            finally:
                self._writes = [(at, n) for at, n, t, was in weights if _version(t) != was]
                if sys.exc_info()[0] is None:
                    self._note_attributes(attributes)
                states = {id(t) for part in parts for t in (vars(part), *vars(part).values())}
                states -= {id(value) for part in parts for value in attributes_of(part).values()}

                def stays(thing: Any, before: Any) -> bool:
                    """Tell whether what a unit left there holds a tensor: so it is seen who reads it."""
                    is_state = id(thing) in states or isinstance(thing, nn.Module)
                    if is_state or not holds_fakes(thing):
                        return False
                    self._stays = True
                    self._writer.at_end.callback(put_back, thing, before)
                    return True

                self._line.moves = kept.restore(stays)

    def _note_attributes(self, before: Sequence[tuple[nn.Module, dict[str, Any]]]) -> None:
        """Note the attributes that the unit has set in its modules, which had others before."""
        names = {id(part): path for path, part in self._unit.named_modules()}
        for part, old in before:
            for name, value in vars(part).items():
                if old.get(name) is value:
                    continue
                if holds_fakes(value):
                    self._set_in[names[id(part)], name] = value
                    self._own |= {*map(storage_key, tensors_in(value))}
                elif isinstance(value, int | float) and name != "training":
                    self._line.numbers.append((names[id(part)], name, value))

    # ---- on numbers

    def _on_ones(self, reason: Exception) -> Any:
        """Make a call that failed without data on ones, and on the numbers of the model's arguments."""
        line, given = self._line, self._given
        self._on_numbers = True
        failure: Exception | None = None
        for number in (1, 0):
            back: dict[int, tuple[Tensor, Tensor]] = {}

            def of_ones(fake: Any, number: int = number, back: Any = back) -> Any:
                if not isinstance(fake, Tensor):
                    return fake
                twin = filled(fake, number)
                back[id(twin)] = fake, twin
                return twin.requires_grad_(fake.requires_grad)

            ones = {key: of_ones(fake) for key, fake in self._values.items()}
            reals: list[Any] = []
            for place, x in enumerate(given):
                real = x
                if isinstance(x, Tensor):
                    real = x.detach().clone()
                    if number == 0 and x.dtype is torch.bool:
                        real.zero_()  # a mask of ones may leave nothing
                    fake = self._fakes.get(place)
                    back[id(real)] = self._faked(x) if fake is None else fake, real
                reals.append(real)
            try:
                with replaced(_of_ones(self._unit)), torch.random.fork_rng(devices=[]):
                    args, kwargs = self._arguments_of(ones, reals)
                    with _Operations(self._operation, on_numbers=True):
                        output = self._call(*args, **kwargs)
            except Exception as error:
                failure = failure or error
                continue

            def faked(tensor: Tensor, back: Any = back) -> Tensor:
                if id(tensor) in back:
                    fake: Tensor = back[id(tensor)][0]
                    return fake
                look = (*look_of(tensor)[:3], self._tree.device, tensor.requires_grad)
                return self._tree.blank(look)

            self._is_guessed = True
            self._by_numbers |= any(isinstance(x, Tensor) for x in given)
            for template in self._lists:
                keys, inner = contents(given[template[1]])
                put_contents(given[template[1]], keys, [map_tensors(x, faked) for x in inner])
            return map_tensors(output, faked)
        assert failure is not None
        if not (self._needs_data or isinstance(reason, NEED_DATA)):
            raise failure
        raise PartitionError(
            f"{line.where}: {line.name} runs neither without data, as stages have tensors of other stages "
            f"({str(reason).splitlines()[0]}), nor on ones ({failure}); put it into a module that is placed "
            "as a whole by naming that in stages=, or, if it needs certain numbers in its arguments, cut "
            "the model by a batch that has them, pipe.cut(...)"
        ) from failure

    # ---- its operations

    def _operation(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation of the call, and note what it reads, makes and costs."""
        tensors = tensors_in((args, kwargs))
        if self._line.unit and any([id(tensor) in self._tree.weights for tensor in tensors]):
            args, kwargs = map_tensors((args, kwargs), self._borrow)
            tensors = tensors_in((args, kwargs))
        self._note_reads(tensors)
        generators = [one for one in (*args, *kwargs.values()) if isinstance(one, torch.Generator)]
        self._line.generators += generators
        if self._on_numbers and func.namespace in COLLECTIVES:
            return self._unsent(func, args, kwargs)
        try:
            output = func(*args, **kwargs)
        except Exception as error:
            if self._on_numbers:
                raise
            # Any operation that fails without data is tried on ones; if that fails too, this error counts.
            self._needs_data |= isinstance(error, NEED_DATA)
            output = self._operation_on_ones(func, args, kwargs, error)
        if self._line.unit and not self._on_numbers:
            for tensor in tensors_in(output):
                is_new = storage_key(tensor) not in self._arguments
                if is_new and self._writer.note_maker(tensor, self._line):
                    self._made.append(weakref.ref(tensor))
        self._writer.work.add(func, args, kwargs, output)
        return output

    def _borrow(self, tensor: Tensor) -> Tensor:
        """What stands for a weight of the model that the unit does not hold, for which it has a fake."""
        tree = self._tree
        name = tree.weights.get(id(tensor))
        if name is None:
            return tensor
        self._borrowed.add(name)
        twin = tree.twin(tensor)
        self._arguments.add(storage_key(twin))
        return filled(twin, 1) if self._on_numbers else twin

    def _note_reads(self, tensors: Sequence[Tensor]) -> None:
        makers, mine = self._writer.makers, self._line.index
        for tensor in tensors:
            if not isinstance(tensor, FakeTensor):
                continue
            self.used.add(id(tensor))
            memory = storage_key(tensor)
            maker = makers.get(memory, mine)
            if maker != mine and memory not in self._arguments:
                self.foreign.add(maker)

    def _unsent(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Answer a collective with ones: other processes may not be at this place, and would not join."""
        reals: dict[int, tuple[Tensor, Tensor]] = {}

        def fake_of(tensor: Tensor) -> Tensor:
            fake = self._tree.mode.from_tensor(tensor.detach())
            reals[id(fake)] = fake, tensor
            return fake

        with without_modes(), torch.no_grad():
            # What a collective of torch.distributed writes into is its first argument.
            for output in tensors_in(args[:1]) if func.namespace == "c10d" else ():
                output.fill_(1)
            fakes, named = map_tensors((args, kwargs), fake_of)
            with self._tree.mode:
                answer = func(*fakes, **named)
            return map_tensors(
                answer, lambda t: reals[id(t)][1] if id(t) in reals else filled(t, 1)
            )

    def _operation_on_ones(self, func: Any, args: Any, kwargs: Any, reason: Exception) -> Any:
        self._tried += 1
        # Code that draws until a condition holds may need zeros to get out.
        for number in (1, 0) if self._tried < _PATIENCE else (0, 1):
            with contextlib.suppress(Exception), without_modes():
                put = functools.partial(self._with_numbers, number)
                filled_in, named = map_tensors((args, kwargs), put)
                output = func(*filled_in, **named)
                return map_tensors(output, lambda t: self._tree.mode.from_tensor(t.detach()))
        raise reason

    def _with_numbers(self, number: int, tensor: Tensor) -> Tensor:
        """A tensor of this number; one that every process has, such as a mask of the arguments, as it is."""
        original = self._originals.get(id(tensor))
        if original is None:
            return filled(tensor, number)
        self._is_guessed = self._by_numbers = True
        return original.detach().clone()

    # ---- what it has done

    def _note_changes(self) -> None:
        line, given = self._line, self._given
        rows: list[tuple[Tensor, Template]] = [(t, (VALUE, n)) for n, t in self._values.items()]
        rows += [(t, (GIVEN, place)) for place, t in self._fakes.items()]
        for tensor, target in rows:
            if not isinstance(tensor, Tensor) or not self._has_changed(tensor):
                continue
            buffer = self._tree.buffer_between(given[target[1]]) if target[0] is GIVEN else ""
            if buffer:
                raise self._writer.refusal(
                    f"changes the buffer {buffer!r} outside of its units, by what units gave; move it into a "
                    "module that is in one stage, with the code that changes it"
                )
            number = (line.index, 1000 + len(line.changes))
            line.changes.append((target, number))
            line.looks[number] = look_of(tensor)
            if target[0] is GIVEN:
                line.shown[number], line.marks[id(tensor)] = tensor, number

    def _note_result(self, output: Any) -> None:
        """Note what the line gives, what it has set, and what it leaves in the author's lists."""
        line, tree = self._line, self._tree
        # A buffer that a unit gives is a value: the next microbatch may change it.
        self._old: dict[int, Number] = {
            id(tree.twin(weight)): tree.weights[id(weight)]
            for weight in self._unit.parameters()
            if id(weight) in tree.weights
        }
        self._old |= {id(tensor): number for number, tensor in self._values.items()}
        self._fake_places = {id(fake): place for place, fake in self._fakes.items()}
        self._changes = dict(line.changes)
        reader = Reader(
            lambda _: None, self._tensor, tree.fixed, as_call=False, opaque=self._object
        )

        def read(value: Any) -> Template:
            return reader.read(value, list(self._given))

        if line.what in SET_HOOKS and output is not None:
            line.result = (CONST, OnlyThere, OnlyThere(line))
        else:
            line.result = read(output)
        if line.unit:
            line.writes = tree.names_of(list(self._unit.modules()), self._writes)
            line.attributes = [(path, name, read(x)) for (path, name), x in self._set_in.items()]
        for before in self._lists:
            after = read(self._given[before[1]])
            if not _alike(after, before, self._given):
                line.left.append((KNOWN, before[1], *after[2:]))

    def _object(self, value: Any) -> Template:
        """A value that cannot be looked into; it may be used where it was made."""
        line = self._line
        for place, one in enumerate(self._given):
            if one is value:
                return (GIVEN, place, type(value))
        number = line.marks.get(id(value))
        if number is None:
            number = line.marks[id(value)] = (line.index, len(line.shown))
            line.shown[number] = value
            kind: Any = type(value)  # where a tensor has its type
            line.looks[number] = (torch.Size(()), (), kind, self._tree.device, False)
        return (VALUE, number)

    def _tensor(self, tensor: Tensor, _: list[Any]) -> Template:
        line = self._line
        if id(tensor) in self._fake_places:
            place = self._fake_places[id(tensor)]
            number = self._changes.get((GIVEN, place))
            return (GIVEN, place, look_of(tensor)) if number is None else (VALUE, number)
        for place, one in enumerate(self._given):
            if one is tensor:
                return (GIVEN, place, look_of(tensor))
        if id(tensor) in self._old:
            old = self._old[id(tensor)]
            return (VALUE, self._changes.get((VALUE, old), old))
        if type(tensor) is not FakeTensor:
            known = self._writer.numbers.get(id(tensor))
            if known is not None:
                return (VALUE, known)
            tensor = self._faked(tensor)
        number = self._new.get(id(tensor))
        if number is None:
            number = self._new[id(tensor)] = (line.index, len(line.shown))
            look = line.looks[number] = (*look_of(tensor)[:4], takes_gradient(tensor))
            if storage_key(tensor) in self._own:
                line.belongs.add(number)
            if line.unit and tensor.layout is torch.strided:
                # Another one than the unit may have left in a list: it is seen who reads that.
                self._alive.append(tensor)
                tensor = self._tree.blank(look)
            line.shown[number], line.marks[id(tensor)] = tensor, number
        return (VALUE, number)


class OnlyThere:
    """Stands for what only the stage of a tensor has, such as the handle of its hook.

    Args:
        line: the line that gives it.
    """

    def __init__(self, line: Line) -> None:
        vars(self)["line"] = line

    def __getattr__(self, name: str) -> Any:
        line = vars(self)["line"]
        raise PartitionError(
            f"{line.where}: the model uses {name!r} of what {line.name} gives, which only the stage that has "
            "the tensor has; put that code into a module that is placed as a whole"
        )


class _Operations(TorchDispatchMode):
    """Lets a function run the operations of a call."""

    def __init__(self, run: Run, *, on_numbers: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._run = run
        # FlexAttention is one, which does not run without data.
        self.supports_higher_order_operators = on_numbers

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._run(func, args, kwargs or {})


def _alike(after: Template, before: Template, given: Sequence[Any]) -> bool:
    """Tell whether a value, such as a list, holds what it held before."""
    # What functions enclose was read from fakes that stood in it; no layer changes a function.
    if not (is_leaf(after) or is_leaf(before) or after[0] is BUILT):
        same = after[1:4] == before[1:4] and len(after[4]) == len(before[4])
        return same and all(
            _alike(one, other, given) for one, other in zip(after[4], before[4], strict=True)
        )
    if after[0] is CONST and before[0] is GIVEN:
        was = given[before[1]]
        return after[2] is was or (type(was) is float and after[2] == was)
    if after[0] is KNOWN and before[0] is AGAIN:
        return bool(after[1] == before[1])
    if after[:2] != before[:2]:
        return False
    return after[0] is not CONST or after[2] is before[2] or bool(after[2] == before[2])


def _version(tensor: Tensor) -> Any:
    return tensor._version, tensor.requires_grad, tensor.shape


def _differ(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray):
        return not np.array_equal(one, other)
    return bool(one != other)


def _is_distributed(hook: Any) -> bool:
    function = hook.func if isinstance(hook, functools.partial) else hook
    return str(getattr(function, "__module__", "")).startswith("torch.distributed")


def _of_ones(module: nn.Module) -> Iterator[tuple[Any, str, Tensor]]:
    """Ones in place of a module's fake parameters and buffers."""
    for part in module.modules():
        if isinstance(part, torch.jit.ScriptModule):
            continue
        for table in (part._parameters, part._buffers):
            fakes = [(n, t) for n, t in table.items() if isinstance(t, FakeTensor)]
            for name, tensor in fakes:
                ones = filled(tensor, 1)
                learns = tensor.requires_grad
                is_weight = getattr(tensor, "_is_param", False)
                yield table, name, nn.Parameter(ones, learns) if is_weight else ones
