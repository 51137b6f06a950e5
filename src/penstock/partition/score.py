"""The score of a microbatch: the author's forward runs once, to its end, and is written down.

* A function of the model's arguments alone runs for real, with real numbers. So masks, ``tolist()``,
  ``if mask.all()`` and counters of the author's just work, as often as in a plain loop.
* All that comes from weights is a *placeholder*, a fake tensor. A call of a *unit* (a module that is placed
  as a whole), or of a function on a placeholder, is a *line*: what is called, a template of its arguments,
  the modes in which it is called. It is answered with more placeholders.

Lines are kept in a tree: from each line lead those that ever came after it. A microbatch whose lines are
known walks along a path and gets the placeholders that lie there; this takes microseconds a line. Only a
new line runs on fake tensors. The end of the path is the *call signature* of the microbatch; see
:mod:`penstock.partition.planning` for what the stages make of it.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import logging
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from penstock._engine.devices import kinds as device_kinds
from penstock._engine.rng import Draws, generators_kept
from penstock._engine.values import map_tensors, tensors_in
from penstock.errors import PartitionError, UsageError
from penstock.partition.alike import Looks, Memo, filled, without_data
from penstock.partition.base import home_of
from penstock.partition.doors import (
    BETWEEN,
    Door,
    Run,
    alone_and_silent,
    hooks_without_data,
    is_checkpoint,
    opened,
    others_seen,
    reads_noted,
    uncheckpointed,
)
from penstock.partition.functions import (
    AS_SHAPES,
    METADATA,
    SET_HOOKS,
    TAKE_GRADIENTS,
    is_ours,
    may_draw,
    name_of,
    reads_numbers,
)
from penstock.partition.kept import Kept, attributes_of, holds_fakes, put_back, replaced
from penstock.partition.lines import is_called_by_library, line_of, place_of, running, where
from penstock.partition.names import (
    FAKE_LOGGER,
    NEED_DATA,
    FakeTensor,
    FakeTensorMode,
    Operation,
    forget_operations,
    is_of_dynamo,
    is_transformed,
    is_wrapped,
    left,
    unwrapped,
    without_functions,
    without_modes,
)
from penstock.partition.templates import (
    AGAIN,
    BATCH,
    CONST,
    GIVEN,
    KNOWN,
    NEW,
    TUPLE,
    VALUE,
    Look,
    Number,
    Reader,
    Template,
    contents,
    fill,
    known_in,
    leaves_of,
    look_of,
    put_contents,
    takes_gradient,
    text_of,
    with_leaves,
)
from penstock.partition.work import Work
from penstock.stage import uncompiled

_MOST_LINES = 50_000
"""How many lines a tree has at most; it then begins anew."""
_MOST_CACHED = 20_000
"""The operations without data that torch may remember."""
_HELD_BY_LINE = 3
"""The references to a placeholder that nothing but its line has, and what counts them."""
_OPAQUE = (set, np.ndarray)
_PATIENCE = 64
"""The number of answers with ones after which a line gets zeros."""
Modes: TypeAlias = tuple[Any, ...]


@dataclass(eq=False, slots=True)
class Line:
    """What happens at one place of a score, in all microbatches that came here the same way.

    Attributes:
        what: the unit's path, the function, or the class of a custom function.
        unit: whether it is a call of a unit.
        direct: whether the author's code calls the unit's ``forward`` itself.
        run: what is called; None for a unit.
        call: for a unit, the number of its calls before.
        index: its place in the path.
        where: the module and line of the author's code.
        label: its name among the values.
        module: the path of the module that called it, of a line between units.
        modes: whether gradients are enabled, how many of the author's checkpoints are around, and autocast.
        args: the templates of its arguments.
        kwargs: those of its keyword arguments, by name.
        beside: that of the containers which the author's code keeps in context variables, and of the
            attributes that it has set in the unit since the unit's last call.
        reads: the values it needs.
        result: the template of what it gave.
        left: those of lists and objects among its arguments that it has changed.
        attributes: those of attributes that it has set in modules of the unit, with their path and name.
        belongs: the values that lie in memory of the unit, which may write into it later.
        writes: the weights and buffers of the unit into which it has written, by name.
        numbers: the attributes that it has set to numbers, which only its stage has, with what they were.
        changes: the arguments that it has changed in place, each with the new value.
        marks: the values that it has made, by the identity of their placeholders.
        shown: the placeholders.
        first: the first placeholders of those that were replaced, whose memory others share.
        looks: how the values look.
        next: the lines that came after it.
        digests: of the paths that end here, by the templates of their outputs.
        plans: of these paths, by their digests.
        digest: a hash of the path up to here, equal in all processes.
        work: its operations, see :class:`Work`.
        flops: its floating-point operations in products, convolutions and attention.
        nbytes: the bytes that it made.
        varies: whether numbers decide the shapes of what it gives.
        decides: whether it reads numbers, on which the author's code may then depend.
        foreign: the lines of which it has read what they left outside of its arguments.
        generators: the model's generators from which it draws.
        checked: whether a stage has compared what it made with the placeholders.
        simple: whether it gives one value, and changes and leaves nothing else.
    """

    what: Any
    run: Any = None
    call: int = 0
    unit: bool = False
    direct: bool = False
    index: int = -1
    where: str = ""
    label: str = ""
    module: str = ""
    modes: Modes = ()
    args: tuple[Template, ...] = ()
    kwargs: tuple[tuple[str, Template], ...] = ()
    beside: Template = (TUPLE, tuple, ())
    reads: frozenset[Number] = frozenset()
    result: Template = (CONST, type(None), None)
    left: list[Template] = field(default_factory=list)
    attributes: list[tuple[str, str, Template]] = field(default_factory=list)
    belongs: set[Number] = field(default_factory=set)
    writes: list[str] = field(default_factory=list)
    numbers: list[tuple[str, str, Any]] = field(default_factory=list)
    changes: list[tuple[Template, Number]] = field(default_factory=list)
    marks: dict[int, Number] = field(default_factory=dict)
    shown: dict[Number, Tensor] = field(default_factory=dict)
    first: dict[Number, Tensor] = field(default_factory=dict)
    looks: dict[Number, Look] = field(default_factory=dict)
    next: dict[Any, Line] = field(default_factory=dict)
    digests: dict[Template, str] = field(default_factory=dict)
    plans: dict[str, Any] = field(default_factory=dict)
    digest: bytes = b""
    work: float = 0.0
    flops: float = 0.0
    nbytes: float = 0.0
    varies: bool = False
    decides: bool = False
    foreign: set[int] = field(default_factory=set)
    generators: list[torch.Generator] = field(default_factory=list)
    checked: bool = False
    simple: bool = False

    @property
    def name(self) -> str:
        """Its name in messages."""
        return self.what if self.unit else name_of(self.what)

    def templates(self) -> Iterator[Template]:
        """The templates of all that it is called with."""
        yield from self.args
        for _, template in self.kwargs:
            yield template
        yield self.beside


@dataclass(eq=False, slots=True)
class Note:
    """A line of one microbatch.

    Attributes:
        line: the line.
        given: what the template of its call leaves open.
        draw: the number of the draw, or of the unit's call; -1 if it draws nothing.
        context: the context variables in which the author's code keeps containers, with these.
        sets: the attributes that the author's code has set in the unit: the module and the name.
    """

    line: Line
    given: list[Any]
    draw: int
    context: Sequence[tuple[ContextVar[Any], Any]] = ()
    sets: Sequence[tuple[nn.Module, str]] = ()


@dataclass(eq=False)
class Score:
    """What the author's forward does in one microbatch.

    Attributes:
        notes: the lines.
        output: the template of the model's output.
        given: what that leaves open.
        root: the root of the tree.
        batch: the tensors of the batch that learn.
        draws: seeds the random numbers of the microbatch.
        inner_work: the operations of modules inside units that were counted, by their identity.
        call: the arguments of the model, if its code reads numbers that units make.
    """

    notes: list[Note]
    output: Template
    given: list[Any]
    root: Line
    batch: list[Tensor]
    draws: Draws | None = None
    inner_work: Mapping[int, float] = field(default_factory=dict)
    call: tuple[Any, Any] | None = None

    @property
    def end(self) -> Line:
        """The last line, which the tree has once for all microbatches that went this way."""
        return self.notes[-1].line if self.notes else self.root

    @property
    def digest(self) -> str:
        """A hash of the path and the output, equal in all processes."""
        end = self.end
        digest = end.digests.get(self.output)
        if digest is None:
            text = text_of(self.output).encode()
            digest = hashlib.blake2b(end.digest + text, digest_size=16).hexdigest()
            end.digests[self.output] = digest
        return digest

    def described(self) -> list[str]:
        """The lines in words, to find the first that differs from another process's."""
        return [f"{note.line.label} at {note.line.where}" for note in self.notes]


