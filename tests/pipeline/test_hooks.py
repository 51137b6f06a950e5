"""Functions that are called before and after actions and steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from penstock import ActionEvent, Pipeline, PipelineStage, StepEvent
from penstock.errors import ScheduleError, StageError, UsageError
from penstock.schedule import Op, merged
from tests.pipeline.models import X, Y, make, mean_loss
from tests.processes import in_processes

Seen = dict[str, ActionEvent]


def seen_by(pipe: Pipeline, which: Any = "*") -> Seen:
    """What hooks are shown, by when and the action."""
    seen: Seen = {}
    pipe.on(
        which,
        before=lambda event: seen.update({f"before {event.action}": event}),
        after=lambda event: seen.update({f"after {event.action}": event}),
    )
    return seen


def test_the_actions_that_are_meant_are_seen_before_and_after() -> None:
    choices: list[tuple[Any, Callable[[Any], bool]]] = [
        ("*", lambda action: True),
        ("*W*", lambda action: action.op is Op.W),
        (lambda action: action.microbatch == 2, lambda action: action.microbatch == 2),
    ]
    for which, meant in choices:
        pipe = make(schedule="ZB-H1")
        seen = seen_by(pipe, which)
        assert pipe.step(X, target=Y).loss == make().step(X, target=Y).loss
        # In one process no messages travel.
        actions = [action for action in merged(pipe.schedule) if meant(action)]
        assert seen.keys() == {
            f"{way} {action}" for action in actions for way in ("before", "after")
        }
        weights = [event for event in seen.values() if event.action.op is Op.W]
        assert {(event.inputs, event.outputs) for event in weights} <= {(None, None)}


def test_values_and_gradients() -> None:
    torch.manual_seed(0)
    first, last = (nn.Linear(X.shape[1], X.shape[1], dtype=X.dtype) for _ in range(2))
    stages = [PipelineStage(layer, index, 2) for index, layer in enumerate((first, last))]
    pipe = Pipeline.from_stages(stages, schedule="1F1B", microbatches=1, loss_fn=mean_loss)
    seen = seen_by(pipe)
    pipe.step(X, target=Y)
    hidden = first(X).detach().requires_grad_()
    mean_loss(last(hidden), Y).backward()
    assert seen["before 0F0"].outputs is None
    (value,), named = seen["after 0F0"].inputs
    assert (torch.equal(value, X), named) == (True, {})
    assert torch.equal(seen["after 0F0"].outputs, hidden)
    assert torch.equal(seen["after 1B0"].outputs[0], hidden.grad)
    assert torch.equal(seen["before 0B0"].inputs[0], hidden.grad)
    assert list(seen["after 0B0"].outputs) == []
    assert [seen[f"after {stage}F0"].rank for stage in (0, 1)] == [0, 1]
    assert seen["before 1F0"].module is last


def test_a_stage_that_was_cut_shows_what_arrives_and_what_it_sends() -> None:
    pipe = make(microbatches=1)
    seen = seen_by(pipe, "*F*")
    pipe.predict(X)
    output, sent = seen["after 0F0"].outputs
    (arrived, *_), _ = seen["after 1F0"].inputs
    assert output is None
    assert sent.keys() == arrived.keys()
    assert all(torch.equal(sent[name], arrived[name]) for name in sent)


def test_hooks_run_in_their_order_until_they_are_removed() -> None:
    pipe, seen = make(), list[str]()
    handle = pipe.on("0F0", before=lambda event: seen.append("first"))
    step = pipe.on_step(lambda event: seen.append(f"after {event.step}"))
    with pipe.on("0F0", before=lambda event: seen.append("second")):
        pipe.step(X, target=Y)
    with pipe.on_step(before=lambda event: seen.append(f"before {event.step}")):
        pipe.step(X, target=Y)
    for one in (handle, handle, step):
        one.remove()
    pipe.step(X, target=Y)
    assert seen == ["first", "second", "after 1", "before 2", "first", "after 2"]


@pytest.mark.parametrize(("text", "when"), [("1F2", "before"), ("1B2", "after")])
def test_what_a_hook_raises_names_the_action_or_is_raised_by_the_step(text: str, when: str) -> None:
    def fails(event: Any) -> None:
        raise KeyError("mine")

    pipe = make()
    with pipe.on_step(fails), pytest.raises(KeyError, match="mine"):
        pipe.step(X, target=Y)
    pipe.on(text, **{when: fails})
    says = f"microbatch 2, action {text}: the hook {when} '{text}' raised KeyError"
    with pytest.raises(StageError, match=says) as caught:
        pipe.step(X, target=Y)
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_hook_on_an_action_may_not_call_the_pipeline() -> None:
    pipe = make()
    with (
        pipe.on("0F0", before=lambda event: pipe.predict(X)),
        pytest.raises(
            StageError, match=r"predict was called in the middle of another call.*pipe\.on_step"
        ),
    ):
        pipe.step(X, target=Y)
    seen: list[float] = []
    with pipe.on_step(lambda event: seen.append(pipe.evaluate(X, target=Y).loss)):
        result = pipe.step(X, target=Y)
    assert seen == pytest.approx([result.loss])


def test_what_is_no_hook() -> None:
    pipe: Any = make()
    for wrong in ({}, {"before": "print"}, {"after": 3}):
        with pytest.raises(UsageError, match=r"before= or after=.* one ActionEvent"):
            pipe.on("0F0", **wrong)
        with pytest.raises(UsageError, match=r"before= or after=.* one StepEvent"):
            pipe.on_step(**wrong)
    for which in (3, None):
        with pytest.raises(UsageError, match="by a pattern or by a function"):
            pipe.on(which, before=print)
    with pytest.raises(ScheduleError, match="matches no kind of action"):
        pipe.on("F", before=print)


def test_a_step_shows_its_number_result_and_cost() -> None:
    pipe, events = make(), list[StepEvent]()
    pipe.randomness.load_state_dict({"seed": 1, "step": 40})
    with pipe.on_step(events.append, before=events.append):
        result = pipe.step(X, target=Y)
    before, after = events
    assert (before.step, before.result, before.seconds) == (41, None, 0)
    assert (after.step, after.is_main_process) == (41, True)
    assert after.result is result
    assert after.seconds > 0
    assert after.memory > 1 << 20


@in_processes(2)
def test_each_process_sees_its_own(group: Any) -> None:
    with make(ranks=None, mesh=group) as pipe:
        seen = seen_by(pipe, "**0")
        pipe.step(X, target=Y)
    assert {text.split()[1][0] for text in seen} == {str(group.rank())}
    assert group.rank() == 0 or {"after 1RECV_F0", "before 1B0"} <= set(seen)
