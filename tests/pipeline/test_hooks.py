"""Functions that are called before and after actions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from penstock import ActionEvent, Pipeline, PipelineStage
from penstock.errors import ScheduleError, StageError, UsageError
from penstock.schedule import Op, merged
from penstock.testing import WorkerPool
from tests.pipeline.models import X, Y, chain, make, mean_loss


def noted(pipe: Pipeline, which: Any) -> list[tuple[str, ActionEvent]]:
    seen: list[tuple[str, ActionEvent]] = []
    pipe.on(
        which,
        before=lambda event: seen.append(("before", event)),
        after=lambda event: seen.append(("after", event)),
    )
    return seen


def texts(seen: list[tuple[str, ActionEvent]]) -> list[str]:
    return [f"{when} {event.action}" for when, event in seen]


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B", "ZB-H1"])
def test_every_action_of_the_schedule_is_seen_before_and_after(schedule: str) -> None:
    pipe = make(schedule=schedule)
    seen = noted(pipe, "*")
    assert pipe.step(X, target=Y).loss == make().step(X, target=Y).loss
    # In one process no messages travel.
    actions = [str(a) for a in merged(pipe.schedule)]
    assert sorted(texts(seen)) == sorted(f"{w} {a}" for a in actions for w in ("before", "after"))


def test_values_and_gradients() -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(X.shape[1], X.shape[1], dtype=X.dtype) for _ in range(2)]
    stages = [PipelineStage(layer, index, 2) for index, layer in enumerate(layers)]
    pipe = Pipeline.from_stages(stages, schedule="1F1B", microbatches=1, loss_fn=mean_loss)
    seen = noted(pipe, "*")
    pipe.step(X, target=Y)
    found = {f"{when} {event.action}": event for when, event in seen}
    first, last = layers
    hidden = first(X).detach().requires_grad_()
    assert found["before 0F0"].outputs is None
    (given,), named = found["after 0F0"].inputs
    assert (torch.equal(given, X), named) == (True, {})
    assert torch.equal(found["after 0F0"].outputs, hidden)
    mean_loss(last(hidden), Y).backward()
    (wanted,) = found["after 1B0"].outputs
    assert torch.equal(wanted, hidden.grad)
    assert torch.equal(found["before 0B0"].inputs[0], hidden.grad)
    assert list(found["after 0B0"].outputs) == []
    assert [found[f"after {stage}F0"].rank for stage in (0, 1)] == [0, 1]
    assert found["before 1F0"].module is last


def test_a_stage_that_was_cut_shows_what_arrives_and_what_it_sends() -> None:
    pipe = make(microbatches=1)
    seen = noted(pipe, "*F*")
    pipe.step(X, target=Y)
    found = {f"{when} {event.action}": event for when, event in seen}
    output, sent = found["after 0F0"].outputs
    (arrived, *_), _ = found["after 1F0"].inputs
    assert output is None
    assert sent.keys() == arrived.keys()
    assert all(torch.equal(sent[name], arrived[name]) for name in sent)


def test_weights_have_neither() -> None:
    pipe = make(schedule="ZB-H1")
    seen = noted(pipe, "*W*")
    pipe.step(X, target=Y)
    assert len(seen) == 16
    assert {(event.inputs, event.outputs) for _, event in seen} == {(None, None)}


def test_a_function_chooses() -> None:
    pipe = make()
    seen = noted(pipe, lambda action: action.op is Op.F and action.microbatch == 2)
    pipe.step(X, target=Y)
    assert sorted(texts(seen)) == sorted(f"{w} {s}F2" for s in (0, 1) for w in ("before", "after"))


def test_hooks_run_in_their_order_until_they_are_removed() -> None:
    pipe, seen = make(), list[str]()
    handle = pipe.on("0F0", before=lambda event: seen.append("first"))
    with pipe.on("0F0", before=lambda event: seen.append("second")):
        pipe.step(X, target=Y)
    pipe.step(X, target=Y)
    handle.remove()
    handle.remove()
    pipe.step(X, target=Y)
    assert seen == ["first", "second", "first"]


def test_evaluation_is_seen_too() -> None:
    pipe = make()
    modes: list[bool] = []
    pipe.on("*F*", before=lambda event: modes.append(event.module.training))
    pipe.predict(X)
    assert modes == [False] * 8


@pytest.mark.parametrize("text", ["1F2", "1B2", "0B2"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_what_a_hook_raises_names_the_action(text: str, when: str) -> None:
    pipe = make()

    def fails(event: ActionEvent) -> None:
        raise KeyError("mine")

    pipe.on(
        text, before=fails if when == "before" else None, after=fails if when == "after" else None
    )
    says = (
        rf"stage {text[0]}, microbatch 2, action {text}: the hook {when} '{text}' raised KeyError"
    )
    with pytest.raises(StageError, match=says) as caught:
        pipe.step(X, target=Y)
    assert isinstance(caught.value.__cause__, KeyError)


def test_what_is_no_hook() -> None:
    pipe = make()
    with pytest.raises(UsageError, match="before= or after="):
        pipe.on("0F0")
    with pytest.raises(UsageError, match="before= or after="):
        pipe.on("0F0", before="print")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="pattern"):
        pipe.on(3, before=print)  # type: ignore[arg-type]
    with pytest.raises(ScheduleError, match="matches no kind of action"):
        pipe.on("F", before=print)


def seen_on_rank(group: Any) -> list[str]:
    """A worker's task: what a rank sees."""
    with make(chain(), ranks=None, group=group) as pipe:
        seen = noted(pipe, "**0")
        pipe.step(X, target=Y)
        return texts(seen)


def test_each_process_sees_its_own(workers: WorkerPool) -> None:
    first, last = workers.run("tests.pipeline.test_hooks:seen_on_rank", 2)
    assert {text.split()[1][0] for text in first} == {"0"}
    assert {text.split()[1][0] for text in last} == {"1"}
    assert {"after 1RECV_F0", "before 1B0"} <= set(last)
