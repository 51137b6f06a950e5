"""Weights by their names in the unsplit model: state dicts, files, and the norm of all gradients."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from penstock import Pipeline, PipelineStage, read_weights
from penstock.errors import StateDictError, UsageError
from tests.catalogue.cases import LANGUAGE, LOOPED, pipeline
from tests.catalogue.making import Does
from tests.pipeline.models import X, Y, assert_same, chain, gradients, make, mean_loss, restless
from tests.processes import in_processes


def plain() -> nn.Module:
    """Has buffers of both kinds."""
    module = Does(lambda _, value: value, kept=torch.arange(3.0))
    module.register_buffer("not_kept", torch.arange(3.0), persistent=False)
    return module


def buffered() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(plain(), nn.Linear(4, 4), plain(), nn.Linear(4, 4)).double()


def shaken(model: nn.Module) -> nn.Module:
    """A copy with other numbers."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        for tensor in [*other.parameters(), *other.buffers()]:
            tensor.add_(1)
    return other


TIED = LANGUAGE["tied"]
PIPELINES: dict[str, Callable[[], tuple[nn.Module, Pipeline]]] = {
    "batch norm": lambda: (restless(), make(restless())),
    "buffers": lambda: (buffered(), make(buffered())),
    "one stage": lambda: (buffered(), make(buffered(), ranks=1)),
    "tied": lambda: (TIED().model, pipeline(TIED(), 4, schedule="ZBVZeroBubble")),
    "looped": lambda: (LANGUAGE["looped"]().model, pipeline(LANGUAGE["looped"](), LOOPED)),
}


@pytest.fixture(params=sorted(PIPELINES))
def both(request: pytest.FixtureRequest) -> tuple[nn.Module, Pipeline]:
    """A plain model and a pipeline of another one like it."""
    return PIPELINES[request.param]()


# ---- state dicts


def test_names_and_values_are_the_plain_models_and_go_both_ways(
    both: tuple[nn.Module, Pipeline], tmp_path: Path
) -> None:
    plain, pipe = both
    assert_same(pipe.weights.state_dict(), plain.state_dict())
    full = pipe.weights.state_dict(full=True)
    assert [name for name, _ in pipe.named_parameters()] == [n for n, _ in plain.named_parameters()]
    other = shaken(plain).state_dict()
    assert pipe.weights.load_state_dict(other) == ([], [])
    assert_same(full, plain.state_dict())  # a full one is a copy
    assert_same(pipe.weights.state_dict(), other)
    pipe.weights.save(tmp_path)
    for state in (pipe.weights.state_dict(full=True), read_weights(tmp_path)):
        empty = copy.deepcopy(plain)
        empty.load_state_dict(state, strict=True)
        assert_same(empty.state_dict(), other)


def spoiled(plain: nn.Module) -> dict[str, Tensor]:
    """A state dict with one name gone and one too many."""
    state = dict(plain.state_dict())
    del state[sorted(state)[-1]]
    return state | {"else.weight": torch.zeros(2)}


def test_missing_and_unexpected_names_are_torchs(both: tuple[nn.Module, Pipeline]) -> None:
    plain, pipe = both
    before = {name: value.clone() for name, value in pipe.weights.state_dict().items()}
    state = spoiled(shaken(plain))
    expected = copy.deepcopy(plain).load_state_dict(state, strict=False)
    with pytest.raises(StateDictError, match="Missing key") as error:
        pipe.weights.load_state_dict(state)
    assert isinstance(error.value, RuntimeError)
    assert all(f'"{name}"' in str(error.value) for name in (*expected.missing_keys, "else.weight"))
    assert_same(pipe.weights.state_dict(), before)
    assert pipe.weights.load_state_dict(state, strict=False) == tuple(map(list, expected))
    plain.load_state_dict(state, strict=False)
    assert_same(pipe.weights.state_dict(), plain.state_dict())


def test_another_size_is_refused_whether_strict_or_not() -> None:
    pipe, model = make(chain()), chain()
    state = model.state_dict() | {"0.0.bias": torch.zeros(7)}
    for strict in (True, False):
        with pytest.raises(StateDictError, match=r"size mismatch for 0.0.bias: \[7\].*\[4\]"):
            pipe.weights.load_state_dict(state, strict=strict)


def test_stages_with_names_alike_are_not_mixed_up(tmp_path: Path) -> None:
    stages = [PipelineStage(nn.Linear(4, 4).double(), index, 2) for index in range(2)]
    pipe = Pipeline.from_stages(stages, schedule="1F1B", microbatches=4, loss_fn=mean_loss)
    pipe.step(X, target=Y)
    calls: list[Callable[[], Any]] = [
        pipe.weights.state_dict,
        lambda: pipe.weights.state_dict(full=True),
        lambda: pipe.weights.save(tmp_path),
    ]
    for call in calls:
        with pytest.raises(UsageError, match="several stages have weights named"):
            call()


# ---- files


def test_a_folder_loads_into_another_number_of_stages(tmp_path: Path) -> None:
    of = TIED()
    first, second = pipeline(of, 4), pipeline(of, 2)
    first.weights.load_state_dict(shaken(of.model).state_dict())
    first.weights.save(tmp_path)
    assert second.weights.load(tmp_path) == ([], [])
    assert_same(second.weights.state_dict(), first.weights.state_dict())


