"""Stages that are cut without data and filled from files: their own part, exactly, or a clear refusal."""

from __future__ import annotations

import json
import os
import struct
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from penstock import Pipeline
from penstock._engine.weights import load_partition, parameters_on_meta, read_weights
from penstock._engine.weights.files import Entry, entries
from penstock.errors import InputFileError, StateDictError, UsageError
from penstock.partition import Partition, partition
from penstock.testing import Case, judge
from tests.processes import run_script
from tests.weights import peak


class Words(nn.Module):
    """Tied weights, and positions that are no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(17, 12)
        self.register_buffer("positions", torch.linspace(0, 1, 32), persistent=False)
        self.blocks = nn.ModuleList(nn.Linear(12, 12) for _ in range(4))
        self.norm = nn.LayerNorm(12)
        self.head = nn.Linear(12, 17, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Any:
        hidden = self.embed(tokens) + self.get_buffer("positions")[: tokens.shape[1], None]
        for block in self.blocks:
            hidden = hidden + block(hidden).tanh()
        return self.head(self.norm(hidden))


TOKENS = torch.arange(32).reshape(4, 8) % 17
CUTS = ["blocks.1", "blocks.2", "norm"]


def word_loss(logits: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def filled() -> nn.Module:
    torch.manual_seed(0)
    return Words().double()


def empty() -> nn.Module:
    with parameters_on_meta():
        return Words().double()


def cut(model: nn.Module) -> Partition:
    return partition(model, CUTS, example=((TOKENS[:2],), {}))


def saved(folder: Path) -> nn.Module:
    """A model in the form of transformers: several files and an index, tied weights under one name."""
    model = filled()
    kept = {n: t for n, t in model.state_dict().items() if n != "head.weight"}
    names = sorted(kept)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, held in parts.items():
        save_file({name: kept[name] for name in held}, folder / file)
    where = {name: file for file, held in parts.items() for name in held}
    (folder / "model.safetensors.index.json").write_text(index(where))
    return model


def close(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def test_stages_are_filled_and_the_others_stay_empty(tmp_path: Path) -> None:
    model = saved(tmp_path)
    parts = cut(empty())
    assert all(p.is_meta for module in parts.modules for p in module.parameters())
    load_partition(parts, [1], tmp_path)
    state = parts.modules[1].state_dict()
    close(dict(state), {name: model.state_dict()[name] for name in state})
    assert all(p.is_meta for m in (parts.modules[0], parts.modules[3]) for p in m.parameters())
    # What is tied stays tied.
    load_partition(parts, [0, 3], tmp_path)
    first, last = (dict(parts.modules[stage].named_parameters()) for stage in (0, 3))
    assert first["embed.weight"] is last["head.weight"]
    close(first["embed.weight"], model.get_parameter("embed.weight"))


def test_a_pipeline_fills_its_stages_and_trains(tmp_path: Path) -> None:
    expected = saved(tmp_path)
    pipe = Pipeline(empty(), ranks=4, stages=CUTS, microbatches=2, loss_fn=word_loss)
    pipe.weights.load(tmp_path)
    judge(Case(expected, (TOKENS,), TOKENS, word_loss), pipe).check(1e-12)


def test_a_pipeline_reads_each_tensor_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path)
    read, reads = Entry.read, Counter[Entry]()

    def counted(entry: Entry) -> Tensor:
        reads[entry] += 1
        return read(entry)

    monkeypatch.setattr(Entry, "read", counted)
    files = read_weights(tmp_path)
    assert "norm.bias" in files
    assert "none" not in files
    assert not reads
    Pipeline(filled(), ranks=4, stages=CUTS).weights.load(tmp_path)
    assert all(reads[files.entry(name)] == 1 for name in files if name != "embed.weight")


def test_what_a_pipeline_saved_is_read_and_replaced(tmp_path: Path) -> None:
    """In another type, and what lies crosswise in memory."""
    folder, model = tmp_path / "new" / "folder", filled()
    with torch.no_grad():
        linear = model.get_submodule("blocks.0")
        linear.weight = nn.Parameter(linear.get_parameter("weight").t())
    with Pipeline(model, ranks=4, stages=CUTS) as pipe:
        pipe.cut(TOKENS[:2])
        pipe.weights.save(folder)
        with torch.no_grad():
            model.get_parameter("norm.bias").fill_(7)
        pipe.weights.save(folder)
    other = empty().bfloat16()
    parts = cut(other)
    load_partition(parts, range(4), folder)
    close(dict(other.state_dict()), dict(model.bfloat16().state_dict()))
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["weight_map"]["norm.bias"].startswith("model-00004-of-00004-")
    assert {*os.listdir(folder)} == {*index["weight_map"].values(), "model.safetensors.index.json"}
    # A file of another save is named, and so is one that is missing.
    pipe = Pipeline(model, ranks=4, stages=CUTS)
    pipe.cut(TOKENS[:2])
    before = (folder / index["weight_map"]["norm.bias"]).read_bytes()
    pipe.weights.save(folder)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    (folder / index["weight_map"]["norm.bias"]).write_bytes(before)
    with pytest.raises(InputFileError, match="is of another save"):
        pipe.weights.load(folder)


# ---- what is refused


def test_all_that_does_not_fit_is_named_and_nothing_is_loaded(tmp_path: Path) -> None:
    saved(tmp_path)
    state = dict(filled().state_dict())
    del state["head.weight"], state["norm.bias"]
    state["norm.weight"] = torch.ones(5, dtype=torch.float64)
    state["extra"] = torch.ones(1)
    (tmp_path / "model.safetensors.index.json").unlink()
    save_file(state, tmp_path / "model.safetensors")
    parts = cut(empty())
    with pytest.raises(StateDictError) as caught:
        load_partition(parts, [0], tmp_path)
    text = str(caught.value)
    assert 'Missing key(s) in state_dict: "norm.bias"' in text
    assert "size mismatch for norm.weight: [5] was given, but the model has [12]" in text
    assert 'Unexpected key(s) in state_dict: "extra"' in text
    assert all(p.is_meta for m in parts.modules for p in m.parameters())


def test_values_that_no_file_has_are_asked_for(tmp_path: Path) -> None:
    saved(tmp_path)
    # Whether the device as a context reaches linspace depends on what transformers has loaded before.
    model = empty()
    model.register_buffer("positions", torch.empty(32, device="meta"), persistent=False)
    with pytest.raises(UsageError, match=r"positions are.*in no file.*penstock.parameters_on_meta"):
        load_partition(cut(model), [0], tmp_path)


def test_every_type_is_read_as_it_was_written(tmp_path: Path) -> None:
    types = [torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.complex64]
    tensors: dict[str, Tensor] = {str(t): torch.arange(6).reshape(2, 3).to(t) for t in types}
    tensors |= {"scalar": torch.tensor(2.5), "none": torch.empty(0, 3)}
    save_file(tensors, tmp_path / "all.safetensors")
    loaded = {name: entry.read() for name, entry in entries(tmp_path / "all.safetensors").items()}
    close(loaded, tensors)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's peak memory")
def test_a_rank_needs_the_memory_of_its_share(tmp_path: Path) -> None:
    peak.write(peak.make(), tmp_path)
    (ran,) = run_script("-m", "tests.weights.peak", str(tmp_path))
    assert ran.status == 0, ran
    assert float(ran.out) < 1.1


def header(about: dict[str, Any], data: bytes = b"") -> bytes:
    text = json.dumps(about).encode()
    return struct.pack("<Q", len(text)) + text + data


F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
FILES = {
    "empty": b"",
    "endless header": struct.pack("<Q", 1 << 60) + b"{}",
    "no json": struct.pack("<Q", 4) + b"nope",
    "cut off": header({"w": F32}, b"1234"),
    "negative": header({"w": {**F32, "shape": [-2]}}, b"12345678"),
    "no offsets": header({"w": {"dtype": "F32", "shape": [2]}}, b"12345678"),
    "sizes beyond memory": header(
        {"w": {**F32, "shape": [0, 2**40, 2**40], "data_offsets": [0, 0]}}
    ),
    "bytes twice": header({f"w{n}": F32 for n in range(1000)}, b"12345678"),
}


def index(files: Any, **metadata: Any) -> str:
    return json.dumps({"weight_map": files, "metadata": metadata})


INDICES = {
    "no JSON": "{",
    "no map": "{}",
    "no files": index({"weight": 1}),
    "odd ties": index({}, tied={"a": []}),
    "very deep": '{"weight_map": ' + "[" * 100_000 + "]" * 100_000 + "}",
    "a long name": index({"weight": "x" * 5000}),
    "escapes": index({"weight": "\x1b[2J\nx"}),
    "not in the file": index({"we\n\x1b[1m" + "x" * 5000: "a.safetensors"}),
    "no name: a path": index({"weight": "/etc/x.safetensors"}),
    "no name: a folder": index({"weight": "./a.safetensors"}),
    "no name: another kind": index({"weight": "train.py"}),
    "no name: another end": index({"weight": "a.safetensors.py"}),
}


@pytest.mark.parametrize("name", [*FILES, *INDICES])
def test_an_odd_file_or_index_is_an_error_of_one_line(tmp_path: Path, name: str) -> None:
    save_file({"other": torch.ones(1)}, tmp_path / "a.safetensors")
    if name in FILES:
        (tmp_path / "model.safetensors").write_bytes(FILES[name])
    else:
        (tmp_path / "model.safetensors.index.json").write_text(INDICES[name])
    with pytest.raises(InputFileError) as caught:
        dict(read_weights(tmp_path))
    text = str(caught.value)
    assert str(tmp_path) in text
    assert ("no file that belongs beside it" in text) >= name.startswith("no name")
    assert "\n" not in text
    assert "\x1b" not in text
    assert len(text) < 600


def test_a_save_removes_none_of_the_users_files_that_an_index_names(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    (tmp_path / "model.safetensors.index.json").write_text(index({"weight": "train.py"}))
    pipe = Pipeline(nn.Sequential(nn.Linear(2, 2)), ranks=1, loss_fn=nn.functional.mse_loss)
    pipe.weights.save(tmp_path)
    assert (tmp_path / "train.py").exists()
    assert {*read_weights(tmp_path)} == {"0.weight", "0.bias"}


@pytest.mark.timeout(30)
def test_a_pipe_or_a_device_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    for path in (tmp_path, Path("/dev/zero")):
        with pytest.raises(InputFileError, match="not a regular file"):
            read_weights(path)
