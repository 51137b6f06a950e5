"""What is saved comes back, and what does not fit is told beforehand."""

from __future__ import annotations

import json
import os
import random
import threading
from collections import Counter, OrderedDict, deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.optim import lr_scheduler

from penstock import Checkpoints, LossScaler, Pipeline
from penstock._engine.weights import read_weights
from penstock.checkpoint import describe, export
from penstock.errors import CheckpointError, InputFileError, StateDictError, UsageError
from tests.checkpoint.runs import Keeps, linear, stepped

# ---- what is saved comes back


STATE = {
    "numbers": [1, 2**70, 0.1, float("inf"), True, None, 1 + 2j],
    "keys": {1: "a", (2, 3): "b"},
    "sets": [{1, 2}, frozenset("ab"), deque([1, 2], 5), (1, (2,))],
    "kinds": OrderedDict(b=1, a=Counter({3: 2})),
    "bytes": b"\x00\xff",
    "torch": [torch.float16, torch.Size([2, 3]), torch.device("cpu")],
    "numpy": [np.float32(0.1), np.int64(3)],
    "$": "a key of our own",
}


def test_any_state_comes_back_from_json_and_safetensors(tmp_path: Path) -> None:
    random.seed(1)
    generator = np.random.RandomState(3)
    tensors: dict[str, Any] = {
        "rng": torch.get_rng_state(),
        "nested": [torch.arange(3), torch.tensor(1.5)],
    }
    state = {**STATE, "python": random.getstate(), "numpy state": generator.get_state()}
    loaded, other = Keeps(), Keeps()
    checkpoints = Checkpoints(tmp_path)
    states = {"model": linear(), "loader": Keeps(state), "other": Keeps(tensors)}
    path = checkpoints.save(0, extra={"mine": [1, "ä"]}, **states).path
    before = sorted(os.listdir(tmp_path))
    assert checkpoints.load(loader=loaded, other=other) == 0
    assert repr(loaded.state) == repr(state)
    assert checkpoints.extra == {"mine": [1, "ä"]}
    assert torch.equal(other.state["rng"], tensors["rng"])
    assert other.state["nested"][1] == 1.5
    # Loading changes nothing there; what is there, others can read.
    assert path is not None
    assert sorted(os.listdir(tmp_path)) == before
    json.loads((path / "checkpoint.json").read_text().split("\n", 1)[1])
    assert torch.equal(
        load_file(path / "states-00001.safetensors")["model/weight"], linear().weight
    )
    assert len(os.listdir(path)) == 2


@pytest.mark.parametrize(
    "value", [object(), lambda: 1, torch.zeros(2).to_sparse(), np.array(["a"])]
)
def test_what_cannot_be_stored_is_told_by_its_place(tmp_path: Path, value: Any) -> None:
    with pytest.raises(CheckpointError, match="loader/sampler/1 is a"):
        Checkpoints(tmp_path).save(0, loader=Keeps({"sampler": [0, value]}))
    assert list(tmp_path.glob("[!.]*")) == []


KINDS: dict[str, dict[str, Any]] = {
    "SGD": {"momentum": 0.9},
    "AdamW": {"amsgrad": True},
    "Muon": {},
    "RMSprop": {},
}


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_optimizers_that_keep_states_for_each_parameter(tmp_path: Path, kind: str) -> None:
    model, other = (linear(bias=kind != "Muon") for _ in range(2))
    optimizer = stepped(model, kind, **KINDS[kind])
    Checkpoints(tmp_path).save(2, model=model, optimizer=optimizer)
    resumed = stepped(other, kind, 0, **KINDS[kind])
    assert Checkpoints(tmp_path).load(model=other, optimizer=resumed) == 2
    for one in (model, other):
        for parameter in one.parameters():
            parameter.grad = torch.full_like(parameter, 0.5)
    optimizer.step()
    resumed.step()
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_states_keep_their_types_and_settings_that_are_tensors(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """torch's own load_state_dict casts what is kept to the parameter's type."""
    model = linear(dtype=torch.bfloat16)
    optimizer = stepped(model)
    scheduler = lr_scheduler.ConstantLR(optimizer)
    optimizer.param_groups[0]["lr"] = torch.tensor(0.25)
    optimizer.state[model.weight]["exp_avg"] = torch.full((2, 3), 0.1)
    # What has no state has none after loading.
    del optimizer.state[model.bias]
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, model=model, optimizer=optimizer, scheduler=scheduler)
    resumed = stepped(model)
    checkpoints.load(model=model)
    assert caplog.text == ""
    checkpoints.load(model=model, optimizer=resumed)
    assert "also holds scheduler, which load() was not given" in caplog.text
    assert resumed.param_groups[0]["lr"].equal(torch.tensor(0.25))
    assert torch.equal(resumed.state[model.weight]["exp_avg"], torch.full((2, 3), 0.1))
    assert not resumed.state[model.bias]