def test_a_tied_weight_is_written_once(tmp_path: Path) -> None:
    pipeline(TIED(), cut=True).weights.save(tmp_path)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert "head.weight" not in index["weight_map"]
    assert index["weight_map"]["embed.weight"].startswith("model-00001-of-00004-")
    assert index["metadata"]["tied"] == {"head.weight": "embed.weight"}
    weights = read_weights(tmp_path)
    assert "head.weight" in weights
    assert index["metadata"]["total_size"] == sum(weights[n].nbytes for n in index["weight_map"])


@pytest.mark.parametrize("kept", ["embed.weight", "head.weight"])
def test_one_name_of_a_tied_weight_is_enough_in_files(kept: str, tmp_path: Path) -> None:
    """As in a single file of transformers, which has no table of ties."""
    of = TIED()
    other = shaken(of.model)
    state = {
        n: t for n, t in other.state_dict().items() if n not in {"embed.weight", "head.weight"}
    }
    save_file(state | {kept: other.get_parameter(kept).detach()}, tmp_path / "model.safetensors")
    for source in (tmp_path, tmp_path / "model.safetensors"):
        pipe = pipeline(of, 2)
        assert pipe.weights.load(source) == ([], [])
        assert_same(pipe.weights.state_dict(), other.state_dict())


# ---- processes


@pytest.mark.parametrize(
    ("shape", "schedule"), [("tied", "ZBVZeroBubble"), ("looped", "DualPipeV")]
)
@in_processes(2, 100.0)
def test_processes_together(group: Any, shape: str, schedule: str, tmp_path: Path) -> None:
    """Everything above, with a process a rank."""
    of = LANGUAGE[shape]()
    state, stages = shaken(of.model).state_dict(), LOOPED if shape == "looped" else 4
    pipe, fresh = (pipeline(of, stages, schedule=schedule, mesh=group) for _ in range(2))
    before = pipe.weights.state_dict(full=True)
    with pytest.raises(StateDictError, match=r'Unexpected key.* in state_dict: "else.weight"'):
        pipe.weights.load_state_dict(spoiled(shaken(of.model)))
    result = pipe.weights.load_state_dict(spoiled(shaken(of.model)), strict=False)
    expected = shaken(of.model).load_state_dict(spoiled(of.model), strict=False)
    assert list(result) == [expected.missing_keys, ["else.weight"]]
    pipe.weights.load_state_dict(state)
    full = pipe.weights.state_dict(full=True)
    assert before.keys() == full.keys() == (set() if group.rank() else state.keys())
    pipe.weights.save(tmp_path)
    pipe.job.meet(lambda: None)
    fresh.weights.load(tmp_path)
    parts = [one.weights.state_dict() for one in (pipe, fresh)]
    for found, wanted in [
        (before, of.model.state_dict()),
        *((one, state) for one in (full, *parts)),
    ]:
        assert all(torch.equal(found[name], wanted[name]) for name in found)
    mine, others = pipe.job.meet(lambda: sorted(parts[0]))
    assert {*mine, *others} == state.keys()
    of.model.load_state_dict(read_weights(tmp_path))
    pipe.close()
    fresh.close()


# ---- the norm


@pytest.mark.parametrize(("shape", "order"), [("tied", 1.0), ("half frozen", 2.0)])
def test_norms_are_torchs(shape: str, order: float) -> None:
    of = LANGUAGE[shape]()
    plain = copy.deepcopy(of.model)
    of.loss_fn(plain(*of.args), of.target).backward()
    expected = float(nn.utils.clip_grad_norm_(plain.parameters(), 0.1, norm_type=order))
    pipe = pipeline(of, 4)
    pipe.step(*of.args, target=of.target)
    assert pipe.weights.grad_norm(order) == pytest.approx(expected, rel=1e-6)
    assert pipe.clip_grad_norm_(0.1, order) == pytest.approx(expected, rel=1e-6)
    assert_same(gradients(pipe), gradients(plain))


def test_the_norm_does_not_depend_on_the_placement() -> None:
    of = LANGUAGE["looped"]()
    of.model.float()
    found = set()
    for schedule, ranks in (("1F1B", 4), ("ZBVZeroBubble", 2), ("DualPipeV", 2)):
        pipe = pipeline(of, LOOPED, schedule=schedule, ranks=ranks)
        pipe.step(*of.args, target=of.target)
        found.add(pipe.weights.grad_norm())
    assert len(found) == 1


@in_processes(2)
def test_torchs_norm_where_one_rank_has_all_that_learns(group: Any) -> None:
    """There it is right, and the other rank is told instead of waiting for it."""
    model = chain(2)
    model[0].requires_grad_(False)
    pipe = make(model, mesh=group, ranks=None)
    pipe.step(X, target=Y)
    told = pytest.raises(UsageError, match="clip_grad_norm_")
    with nullcontext() if group.rank() else told:
        nn.utils.clip_grad_norm_(pipe.parameters(), 1e-3)
    pipe.clip_grad_norm_(1e-3)
    pipe.close()
