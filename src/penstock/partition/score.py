"""The score of a microbatch: the author's forward runs once, to its end, and is written down.

* A function of the model's arguments alone runs for real, with real numbers. So masks, ``tolist()``,
  ``if mask.all()`` and counters of the author's just work, as often as in a plain loop.
* All that comes from weights is a *placeholder*, a fake tensor. A call of a *unit* (a module that is placed
  as a whole), or of a function on a placeholder, is a *line*: what is called, a template of its arguments,
  the modes in which it is called. It is answered with more placeholders.

Lines are kept in a tree: from each line lead those that ever came after it. A microbatch whose lines are
known walks along a path and gets the placeholders that lie there; this takes microseconds a line. Only a
new line runs on fake tensors. The end of the path is the *call signature* of the microbatch.

Here are a line, a note and a score. To go on reading: :mod:`~penstock.partition.tree` keeps the lines,
:mod:`~penstock.partition.writer` follows the author's code along them,
:mod:`~penstock.partition.trial` finds out what a new line does,
:mod:`~penstock.partition.planning` makes of a score what each stage does, and
:mod:`~penstock.partition.playing` does it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from penstock._engine.rng import Draws
from penstock.partition.functions import name_of
from penstock.partition.templates import CONST, NOTHING, Look, Number, Template, text_of

Modes: TypeAlias = tuple[Any, ...]


@dataclass(eq=False, slots=True)
class Line:
    """What happens at one place of a score, in all microbatches that came here the same way.

    Attributes:
        what: the unit's path, the function, or the class of a custom function.
        unit: whether it is a call of a unit.
        run: what a stage calls.
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
        borrowed: the weights among its reads that it has used though the unit does not hold them.
        moves: the unit's attribute whose list, dictionary or object it has changed; empty if there is none.
        generators: the model's generators from which it draws.
        checked: whether a stage has compared what it made with the placeholders.
        simple: whether it gives one value, and changes and leaves nothing else.
        copies_buffers: whether it gets copies of buffers, which the next microbatch may write into.
    """

    what: Any
    run: Any = None
    call: int = 0
    unit: bool = False
    index: int = -1
    where: str = ""
    label: str = ""
    module: str = ""
    modes: Modes = ()
    args: tuple[Template, ...] = ()
    kwargs: tuple[tuple[str, Template], ...] = ()
    beside: Template = NOTHING
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
    borrowed: frozenset[str] = frozenset()
    moves: str = ""
    generators: list[torch.Generator] = field(default_factory=list)
    checked: bool = False
    simple: bool = False
    copies_buffers: bool = False

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
        saving: the author's saved_tensors_hooks around the call; None if there are none.
    """

    line: Line
    given: list[Any]
    draw: int
    context: Sequence[tuple[ContextVar[Any], Any]] = ()
    sets: Sequence[tuple[nn.Module, str]] = ()
    saving: tuple[Any, Any] | None = None


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
