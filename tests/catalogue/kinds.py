"""Chains whose modules give each other values of many kinds."""

from __future__ import annotations

import enum
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import InitVar, dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

from penstock.testing import Case

WIDTH = 4
X = torch.linspace(-1, 1, 8 * WIDTH, dtype=torch.float64).reshape(8, WIDTH)


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
    """Cannot be made by a call with its fields."""

    width: InitVar[int]
    x: Tensor
    total: Tensor = field(init=False)

    def __post_init__(self, width: int) -> None:
        self.total = self.x * width


class Pair(NamedTuple):
    first: Any
    second: Any = None


class Outer:
    @dataclass
    class Inner:
        x: Any


class Cache:
    """Of no kind that Penstock knows; registered with torch."""

    def __init__(self, keys: Tensor, length: int) -> None:
        self.keys, self.length = keys, length


pytree.register_pytree_node(
    Cache,
    lambda cache: ([cache.keys, cache.length], None),
    lambda items, _: Cache(*items),
    serialized_type_name="tests.catalogue.kinds.Cache",
)


class Rows(list[Any]):
    """A list of a class of its own."""

    def total(self) -> Any:
        return self[0]


class Table(dict[str, Any]):
    """A dict of a class of its own."""


class Mode(enum.Enum):
    FAST = "fast"


class Kind(NamedTuple):
    """How a hidden tensor becomes a value, and a value a hidden tensor."""

    wrap: Callable[[Tensor], Any]
    unwrap: Callable[[Any], Tensor]


def typed(h: Tensor) -> dict[str, Tensor]:
    x = h.detach()
    return {
        "h": h,
        "bfloat16": x.bfloat16(),
        "float8": x.to(torch.float8_e4m3fn),
        "int8": (x * 9).to(torch.int8),
        "uint16": (x.abs() * 9).to(torch.int64).to(torch.uint16),
        "bool": x > 0,
        "complex64": torch.complex(x.float(), -x.float()),
    }


def untyped(value: dict[str, Tensor]) -> Tensor:
    h = value.pop("h")
    for tensor in value.values():
        h = h + (tensor.imag if tensor.is_complex() else tensor.double()) * 0.1
    return h


def noted(h: Tensor) -> Any:
    state: Any = State(h)
    state.more = h * 2
    return state


KINDS: dict[str, Kind] = {
    "dict": Kind(
        lambda h: {"hidden": h, "mask": h.detach() > 0, "scale": 2.0, "none": None, "text": "a"},
        lambda v: v["hidden"] * v["mask"] * v["scale"] + v["hidden"],
    ),
    "dataclass": Kind(
        lambda h: State(h, h.detach() > 0, layer=3), lambda v: v.hidden * v.mask * v.layer
    ),
    "nested dataclasses": Kind(
        lambda h: Frozen(State(h), ("a",)), lambda v: v.inner.hidden * len(v.names)
    ),
    "dataclass with a computed field": Kind(lambda h: Computed(3, h), lambda v: v.total + v.x),
    "class inside a class": Kind(lambda h: Outer.Inner([h, h * 2]), lambda v: v.x[0] - v.x[1]),
    "named tuple": Kind(lambda h: Pair(h, Pair(h * 2, 3)), lambda v: v.first + v.second.first),
    "tuple": Kind(lambda h: ((), h, 3, True), lambda v: v[1] * v[2]),
    "ordered and default dicts": Kind(
        lambda h: OrderedDict(a=h, b=defaultdict(list, x=[h * 2])),
        lambda v: v["a"] + v["b"]["x"][0] + len(v["b"]["new"]),
    ),
    "registered with torch": Kind(lambda h: Cache(h, 2), lambda v: v.keys * v.length),
    "types": Kind(typed, untyped),
    "complex": Kind(lambda h: torch.complex(h, h * 2), lambda v: v.real + v.imag.sin()),
    "conjugated": Kind(lambda h: torch.complex(h, h * 2).conj(), lambda v: v.real - v.imag),
    "negated": Kind(lambda h: torch.complex(h, h * 2).conj().imag, lambda v: v.cos()),
    "transposed": Kind(lambda h: h.t(), lambda v: v.t()),
    "expanded": Kind(lambda h: h[:, None].expand(-1, 3, -1), lambda v: v.cos().sum(1)),
    "sliced": Kind(lambda h: torch.cat([h, h], 1)[:, ::2], lambda v: v * 2),
    "without elements": Kind(
        lambda h: {"h": h, "empty": h[:, :0], "mask": h[:0] > 0},
        lambda v: v["h"] + v["empty"].sum(1, keepdim=True) + v["mask"].sum(),
    ),
    "without dimensions": Kind(
        lambda h: {"h": h, "two": h.sum() * 0 + 2, "n": torch.tensor(3)},
        lambda v: v["h"] * v["two"] * v["n"],
    ),
    "one tensor twice": Kind(lambda h: [h, {"again": h}], lambda v: v[0] * v[1]["again"]),
    "what max gives": Kind(
        lambda h: {"max": h.max(1, keepdim=True)}, lambda v: v["max"].values + v["max"].indices
    ),
    "packed": Kind(
        lambda h: {"packed": PackedSequence(h, torch.tensor([len(h)], device="cpu"))},
        lambda v: v["packed"].data,
    ),
    "list and dict of classes of their own": Kind(
        lambda h: Rows([h, Table(h=h * 2)]), lambda v: v.total() + v[1]["h"] * (type(v) is Rows)
    ),
    "an attribute that is no field": Kind(noted, lambda v: v.hidden + v.more),
    "changed in place": Kind(
        lambda h: {"h": h * 1, "mask": h.detach() > 0},
        lambda v: v["h"].mul_(v["mask"].logical_not_()),
    ),
}
ONLY_CUT: dict[str, Kind] = {
    "constants": Kind(
        lambda h: {
            "h": h,
            "mode": Mode.FAST,
            "cut": slice(0, WIDTH),
            "dtype": h.dtype,
            "size": h.shape,
        },
        lambda v: v["h"][:, v["cut"]].to(v["dtype"]).reshape(v["size"]) * (v["mode"] is Mode.FAST),
    ),
}
"""These cannot travel; where the author's forward is cut, only tensors do, and each stage has the rest."""


class Layer(nn.Module):
    """A linear layer between two kinds of value; ``None`` is a plain tensor."""

    def __init__(self, takes: Kind | None, gives: Kind | None) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.takes, self.gives = takes, gives

    def forward(self, *values: Any) -> Any:
        # A tuple that a stage by hand returns comes as several arguments.
        value = values[0] if len(values) == 1 else values
        hidden: Any = value if self.takes is None else self.takes.unwrap(value)
        if hidden.shape[-1] == 1:
            hidden = hidden.expand(-1, WIDTH)
        hidden = torch.tanh(self.lin(hidden))
        return hidden if self.gives is None else self.gives.wrap(hidden)


def loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def layers(kind: Kind) -> list[Layer]:
    torch.manual_seed(0)
    return [Layer(None, kind), Layer(kind, kind), Layer(kind, kind), Layer(kind, None)]


def case_of(kind: Kind) -> Case:
    return Case(nn.Sequential(*layers(kind)), (X,), X.flip(0), loss)
