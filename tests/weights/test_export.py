"""Stages on disk are the unsplit model's weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from penstock.partition import partition
from penstock.weights import WeightFiles, read_weights, save_index, save_stage
from penstock.weights.folders import INDEX, stage_file


def save(model: nn.Sequential, folder: Path, stages: int) -> None:
    modules = partition(model, stages).modules
    save_index(
        folder, {i: save_stage(m.state_dict(), folder, i, stages) for i, m in enumerate(modules)}
    )


def load(folder: Path) -> dict[str, Tensor]:
    index = json.loads((folder / INDEX).read_text())
    loaded = {file: load_file(folder / file) for file in set(index["weight_map"].values())}
    return {name: loaded[file][name] for name, file in index["weight_map"].items()}


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 2).to(torch.bfloat16))


def test_the_files_load_into_the_plain_model(tmp_path: Path) -> None:
    source, target = model(), model()
    with torch.no_grad():
        source.get_parameter("0.weight").add_(1)
    save(source, tmp_path, 2)
    target.load_state_dict(load(tmp_path))
    assert all(map(torch.equal, target.state_dict().values(), source.state_dict().values()))


def test_the_index_is_in_the_form_of_transformers(tmp_path: Path) -> None:
    save(model(), tmp_path, 3)
    index: dict[str, Any] = json.loads((tmp_path / INDEX).read_text())
    sizes = [t.numel() * t.element_size() for t in model().state_dict().values()]
    assert index["metadata"] == {"total_size": sum(sizes)}
    assert index["weight_map"]["2.bias"] == "model-00003-of-00003.safetensors"


def test_files_are_complete_or_not_there(tmp_path: Path) -> None:
    save(model(), tmp_path / "new" / "folder", 2)
    names = {path.name for path in (tmp_path / "new" / "folder").iterdir()}
    assert names == {INDEX, stage_file(0, 2), stage_file(1, 2)}


def test_saving_again_replaces(tmp_path: Path) -> None:
    source = model()
    save(source, tmp_path, 1)
    with torch.no_grad():
        source.get_parameter("0.bias").fill_(7)
    save(source, tmp_path, 1)
    assert load(tmp_path)["0.bias"].tolist() == [7, 7, 7]


def test_tied_weights_are_there_under_each_name(tmp_path: Path) -> None:
    tied = nn.ModuleDict({"embed": nn.Embedding(4, 3), "head": nn.Linear(3, 4, bias=False)})
    tied["head"].weight = tied["embed"].weight
    (stage,) = partition(tied, [["embed", "head"]]).modules
    save_index(tmp_path, {0: save_stage(stage.state_dict(), tmp_path, 0, 1)})
    assert torch.equal(load(tmp_path)["head.weight"], load(tmp_path)["embed.weight"])


def test_what_lies_crosswise_in_memory_is_written_straight(tmp_path: Path) -> None:
    linear = nn.Linear(2, 3)
    linear.weight = nn.Parameter(torch.arange(6.0).reshape(2, 3).t())
    save(nn.Sequential(linear), tmp_path, 1)
    assert torch.equal(load(tmp_path)["0.weight"], linear.weight)


def test_a_name_is_looked_up_without_reading_its_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(model(), tmp_path, 2)
    found = read_weights(tmp_path)
    monkeypatch.setattr(WeightFiles, "__getitem__", lambda *_: pytest.fail("a tensor is read"))
    assert "0.weight" in found
    assert "none" not in found
