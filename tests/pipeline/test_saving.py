"""Weights on disk are those of the unsplit model, whoever wrote them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from penstock import read_weights
from penstock.testing import WorkerPool
from tests.pipeline.models import STAGES, X, Y, assert_same, chain, make, named, restless


def load(folder: Path) -> dict[str, Tensor]:
    """All files together; each tensor is in one, and the index tells which."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    found = {name: t for file in files for name, t in load_file(folder / file).items()}
    assert found.keys() == index["weight_map"].keys()
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in found.values())
    return found


@pytest.mark.parametrize("make_model", [chain, restless])
def test_a_trained_model_loads_into_the_plain_one(tmp_path: Path, make_model: Any) -> None:
    pipe, plain = make(make_model()), make_model()
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    pipe.step(X, target=Y)
    optimizer.step()
    pipe.save(tmp_path)
    plain.load_state_dict(load(tmp_path))
    with torch.no_grad():
        torch.testing.assert_close(plain.eval()(X), pipe.predict(X))


def test_the_users_model_and_the_files_agree(tmp_path: Path) -> None:
    model = named()
    pipe = make(model, stages=STAGES)
    pipe.save(str(tmp_path / "run"))
    assert_same(load(tmp_path / "run"), model.state_dict())
    assert_same(pipe.state_dict(), model.state_dict())


def test_a_module_with_two_names_is_saved_once_and_read_under_both(tmp_path: Path) -> None:
    lin = nn.Linear(4, 4).double()
    model = nn.Sequential(lin, nn.Tanh(), lin, nn.Linear(4, 4).double())
    make(model, stages=[["0", "1", "2"], ["3"]]).save(tmp_path)
    assert load(tmp_path).keys() == {"0.weight", "0.bias", "3.weight", "3.bias"}
    assert_same(dict(read_weights(tmp_path)), model.state_dict())


def save(group: Any, folder: str) -> None:
    pipe = make(chain(), ranks=3, group=group)
    pipe.save(folder)
    # The index is complete when any rank goes on to use it.
    pipe.agree(None)


def test_processes_save_together(workers: WorkerPool, tmp_path: Path) -> None:
    workers.run(f"{__name__}:save", 3, 30.0, folder=str(tmp_path))
    assert_same(load(tmp_path), chain().state_dict())
    assert len(list(tmp_path.iterdir())) == 4
