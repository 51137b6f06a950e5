"""Finding what a stage gives without leaving a trace in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock.specs import ValueSpec, infer_output, spec_of_arguments

CPU = torch.device("cpu")


class Cached(nn.Module):
    """Keeps a table that it makes on first use, as rotary positions do."""

    table: Tensor | None = None
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.table is None:
            self.table = torch.arange(x.shape[-1], device=x.device)
        return x + self.table


class Reads(nn.Module):
    """Looks at data, which the meta device has not."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return x * self.weight + torch.rand(3) if float(x.detach().sum()) == 0 else x[:0]


class Uncopyable(nn.Linear):
    def __deepcopy__(self, memo: dict[int, Any]) -> Uncopyable:
        raise TypeError("holds a lock")


class InPlace(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2)


class Several(nn.Module):
    def forward(self, x: Tensor, *, scale: float, mask: Tensor) -> dict[str, Any]:
        return {"hidden": x * scale, "mask": mask, "layers": 3}


class Refuses(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise KeyError("not today")


MODULES: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(3, 3),
    "frozen": lambda: nn.Linear(3, 3).requires_grad_(False),
    "dropout": lambda: nn.Dropout(0.5),
    "batch norm": lambda: nn.BatchNorm1d(3),
    "cached": Cached,
    "reads": Reads,
    "cannot be copied": lambda: Uncopyable(3, 3),
    "in place": InPlace,
    "tuple": lambda: nn.RNN(3, 3),
}


def infer(module: nn.Module, *args: Any, **kwargs: Any) -> ValueSpec:
    return infer_output(module, spec_of_arguments(args, kwargs), CPU)


def traces(module: nn.Module) -> dict[str, Any]:
    """Everything that a call could leave behind."""
    plain = {key: value for key, value in vars(module).items() if not key.startswith("_")}
    grads = {name: p.grad for name, p in module.named_parameters()}
    state = {name: t.tolist() for name, t in module.state_dict().items()}
    return {"plain": plain, "grads": grads, "state": state, "rng": torch.get_rng_state().tolist()}


@pytest.mark.parametrize("name", sorted(MODULES))
@pytest.mark.parametrize("learns", [True, False])
def test_the_spec_is_that_of_the_real_output(name: str, learns: bool) -> None:
    x = torch.zeros(4, 3, requires_grad=learns)
    module = MODULES[name]()
    expected = ValueSpec.of(MODULES[name]()(x * 1 if learns else x))
    assert infer(module, x) == expected


@pytest.mark.parametrize("name", sorted(MODULES))
def test_it_leaves_no_trace(name: str) -> None:
    module = MODULES[name]()
    before = traces(module)
    infer(module, torch.zeros(4, 3))
    assert traces(module) == before


@pytest.mark.parametrize("name", ["linear", "reads"])
def test_it_leaves_parameters_where_they_are(name: str) -> None:
    module = MODULES[name]()
    before = list(module.parameters())
    infer(module, torch.zeros(4, 3))
    assert all(a is b for a, b in zip(module.parameters(), before, strict=True))


def test_arguments_by_name_and_plain_values() -> None:
    spec = infer(Several(), torch.zeros(2), scale=2.0, mask=torch.ones(2).bool())
    assert [str(tensor) for tensor in spec.tensors] == ["float32[2]", "bool[2]"]
    assert spec.fill(["hidden", "mask"]) == {"hidden": "hidden", "mask": "mask", "layers": 3}


def test_what_the_module_raises_for_real_is_raised() -> None:
    with pytest.raises(KeyError, match="not today"):
        infer(Refuses(), torch.zeros(2))


def test_wrong_shapes_are_told_by_torch() -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        infer(nn.Linear(3, 3), torch.zeros(2, 4))