class Together(torch.optim.SGD):
    """Keeps something for no parameter."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "everything": 1}


def test_all_that_a_run_has(tmp_path: Path) -> None:
    """A scaler, schedulers, a module beside the model, and what is None."""
    model, critic = linear(), linear(4)
    both = nn.ModuleList([model, critic])
    optimizer = stepped(both, "SGD", 1, momentum=0.5)
    linearly = lr_scheduler.LinearLR(optimizer, total_iters=2)
    stepwise = lr_scheduler.MultiStepLR(optimizer, [3, 5])
    scheduler = lr_scheduler.SequentialLR(optimizer, [linearly, stepwise], [2])
    scaler = LossScaler(128.0)
    optimizer.step()
    scheduler.step()
    states = {"model": model, "critic": critic, "optimizer": optimizer, "scheduler": scheduler}
    states |= {"scaler": scaler, "ema": None}
    before = critic.weight.detach().clone(), repr(scheduler.state_dict()), scaler.state_dict()
    Checkpoints(tmp_path).save(1, **states)
    for _ in range(4):
        optimizer.step()
        scheduler.step()
    Checkpoints(tmp_path).load(**states)
    assert torch.equal(critic.weight, before[0])
    assert optimizer.state[critic.weight]["momentum_buffer"].eq(1.5).all()
    assert (repr(scheduler.state_dict()), scaler.state_dict()) == before[1:]


def test_a_group_for_each_layer_and_its_scheduler(tmp_path: Path) -> None:
    """In another order each parameter keeps its settings; a scheduler keeps its by place."""
    model = nn.Sequential(linear(), nn.Linear(2, 2), nn.Linear(2, 2))

    def pair(order: list[int]) -> tuple[Any, Any]:
        groups = [{"params": model[i].parameters(), "lr": 0.1 * (i + 1)} for i in order]
        optimizer = torch.optim.SGD(groups, momentum=0.9)
        return optimizer, lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))

    optimizer, scheduler = pair([0, 1, 2])
    optimizer.step()
    scheduler.step()
    optimizer.param_groups[1]["lr"] = optimizer.param_groups[0]["lr"]
    Checkpoints(tmp_path).save(1, model=model, optimizer=optimizer, scheduler=scheduler)
    assert "group 1: 2 parameters" in describe(tmp_path), "though its settings are the first's"
    other, follows = pair([2, 0, 1])
    states: dict[str, Any] = {"model": model, "optimizer": other, "scheduler": follows}
    for strict in (True, False):
        with pytest.raises(StateDictError, match="scheduler= keeps a value for each group"):
            Checkpoints(tmp_path).load(strict=strict, **states)
    Checkpoints(tmp_path).load(model=model, optimizer=other)
    assert [group["lr"] for group in other.param_groups] == pytest.approx([0.15, 0.05, 0.05])


# ---- what does not fit


def test_all_that_does_not_fit_is_told_before_anything_is_changed(tmp_path: Path) -> None:
    model = nn.ModuleDict({"a": linear(), "b": linear(), "c": linear(4)})
    optimizer = torch.optim.SGD(model.parameters())
    states: dict[str, Any] = {
        "model": model,
        "optimizer": optimizer,
        "ema": linear(),
        "other": Keeps(1),
    }
    Checkpoints(tmp_path).save(4, **states)
    other = nn.ModuleDict({"a": linear(5), "c": linear(4, dtype=torch.float64), "d": linear()})
    before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    adam = torch.optim.Adam(other.parameters())
    states = {"loader": Keeps(), "ema": Keeps(), "other": linear()}
    with pytest.raises(StateDictError) as raised:
        Checkpoints(tmp_path).load(model=other, optimizer=adam, **states)
    for text in (
        "step-00000004 does not fit, and nothing was loaded",
        "model/a.weight: [2, 3] was saved, [2, 5] is here",
        "missing in it: model/d.weight, model/d.bias, optimizer/d.weight, optimizer/d.bias",
        "in it, but not here: model/b.bias, model/b.weight, optimizer/b.bias, optimizer/b.weight",
        "model/c.weight: torch.float32 was saved, torch.float64 is here",
        "optimizer= is of the class Adam, SGD was saved",
        "loader= was not saved; there are model=, ema=, optimizer=, other=",
        "ema= is a state, weights was saved",
        "other= is weights, a state was saved",
    ):
        assert text in str(raised.value)
    assert all(torch.equal(before[name], tensor) for name, tensor in other.state_dict().items())
    with pytest.raises(StateDictError, match="is of another model, and nothing was loaded"):
        Checkpoints(tmp_path).load(model=nn.ModuleDict({"x": linear()}))


def test_what_fits_is_loaded_and_cast_where_not_all_must(tmp_path: Path, caplog: Any) -> None:
    """What is kept in the weight's type is cast with it; what is kept in another type stays."""
    model = nn.ModuleDict({"a": linear(dtype=torch.bfloat16), "b": linear()})
    saved = stepped(model)
    weight = model.get_parameter("a.weight")
    saved.state[weight]["exp_avg_sq"] = saved.state[weight]["exp_avg_sq"].double()
    Checkpoints(tmp_path).save(4, model=model, optimizer=saved)
    old, new = linear(4 - 1), linear()
    other = nn.ModuleDict({"a": old, "d": new})
    optimizer = stepped(other, steps=1)
    assert Checkpoints(tmp_path).load(strict=False, model=other, optimizer=optimizer) == 4
    assert "missing in it: model/d.weight" in caplog.text
    assert "of another type: model/a.weight: torch.bfloat16 was saved" in caplog.text
    state = optimizer.state[old.weight]
    assert (state["step"], optimizer.state[new.weight]["step"]) == (2, 1)
    assert torch.equal(old.weight.bfloat16(), weight)
    assert old.weight.dtype is state["exp_avg"].dtype is torch.float32
    assert state["exp_avg_sq"].dtype is torch.float64
    assert torch.equal(state["exp_avg"].bfloat16(), saved.state[weight]["exp_avg"])


