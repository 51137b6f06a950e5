"""What units gave without data, so that of units that are alike only one runs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from penstock._engine.values import PLAIN
from penstock.partition.interception import Interceptor
from penstock.partition.names import FakeTensor, FakeTensorMode, without_modes
from penstock.partition.score import Line
from penstock.partition.snapshot import REGISTRIES
from penstock.partition.templates import (
    GIVEN,
    VALUE,
    Look,
    Number,
    Template,
    leaves_of,
    look_of,
    with_leaves,
)

Numbers = dict[tuple[int, str], int]
"""Attributes that may be the number of a layer, by the position of their module and their name."""
_MOST = 4_000
"""How many answers are remembered; the oldest are dropped."""
_DEEP, _LONG = 6, 1_000
"""How deep what modules hold is compared, and how many members of a container."""
_PLAIN_SIZE = type("Plain", (), {}).__basicsize__
"""The size of objects that hold all that they hold in their dictionary."""
_FORWARD, _COMPILED = "forward", "_compiled_call_impl"
"""Attributes that an interceptor sets. What was compiled runs as it was written."""
_SKIPPED = REGISTRIES | {"training", _FORWARD, _COMPILED}
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


class Memo:
    """Remembers what units gave, by how they and their arguments looked."""

    def __init__(self) -> None:
        self._is_trusted = True
        self._of: dict[Any, Any] = {}
        self._reads: dict[Any, frozenset[tuple[int, str]]] = {}

    def distrust(self) -> None:
        """Let each unit run from now on: one has done something else than the run without data."""
        self._is_trusted = False
        self._of.clear()

    def get(self, call: CallLook) -> Answer | None:
        """Return what a unit gave in a call like this; layers' numbers count if such a unit has read them."""
        return self._of.get(self._key(call)) if self._is_trusted else None

    def put(self, call: CallLook, reads: set[tuple[int, str]], answer: Answer) -> None:
        """Remember what a unit gave that has read these of its numbers."""
        self._reads[call.look] = self._reads.get(call.look, frozenset()) | reads
        self._of[self._key(call)] = answer
        if len(self._of) > _MOST:
            del self._of[next(iter(self._of))]

    def _key(self, call: CallLook) -> Any:
        look = call.look
        reads = self._reads.get(look, ())
        return look, frozenset((place, call.unit.numbers.get(place)) for place in reads)


class Answer(NamedTuple):
    """What a unit did in a call, for calls that look the same.

    Attributes:
        line: the line of the call, which gave new tensors, and did nothing else; without those after it.
        tensors: the templates of the call's tensors.
        inner: the operations of the modules in the unit that were counted, by position.
        writes: the weights and buffers into which it has written, by the position of their module.
        varies: whether the unit itself has read numbers.
    """

    line: Line
    tensors: list[Template]
    inner: Mapping[int, float]
    writes: Sequence[tuple[int, str]]
    varies: bool

    def can_repeat(self) -> bool:
        """Tell whether another call can give the same: all that it reads and gives is of the call, or new."""
        line, values = self.line, {t[1] for t in self.tensors if t[0] is VALUE}
        given = {t[1] for t in leaves_of(line.result) if t[0] is VALUE}
        new = line.shown.values()
        return (
            line.reads <= values
            and given <= values | line.shown.keys()
            and all(isinstance(tensor, Tensor) for tensor in new)
        )

    def tell(self, line: Line, call: CallLook, blank: Callable[[Look], Tensor]) -> None:
        """Note in the line of such a call what it gives; ``blank`` makes a placeholder."""
        known = self.line
        leaves = dict(zip(self.tensors, call.tensors, strict=True))
        line.reads = frozenset(
            now[1]
            for was, now in leaves.items()
            if now[0] is VALUE and (was[0] is GIVEN or was[1] in known.reads)
        )
        for number, look in known.looks.items():
            mine, tensor = (line.index, int(number[1])), blank(look)
            leaves[VALUE, number] = VALUE, mine
            line.shown[mine], line.looks[mine] = tensor, look
            line.marks[id(tensor)] = mine
        line.result = with_leaves(known.result, lambda leaf: leaves.get(leaf, leaf))
        line.work, line.flops, line.nbytes = known.work, known.flops, known.nbytes
        line.varies, line.moves = self.varies, known.moves


def without_data(mode: FakeTensorMode, look: Look) -> FakeTensor:
    """A fake tensor; made at once, since each operation on one takes a fraction of a millisecond."""
    shape, strides, dtype, device, learns = look
    with without_modes():
        # A sparse tensor has no strides: what it is made of shows when a message would carry it.
        meta = (
            torch.empty_strided(shape, strides, dtype=dtype, device="meta")
            if len(strides) == len(shape)
            else torch.empty(shape, dtype=dtype, device="meta")
        )
        return FakeTensor(mode, meta.requires_grad_(learns), device)


def filled(tensor: Tensor, number: int, device: torch.device | None = None) -> Tensor:
    """A tensor like another, with this number everywhere; on its device, if no other is given."""
    home = device or tensor.device
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=home)
    return made.fill_(number)


