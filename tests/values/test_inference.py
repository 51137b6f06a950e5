"""Finding what a stage gives without leaving a trace in it."""

from __future__ import annotations

import copy
import random
import threading
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from penstock.values import ValueSpec, infer_output, spec_of_arguments

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


class Counts(nn.Module):
    """Counts and keeps what it sees in its own attributes; reads data where asked."""

    def __init__(self, *, reads: bool = False, copyable: bool = True) -> None:
        super().__init__()
        self.calls, self.reads, self.copyable = 0, reads, copyable
        self.seen: list[Any] = []
        self.notes: dict[str, Any] = {"shapes": []}
        self.table = torch.ones(3)
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(tuple(x.shape))
        self.notes["last"] = x
        self.table += random.random() + np.random.rand()
        if self.reads and float(x.detach().sum()) > 1:
            return x[:0]
        found: Tensor = self.norm(x) + self.table + torch.rand(3, device=x.device)
        return found

    def __deepcopy__(self, memo: dict[int, Any]) -> Counts:
        if not self.copyable:
            raise TypeError("holds a lock")
        made = Counts.__new__(Counts)
        memo[id(self)] = made
        vars(made).update({k: copy.deepcopy(v, memo) for k, v in vars(self).items()})
        return made


class Grown(nn.Module):
    """Keeps a tensor with a graph, which deepcopy refuses."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.last: Tensor | None = None
        self(torch.zeros(2, 3))

    def forward(self, x: Tensor) -> Tensor:
        self.last = x * self.weight
        return self.last


def spectral() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.utils.spectral_norm(nn.Linear(3, 3))


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
    "counts": Counts,
    "counts and reads": lambda: Counts(reads=True),
    "counts and cannot be copied": lambda: Counts(reads=True, copyable=False),
    "holds a graph": Grown,
    "spectral norm": spectral,
    "parametrized": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3)),
}


def infer(module: nn.Module, *args: Any, **kwargs: Any) -> ValueSpec:
    return infer_output(module, spec_of_arguments(args, kwargs), CPU)


def traces(module: nn.Module) -> dict[str, Any]:
    """Everything that a call could leave behind."""
    plain = {key: value for key, value in vars(module).items() if not key.startswith("_")}
    grads = {name: p.grad for name, p in module.named_parameters()}
    state = {name: t.tolist() for name, t in module.state_dict().items()}
    versions = [parameter._version for parameter in module.parameters()]
    rng = (torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist())  # type: ignore[index]
    return {
        "plain": {key: repr(value) for key, value in plain.items()},
        "same": {key: id(value) for key, value in plain.items()},
        "grads": grads,
        "state": state,
        "versions": versions,
        "rng": rng,
    }


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


@pytest.mark.parametrize("name", ["linear", "reads", "counts and cannot be copied"])
def test_gradients_that_are_there_stay(name: str) -> None:
    module = MODULES[name]()
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    infer(module, torch.zeros(4, 3))
    assert all(p.grad is not None and bool((p.grad == 1).all()) for p in module.parameters())


# ---- hooks

NOTED: list[Any] = []


def notes(module: nn.Module, args: Any, output: Any) -> None:
    NOTED.append(output.shape)


def notes_and_changes(module: nn.Module, args: Any, output: Any) -> Any:
    NOTED.append(output.shape)
    return output.double()


def learns(module: nn.Module, args: Any, output: Any) -> None:
    output.requires_grad_(True)


def noted(value: Any, times: int = 1) -> None:
    return noted(value, times - 1) if times else NOTED.append(value)


class Recorder:
    def __init__(self) -> None:
        self.calls: list[Any] = []

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        self.calls.append(output)

    def method(self, module: nn.Module, args: Any) -> None:
        self.calls.append(args)


RECORDER = Recorder()


@pytest.mark.parametrize("reads", [False, True])
def test_hooks_that_note_something_note_nothing(reads: bool) -> None:
    module, recorder, mine = Counts(reads=reads), Recorder(), list[Any]()
    module.norm.register_forward_hook(recorder)
    module.register_forward_pre_hook(recorder.method)
    module.register_forward_hook(notes)
    module.register_forward_hook(lambda *_: mine.append(1))
    module.norm.register_forward_pre_hook(lambda *_: NOTED.append(1))
    infer(module, torch.zeros(4, 3))
    assert (NOTED, recorder.calls, mine) == ([], [], [])
    module(torch.zeros(4, 3))
    assert (len(NOTED), len(recorder.calls), len(mine)) == (2, 2, 1)
    NOTED.clear()


@pytest.mark.parametrize("copyable", [False, True])
def test_hooks_that_change_something_do(copyable: bool) -> None:
    module = Counts(reads=not copyable, copyable=copyable).requires_grad_(False)
    module.register_forward_hook(notes_and_changes)
    module.register_forward_hook(learns)
    module.register_forward_hook(partial(lambda times, module, args, output: [output] * times, 2))
    found = infer(module, torch.zeros(4, 3))
    assert [str(tensor) for tensor in found.tensors] == ["float64[4, 3], requires grad"] * 2
    assert NOTED == []
    assert len(module._forward_hooks) == 3


def test_hooks_that_note_something_through_a_function_note_nothing() -> None:
    module, mine, recorder = nn.Linear(3, 3), list[Any](), Recorder()

    def note(value: Any) -> None:
        mine.append(value)

    module.register_forward_hook(lambda module, args, output: noted(output))
    module.register_forward_hook(lambda module, args, output: note(output))
    module.register_forward_hook(lambda module, args, output: recorder(module, args, output))
    module.register_forward_hook(lambda module, args, output: RECORDER(module, args, output))
    module.register_forward_hook(lambda module, args, output: next(map(noted, output)))
    infer(module, torch.zeros(1, 3))
    assert (NOTED, mine, recorder.calls, RECORDER.calls) == ([], [], [], [])
    module(torch.zeros(1, 3))
    assert (len(NOTED), len(mine), len(recorder.calls), len(RECORDER.calls)) == (2, 1, 1, 1)
    NOTED.clear()
    RECORDER.calls.clear()


def test_a_hook_that_cannot_be_copied_is_not_called() -> None:
    module, lock = nn.Linear(3, 3), threading.Lock()
    module.register_forward_hook(lambda module, args, output: output.double() if lock else output)
    assert str(infer(module, torch.zeros(1, 3)).tensors[0]) == "float32[1, 3], requires grad"


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