def of_class(kind: Any) -> dict[str, Any]:
    model = linear()
    return {"model": model, "optimizer": kind(model.parameters(), lr=0.1)}


SAVES: list[tuple[dict[str, Any], str]] = [
    ({"model": linear(), "pipe": linear()}, "give pipe= or model="),
    ({"loader": [1]}, "loader= was given a list"),
    ({"a/b": linear()}, "cannot be the name of what is saved"),
    ({"optimizer": stepped(linear())}, "optimizer= was given without pipe= or model="),
    ({"model": linear(), "optimizer": stepped(linear())}, "not the model.s: number 0"),
    (of_class(torch.optim.LBFGS), "optimizer= is of the class LBFGS, which keeps one state"),
    (of_class(Together), "optimizer= keeps 'everything' for no parameter"),
    ({"step": -1, "model": linear()}, "step=-1: must be the number of steps"),
]


@pytest.mark.parametrize(("states", "text"), SAVES)
def test_what_cannot_be_saved(tmp_path: Path, states: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        Checkpoints(tmp_path).save(**{"step": 1, **states})


def test_a_pipeline_goes_on_from_a_plain_loop(tmp_path: Path, caplog: Any) -> None:
    """What it draws follows the step."""
    model = nn.Sequential(linear(), nn.Linear(2, 2))
    Checkpoints(tmp_path).save(9, model=model)
    pipe = Pipeline(model, ranks=2, seed=3)
    assert Checkpoints(tmp_path).load(pipe=pipe) == 9
    assert pipe.randomness.state_dict() == {"seed": 3, "step": 9}
    assert "the next step is taken to be number 9" in caplog.text


# ---- the folder


def test_the_latest_is_the_one_written_last_and_old_ones_go(tmp_path: Path, caplog: Any) -> None:
    with pytest.raises(UsageError, match="keep=0: must be how many"):
        Checkpoints(tmp_path, keep=0)
    checkpoints, model = Checkpoints(tmp_path, keep=2), linear()
    assert checkpoints.load(model=model) is None
    for step in (1, 2, 5):
        checkpoints.save(step, model=model)
    assert checkpoints.steps() == [5, 2]
    # Whoever goes back to an older one and on from there has left the newer ones behind.
    checkpoints.save(3, model=model)
    assert Checkpoints(tmp_path).load(model=model) == 3
    # One that is saved again takes the place of the first, only when it is whole.
    checkpoints.save(3, model=model)
    assert checkpoints.steps() == [3, 5]
    paths = sorted(tmp_path.glob("step-*"))
    assert [path.name for path in paths] == ["step-00000003-3", "step-00000005"]
    with pytest.raises(UsageError, match="has no checkpoint of it; it has those of steps 3, 5"):
        checkpoints.load(2, model=model)
    # Nothing older is taken silently; the campaign flips bytes anywhere, and asks for the one before.
    files = [path / "states-00001.safetensors" for path in paths]
    files[0].write_bytes(files[0].read_bytes()[:-1])
    with pytest.raises(InputFileError, match=r"3-3/states.*is damaged.*load\(step=5\) takes that"):
        Checkpoints(tmp_path).load(model=model)
    auto = Checkpoints(tmp_path)
    assert auto.load(model=model, resume="auto") == 5
    assert "resumes from step 5, not from the newest, step 3: " in caplog.text
    assert "3-3/states-00001.safetensors is damaged" in auto.skipped[0]
    # When none is whole, all are named.
    files[1].write_bytes(files[1].read_bytes() + b"more")
    with pytest.raises(
        InputFileError, match=r"no checkpoint in .* is whole: .*3-3/states.*; .*5/states"
    ):
        Checkpoints(tmp_path).load(model=model, resume="auto")


def test_what_is_written_beside_the_training_is_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, checkpoints = linear(), Checkpoints(tmp_path, asynchronous=True)
    before = model.weight.detach().clone()
    changed, open_file = threading.Event(), Path.open

    def open_later(path: Path, *args: Any, **options: Any) -> Any:
        assert path.suffix != ".safetensors" or changed.wait(60)
        return open_file(path, *args, **options)

    monkeypatch.setattr(Path, "open", open_later)
    saved = checkpoints.save(1, model=model)
    with torch.no_grad():
        model.weight.add_(1)
    changed.set()
    checkpoints.wait()
    assert "being written" in str(saved)
    assert checkpoints.last is not None
    assert checkpoints.last.bytes > model.weight.nbytes
    assert f"{checkpoints.last.seconds:.3f} s, stalled" in str(checkpoints.last)
    assert Checkpoints(tmp_path).load(model=model) == 1
    assert torch.equal(model.weight, before)


def test_the_weights_of_an_unsplit_model_are_shown_and_exported(tmp_path: Path) -> None:
    model = nn.Sequential(linear(), nn.Linear(2, 2), nn.Linear(2, 2))
    model[2].weight = model[1].weight
    states = {"model": model, "optimizer": stepped(model), "loader": Keeps(1)}
    Checkpoints(tmp_path / "run").save(3, **states, extra={"seen": 1})
    text = describe(tmp_path / "run", check=True)
    for part in ("step-00000003", "unsplit", "all bytes are those", "AdamW", "group 0", "seen"):
        assert part in text
    assert "1 further names of tied ones" in text
    export(tmp_path / "run", tmp_path / "weights")
    weights = read_weights(tmp_path / "weights")
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())
    with pytest.raises(UsageError, match="holds weights already"):
        export(tmp_path / "run", tmp_path / "weights")
    with pytest.raises(UsageError, match="holds no checkpoint"):
        describe(tmp_path / "weights")
    Checkpoints(tmp_path / "run").save(4, loader=Keeps(1))
    with pytest.raises(UsageError, match="holds no weights of a pipeline"):
        export(tmp_path / "run", tmp_path / "none")