class Looks:
    """How a unit looks: its modules, weights, modes and hooks, and what these hold.

    Units that look the same do the same, as far as Python shows. What cannot be looked into is equal to
    itself alone.

    Args:
        unit: the unit.
        path: its path. Attributes of the author's modules that equal a number in it do not count.

    Attributes:
        parts: the modules of the unit.
        numbers: the attributes that do not count.
        look: the look, which can be hashed; None if nothing can be said.
    """

    def __init__(self, unit: nn.Module, path: str) -> None:
        self.parts, self._path = list(unit.modules()), path
        self.numbers: Numbers = {}
        self._layers = {int(name) for name in path.split(".") if name.isdecimal()}
        self._positions = {id(part): index for index, part in enumerate(self.parts)}
        self._seen: dict[int, tuple[Any, Any]] = {}
        scripted = any(isinstance(part, torch.jit.ScriptModule) for part in self.parts)
        self.look = None if scripted else tuple(map(self._of_part, self.parts))

    def is_as_before(self) -> bool:
        """Tell whether the unit still looks like this."""
        now = Looks(self.parts[0], self._path)
        return (now.look, now.numbers) == (self.look, self.numbers)

    def layers(self) -> list[tuple[nn.Module, str, tuple[int, str]]]:
        """The modules and names of the attributes that do not count, each with its place."""
        return [(self.parts[at], name, (at, name)) for at, name in self.numbers]

    def _of_part(self, part: nn.Module) -> Any:
        state, position = vars(part), self._positions[id(part)]
        tables = part._parameters, part._buffers
        tensors = [(n, *look_of(t)) for table in tables for n, t in table.items() if t is not None]
        modules = [(n, self._positions[id(m)]) for n, m in part._modules.items() if m is not None]
        hooks = [self._of(hook) for name in _HOOKS for hook in state[name].values()]
        held: list[Any] = []
        written = not type(part).__module__.startswith("torch.")
        for name, value in state.items():
            if written and type(value) is int and value in self._layers:
                self.numbers[position, name] = value
                held.append(name)
            elif name not in _SKIPPED:
                held.append((name, self._of(value)))
        looks = tuple(tensors), tuple(modules), tuple(hooks), tuple(held)
        return type(part), part.training, *looks, self._of(part.forward)

    def _of(self, value: Any, depth: int = 0) -> Any:
        kind = type(value)
        if kind in PLAIN:
            return kind, value
        if kind in _ITSELF:
            return value
        if id(value) in self._positions:
            return self._positions[id(value)]
        if isinstance(value, Tensor) and value.layout is torch.strided:
            return kind, *look_of(value)
        closed = depth == _DEEP or isinstance(value, nn.Module | Tensor)
        if closed or (inside := _inside(value)) is None:
            return _Itself(value)
        if id(value) not in self._seen:
            # With itself, so that no other object gets its identity; what holds itself, by its kind.
            self._seen[id(value)] = value, kind
            look = kind, *[self._of(one, depth + 1) for one in inside]
            self._seen[id(value)] = value, look
        return self._seen[id(value)][1]


@dataclass(eq=False)
class CallLook:
    """How a call of a unit looks, whichever values it has.

    Attributes:
        unit: how the unit looks.
        tensors: the templates of the call's tensors, each once.
        look: what two calls have in common of which a unit makes the same; it can be hashed.
    """

    unit: Looks
    tensors: list[Template]
    look: Any

    @classmethod
    def of(cls, line: Line, unit: nn.Module, shown: Mapping[Number, Any]) -> CallLook | None:
        """The look of a call; None if nothing can be said, as where it has objects of the author's.

        Args:
            line: the call.
            unit: the unit that is called.
            shown: the placeholders of the values.
        """
        places: dict[Template, int] = {}

        def abstract(leaf: Template) -> Template:
            if leaf[0] is VALUE:
                tensor = shown[leaf[1]]
                look = look_of(tensor) if isinstance(tensor, Tensor) else None
            elif leaf[0] is GIVEN and leaf[2] is not float and type(leaf[2]) is not CodeType:
                look = leaf[2]
            else:
                return leaf
            if type(look) is not tuple:
                raise LookupError
            return places.setdefault(leaf, len(places)), look

        try:
            args = tuple([with_leaves(of, abstract) for of in line.args])
            kwargs = tuple([(name, with_leaves(of, abstract)) for name, of in line.kwargs])
        except LookupError:
            return None
        if line.beside[4]:
            return None
        looks = Looks(unit, line.what)
        if looks.look is None:
            return None
        look = args, kwargs, line.modes, torch.get_default_dtype(), looks.look
        return cls(looks, list(places), look)


class _Itself(NamedTuple):
    """Equals what holds the very same object."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return type(other) is _Itself and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


_ITSELF = {torch.dtype, torch.device, type, ModuleType, BuiltinFunctionType, CodeType, _Itself}


def _inside(value: Any) -> list[Any] | None:
    """Return what a container, function or object holds; None if that is not to be seen."""
    if isinstance(value, FunctionType):
        cells: list[Any] = []
        for cell in value.__closure__ or ():
            with suppress(ValueError):  # a cell that nothing has been put into yet
                cells.append(cell.cell_contents)
        names = _Itself(value.__globals__)
        return [value.__code__, names, value.__defaults__, value.__kwdefaults__, *cells]
    if isinstance(value, MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, partial):
        if value.args and isinstance(value.args[0], Interceptor):
            return list(value.args[1:])
        return [value.func, value.args, value.keywords]
    inside = list(vars(value).items()) if hasattr(value, "__dict__") else []
    if isinstance(value, dict):
        inside += dict.items(value)
    elif isinstance(value, list | tuple | deque):
        inside += value
    elif isinstance(value, set | frozenset):
        inside += sorted(value, key=repr)
    elif isinstance(value, np.generic):
        inside += [value.item()]
    elif not hasattr(value, "__dict__") or type(value).__basicsize__ != _PLAIN_SIZE:
        return None
    return inside if len(inside) <= _LONG else None
