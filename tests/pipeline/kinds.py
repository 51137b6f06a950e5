"""Chains whose modules give each other values of many kinds."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock.testing import Case, compare
from tests.pipeline.zoo import Answer, Frozen, Mode, Outer, Pair, Point, State

WIDTH = 4
X = torch.linspace(-1, 1, 8 * WIDTH, dtype=torch.float64).reshape(8, WIDTH)


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
        "float16": x.half(),
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


def with_constants(h: Tensor) -> dict[Any, Any]:
    return {
        "h": h,
        "mode": Mode.FAST,
        "cut": slice(0, WIDTH),
        "dtype": torch.float64,
        "size": torch.Size([1, WIDTH]),
        "times": [1, True, 0.5, None, 1 + 2j],
        Mode.SLOW: "text",
    }


def use_constants(value: dict[Any, Any]) -> Tensor:
    assert value["mode"] is Mode.FAST
    assert value[Mode.SLOW] == "text"
    ones = torch.ones(value["size"], dtype=value["dtype"])
    one, true, half, none, number = value["times"]
    assert true is True
    assert none is None
    found: Tensor = value["h"][:, value["cut"]] * ones * half * one * number.imag
    return found


KINDS: dict[str, Kind] = {
    "dict": Kind(
        lambda h: {"hidden": h, "mask": h.detach() > 0, "scale": 2.0, "none": None},
        lambda v: v["hidden"] * v["mask"] * v["scale"] + v["hidden"],
    ),
    "dataclass": Kind(
        lambda h: State(h, h.detach() > 0, layer=3), lambda v: v.hidden * v.mask * v.layer
    ),
    "nested dataclasses": Kind(
        lambda h: Frozen(State(h), ("a",)), lambda v: v.inner.hidden * len(v.names)
    ),
    "class inside a class": Kind(lambda h: Outer.Inner([h, h * 2]), lambda v: v.x[0] - v.x[1]),
    "named tuple": Kind(lambda h: Pair(h, Point(h * 2, 3)), lambda v: v.first + v.second.x),
    "a tuple of one": Kind(lambda h: (h,), lambda v: v[0]),
    "an empty tuple inside": Kind(lambda h: ((), h, ()), lambda v: v[1]),
    "None and numbers": Kind(lambda h: (h, None, 3, True, "text"), lambda v: v[0] * v[2]),
    "ordered and default dicts": Kind(
        lambda h: OrderedDict(a=h, b=defaultdict(list, x=[h * 2])),
        lambda v: v["a"] + v["b"]["x"][0] + len(v["b"]["new"]),
    ),
    "a model's output": Kind(
        lambda h: Answer(logits=h, layers=(h * 2, None)), lambda v: v["logits"] + v.layers[0]
    ),
    "what max gives": Kind(lambda h: h.max(1, keepdim=True), lambda v: v.values + v.indices),
    "constants": Kind(with_constants, use_constants),
    "types": Kind(typed, untyped),
    "complex": Kind(lambda h: torch.complex(h, h * 2), lambda v: v.real + v.imag.sin()),
    "conjugated": Kind(lambda h: torch.complex(h, h * 2).conj(), lambda v: v.real - v.imag),
    "negated": Kind(lambda h: torch.complex(h, h * 2).conj().imag, lambda v: v.cos()),
    "transposed": Kind(lambda h: h.t(), lambda v: v.t()),
    "permuted": Kind(
        lambda h: torch.stack([h, h * 2, h.sin()]).permute(2, 0, 1), lambda v: v.sum(1).t()
    ),
    "expanded": Kind(lambda h: h[:, None].expand(-1, 3, -1), lambda v: v.cos().sum(1)),
    "a mask that is expanded": Kind(
        lambda h: (h, (h.detach()[:, :1] > 0).expand(-1, WIDTH)), lambda v: v[0] * v[1]
    ),
    "sliced": Kind(lambda h: torch.cat([h, h], 1)[:, ::2], lambda v: v * 2),
    "without elements": Kind(
        lambda h: {"h": h, "empty": h[:, :0], "none": h.new_zeros(0), "mask": h[:0] > 0},
        lambda v: v["h"] + v["empty"].sum(1, keepdim=True) + v["none"].sum() + v["mask"].sum(),
    ),
    "without dimensions": Kind(
        lambda h: {"h": h, "two": h.sum() * 0 + 2, "n": torch.tensor(3)},
        lambda v: v["h"] * v["two"] * v["n"],
    ),
    "one tensor twice": Kind(lambda h: [h, {"again": h}], lambda v: v[0] * v[1]["again"]),
    "changed in place": Kind(lambda h: h * 1, lambda v: v.relu_() + 0.5),
    "changed in place inside": Kind(
        lambda h: {"h": h * 1, "mask": h.detach() > 0},
        lambda v: v["h"].mul_(v["mask"].logical_not_()),
    ),
}


class Layer(nn.Module):
    """A linear layer between two kinds of value; ``None`` is a plain tensor."""

    def __init__(self, takes: str | None, gives: str | None) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.takes, self.gives = takes, gives

    def forward(self, value: Any) -> Any:
        hidden = value if self.takes is None else KINDS[self.takes].unwrap(value)
        if hidden.shape[-1] == 1:
            hidden = hidden.expand(-1, WIDTH)
        hidden = torch.tanh(self.lin(hidden))
        return hidden if self.gives is None else KINDS[self.gives].wrap(hidden)


def loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def case_of(kind: str) -> Case:
    torch.manual_seed(0)
    model = nn.Sequential(
        Layer(None, kind), Layer(kind, kind), Layer(kind, kind), Layer(kind, None)
    )
    return Case(model, (X,), X.flip(0), loss)


def run_kinds(group: Any, schedule: str, kinds: list[str]) -> dict[str, Any]:
    """A worker's task: for each kind the largest difference from the unsplit model, and the bits."""
    found = {}
    for kind in kinds:
        verdict = compare(
            case_of(kind), schedule=schedule, ranks=2, microbatches=4, group=group, steps=2
        )
        found[kind] = [max(verdict.differences().values()), verdict.digest()]
    return found
