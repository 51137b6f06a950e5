"""The plain ways to save an optimizer beside a pipeline: right, or refused by name."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from penstock.errors import StateDictError
from penstock.testing import WorkerPool
from tests.checkpoint.runs import AFTER, BEFORE, Run


def reference() -> tuple[Run, list[float]]:
    """The run of the unsplit model, stopped, and the losses that are due."""
    run = Run("plain")
    run.train(BEFORE)
    return run, copy.deepcopy(run).train(AFTER)


def go_on(run: Run, source: Run) -> list[float]:
    """Go on with what is not the optimizer's."""
    assert run.pipe is not None
    run.pipe.load_state_dict(source.model.state_dict())
    run.scheduler.load_state_dict(source.scheduler.state_dict())
    run.pipe.randomness.load_state_dict({"seed": 7, "step": BEFORE})
    run.step = BEFORE
    return run.train(AFTER)


def test_states_by_name_in_one_process() -> None:
    source, expected = reference()
    run = Run("ZB-V", 2)
    assert run.pipe is not None
    named = get_optimizer_state_dict(source.model, source.optimizer)
    # The one that is tied has its first name in a pipeline, and so it has in torch's state dict.
    result = run.pipe.load_optimizer_state_dict(run.optimizer, named)
    assert result == ([], [])
    assert go_on(run, source) == pytest.approx(expected, abs=2e-6)


def test_states_by_name_go_back_to_the_unsplit_model() -> None:
    run, plain = Run("1F1B", 2), Run("plain")
    run.train(BEFORE)
    assert run.pipe is not None
    named = run.pipe.optimizer_state_dict(run.optimizer, full=True)
    set_optimizer_state_dict(plain.model, plain.optimizer, named)
    for parameter, state in plain.optimizer.state.items():
        name = next(n for n, p in plain.model.named_parameters() if p is parameter)
        assert torch.equal(state["exp_avg"], named["state"][name]["exp_avg"])
    # They are copies.
    run.train(1)
    assert all(state["step"] == BEFORE for state in named["state"].values())


def whole_between_processes(group: Any, path: str) -> list[Any]:
    """A worker's task: from two ranks to rank 0 and a file, and from the file to all ranks."""
    source, expected = reference()
    run = Run("1F1B", 2, group)
    assert run.pipe is not None
    run.train(BEFORE)
    state = run.pipe.optimizer_state_dict(run.optimizer, full=True)
    if run.pipe.leads:
        torch.save(state, path)
    after = run.train(AFTER)
    run.pipe.agree(None)
    other = Run("1F1B", 2, group)
    assert other.pipe is not None
    other.pipe.load_optimizer_state_dict(other.optimizer, torch.load(path))
    found = go_on(other, source)
    refused = ""
    try:
        other.pipe.load_optimizer_state_dict(other.optimizer, {"state": {}, "param_groups": []})
    except StateDictError as error:
        refused = str(error)
    run.close()
    other.close()
    return [len(state.get("state", ())), expected, after, found, refused]


def test_states_by_name_between_processes(workers: WorkerPool, tmp_path: Path) -> None:
    path = str(tmp_path / "state.pt")
    first, second = workers.run(f"{__name__}:whole_between_processes", 2, path=path)
    assert (first[0], second[0]) == (33, 0)
    for _, expected, after, found, refused in (first, second):
        assert after == pytest.approx(expected, abs=2e-6)
        assert found == pytest.approx(expected, abs=2e-6)
        assert "the optimizer's states do not fit, and none were loaded" in refused
        assert '"8.mix.weight"' in refused
        assert '"1.mix.weight"' in refused


def one_for_all(group: Any, path: str) -> str:
    """A worker's task: the leader's own state dict, loaded by everyone."""
    run = Run("1F1B", 2, group)
    assert run.pipe is not None
    run.train(BEFORE)
    if run.pipe.leads:
        torch.save(run.optimizer.state_dict(), path)
    run.pipe.agree(None)
    other = Run("1F1B", 2, group)
    try:
        other.optimizer.load_state_dict(torch.load(path))
        other.train(1)
    except StateDictError as error:
        return str(error)
    except ValueError as error:
        # torch looks at how many parameters there are.
        return f"torch: {error}"
    finally:
        run.close()
        other.close()
    return "nothing was said"


def test_one_ranks_own_state_dict_on_another(workers: WorkerPool, tmp_path: Path) -> None:
    path = str(tmp_path / "state.pt")
    first, second = workers.run(f"{__name__}:one_for_all", 2, path=path)
    assert first == "nothing was said"
    assert "was given the state of another one: its group 0 holds 5 parameters from" in second
    assert "penstock.Checkpoints" in second


def test_positions_are_refused_and_what_fits_is_not() -> None:
    run = Run("1F1B", 2)
    assert run.pipe is not None
    run.train(1)
    state = run.optimizer.state_dict()
    with pytest.raises(StateDictError, match="holds positions, which mean different parameters"):
        run.pipe.load_optimizer_state_dict(run.optimizer, state)
    # In the layout that it is from, an optimizer's own is right, through torch.save too.
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    other = Run("ZB-V", 2)
    other.optimizer.load_state_dict(torch.load(buffer))
    other.train(1)


def test_a_group_that_is_added_later_is_no_mistake() -> None:
    run = Run("1F1B", 2)
    run.train(1)
    assert run.pipe is not None
    first = run.optimizer.param_groups[0]["params"].pop()
    run.optimizer.add_param_group({"params": [first]})
    run.train(1)


def test_torchs_own_checkpoint_asks_for_another_call() -> None:
    with pytest.raises(AttributeError, match=r"penstock\.Checkpoints saves optimizers"):
        _ = Run("1F1B", 2).pipe.optimizer_state  # type: ignore[union-attr]