class ScoreTree:
    """The lines of an author's forward.

    Args:
        model: the whole model.
        forward: its forward.
        units: the paths of the modules that are placed as a whole.
        memo: what units gave, so that those that are alike need not run.
    """

    def __init__(
        self, model: nn.Module, forward: Callable[..., Any], units: Sequence[str], memo: Memo
    ) -> None:
        self.model, self.forward, self.memo = model, forward, memo
        self.units = {path: model.get_submodule(path) for path in units}
        self.doors = [Door(module, path) for path, module in self.units.items()]
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.metadata: set[Any] = set()
        self.by_numbers: set[Any] = set()
        self.roots: dict[Any, Line] = {}
        self.lines = 0
        self.writer: Writer | None = None
        self._doors_open: list[Door] = []
        self._open: dict[str, nn.Module] = {}
        self.modules = list(model.modules())
        self.paths = {id(module): path for path, module in model.named_modules()}
        inside = {id(p): path for path, unit in self.units.items() for p in unit.modules()}
        self.unit_of = inside
        self.outside = [
            (path, module) for path, module in model.named_modules() if id(module) not in inside
        ]
        units_of = set(map(id, self.units.values()))
        self._around, self._between = list[tuple[str, nn.Module]](), list[tuple[str, nn.Module]]()
        for path, module in self.outside:
            is_around = any(id(part) in units_of for part in module.modules())
            (self._around if is_around else self._between).append((path, module))
        self._tables = [
            (table, name, f"{path}.{name}" if path else name)
            for path, module in model.named_modules(remove_duplicate=False)
            if not isinstance(module, torch.jit.ScriptModule)
            for table in (
                # Tensors in attributes of units are theirs, like buffers.
                [module._parameters, module._buffers, vars(module)]
                if id(module) in inside
                else [module._parameters]
            )
            for name, tensor in table.items()
            if isinstance(tensor, nn.Parameter)
            or type(tensor) is Tensor
            or (table is not vars(module) and tensor is not None)
        ]
        self._written = [
            module for module in self.modules if not type(module).__module__.startswith("torch.")
        ]
        self._settings: tuple[Any, ...] = ()
        self._hashed: tuple[tuple[Any, ...], str] = (), ""
        self._weights: list[Any] | None = None
        self.weights: dict[int, str] = {}
        self.tensors: dict[str, Tensor] = {}
        self._twins: dict[int, tuple[Tensor, Tensor]] = {}
        self.fixed: dict[int, Any] = {}
        self.refresh()
        self.device = home_of(model)

    def refresh(self) -> None:
        """Learn which tensors the model has now: they may have been moved, sharded or freed."""
        now = [table.get(name) for table, name, _ in self._tables]
        if self._weights is not None:
            for one, known in zip(now, self._weights, strict=True):
                if one is not known:
                    break
            else:
                return
        self._weights = now
        self.weights, self.tensors = {}, {}
        for tensor, (_, _, name) in zip(now, self._tables, strict=True):
            if isinstance(tensor, Tensor):
                self.tensors[name] = tensor
                self.weights.setdefault(id(tensor), name)
        self.parameters = list(self.model.parameters())
        self.buffers = {
            id(buffer): f"{path}.{name}" if path else name
            for path, module in self.outside
            for name, buffer in module._buffers.items()
            if buffer is not None
        }
        # Objects that modules hold are the same in all calls.
        self.fixed = {
            id(value): value
            for module in self.modules
            for value in vars(module).values()
            if not isinstance(value, list | dict | Tensor | int | str | None)
        }

    def start(self, batch: Sequence[Tensor] = ()) -> Line:
        """The root of the tree for the settings of the model's modules, and which weights learn.

        Args:
            batch: the tensors of the batch that learn.
        """
        state = (tuple(map(look_of, batch)), *(self._settings or self._settings_now()))
        root = self.roots.get(state)
        if root is None:
            if self.lines > _MOST_LINES:
                self.roots.clear()
                self.lines = 0
            text = text_of(state[0])  # each rank's settings are its own
            digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
            root = self.roots[state] = Line(None, digest=digest)
        return root

    def _settings_now(self) -> tuple[Any, ...]:
        """The modes and hooks of modules, which weights learn, and the author's flags and words."""
        hooks, flags = list[int](), list[Any]()
        for module in self.modules:
            hooks.append(len(module._forward_hooks) + len(module._forward_pre_hooks))
        for module in self._written:
            for value in vars(module).values():
                if value is True or value is False or type(value) is str:
                    flags.append(value)
        return (
            tuple([module.training for module in self.modules]),
            tuple([parameter.requires_grad for parameter in self.parameters]),
            tuple(hooks),
            tuple(flags),
            torch.get_default_dtype(),
        )

    def settings(self) -> str:
        """A hash of the settings on which scores depend."""
        now = self._settings_now()
        if now != self._hashed[0]:
            self._hashed = now, hashlib.blake2b(repr(now).encode(), digest_size=16).hexdigest()
        return self._hashed[1]

    def hooked(self) -> list[Door]:
        """Doors of the modules between units that have hooks: each call is in one stage, like a unit's.

        Raises:
            PartitionError: a module that is in several stages has backward hooks: no stage has both its ends.
        """
        for path, module in self._around:
            if module._backward_hooks or module._backward_pre_hooks:
                raise PartitionError(
                    f"{path or 'the model'} has backward hooks, and its parts are placed by themselves: no "
                    "stage has its gradients on both ends. Set the hooks on its parts, or place it as a "
                    "whole by naming it in stages="
                )
        doors: list[Door] = []
        for path, module in self._between:
            within = doors and path.startswith(f"{doors[-1].path}.")
            if not within and any(map(_has_hooks, module.modules())):
                doors.append(Door(module, path))
        return doors

    def forget(self) -> None:
        """Forget all lines: a unit has done something else than its line says."""
        self.memo.distrust()
        self.roots.clear()
        self.lines = 0

    # ---- fake tensors

    def twin(self, tensor: Tensor) -> Tensor:
        """The fake tensor of a weight."""
        known = self._twins.get(id(tensor))
        if known is not None and known[0] is tensor:
            twin = known[1]
            if twin.requires_grad is tensor.requires_grad and twin.shape == tensor.shape:
                return twin
        learns = tensor.requires_grad and tensor.is_leaf
        look = (tensor.shape, tensor.stride(), tensor.dtype, self.device, learns)
        twin = without_data(self.mode, look)
        twin._is_param = isinstance(tensor, nn.Parameter)
        self._twins[id(tensor)] = tensor, twin
        return twin

    def blank(self, look: Look) -> Tensor:
        """A new placeholder."""
        tensor = without_data(self.mode, look)
        # Code between units may change it in place, which a leaf does not allow.
        if not tensor.requires_grad:
            return tensor
        with torch.enable_grad():
            return tensor.clone()

    def stand_ins(self, module: nn.Module) -> Iterator[tuple[Any, str, Tensor]]:
        """Fake tensors in place of a module's parameters and buffers."""
        for part in module.modules():
            if isinstance(part, torch.jit.ScriptModule):
                continue
            for table in (part._parameters, part._buffers):
                for name, tensor in [(n, t) for n, t in table.items() if t is not None]:
                    yield table, name, self.twin(tensor)
            state = vars(part)
            for name in [n for n, x in state.items() if type(x) is Tensor and not x.is_sparse]:
                yield state, name, self.mode.from_tensor(state[name].detach())

    # ---- writing

    def write(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        draws: Draws | None = None,
        doors: Sequence[Door] = (),
        inner: Sequence[Door] = (),
    ) -> Score:
        """Run the author's forward on placeholders, and write down what happens.

        Args:
            args: the model's arguments, with their numbers.
            kwargs: its keyword arguments.
            draws: seeds what functions between units draw; None leaves the generators alone.
            doors: the doors of other modules to place as a whole, such as those with hooks.
            inner: the doors of modules inside units, whose operations are counted too.

        Raises:
            PartitionError: the model cannot be cut this way; the message names the module and the line.
        """
        tensors = tensors_in((tuple(args), dict(kwargs)))
        if any(tensor.is_inference() for tensor in tensors):
            args, kwargs = map_tensors((tuple(args), dict(kwargs)), Tensor.clone)
        batch = [tensor for tensor in tensors if tensor.requires_grad]
        writer = Writer(self, draws, batch)
        output = self.run(writer, args, kwargs, doors, inner)
        call = (args, kwargs) if writer.decides else None
        score = Score(*writer.ended(output), writer.root, batch, draws, writer.inner_work, call)
        writer.let_go()
        del writer, output
        for note in score.notes:
            for shown in note.line.shown.values():
                if sys.getrefcount(shown) > _HELD_BY_LINE:
                    del shown
                    self._replace_leaked(note.line)
                    break
        return score

    def _replace_leaked(self, line: Line) -> None:
        """Give a line other placeholders in place of those that the author's code has kept somewhere.

        In a later microbatch, or outside of the model, they stand for nothing, and using them is refused.
        """
        for number in list(line.shown):
            tensor = line.shown[number]
            if (
                type(tensor) is FakeTensor
                and tensor.layout is torch.strided
                and sys.getrefcount(tensor) > _HELD_BY_LINE
            ):
                line.first.setdefault(number, tensor)  # its memory says what shares it
                blank = self.blank((*look_of(tensor)[:4], line.looks[number][4]))
                line.marks = {k: n for k, n in line.marks.items() if n != number}
                line.marks[id(blank)] = number
                line.shown[number] = blank

    def rehearse(
        self,
        call: tuple[Sequence[Any], Mapping[str, Any]],
        doors: Sequence[Door] = (),
        inner: Sequence[Door] = (),
    ) -> Score:
        """Write a score of a call that does not count; whatever the author's code changes is put back.

        Args:
            call: the model's arguments; ones stand for tensors without data.
            doors: as for :meth:`write`.
            inner: as for :meth:`write`.
        """
        self.refresh()
        args, kwargs = map_tensors((tuple(call[0]), dict(call[1])), self._with_data)
        tables: list[Any] = [t for _, m in self.outside for t in (m._buffers, vars(m))]
        held = [(t, n, x) for t in tables for n, x in t.items() if type(x) is Tensor]
        copies = [(table, name, self._with_data(x)) for table, name, x in held]
        buffers, kept = self.buffers, Kept(self.modules)
        # A change of a copy is one of the buffer.
        named = zip(copies, held, strict=True)
        self.buffers = {id(y): buffers[id(x)] for (_, _, y), (_, _, x) in named if id(x) in buffers}
        try:
            with generators_kept([self.device]), replaced(copies):
                return self.write(args, kwargs, None, doors, inner)
        finally:
            self.buffers = buffers
            kept.restore()

    def _with_data(self, tensor: Tensor) -> Tensor:
        """A copy of a tensor, of ones where it has no data."""
        if not tensor.is_meta:
            return tensor.detach().clone().requires_grad_(tensor.requires_grad)
        ones = torch.ones(tensor.shape, dtype=tensor.dtype, device=self.device)
        return ones.requires_grad_(tensor.requires_grad)

    @contextmanager
    def open(self, doors: Sequence[Door] = ()) -> Iterator[None]:
        """A context in which calls of units are answered, for several microbatches.

        Args:
            doors: the doors of other modules to place as a whole, such as those with hooks.
        """
        self._settings = self._settings_now()
        self._doors_open = [*self.doors, *doors]
        self._open = {door.path: door.module for door in self._doors_open}
        padded = [
            module.register_forward_pre_hook(self._check_padding, with_kwargs=True)
            for _, module in self.outside
            if isinstance(module, nn.TransformerEncoder)
            and getattr(module, "use_nested_tensor", False)
            and not (module.training or torch.is_grad_enabled())
        ]
        try:
            with opened(self._doors_open, _unanswered, self._open), self._sets_noted():
                yield
        finally:
            self._doors_open, self._open, self._settings = [], {}, ()
            for hook in padded:
                hook.remove()

    @contextmanager
    def _sets_noted(self) -> Iterator[None]:
        """Tell the writer which attributes of units the author's code sets."""
        set_plainly = nn.Module.__setattr__

        def set_noted(module: nn.Module, name: str, value: Any) -> None:
            set_plainly(module, name, value)
            if self.writer is not None and id(module) in self.unit_of:
                self.writer.has_set(self.unit_of[id(module)], module, name)

        nn.Module.__setattr__ = set_noted  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            nn.Module.__setattr__ = set_plainly  # type: ignore[method-assign]

    def _check_padding(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Refuse PyTorch's encoders that drop padding with nested tensors, if their layers are units."""
        if kwargs.get("src_key_padding_mask", args[2] if len(args) > 2 else None) is not None:
            raise PartitionError(
                f"{self.paths.get(id(module)) or 'the model'} (TransformerEncoder) drops padded positions in "
                "evaluation, by nested tensors, which cannot travel between stages; set its "
                "use_nested_tensor = False, or place it as a whole by naming it in stages="
            )

    def run(
        self,
        writer: Writer,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        doors: Sequence[Door] = (),
        inner: Sequence[Door] = (),
    ) -> Any:
        """Run the author's forward, of which a writer answers the calls."""
        with ExitStack() as stack:
            if not self._open:
                stack.enter_context(self.open(doors))
            writer.units = self._open
            for door in self._doors_open:
                door.call = writer.unit
            stack.enter_context(writer.settled())
            if inner:
                stack.enter_context(opened(inner, writer.counted))
            stack.enter_context(others_seen(writer))
            stack.enter_context(writer)
            self.writer = writer
            try:
                output: Any = self.forward(*args, **kwargs)
            except Exception as error:
                if writer.refused:
                    raise writer.refused[0] from None
                raise writer.explained(error) from error
            finally:
                self.writer = None
            for door in self._doors_open:
                door.call = _unanswered
        if writer.refused:
            raise writer.refused[0]
        return output


def _unanswered(door: Door, run: Run, args: Any, kwargs: Any) -> Any:
    """The module's own call, between microbatches."""
    return run(*args, **kwargs)


class Writer(TorchFunctionMode):
    """Writes the score of one microbatch, while the author's forward runs.

    Args:
        tree: the lines that are known.
        draws: as for :meth:`ScoreTree.write`.

    Attributes:
        numbers: the values, by the identity of their placeholders.
        shown: the placeholders of all values so far.
        refused: errors that count, whatever the author's code makes of them.
        decides: whether the author's code has read numbers that units make.
    """

    silent = True
    """Whether calls are answered with placeholders alone."""

    def __init__(self, tree: ScoreTree, draws: Draws | None, batch: Sequence[Tensor] = ()) -> None:
        super().__init__()
        self.decides = False
        self._tree, self._draws, self._drawn = tree, draws, 0
        self.root = self._at = tree.start(batch)
        self.notes: list[Note] = []
        self.numbers: dict[int, Any] = dict(tree.weights)
        self.shown: dict[Any, Tensor] = dict(tree.tensors)
        for number, tensor in enumerate(batch):
            self.numbers[id(tensor)] = (BATCH, number)
            self.shown[BATCH, number] = tensor
        self.units: dict[str, nn.Module] = {}
        self.refused: list[Exception] = []
        self._reader = Reader(self.numbers.get, self._read_tensor, tree.fixed)
        self._calls: Counter[str] = Counter()
        self._looks: dict[int, tuple[Tensor, Look]] = {}
        self._depth = 0
        self._inside = False
        self._now: _Running | None = None
        self._latest = ""
        self._sets: dict[str, dict[tuple[int, str], nn.Module]] = {}
        self._undo: dict[tuple[int, str], tuple[dict[str, Any], str, Any]] = {}
        self._left: dict[int, tuple[Any, Any]] = {}
        self._makers: dict[int, int] = {}
        self._memory: list[Any] = []
        self._overwritten: set[int] = set()
        self._work = Work()
        self._inner: dict[int, float] = {}
        self._before = dict(copy_context().items())

    @property
    def inner_work(self) -> dict[int, float]:
        """The work of the modules inside units that were counted."""
        return self._inner

    @contextmanager
    def settled(self) -> Iterator[None]:
        """A context in which the model's code runs on fakes; it leaves attributes as they were."""
        logger = logging.getLogger(FAKE_LOGGER)
        silent, logger.disabled = logger.disabled, True
        # Its fused kernels give other tensors without data than with data. As of torch 2.13.
        fused = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            with ExitStack() as self._stack:
                yield
        finally:
            logger.disabled = silent
            torch.backends.mha.set_fastpath_enabled(fused)
            for table, name, value in self._undo.values():
                if value is self:
                    table.pop(name, None)
                else:
                    table[name] = value
            for thing, before in self._left.values():
                put_back(thing, before)
            forget_operations(_MOST_CACHED)

    def let_go(self) -> None:
        """Let go of all tensors: what holds placeholders now is the author's."""
        del self._reader  # it refers back here
        self.shown.clear()
        self._looks.clear()
        self._memory.clear()

    # ---- what the author's code calls

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._inside or func in METADATA or func in self._tree.metadata:
            return func(*args, **kwargs)
        if is_transformed() and any(map(is_wrapped, tensors_in((args, kwargs)))):
            inside = [unwrapped(tensor) for tensor in tensors_in((args, kwargs))]
            if not any(type(t) is FakeTensor or id(t) in self.numbers for t in inside):
                return func(*args, **kwargs)  # of the arguments alone, as masks are
            raise self._refusal(
                f"calls {name_of(func)} under a transform of torch.func, such as vmap, between its units"
            )
        if isinstance(func, Operation) and _is_dispatched(sys._getframe(1)):
            raise self._refusal(
                "runs compiled code between its units, such as a function of torch.jit"
            )
        follows = self._follows(args) or (bool(kwargs) and self._follows(kwargs.values()))
        if follows and func in AS_SHAPES:
            real = self._only_shaped(func, args)
            if real is not None:
                return self.__torch_function__(func, types, real, kwargs)
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
            raise self._refusal("takes gradients between its units, which no stage has whole")
        return self._line(func, func, 0, args, kwargs, draw)

    def unit(self, door: Door, run: Run, args: Any, kwargs: Any) -> Any:
        """Answer for a unit."""
        if self._inside:
            return run(*args, **kwargs)
        is_direct = getattr(run, "__name__", "") == "forward"
        if not is_direct and not isinstance(door.module, torch.jit.ScriptModule):
            # A compiled module runs as it was written.
            run = getattr(door.module, "_orig_mod", door.module)._call_impl
        path = door.path
        call, self._calls[path] = self._calls[path], self._calls[path] + 1
        key = (path, "forward") if is_direct else path
        output = self._line(path, run, call, args, kwargs, call, key)
        self._latest = path
        return output

    def counted(self, door: Door, run: Run, args: Any, kwargs: Any) -> Any:
        """Count the operations of a module inside a unit."""
        before = self._work.total
        output = run(*args, **kwargs)
        key = id(door.module)
        self._inner[key] = self._inner.get(key, 0.0) + self._work.total - before
        return output

    def applied(self, function: type[Function], run: Run, args: Any, kwargs: Any) -> Any:
        """Answer for a custom function."""
        if self._now is not None:
            # It may keep what no operation reads.
            self._now.used |= set(map(id, tensors_in((args, kwargs))))
        if self._inside or is_checkpoint(function) or not self._follows((args, kwargs)):
            return run(*args, **kwargs)
        return self._line(function, run, 0, args, kwargs, -1)

    def checkpointed(self, run: Run, args: Any, kwargs: Any, options: Mapping[str, Any]) -> Any:
        """Answer for a checkpoint of the author's: each unit in it is recomputed by itself."""
        if self._inside:
            if self._now is not None:
                self._now.used |= set(map(id, tensors_in((args[1:], kwargs))))
            return args[0](*args[1:], **kwargs)
        with uncheckpointed(args[1:], options):
            self._depth += 1
            try:
                return args[0](*args[1:], **kwargs)
            finally:
                self._depth -= 1

    def _follows(self, values: Any) -> bool:
        """Whether there is a value among some arguments."""
        for value in values:
            if isinstance(value, Tensor):
                if id(value) in self.numbers:
                    return True
                if type(value) is FakeTensor or is_wrapped(value):
                    self._check_foreign(value)
                elif self._overwritten and storage_of(value) in self._overwritten:
                    raise self._refusal(
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
            raise self._refusal(
                "calls a function under a transform of torch.func, such as vmap, between its units"
            )
        if type(tensor) is not FakeTensor:
            return
        maker = self._makers.get(storage_of(tensor))
        if maker is not None:
            raise self._refusal(
                f"uses a tensor that {self.notes[maker].line.name} left in an attribute or a list, which "
                "other stages do not have; return it from there (a loss: penstock.add_loss)"
            )
        raise self._refusal(
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
        tree, given, copies = self._tree, list[Any](), type(what) is not str
        read, number_of = self._reader.read, self.numbers.get
        casts = ()
        if torch.is_autocast_enabled() or torch.is_autocast_enabled("cpu"):
            casts = _autocast()
        modes = (torch.is_grad_enabled(), self._depth, *casts)
        # In a loop, and with the commonest values first: this runs for each line of each microbatch.
        looks, templates = self._looks, list[Template]()
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
                if isinstance(value, dict | list) and self._before.get(variable) is not value:
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
            direct = not copies and type(key[0]) is tuple
            line = Line(what, run if copies else None, call, not copies, direct)
            line.index, line.modes = self._at.index + 1, modes
            line.args = tuple(templates[: len(args)])
            line.kwargs = tuple(zip(kwargs, templates[len(args) :], strict=True))
            line.beside = (TUPLE, tuple, tuple(beside))
            with left(self):
                output = self.new(line, run, given)
            if output is not _LINE:
                return output
            if what in tree.by_numbers and not numbers:
                key = (*key[:-1], self._numbers_in(given))
            line.simple = line.result[0] is VALUE and not (
                line.changes or line.left or line.attributes or line.numbers or line.belongs
            )
            line.digest = hashlib.blake2b(
                self._at.digest + f"{_key_text(key)}".encode(), digest_size=16
            ).digest()
            self._at.next[key] = line
            tree.lines += 1
        self._at = line
        note = Note(line, given, draw, context, sets)
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
                self._overwritten.add(storage_of(given[target[1]]))
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
            self._put(
                self.units[line.what].get_submodule(path), name, fill(template, self.shown, given)
            )
        if line.numbers:
            unit = self.units[line.what]
            noted = []
            for path, name, value in line.numbers:
                module = unit.get_submodule(path)
                self._put(module, name, value)
                noted.append((module, name, (line, name)))
            self._stack.enter_context(reads_noted(noted, self._used_elsewhere))
        result = line.result
        return self.shown[result[1]] if result[0] is VALUE else fill(result, self.shown, given)

    def _put(self, module: nn.Module, name: str, value: Any) -> None:
        """Set an attribute until the author's forward has run."""
        table = vars(module)
        self._undo.setdefault((id(table), name), (table, name, table.get(name, self)))
        table[name] = value

    def has_set(self, path: str, module: nn.Module, name: str) -> None:
        """Note that the author's code has set an attribute in a unit: the unit gets it with its next call."""
        if not self._inside and name in vars(module):
            self._sets.setdefault(path, {})[id(module), name] = module

    def _used_elsewhere(self, attribute: tuple[Line, str]) -> None:
        """Refuse to use a number that a unit has set, before it has a value."""
        line, name = attribute
        if self._now is not None:
            self._now.foreign.add(line.index)
        elif not self._inside:
            raise self._refusal(
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

    def new(self, line: Line, run: Run, given: list[Any]) -> Any:
        """Find out what a new line does; returns ``_LINE``, or what a function of shapes alone gave."""
        self._name(line)
        leaves = (t for of in line.templates() for t in leaves_of(of, inside=False))
        self._check_known([t[1] for t in leaves if t[0] is VALUE])
        if line.unit and self._answered(line):
            return _LINE
        return self._try(line, run, given)

    def _name(self, line: Line) -> None:
        paths = self._tree.paths
        if line.unit:
            line.label, line.where = line.what, where(paths, line.what)
            return
        module, text = running(paths)
        line.where = place_of(paths, module, text)
        line.module = "" if module is None else paths[id(module)]
        name = name_of(line.what).strip("_")
        line.label = f"{name} after {self._latest}" if self._latest else name

    def _try(self, line: Line, run: Run, given: list[Any]) -> Any:
        """Run a new line on fake tensors, and note what it does."""
        tree, templates = self._tree, list(line.templates())
        leaves = [leaf for of in templates for leaf in leaves_of(of)]
        direct = {t[1] for of in templates for t in leaves_of(of, inside=False) if t[0] is VALUE}
        hidden = {leaf[1] for leaf in leaves if leaf[0] is VALUE} - direct
        places = [leaf[1] for leaf in leaves if leaf[0] is GIVEN]
        reals = {place: given[place] for place in places if isinstance(given[place], Tensor)}
        fakes = {index: self._faked(tensor) for index, tensor in reals.items()}
        values = {number: self._fake_of(number) for number in direct | hidden}
        tensors = [t for t in (*fakes.values(), *values.values()) if isinstance(t, Tensor)]
        before = {id(t): _version(t) for t in tensors}
        old = [template for of in templates for template in known_in(of)]
        filled = [fakes.get(index, one) for index, one in enumerate(given)]
        inputs = [fill(of, values, filled) for of in line.args]
        named = {name: fill(of, values, filled) for name, of in line.kwargs}
        fill(line.beside, values, filled)
        for number, tensor in self.shown.items() if line.unit else ():
            if isinstance(number, tuple) and number[0] >= 0 and isinstance(tensor, Tensor):
                self._makers.setdefault(storage_of(tensor), number[0])
        now = _Running(line, {id(f): reals[k] for k, f in fakes.items()})
        now.arguments = {*map(storage_of, tensors)}
        counts = self._work.counts
        set_in: dict[tuple[str, str], Any] = {}
        shelf = {number: id(tensor) for number, tensor in values.items() if number in hidden}
        look, called = self._abstract(line) if line.unit else (None, [])
        looks = None if look is None else Looks(self.units[line.what], line.what)
        numbers = (
            []
            if looks is None
            else [(looks.parts[at], name, (at, name)) for at, name in looks.numbers]
        )
        with reads_noted(numbers, now.reads.add):
            output = self._run(now, run, inputs, named, set_in, given, values)
        if now.by_numbers:
            tree.by_numbers.add(line.what)
        line.work, line.flops, line.nbytes = map(float.__sub__, self._work.counts, counts)
        changed = any(_version(t) != before[id(t)] for t in tensors)
        if not line.unit and line.what not in SET_HOOKS and not is_ours(line.what):
            acts = changed or now.needs_data or line.what in tree.by_numbers
            if not tensors_in(output) and not acts:
                tree.metadata.add(line.what)
                return output
        read = {number for number, key in shelf.items() if key in now.used}
        line.reads = frozenset(direct | read)
        line.varies = now.needs_data or self._vary(line)
        line.foreign |= now.foreign
        if not line.unit:
            line.decides = reads_numbers(line.what) or (
                now.needs_data and not self._by_given(line, given)
            )
        self._note_changes(line, values, fakes, before, given)
        maker = _Maker(self, now, fakes, values, given)
        if line.what in SET_HOOKS and output is not None:
            line.result = (CONST, OnlyThere, OnlyThere(line))
        else:
            line.result = maker.read(output)
        if line.unit:
            line.writes = self._names_of(list(self.units[line.what].modules()), now.writes)
            line.attributes = [
                (path, name, maker.read(value)) for (path, name), value in set_in.items()
            ]
        for one in old:
            after = maker.read(given[one[1]])
            if not _alike(after, one, given):
                line.left.append((KNOWN, one[1], *after[2:]))
        for one in old:
            fill(one, self.shown, given)
        if looks is not None and not now.is_guessed and not now.stays:
            maker.alive.clear()
            del output, set_in
            if all(made() is None for made in now.made):
                # Nothing else holds what the unit has made, as a list does that a hook fills.
                self._learn(line, look, called, looks, now)
        return _LINE

    def _names_of(self, parts: Sequence[nn.Module], places: Sequence[tuple[int, str]]) -> list[str]:
        """The names of weights and buffers, given by the positions of their modules."""
        tree = self._tree
        tensors = [
            next(
                (t[name] for t in (part._parameters, part._buffers, vars(part)) if name in t), None
            )
            for part, name in [(parts[at], name) for at, name in places]
        ]
        return [tree.weights[id(t)] for t in tensors if id(t) in tree.weights]

    def _check_known(self, numbers: Collection[Number]) -> None:
        """Refuse a value on which something has acted that is no function of PyTorch."""
        for number in numbers:
            if isinstance(number, tuple) and number[0] >= 0:
                look = self.notes[number[0]].line.looks.get(number)
                shown = self.shown[number]
                learns = isinstance(shown, Tensor) and takes_gradient(shown)
                if look is not None and look[4] != learns:
                    raise self._refusal(
                        "acts on what units gave by something that is no function of PyTorch, such as a "
                        "function compiled by torch.jit, or the apply of a custom function that was given "
                        "another name; call it as Function.apply, or put it into a module that is placed as "
                        "a whole"
                    )

    def _by_given(self, line: Line, given: Sequence[Any]) -> bool:
        """Whether the numbers that a function needs are given, as a mask of the arguments is."""
        of_values = [self.shown[number] for number in line.reads]
        floats = all(t.dtype.is_floating_point for t in of_values if isinstance(t, Tensor))
        return floats and any(isinstance(one, Tensor) for one in given)

    def _vary(self, line: Line) -> bool:
        """Whether numbers decide the shapes of what a line reads."""
        made = (number[0] for number in line.reads if isinstance(number, tuple))
        return any(index >= 0 and self.notes[index].line.varies for index in made)

    def _faked(self, tensor: Tensor) -> Tensor:
        if type(tensor) is Tensor and tensor.layout is torch.strided:
            return without_data(self._tree.mode, look_of(tensor))
        fake = self._tree.mode.from_tensor(tensor.detach())
        return fake.requires_grad_(tensor.requires_grad) if tensor.requires_grad else fake

    def _fake_of(self, number: Number) -> Tensor:
        tensor = self.shown[number]
        if type(tensor) is FakeTensor or not isinstance(tensor, Tensor):
            return tensor
        if isinstance(number, str) or id(tensor) in self._tree.weights:
            return self._tree.twin(tensor)
        return self._faked(tensor)

    def _run(
        self,
        now: _Running,
        run: Run,
        inputs: list[Any],
        named: dict[str, Any],
        set_in: dict[tuple[str, str], Any],
        given: list[Any],
        values: Mapping[Number, Tensor],
    ) -> Any:
        """Run a call on fake tensors; or on made-up numbers, if it needs some."""
        line, tree = now.line, self._tree
        module = self.units[line.what] if line.unit else nn.Module()
        self._inside, self._now = True, now
        mutable = [(one, copy.deepcopy(one)) for one in given if isinstance(one, _OPAQUE)]
        if any(hasattr(type(one), "__next__") for one in given):
            raise self._refusal(
                f"gives {line.name} an iterator, which every stage would take from; give a list"
            )
        held = [
            (given[t[1]], contents(given[t[1]])) for of in line.templates() for t in known_in(of)
        ]
        try:
            with self._left_alone(now, module, set_in):
                try:
                    with tree.mode, _MadeUp(self, now):
                        output = run(*inputs, **named)
                except PartitionError:
                    raise
                except Exception as error:
                    for thing, before in held:
                        put_contents(thing, *before)
                    return self._on_ones(now, run, given, values, error)
                for one, was in mutable:
                    if _differ(one, was):
                        raise self._refusal(
                            f"gives {line.name} a {type(one).__name__} that it changes, which other stages "
                            "would not see; return what it makes of it, or use a list"
                        )
                return output
        finally:
            self._inside, self._now = False, None
            torch.clear_autocast_cache()

    @contextmanager
    def _left_alone(
        self, now: _Running, module: nn.Module, set_in: dict[tuple[str, str], Any]
    ) -> Iterator[None]:
        """Fake tensors in place of a unit's weights; whatever its code keeps is put back."""
        tree, line = self._tree, now.line
        if not line.unit:
            yield
            return
        parts = list(module.modules())
        with ExitStack() as stack:
            stack.enter_context(alone_and_silent())
            kept = Kept(parts)
            # Dynamo cannot compile on fake tensors, and would not try again on real ones.
            stack.enter_context(uncompiled())
            stack.enter_context(replaced(tree.stand_ins(module)))
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
            now.own = {storage_of(t) for t in fakes if not getattr(t, "_is_param", False)}
            now.arguments |= {storage_of(one) for one in fakes if id(one) not in self.numbers}
            hooks_without_data([module])
            try:
                yield
            finally:
                now.writes = [(at, n) for at, n, t, was in weights if _version(t) != was]
                if sys.exc_info()[0] is None:
                    names = {id(part): path for path, part in module.named_modules()}
                    for part, before in attributes:
                        for name, value in vars(part).items():
                            if before.get(name) is value:
                                continue
                            if holds_fakes(value):
                                set_in[names[id(part)], name] = value
                                now.own |= {*map(storage_of, tensors_in(value))}
                            elif isinstance(value, int | float) and name != "training":
                                line.numbers.append((names[id(part)], name, value))
                states = {id(t) for part in parts for t in (vars(part), *vars(part).values())}
                states -= {id(value) for part in parts for value in attributes_of(part).values()}

                def stays(thing: Any, before: Any) -> bool:
                    """Whether what a unit left there holds a tensor: so it is seen who reads it."""
                    if (
                        id(thing) in states
                        or isinstance(thing, nn.Module)
                        or not holds_fakes(thing)
                    ):
                        return False
                    now.stays = True
                    self._left.setdefault(id(thing), (thing, before))
                    return True

                kept.restore(stays)

    def _on_ones(
        self,
        now: _Running,
        run: Run,
        given: list[Any],
        values: Mapping[Number, Tensor],
        reason: Exception,
    ) -> Any:
        """Run a line that failed without data on ones, and on the numbers of the model's arguments."""
        line, tree = now.line, self._tree
        module = self.units[line.what] if line.unit else nn.Module()
        failure: Exception | None = None
        for number in (1, 0):
            back: dict[int, tuple[Tensor, Tensor]] = {}

            def of_ones(fake: Tensor, number: int = number, back: Any = back) -> Tensor:
                twin = filled(fake, number)
                back[id(twin)] = fake, twin
                return twin.requires_grad_(fake.requires_grad)

            ones = {
                key: of_ones(fake) if isinstance(fake, Tensor) else fake
                for key, fake in values.items()
            }
            reals: list[Any] = []
            for x in given:
                real = x
                if isinstance(x, Tensor):
                    real = x.detach().clone()
                    if number == 0 and x.dtype is torch.bool:
                        real.zero_()  # a mask of ones may leave nothing
                    back[id(real)] = self._faked(x), real
                reals.append(real)
            try:
                with replaced(_of_ones(module)), torch.random.fork_rng(devices=[]):
                    inputs = [fill(of, ones, reals) for of in line.args]
                    named = {name: fill(of, ones, reals) for name, of in line.kwargs}
                    fill(line.beside, ones, reals)
                    with _CountsWork(self._work):
                        output = run(*inputs, **named)
            except Exception as error:
                failure = failure or error
                continue

            def faked(tensor: Tensor, back: Any = back) -> Tensor:
                if id(tensor) in back:
                    fake: Tensor = back[id(tensor)][0]
                    return fake
                return tree.blank((*look_of(tensor)[:3], tree.device, tensor.requires_grad))

            now.is_guessed = True
            now.by_numbers |= any(isinstance(x, Tensor) for x in given)
            for of in line.templates():
                for known in known_in(of):
                    keys, inner = contents(given[known[1]])
                    put_contents(given[known[1]], keys, [map_tensors(x, faked) for x in inner])
            return map_tensors(output, faked)
        assert failure is not None
        if not (now.needs_data or isinstance(reason, NEED_DATA)):
            raise failure
        raise PartitionError(
            f"{line.where}: {line.name} runs neither without data, as stages have tensors of other stages "
            f"({str(reason).splitlines()[0]}), nor on ones ({failure}); put it into a module that is placed "
            "as a whole by naming that in stages=, or, if it needs certain numbers in its arguments, cut "
            "the model by a batch that has them, pipe.cut(...)"
        ) from failure

    def _note_changes(
        self,
        line: Line,
        values: Mapping[Number, Tensor],
        fakes: Mapping[int, Tensor],
        before: Mapping[int, Any],
        given: Sequence[Any],
    ) -> None:
        rows: list[tuple[Tensor, Template]] = [(t, (VALUE, n)) for n, t in values.items()]
        rows += [(t, (GIVEN, index)) for index, t in fakes.items()]
        for tensor, target in rows:
            if not isinstance(tensor, Tensor) or _version(tensor) == before[id(tensor)]:
                continue
            buffer = self._tree.buffers.get(id(given[target[1]])) if target[0] is GIVEN else None
            if buffer is not None:
                raise self._refusal(
                    f"changes the buffer {buffer!r} outside of its units, by what units gave; move it into a "
                    "module that is in one stage, with the code that changes it"
                )
            number = (line.index, 1000 + len(line.changes))
            line.changes.append((target, number))
            line.looks[number] = look_of(tensor)
            if target[0] is GIVEN:
                line.shown[number], line.marks[id(tensor)] = tensor, number

    # ---- units that are alike

    def _abstract(self, line: Line) -> tuple[Any, list[Template]]:
        """How a call looks, whichever values it has, and its tensors, each once.

        The look is None if it says too little: objects of the author's are in the call, or set beside it.
        """
        places: dict[Template, int] = {}
        has_objects = False

        def abstract(leaf: Template) -> Template:
            nonlocal has_objects
            look = leaf[2] if leaf[0] is GIVEN else None
            if leaf[0] is VALUE:
                tensor = self.shown[leaf[1]]
                if not isinstance(tensor, Tensor):
                    has_objects = True
                    return leaf
                look = look_of(tensor)
            if type(look) is not tuple:
                return leaf
            return places.setdefault(leaf, len(places)), look

        args = tuple([with_leaves(of, abstract) for of in line.args])
        kwargs = tuple([(name, with_leaves(of, abstract)) for name, of in line.kwargs])
        if has_objects or line.beside[2]:
            return None, []
        return (args, kwargs, line.modes, torch.get_default_dtype()), list(places)

    def _answered(self, line: Line) -> bool:
        """Answer a line as one like it was answered."""
        call, old = self._abstract(line)
        if call is None or line.what in self._tree.by_numbers:
            return False
        looks = Looks(self.units[line.what], line.what)
        if looks.look is None:
            return False
        answer = self._tree.memo.get((call, looks.look), looks.numbers)
        if answer is None:
            return False
        line.reads = frozenset(old[at][1] for at in answer.reads if old[at][0] is VALUE)
        for place, look in answer.looks.items():
            tensor = self._tree.blank(look)
            number = (line.index, place)
            line.shown[number], line.looks[number] = tensor, look
            line.marks[id(tensor)] = number

        def back(leaf: Template) -> Template:
            if leaf[0] is not VALUE:
                return leaf
            which, at = leaf[1]
            return old[at] if which == "old" else (VALUE, (line.index, at))

        line.result = with_leaves(answer.result, back)
        line.work, line.flops, line.nbytes = answer.work
        line.varies = answer.varies or self._vary(line)
        line.writes = self._names_of(looks.parts, answer.writes)
        for position, count in answer.inner.items():
            key = id(looks.parts[position])
            self._inner[key] = self._inner.get(key, 0.0) + count
        return True

    def _learn(
        self, line: Line, look: Any, old: list[Template], looks: Looks, now: _Running
    ) -> None:
        """Remember what a unit gave, if all it did was to give new tensors."""
        does_more = (
            line.changes
            or line.left
            or line.attributes
            or line.numbers
            or line.foreign
            or line.generators
            or line.belongs
        )
        if look is None or looks.look is None or does_more:
            return
        if looks != Looks(self.units[line.what], line.what):
            return

        def away(leaf: Template) -> Template:
            if leaf[0] is VALUE and leaf[1] in line.shown:
                return (VALUE, ("new", leaf[1][1]))
            if leaf[0] is VALUE or leaf in old:
                return (VALUE, ("old", old.index(leaf)))
            return leaf

        try:
            result = with_leaves(line.result, away)
        except ValueError:
            return  # it gives a weight of its own
        reads = [at for at, t in enumerate(old) if t[0] is GIVEN or t[1] in line.reads]
        if len(line.reads) != sum(t[0] is VALUE and t[1] in line.reads for t in old):
            return
        if not all(isinstance(tensor, Tensor) for tensor in line.shown.values()):
            return
        answer = Answer(
            result,
            reads,
            {number[1]: of for number, of in line.looks.items() if isinstance(number, tuple)},
            (line.work, line.flops, line.nbytes),
            now.inner(looks.parts, self._inner),
            now.needs_data,
            now.writes,
        )
        self._tree.memo.put((look, looks.look), looks.numbers, now.reads, answer)

    # ---- the end

    def ended(self, output: Any) -> tuple[list[Note], Template, list[Any]]:
        """The lines, the template of the output, and what that leaves open."""
        given: list[Any] = []
        reader = Reader(self.numbers.get, self._read_tensor, self._tree.fixed)
        if hasattr(type(output), "__next__"):
            kind, model = type(output).__name__, type(self._tree.model).__name__
            raise PartitionError(
                f"the {model}'s forward{line_of(self._tree.model)} returns a {kind}, which would run after "
                "the stages have ended; return a tuple or list of what it gives"
            )
        return self.notes, reader.read(output, given), given

    # ---- what cannot be written

    def _refusal(self, does: str) -> PartitionError:
        error = PartitionError(
            f"{where(self._tree.paths)}: the model {does}; put that into a module that is placed as a whole"
            if ";" not in does
            else f"{where(self._tree.paths)}: the model {does}"
        )
        self.refused.append(error)
        return error

    def explained(self, error: Exception) -> Exception:
        """What to raise for an error of the author's code."""
        by = "torch.compile" if is_of_dynamo(error) else ""
        if isinstance(error, RuntimeError) and not str(error).strip():
            # A scripted function says nothing on tensors without data.
            by = "torch.jit"
        if not by:
            return error
        after = f"after {self._latest}, " if self._latest else ""
        return PartitionError(
            f"{after}the {type(self._tree.model).__name__} runs code that {by} has compiled between its "
            "units, which cannot be cut; compile modules that are placed as a whole"
        )

    # ---- for the watch of a line that runs

    def before_operation(self, now: _Running, call: Any) -> None:
        """Note what an operation of a line reads, and whether it draws."""
        args, kwargs = call
        for tensor in tensors_in(call):
            if not isinstance(tensor, FakeTensor):
                continue
            now.used.add(id(tensor))
            maker = self._makers.get(storage_of(tensor))
            if (
                maker is not None
                and maker != now.line.index
                and storage_of(tensor) not in now.arguments
            ):
                now.foreign.add(maker)
        now.line.generators += [
            one for one in (*args, *kwargs.values()) if isinstance(one, torch.Generator)
        ]

    def after_operation(self, now: _Running, func: Any, call: Any, output: Any) -> None:
        """Note what an operation of a line has made, and count it."""
        if now.line.unit:
            for tensor in tensors_in(output):
                key = storage_of(tensor)
                if key not in now.arguments and key not in self._makers:
                    self._makers[key] = now.line.index
                    self._memory.append(tensor.untyped_storage())  # no other gets its identity
                    now.made.append(weakref.ref(tensor))
        args, kwargs = call
        self._work.add(func, args, kwargs, output)


_LINE = object()


@dataclass(eq=False)
class Answer:
    """What a unit gave: the template of its result, what it read, the looks of new tensors, its work."""

    result: Template
    reads: Sequence[int]
    looks: dict[int, Look]
    work: tuple[float, float, float]
    inner: dict[int, float]
    varies: bool
    writes: Sequence[tuple[int, str]]


class _Running:
    """A new line that runs now.

    Attributes:
        line: the line.
        originals: the arguments with data, by the identity of the fakes that stand for them.
        arguments: the memory of its arguments.
        used: the identities of the tensors that its operations have read.
        foreign: the lines whose tensors it has read, though they were no arguments.
        needs_data: whether it has read numbers.
        is_guessed: whether it ran on numbers of the arguments, or on ones.
        reads: the attributes that it has read which may be a layer's number.
        made: the tensors that its operations have made, if they are still there.
        own: where the memory of the unit's buffers and attributes lies.
        writes: the weights and buffers into which it has written, by the position of their module.
        by_numbers: whether numbers of the arguments have decided what it gave.
        stays: whether it has left tensors in containers.
    """

    def __init__(self, line: Line, originals: Mapping[int, Tensor]) -> None:
        self.line, self.originals = line, originals
        self.arguments: set[int] = set()
        self.used: set[int] = set()
        self.foreign: set[int] = set()
        self.reads: set[Any] = set()
        self.made: list[weakref.ref[Tensor]] = []
        self.own: set[int] = set()
        self.writes: list[tuple[int, str]] = []
        self.needs_data = self.is_guessed = self.by_numbers = self.stays = False

    def inner(self, parts: Sequence[nn.Module], counts: Mapping[int, float]) -> dict[int, float]:
        """The work of the parts, by position, as far as it was counted."""
        return {at: counts[id(part)] for at, part in enumerate(parts) if counts.get(id(part))}


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


class _Maker:
    """Reads the templates of what a new line has made, and gives its tensors numbers."""

    def __init__(
        self,
        writer: Writer,
        now: _Running,
        fakes: Mapping[int, Tensor],
        values: Mapping[Number, Tensor],
        given: list[Any],
    ) -> None:
        line = now.line
        self._writer, self._line, self._given, self._own = writer, line, given, now.own
        self._fakes = {id(fake): index for index, fake in fakes.items()}
        tree = writer._tree
        # A buffer that a unit gives is a value: the next microbatch may change it.
        unit = writer.units[line.what] if line.unit else nn.Module()
        self._old: dict[int, Number] = {
            id(tree.twin(weight)): tree.weights[id(weight)]
            for weight in unit.parameters()
            if id(weight) in tree.weights
        }
        self._old |= {id(tensor): number for number, tensor in values.items()}
        self._changed = dict(line.changes)
        self._new: dict[int, Number] = {}
        self.alive: list[Tensor] = []
        self._reader = Reader(
            lambda _: None, self._tensor, tree.fixed, as_call=False, opaque=self._object
        )

    def read(self, value: Any) -> Template:
        return self._reader.read(value, list(self._given))

    def _object(self, value: Any) -> Template:
        """A value that cannot be looked into; it may be used where it was made."""
        line = self._line
        for index, one in enumerate(self._given):
            if one is value:
                return (GIVEN, index, type(value))
        number = line.marks.get(id(value))
        if number is None:
            number = line.marks[id(value)] = (line.index, len(line.shown))
            line.shown[number] = value
            kind: Any = type(value)  # where a tensor has its type
            line.looks[number] = (torch.Size(()), (), kind, self._writer._tree.device, False)
        return (VALUE, number)

    def _tensor(self, tensor: Tensor, _: list[Any]) -> Template:
        line, writer = self._line, self._writer
        if id(tensor) in self._fakes:
            index = self._fakes[id(tensor)]
            number = self._changed.get((GIVEN, index))
            return (GIVEN, index, look_of(tensor)) if number is None else (VALUE, number)
        for index, one in enumerate(self._given):
            if one is tensor:
                return (GIVEN, index, look_of(tensor))
        if id(tensor) in self._old:
            old = self._old[id(tensor)]
            return (VALUE, self._changed.get((VALUE, old), old))
        if type(tensor) is not FakeTensor:
            known = writer.numbers.get(id(tensor))
            if known is not None:
                return (VALUE, known)
            tensor = writer._faked(tensor)
        number = self._new.get(id(tensor))
        if number is None:
            number = self._new[id(tensor)] = (line.index, len(line.shown))
            look = line.looks[number] = (*look_of(tensor)[:4], takes_gradient(tensor))
            if storage_of(tensor) in self._own:
                line.belongs.add(number)
            if line.unit and tensor.layout is torch.strided:
                # Another one than the unit may have left in a list: it is seen who reads that.
                self.alive.append(tensor)
                tensor = writer._tree.blank(look)
            line.shown[number], line.marks[id(tensor)] = tensor, number
        return (VALUE, number)


def _alike(after: Template, before: Template, given: Sequence[Any]) -> bool:
    """Whether a list or object holds what it held before."""
    if after[3] != before[3] or len(after[4]) != len(before[4]):
        return False
    for one, other in zip(after[4], before[4], strict=True):
        if one[0] is CONST and other[0] is GIVEN:
            was = given[other[1]]
            if one[2] is not was and not (type(was) is float and one[2] == was):
                return False
        elif one[0] in (NEW, KNOWN) and other[0] is KNOWN:
            if one[1] != other[1] or not _alike(one, other, given):
                return False
        elif one[0] is KNOWN and other[0] is AGAIN:
            if one[1] != other[1]:
                return False
        elif one[:2] != other[:2] or (
            one[0] is CONST and one[2] is not other[2] and one[2] != other[2]
        ):
            return False
    return True


def _has_hooks(module: nn.Module) -> bool:
    return bool(
        module._forward_pre_hooks
        or module._forward_hooks
        or module._backward_pre_hooks
        or module._backward_hooks
    )


def _version(tensor: Tensor) -> Any:
    return tensor._version, tensor.requires_grad, tensor.shape


def storage_of(tensor: Tensor) -> int:
    """The identity of a tensor's memory."""
    if tensor.layout is not torch.strided:
        return id(tensor)
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError, UsageError):
        return id(tensor)


def _differ(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray):
        return not np.array_equal(one, other)
    return bool(one != other)


def _is_dispatched(frame: Any) -> bool:
    """Whether an operation is called from within the dispatcher: no function of PyTorch was seen before."""
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


class _MadeUp(TorchDispatchMode):
    """Goes on with ones where an operation needs a tensor's numbers, and notes what a line reads."""

    def __init__(self, writer: Writer, now: _Running) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._writer, self._now, self._count = writer, now, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._writer.before_operation(self._now, (args, kwargs))
        try:
            output = func(*args, **kwargs)
        except Exception as error:
            # Any operation that fails without data is tried on ones; if that fails too, this error counts.
            self._now.needs_data |= isinstance(error, NEED_DATA)
            output = self._on_ones(func, args, kwargs, error)
        self._writer.after_operation(self._now, func, (args, kwargs), output)
        return output

    def _on_ones(self, func: Any, args: Any, kwargs: Any, reason: Exception) -> Any:
        mode = self._writer._tree.mode
        self._count += 1
        # Code that draws until a condition holds may need zeros to get out.
        for number in (1, 0) if self._count < _PATIENCE else (0, 1):
            with contextlib.suppress(Exception), without_modes():
                put = functools.partial(self._with_numbers, number)
                filled, named = map_tensors((args, kwargs), put)
                output = func(*filled, **named)
                return map_tensors(output, lambda t: mode.from_tensor(t.detach()))
        raise reason

    def _with_numbers(self, number: int, tensor: Tensor) -> Tensor:
        """A tensor of this number; one that every process has, such as a mask of the arguments, as it is."""
        original = self._now.originals.get(id(tensor))
        if original is None:
            return filled(tensor, number)
        self._now.is_guessed = self._now.by_numbers = True
        return original.detach().clone()


class _CountsWork(TorchDispatchMode):
    """Counts the operations of a line that runs on ones."""

    supports_higher_order_operators = True
    """FlexAttention is one."""

    def __init__(self, work: Work) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._work = work

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        self._work.add(func, args, kwargs or {}, output)
        return output


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
