"""What is saved comes back, what is not whole is never loaded, and what does not fit is told beforehand."""

from __future__ import annotations

import json
import logging
import os
import random
from collections import Counter, OrderedDict, deque
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from penstock import Checkpoints, LossScaler, Pipeline, PipelineStage
from penstock.checkpoint import describe, export
from penstock.errors import CheckpointError, InputFileError, StateDictError, UsageError
from penstock.weights import read_weights


class Keeps:
    """Any object with a state."""

    def __init__(self, state: Any = None) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def linear(width: int = 3, **options: Any) -> nn.Linear:
    torch.manual_seed(width)
    return nn.Linear(width, 2, **options)


def stepped(model: nn.Module, kind: str = "AdamW", steps: int = 2, **options: Any) -> Any:
    """An optimizer that has something to keep."""
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.1, **options)
    for _ in range(steps):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    return optimizer


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


def test_any_state_comes_back(tmp_path: Path) -> None:
    random.seed(1)
    generator = np.random.RandomState(3)
    tensors: dict[str, Any] = {
        "rng": torch.get_rng_state(),
        "nested": [torch.arange(3), torch.tensor(1.5)],
    }
    state = {**STATE, "python": random.getstate(), "numpy state": generator.get_state()}
    given, found, other = Keeps(state), Keeps(), Keeps()
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(0, loader=given, other=Keeps(tensors), extra={"mine": [1, "ä"]})
    assert checkpoints.load(loader=found, other=other) == 0
    assert repr(found.state) == repr(state)
    assert checkpoints.extra == {"mine": [1, "ä"]}
    assert torch.equal(other.state["rng"], tensors["rng"])
    assert other.state["nested"][1] == 1.5


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
    "Adafactor": {},
    "Muon": {},
    "RMSprop": {},
    "NAdam": {},
    "Rprop": {},
}


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_optimizers_that_keep_states_for_each_parameter(tmp_path: Path, kind: str) -> None:
    model, other = linear(bias=kind != "Muon"), linear(bias=kind != "Muon")
    optimizer = stepped(model, kind, **KINDS[kind])
    Checkpoints(tmp_path).save(2, model=model, optimizer=optimizer)
    resumed = stepped(other, kind, 0, **KINDS[kind])
    assert Checkpoints(tmp_path).load(model=other, optimizer=resumed) == 2
    for one in (model, other):
        for parameter in one.parameters():
            parameter.grad = torch.full_like(parameter, 0.5)
    optimizer.step()
    resumed.step()
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True)
    )


def test_states_keep_their_types_and_settings_that_are_tensors(tmp_path: Path) -> None:
    """torch's own load_state_dict casts what is kept to the parameter's type."""
    model = linear(dtype=torch.bfloat16)
    optimizer = stepped(model)
    optimizer.param_groups[0]["lr"] = torch.tensor(0.25)
    for state in optimizer.state.values():
        state["exp_avg"] = state["exp_avg"].float() + 1e-4
    Checkpoints(tmp_path).save(1, model=model, optimizer=optimizer)
    resumed = stepped(model, steps=0)
    Checkpoints(tmp_path).load(model=model, optimizer=resumed)
    assert resumed.param_groups[0]["lr"].equal(torch.tensor(0.25))
    moments = (of.state[model.weight]["exp_avg"] for of in (resumed, optimizer))
    assert torch.equal(*moments)


def test_a_parameter_without_a_state_has_none_after_loading(tmp_path: Path) -> None:
    model = linear()
    Checkpoints(tmp_path).save(0, model=model, optimizer=stepped(model, steps=0))
    used = stepped(model)
    Checkpoints(tmp_path).load(model=model, optimizer=used)
    assert not any(used.state.values())


