"""Values of many types, of classes that any rank can find."""

from __future__ import annotations

import enum
from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Iterator
from dataclasses import InitVar, dataclass, field, fields
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

A, B, C = torch.zeros(1), torch.ones(2), torch.full((3,), 2.0)


@dataclass
class State:
    hidden: Tensor
    mask: Tensor | None = None
    layer: int = 0


@dataclass(frozen=True, slots=True)
class Frozen:
    inner: State
    names: tuple[str, ...] = ()


@dataclass
class Computed:
    """Sets more than its fields, and cannot be made by a call with them."""

    width: InitVar[int]
    x: Tensor
    total: Tensor = field(init=False)

    def __post_init__(self, width: int) -> None:
        self.total = self.x * width
        self.note = f"times {width}"

    @cached_property
    def doubled(self) -> Tensor:
        return self.x * 2


class Pair(NamedTuple):
    first: Any
    second: Any = None


Point = namedtuple("Point", "x y")


class Mode(enum.Enum):
    FAST = "fast"
    SLOW = 2


class Bits(enum.Flag):
    READ = 1
    WRITE = 2


class Level(enum.IntEnum):
    LOW = 1


class Output(OrderedDict[str, Any]):
    """As transformers' ``ModelOutput``: a dataclass whose set fields are the items of a dict."""

    def __post_init__(self) -> None:
        for found in fields(self):  # type: ignore[arg-type] # those that derive are dataclasses
            value = getattr(self, found.name)
            if value is not None:
                self[found.name] = value

    def __iter__(self) -> Iterator[str]:
        return iter(list(super().keys()))


@dataclass
class Answer(Output):
    logits: Any = None
    loss: Any = None
    layers: Any = None


class Outer:
    @dataclass
    class Inner:
        x: Any


def computed() -> Computed:
    made = Computed(3, B)
    _ = made.doubled
    return made


VALUES: dict[str, Any] = {
    "a tensor": A,
    "a parameter": torch.nn.Parameter(B),
    "a tuple of tensors": (A, B),
    "a long tuple of tensors": (A,) * 30,
    "an empty tuple": (),
    "a list": [A, [B, []]],
    "a dict": {"x": A, 3: {"y": B}},
    "a dict with other keys": {True: A, 1.5: B, None: C, (1, "a"): 2, Mode.FAST: 3},
    "plain values": (None, True, 2, 0.5, "text", b"\x00\xff", ..., 1 - 2j, range(1, 9, 2)),
    "torch's constants": (
        torch.Size([2, 3]),
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.device("cuda", 1),
        torch.strided,
        torch.channels_last,
    ),
    "slices": [slice(None), slice(1, A), {"k": slice(0, 4, 2)}],
    "enums": (Mode.FAST, Mode.SLOW, Bits.READ, Bits.READ | Bits.WRITE, Bits(0), Level.LOW),
    "a mixture": ({"hidden": A, "mask": None}, [B, (C, 1)], "end"),
    "one tensor twice": (A, [A]),
    "an ordered dict": OrderedDict(x=A, y=OrderedDict()),
    "default dicts": defaultdict(list, {"x": [A]}, y=[defaultdict(None, z=B)]),
    "a dataclass": State(A, layer=3),
    "a frozen one with slots": Frozen(State(A, B), ("a", "b")),
    "one with more than fields": computed(),
    "one inside a class": Outer.Inner({"x": A}),
    "named tuples": (Pair(A), Point(1, Pair(B, C))),
    "what max gives": torch.ones(2, 3).max(1),
    "a model's output": Answer(logits=A, layers=(B, None)),
    "a model's output with one field": Answer(layers={"a": A}),
}
