"""A bound program as a table."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from penstock import Pipeline
from penstock.errors import UsageError
from penstock.runtime import explain

X = torch.ones(4, 3)


def pipeline(schedule: str) -> Pipeline:
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 3))
    return Pipeline(
        model, schedule=schedule, ranks=2, microbatches=2, loss_fn=nn.functional.mse_loss
    )


def test_before_the_first_call_there_is_nothing_to_explain() -> None:
    with pytest.raises(UsageError, match="call step"):
        pipeline("1F1B").explain()


def test_each_action_tells_what_it_reads_and_writes() -> None:
    pipe = pipeline("ZB-H1")
    pipe.step(X, target=X)
    bound = pipe._local.ranks[1].bound
    assert bound is not None
    rows = {row.action: row for row in explain(bound)}
    # Two samples of five float32 numbers.
    assert rows["take 1RECV_F0"][2:] == ("", "stage0[0]", "0 -> 1", 40)
    assert rows["1F0"][2:] == ("stage0[0]", "output[0]", "", 0)
    assert rows["1I0"][2:] == ("loss[0]", "grad(stage0[0])", "", 0)
    assert rows["1SEND_B0"][2:] == ("grad(stage0[0])", "", "1 -> 0", 40)
    assert rows["1W0"][2:] == ("what 1I0 kept", "grad(weights of stage 1)", "", 0)


def test_the_table_is_of_the_last_call() -> None:
    pipe = pipeline("1F1B")
    pipe.step(X, target=X)
    trained = pipe.explain()
    assert trained.count("schedule 1F1B\n") == 2
    assert " 1B1 " in trained
    pipe.predict(X)
    assert "1B1" not in pipe.explain()


def test_what_a_call_does_not_need_is_not_in_its_program() -> None:
    pipe = pipeline("1F1B")
    pipe.step(X, target=X)
    bound = pipe._local.ranks[0].bound
    assert bound is not None
    plain = sum(len(action.row) for action in bound.actions)
    with pipe.on("0F0", before=lambda event: None):
        pipe.step(X, target=X, record=True)
    hooked = pipe._local.ranks[0].bound
    assert hooked is not None
    assert hooked is not bound
    assert sum(len(action.row) for action in hooked.actions) > plain
    pipe.step(X, target=X)
    assert pipe._local.ranks[0].bound is bound