class Momentum(torch.optim.SGD):
    """Keeps something for no parameter."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "everything": 1}


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, Momentum])
def test_optimizers_that_keep_one_state_are_refused(tmp_path: Path, kind: Any) -> None:
    model = linear()
    with pytest.raises(UsageError, match=r"optimizer= (is an LBFGS|keeps 'everything' for no)"):
        Checkpoints(tmp_path).save(0, model=model, optimizer=kind(model.parameters(), lr=0.1))


def test_a_scaler_schedulers_and_what_is_none(tmp_path: Path) -> None:
    model = linear()
    optimizer = stepped(model, steps=0)
    scheduler = torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=2),
            torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 5]),
        ],
        [2],
    )
    optimizer.step()
    scheduler.step()
    scaler = LossScaler(128.0)
    Checkpoints(tmp_path).save(
        1, model=model, optimizer=optimizer, scheduler=scheduler, scaler=scaler, ema=None
    )
    states = scheduler.state_dict(), scaler.state_dict()
    for _ in range(4):
        scheduler.step()
    Checkpoints(tmp_path).load(
        model=model, optimizer=optimizer, scheduler=scheduler, scaler=scaler, ema=None
    )
    assert (repr(scheduler.state_dict()), scaler.state_dict()) == (repr(states[0]), states[1])


def test_a_module_beside_the_model_has_an_optimizer_too(tmp_path: Path) -> None:
    model, critic = linear(), linear(4)
    optimizer = torch.optim.SGD([*model.parameters(), *critic.parameters()], momentum=0.5)
    for parameter in [*model.parameters(), *critic.parameters()]:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    before = critic.weight.detach().clone()
    Checkpoints(tmp_path).save(1, model=model, critic=critic, optimizer=optimizer)
    optimizer.step()
    Checkpoints(tmp_path).load(model=model, critic=critic, optimizer=optimizer)
    assert torch.equal(critic.weight, before)
    assert optimizer.state[critic.weight]["momentum_buffer"].eq(1).all()


# ---- groups


def test_a_group_for_each_layer_and_its_scheduler(tmp_path: Path) -> None:
    """In another order each parameter keeps its settings; a scheduler keeps its by place."""
    model = nn.Sequential(linear(), nn.Linear(2, 2), nn.Linear(2, 2))

    def made(order: list[int]) -> tuple[Any, Any]:
        groups = [{"params": model[i].parameters(), "lr": 0.1 * (i + 1)} for i in order]
        optimizer = torch.optim.SGD(groups, momentum=0.9)
        return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))

    optimizer, scheduler = made([0, 1, 2])
    optimizer.step()
    scheduler.step()
    Checkpoints(tmp_path).save(1, model=model, optimizer=optimizer, scheduler=scheduler)
    other, follows = made([2, 0, 1])
    for strict in (True, False):
        with pytest.raises(StateDictError, match="scheduler= keeps a value for each group"):
            Checkpoints(tmp_path).load(
                strict=strict, model=model, optimizer=other, scheduler=follows
            )
    Checkpoints(tmp_path).load(model=model, optimizer=other)
    assert [group["lr"] for group in other.param_groups] == pytest.approx([0.15, 0.05, 0.1])


# ---- what does not fit


def test_all_that_does_not_fit_is_told_before_anything_is_changed(tmp_path: Path) -> None:
    model = nn.ModuleDict({"a": linear(), "b": linear(), "c": linear(4)})
    optimizer = torch.optim.SGD(model.parameters())
    Checkpoints(tmp_path).save(4, model=model, optimizer=optimizer)
    other = nn.ModuleDict({"a": linear(5), "c": linear(4, dtype=torch.float64), "d": linear()})
    before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    checkpoints, keeps = Checkpoints(tmp_path), Keeps()
    adam = torch.optim.Adam(other.parameters())
    with pytest.raises(StateDictError) as raised:
        checkpoints.load(model=other, optimizer=adam, loader=keeps)
    for text in (
        "step-00000004 does not fit, and nothing was loaded",
        "model/a.weight: [2, 3] was saved, [2, 5] is here",
        "missing in it: model/d.weight, model/d.bias, optimizer/d.weight, optimizer/d.bias",
        "in it, but not here: model/b.bias, model/b.weight, optimizer/b.bias, optimizer/b.weight",
        "model/c.weight: torch.float32 was saved, torch.float64 is here",
        "optimizer= is of the class Adam, SGD was saved",
        "loader= was not saved; there are model=, optimizer=",
    ):
        assert text in str(raised.value)
    assert all(torch.equal(before[name], tensor) for name, tensor in other.state_dict().items())


def test_what_fits_is_loaded_where_not_all_must(tmp_path: Path, caplog: Any) -> None:
    model = nn.ModuleDict({"a": linear(), "b": linear()})
    Checkpoints(tmp_path).save(4, model=model, optimizer=stepped(model))
    saved = model.get_parameter("a.weight").detach().clone()
    old, new = linear(), linear()
    other = nn.ModuleDict({"a": old, "d": new})
    optimizer = stepped(other, steps=1)
    with caplog.at_level(logging.WARNING):
        assert Checkpoints(tmp_path).load(strict=False, model=other, optimizer=optimizer) == 4
    assert "missing in it: model/d.weight" in caplog.text
    assert torch.equal(old.weight, saved)
    assert optimizer.state[old.weight]["step"] == 2
    assert optimizer.state[new.weight]["step"] == 1


def test_what_was_saved_as_another_kind(tmp_path: Path) -> None:
    Checkpoints(tmp_path).save(1, model=linear(), ema=linear(), other=Keeps(1))
    for given in ({"ema": Keeps()}, {"other": linear()}):
        with pytest.raises(
            StateDictError, match=r"(ema|other)= is .*, (weights|a state) was saved"
        ):
            Checkpoints(tmp_path).load(model=linear(), **given)


def test_another_model(tmp_path: Path) -> None:
    Checkpoints(tmp_path).save(1, model=nn.ModuleDict({"a": linear()}))
    with pytest.raises(StateDictError, match="is of another model, and nothing was loaded"):
        Checkpoints(tmp_path).load(model=nn.ModuleDict({"x": linear()}))


def test_what_was_saved_and_not_asked_for_is_told(tmp_path: Path, caplog: Any) -> None:
    model = linear()
    optimizer = stepped(model)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    Checkpoints(tmp_path).save(1, model=model, optimizer=optimizer, scheduler=scheduler)
    Checkpoints(tmp_path).load(model=model)
    assert caplog.text == ""
    Checkpoints(tmp_path).load(model=model, optimizer=optimizer)
    assert "also holds scheduler, which load() was not given" in caplog.text


def test_calls_that_mean_nothing(tmp_path: Path) -> None:
    model = linear()
    for options, text in (
        ({"model": model, "pipe": linear()}, "give pipe= or model="),
        ({"loader": [1]}, "loader= was given a list"),
        ({"optimizer": stepped(linear())}, "optimizer= was given without pipe= or model="),
        (
            {"model": model, "optimizer": stepped(linear())},
            "has parameters that are not the model.s: number 0",
        ),
    ):
        with pytest.raises(UsageError, match=text):
            Checkpoints(tmp_path).save(1, **options)
    with pytest.raises(UsageError, match="keep=0: must be how many"):
        Checkpoints(tmp_path, keep=0)
    with pytest.raises(UsageError, match="step=-1: must be the number of steps"):
        Checkpoints(tmp_path).save(-1, model=model)
    assert Checkpoints(tmp_path / "none").load(model=model) is None
    Checkpoints(tmp_path).save(1, model=model)
    with pytest.raises(UsageError, match="has no checkpoint of it; it has those of steps 1"):
        Checkpoints(tmp_path).load(2, model=model)


# ---- the folder


def steps(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))


def test_the_latest_is_the_one_written_last_and_old_ones_go(tmp_path: Path) -> None:
    checkpoints, model = Checkpoints(tmp_path, keep=2), linear()
    for step in (1, 2, 5):
        checkpoints.save(step, model=model)
    assert checkpoints.steps() == [5, 2]
    # Whoever goes back to an older one and on from there has left the newer ones behind.
    checkpoints.save(3, model=model)
    assert Checkpoints(tmp_path).load(model=model) == 3
    # One that is saved again takes the place of the first, only when it is whole.
    checkpoints.save(3, model=model)
    assert checkpoints.steps() == [3, 5]
    assert steps(tmp_path) == ["step-00000003-2", "step-00000005"]


def test_when_none_is_whole_all_are_named(tmp_path: Path, caplog: Any) -> None:
    """The campaign flips bytes anywhere, and takes the one before."""
    checkpoints, model = Checkpoints(tmp_path), linear()
    paths = [checkpoints.save(step, model=model).path for step in (1, 2)]
    for path in paths:
        assert path is not None
        (path / "states-00001.safetensors").unlink()
    with pytest.raises(
        InputFileError, match=r"no checkpoint in .* is whole: .*02/states.*; .*01/states"
    ):
        Checkpoints(tmp_path).load(model=model)


def saved_whole(checkpoints: Checkpoints, step: int, model: nn.Module) -> None:
    checkpoints.save(step, model=model)
    checkpoints.wait()


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("moment", range(1, 8, 2))
def test_a_full_disk_leaves_the_last_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: int, asynchronous: bool
) -> None:
    """The disk is full at one of the moments at which a saving waits for it: files, folders, the table."""
    model = linear()
    checkpoints = Checkpoints(tmp_path, keep=1, asynchronous=asynchronous)
    saved_whole(checkpoints, 1, model)
    fsync, left = os.fsync, moment

    def full(handle: int) -> None:
        nonlocal left
        left -= 1
        if not left:
            raise OSError(28, "No space left on device")
        fsync(handle)

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        failed = False
        try:
            saved_whole(checkpoints, 2, model)
        except CheckpointError as error:
            failed = "No space left on device" in str(error)
    # After the last moment of the new one's saving nothing can fail any more.
    assert failed == (left <= 0)
    if failed and moment < 4:
        assert steps(tmp_path) == ["step-00000001"]
    assert list(tmp_path.glob(".writing*")) == []
    saved_whole(checkpoints, 3, model)
    assert steps(tmp_path) == ["step-00000003"]


def test_what_is_written_beside_the_training_is_as_it_was(tmp_path: Path) -> None:
    model, checkpoints = linear(), Checkpoints(tmp_path, asynchronous=True)
    before = model.weight.detach().clone()
    saved = checkpoints.save(1, model=model)
    with torch.no_grad():
        model.weight.add_(1)
    checkpoints.wait()
    assert "being written" in str(saved) or saved.path
    assert checkpoints.last is not None
    assert checkpoints.last.bytes > model.weight.nbytes
    assert f"{checkpoints.last.seconds:.3f} s, stalled" in str(checkpoints.last)
    assert Checkpoints(tmp_path).load(model=model) == 1
    assert torch.equal(model.weight, before)


# ---- what is read


def test_files_are_json_and_safetensors(tmp_path: Path) -> None:
    path = Checkpoints(tmp_path).save(1, model=linear(), loader=Keeps(STATE)).path
    assert path is not None
    json.loads((path / "checkpoint.json").read_text().split("\n", 1)[1])
    tensors = load_file(path / "states-00001.safetensors")
    assert torch.equal(tensors["model/weight"], linear().weight)
    assert len(os.listdir(path)) == 2


def test_the_weights_of_an_unsplit_model_are_shown_and_exported(tmp_path: Path) -> None:
    model = nn.Sequential(linear(), nn.Linear(2, 2))
    optimizer = stepped(model)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    Checkpoints(tmp_path / "run").save(
        3, model=model, optimizer=optimizer, scheduler=scheduler, extra={"seen": 1}
    )
    text = describe(tmp_path / "run", check=True)
    for part in ("step-00000003", "unsplit", "all bytes are those", "AdamW", "group 0", "seen"):
        assert part in text
    export(tmp_path / "run", tmp_path / "weights")
    found = read_weights(tmp_path / "weights")
    assert all(torch.equal(found[name], value) for name, value in model.state_dict().items())


# ---- stages made by hand


def test_different_weights_of_one_name_are_refused(tmp_path: Path) -> None:
    """Two stages made by hand, whose modules call their weights alike."""
    stages = [PipelineStage(nn.Sequential(linear()), i, 2) for i in range(2)]
    pipe = Pipeline.from_stages(stages, schedule="GPipe")
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, model=nn.Sequential(linear()))
    for call in (checkpoints.load, partial(checkpoints.save, 2)):
        with pytest.raises(UsageError, match=r"several stages have weights named 0\.weight"):
            call(pipe=pipe)


# ---- what goes on without a checkpoint's randomness


def test_random_numbers_follow_the_step_of_a_plain_loop(tmp_path: Path, caplog: Any) -> None:
    model = nn.Sequential(linear(), nn.Linear(2, 2))
    Checkpoints(tmp_path).save(9, model=model)
    pipe = Pipeline(model, ranks=2, seed=3)
    assert Checkpoints(tmp_path).load(pipe=pipe) == 9
    assert pipe.randomness.state_dict() == {"seed": 3, "step": 9}
    assert "the next step is taken to be number 9" in caplog.text


def test_the_folder_is_only_read_by_loading(tmp_path: Path) -> None:
    Checkpoints(tmp_path).save(1, model=linear())
    before = sorted(os.listdir(tmp_path))
    (tmp_path / ".lock").unlink(missing_ok=True)
    Checkpoints(tmp_path).load(model=linear())
    assert sorted({*os.listdir(tmp_path), ".lock"}) == before
