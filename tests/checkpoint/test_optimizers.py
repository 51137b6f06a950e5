"""The plain ways to save an optimizer beside a pipeline: right, or refused by name."""

from __future__ import annotations

import copy
import io
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from penstock.errors import StateDictError
from tests.checkpoint.runs import AFTER, BEFORE, Run
from tests.processes import in_processes


def reference() -> tuple[Run, list[float]]:
    """The run of the unsplit model, stopped, and the losses that are due."""
    run = Run("plain")
    run.train(BEFORE)
    return run, copy.deepcopy(run).train(AFTER)


def go_on(run: Run, source: Run) -> list[float]:
    """Go on with what is not the optimizer's."""
    assert run.pipe is not None
    run.pipe.weights.load_state_dict(source.model.state_dict())
    run.scheduler.load_state_dict(source.scheduler.state_dict())
    run.pipe.randomness.load_state_dict({"seed": 7, "step": BEFORE})
    run.step = BEFORE
    return run.train(AFTER)


def test_states_by_name_from_the_unsplit_model_and_back() -> None:
    source, expected = reference()
    run, plain = Run("ZB-V", 2), Run("plain")
    assert run.pipe is not None
    named = get_optimizer_state_dict(source.model, source.optimizer)
    # The one that is tied has its first name in a pipeline, and so it has in torch's state dict.
    result = run.pipe.weights.load_optimizer_state_dict(run.optimizer, named)
    assert result == ([], [])
    named = run.pipe.weights.optimizer_state_dict(run.optimizer, full=True)
    assert go_on(run, source) == pytest.approx(expected, abs=2e-6)
    # They were copies.
    set_optimizer_state_dict(plain.model, plain.optimizer, named)
    assert all(state["step"] == BEFORE for state in plain.optimizer.state.values())
    for parameter, state in source.optimizer.state.items():
        name = next(n for n, p in source.model.named_parameters() if p is parameter)
        there = plain.optimizer.state[plain.model.get_parameter(name)]
        assert torch.equal(state["exp_avg"], there["exp_avg"])


@in_processes(2)
def test_states_by_name_between_processes(group: Any, tmp_path: Path) -> None:
    """From two ranks to rank 0 and a file, and from the file to all ranks."""
    (source, losses), path = reference(), tmp_path / "state.pt"
    expected = pytest.approx(losses, abs=2e-6)
    run = Run("1F1B", 2, group)
    assert run.pipe is not None
    run.train(BEFORE)
    state = run.pipe.weights.optimizer_state_dict(run.optimizer, full=True)
    assert len(state.get("state", ())) == (0 if group.rank() else 33)
    if run.pipe.is_main_process:
        torch.save(state, path)
    assert run.train(AFTER) == expected
    run.pipe.job.meet(lambda: None)
    other = Run("1F1B", 2, group)
    assert other.pipe is not None
    other.pipe.weights.load_optimizer_state_dict(other.optimizer, torch.load(path))
    assert go_on(other, source) == expected
    says = r'do not fit, and none were loaded.*"1.mix.weight".*"8.mix.weight"'
    with pytest.raises(StateDictError, match=f"(?s){says}"):
        other.pipe.weights.load_optimizer_state_dict(
            other.optimizer, {"state": {}, "param_groups": []}
        )
    run.close()
    other.close()


@in_processes(2)
def test_one_ranks_own_state_dict_on_another(group: Any, tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    run, other = Run("1F1B", 2, group), Run("1F1B", 2, group)
    assert run.pipe is not None
    run.train(BEFORE)
    if run.pipe.is_main_process:
        torch.save(run.optimizer.state_dict(), path)
    run.pipe.job.meet(lambda: None)
    other.optimizer.load_state_dict(torch.load(path))
    says = (
        "was given the state of another one: it keeps values for '1.mix.weight', which.*Checkpoints"
    )
    with pytest.raises(StateDictError, match=says) if group.rank() else nullcontext():
        other.train(1)
    run.close()
    other.close()


def test_positions_are_refused_and_what_fits_is_not() -> None:
    run = Run("1F1B", 2)
    assert run.pipe is not None
    run.train(1)
    state = run.optimizer.state_dict()
    for odd, text in ((state, "holds positions, which mean"), ({"a": 1}, "has 'state' and")):
        with pytest.raises(StateDictError, match=text):
            run.pipe.weights.load_optimizer_state_dict(run.optimizer, odd)
    # In the layout that it is from, an optimizer's own is right, through torch.save too.
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    other = Run("ZB-V", 2)
    other.optimizer.load_state_dict(torch.load(buffer))
    other.train(1)
    # A group that is added later is no mistake.
    first = other.optimizer.param_groups[0]["params"].pop()
    other.optimizer.add_param_group({"params": [first]})
    other.train(1)
    with pytest.raises(AttributeError, match=r"penstock\.Checkpoints saves optimizers"):
        _ = run.pipe.optimizer_state  # type: ignore[attr-defined]
