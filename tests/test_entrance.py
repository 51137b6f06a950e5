"""How values come into a stage: own tensors, copies of what it changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock import PipelineStage
from penstock.errors import SpecError
from penstock.stage import Entrance


class Does(nn.Module):
    """Does something to its first argument; gives a sum of all."""

    def __init__(self, what: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.what = what

    def forward(self, x: Tensor, *others: Tensor, **named: Any) -> Tensor:
        self.what(x)
        return x + sum(other.sum() for other in others)


def stage_of(what: Callable[[Tensor], Any]) -> PipelineStage:
    return PipelineStage(Does(what), 0, 1)


CHANGES: dict[str, Callable[[Tensor], Any]] = {
    "relu_": torch.relu_,
    "an item": lambda x: x.__setitem__(0, 5.0),
    "through a view": lambda x: x.view(-1)[:2].mul_(3),
    "out=": lambda x: torch.neg(x.detach(), out=x.detach()),
}


def values(**asks: Any) -> Tensor:
    return torch.linspace(-1, 1, 6, dtype=torch.float64, **asks).reshape(2, 3)


@pytest.mark.parametrize("learns", [True, False])
@pytest.mark.parametrize("name", sorted(CHANGES))
def test_a_change_in_place_is_seen_by_the_stage_alone(name: str, learns: bool) -> None:
    stage = stage_of(CHANGES[name])
    expected = values()
    CHANGES[name](expected)
    for microbatch in range(3):
        x = values().requires_grad_(learns)
        assert torch.equal(stage.forward(microbatch, (x,)), expected)
        assert torch.equal(x, values())
        assert stage.changed == [0]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode: Callable[[], Any]) -> None:
    stage = stage_of(torch.relu_)
    with mode():
        x = values()
        for microbatch in range(3):
            assert torch.equal(stage.forward(microbatch, (x,)), values().relu())
            assert torch.equal(x, values())


def test_a_batch_made_in_inference_mode() -> None:
    with torch.inference_mode():
        x = values()
    stage = stage_of(torch.relu_)
    for microbatch in range(2):
        assert torch.equal(stage.forward(microbatch, (x,)), values().relu())
        assert torch.equal(x, values())


def test_the_gradient_is_that_of_the_plain_module() -> None:
    stage, x, plain = stage_of(torch.relu_), values().requires_grad_(), values().requires_grad_()
    (plain * 1).relu_().square().sum().backward()
    for microbatch in range(2):
        output = stage.forward(microbatch, (x,))
        (found,) = stage.backward(microbatch, [2 * output.detach()])
        assert found is not None
        assert plain.grad is not None
        assert torch.equal(found, plain.grad)


def test_only_what_changes_is_copied() -> None:
    seen: list[int] = []
    stage = stage_of(lambda x: seen.append(x.data_ptr()))
    pointers = []
    for microbatch in range(3):
        x = values()
        pointers.append(x.data_ptr())
        stage.forward(microbatch, (x,))
    assert [a == b for a, b in zip(seen, pointers, strict=True)] == [False, True, True]
    assert stage.changed == []


def test_each_shape_and_mode_is_learned_by_itself() -> None:
    seen: list[Tensor] = []

    def look(x: Tensor) -> None:
        seen.append(x)
        if len(x) == 1:
            x.relu_()

    stage = stage_of(look)
    short, long = values()[:1], values()
    for x in (long, short, short, long):
        stage.forward(len(seen), (x,))
    assert torch.equal(short, values()[:1])
    stage.module.eval()
    stage.forward(9, (long,))
    assert [t.data_ptr() == long.data_ptr() for t in seen] == [False, False, False, True, False]


def test_a_change_that_comes_late_is_an_error() -> None:
    calls: list[int] = []
    stage = stage_of(lambda x: calls.append(1) if not calls else x.relu_())
    stage.forward(0, (values(), values()))
    with pytest.raises(SpecError, match=r"stage 0 changed \[0\] of its arguments in place, which"):
        stage.forward(1, (values(), values()))


def test_a_change_of_an_argument_by_name_is_told_by_its_path() -> None:
    entrance = Entrance(2)
    for change in (False, True):
        entered = entrance.enter((values(),), {"deep": {"y": values()}}, training=True)
        if change:
            entered.call[1]["deep"]["y"].zero_()
            with pytest.raises(SpecError, match=r"stage 2 changed \[1\]\['deep'\]\['y'\] of its"):
                entrance.leave(entered)
        else:
            assert entrance.leave(entered) == []


STRIDED: dict[str, Callable[[], Tensor]] = {
    "transposed": lambda: torch.rand(3, 2).t(),
    "sliced": lambda: torch.rand(4, 6)[::2, 1::2],
    "expanded": lambda: torch.rand(2, 1, 3).expand(2, 4, 3),
    "expanded from a number": lambda: torch.tensor(2.0).expand(2, 2),
    "empty": lambda: torch.rand(0, 3).t(),
    "of one": lambda: torch.rand(1, 4)[:, ::2],
}


@pytest.mark.parametrize("name", sorted(STRIDED))
def test_copies_lie_as_their_originals(name: str) -> None:
    original = STRIDED[name]()
    entered = Entrance(0).enter((original,), {}, training=True)
    (copy,) = entered.call[0]
    assert torch.equal(copy, original)
    assert copy.stride() == original.stride()
    assert not original.numel() or copy.data_ptr() != original.data_ptr()


def test_windows_that_overlap_are_copied_somehow() -> None:
    original = torch.arange(5.0).unfold(0, 3, 1)
    (copy,) = Entrance(0).enter((original,), {}, training=True).call[0]
    assert torch.equal(copy, original)


def test_what_a_module_asks_of_a_tensor_is_asked_of_no_other() -> None:
    mask = torch.zeros(2)
    stage = stage_of(lambda x: x.requires_grad_())
    for microbatch in range(2):
        stage.forward(microbatch, (mask,))
        assert not mask.requires_grad


def test_containers_are_the_stages_own() -> None:
    stage = PipelineStage(Appends(), 0, 1)
    given = {"items": [values()], "count": 0}
    stage.forward(0, (given,))
    assert (len(given["items"]), given["count"]) == (1, 0)  # type: ignore[arg-type]


class Appends(nn.Module):
    def forward(self, given: dict[str, Any]) -> Tensor:
        given["items"].append(given["items"][0])
        given["count"] += 1
        total: Tensor = sum(given["items"])
        return total


def test_a_hook_fires_once_a_microbatch_and_step() -> None:
    fired: list[int] = []
    stage = stage_of(lambda x: x.register_hook(lambda grad: fired.append(1)))
    x = values().requires_grad_()
    for step in range(4):
        for microbatch in range(2):
            stage.forward(microbatch, (x,))
        for microbatch in range(2):
            stage.backward(microbatch, [torch.ones(2, 3, dtype=torch.float64)])
        assert len(fired) == 2 * (step + 1)


def test_what_was_learned_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.stage.entrance._REMEMBERED", 3)
    entrance = Entrance(0)
    for length in range(8):
        entrance.leave(entrance.enter((torch.zeros(length),), {}, training=True))
    assert len(entrance._changes) <= 3
