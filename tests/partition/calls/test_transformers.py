"""Models of transformers, unedited: the loss and every gradient are the unsplit model's."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock import Pipeline
from penstock.errors import PartitionError
from penstock.partition import partition
from penstock.testing import Case, compare
from tests.partition.calls.authors import AUTHORS, made
from tests.partition.calls.driving import check_equal, describe, square_mean

pytestmark = pytest.mark.slow
torch.set_num_threads(1)


@pytest.mark.parametrize(("stages", "training"), [(2, False), (3, True), (4, True)])
@pytest.mark.parametrize("name", sorted(AUTHORS))
def test_by_count(name: str, stages: int, training: bool) -> None:
    model, kwargs, tolerance = made(name, training=training)
    cut = check_equal(model, lambda m: partition(m, stages), (), kwargs, tolerance=tolerance)
    assert len(cut.modules) == stages


@pytest.mark.parametrize("name", sorted(AUTHORS))
def test_by_path(name: str) -> None:
    model, kwargs, tolerance = made(name)
    points = AUTHORS[name].points
    check_equal(model, lambda m: partition(m, points), (), kwargs, tolerance=tolerance)


def output_loss(output: Any, target: Tensor) -> Tensor:
    return square_mean(output)


@pytest.mark.parametrize("name", sorted(AUTHORS))
@pytest.mark.parametrize(("schedule", "stages"), [("1F1B", 2), ("Interleaved1F1B", 4), ("ZB-V", 4)])
def test_three_steps(name: str, schedule: str, stages: int) -> None:
    model, kwargs, tolerance = made(name)
    kwargs.pop("labels", None) if name == "roberta" else None
    case = Case(model, (), torch.zeros(4), output_loss, kwargs=kwargs)
    verdict = compare(case, schedule=schedule, ranks=2, stages=stages, microbatches=4, steps=3)
    verdict.check(10 * tolerance)


def test_an_encoder_feeds_all_decoders() -> None:
    model, kwargs, _ = made("t5")
    edges = describe(partition(model, AUTHORS["t5"].points), (), kwargs).edges
    encoder = [edge for edge in edges if edge.value == "encoder.final_layer_norm"]
    assert [(edge.source, edge.targets) for edge in encoder] == [(1, (2, 3))]


def test_only_hidden_states_travel() -> None:
    """Masks, positions and rotary tables are made anew in each stage."""
    model, kwargs, _ = made("llama")
    edges = describe(partition(model, AUTHORS["llama"].points), (), kwargs).edges
    assert [edge.value for edge in edges] == [f"model.layers.{index}" for index in (0, 1, 3)]


def pipeline(model: nn.Module, **options: Any) -> Pipeline:
    asked: dict[str, Any] = {
        "schedule": "1F1B",
        "stages": 2,
        "microbatches": 2,
        "loss_fn": output_loss,
    }
    return Pipeline(model, **(asked | options))


def test_the_output_is_the_authors() -> None:
    model, kwargs, _ = made("llama", training=False)
    whole = copy.deepcopy(model)
    found = pipeline(model).predict(**kwargs)
    with torch.no_grad():
        torch.testing.assert_close(found.logits, whole(**kwargs).logits, atol=1e-12, rtol=0)
    # A cache would hold the layers of the last stage alone.
    assert found.past_key_values is None


def test_checkpointed_layers() -> None:
    model, kwargs, tolerance = made("llama")
    enable = getattr(model, "activation_checkpointing_enable", None)
    (enable or model.gradient_checkpointing_enable)()  # type: ignore[operator]
    case = Case(model, (), torch.zeros(4), output_loss, kwargs=kwargs)
    compare(case, schedule="ZB-V", ranks=2, microbatches=4).check(tolerance)


def test_the_models_own_loss() -> None:
    model, kwargs, _ = made("roberta")
    whole = copy.deepcopy(model)
    pipe = pipeline(model, loss_fn=lambda output, target: output.loss)
    result = pipe.step(**kwargs, target=torch.zeros(4))
    assert result.loss == pytest.approx(float(whole(**kwargs).loss.detach()), abs=1e-9)


def test_without_a_mask_only_the_first_stage_needs_the_batch() -> None:
    model, kwargs, _ = made("llama")
    cut = partition(model, 3)
    edges = describe(cut, (), {"input_ids": kwargs["input_ids"]}).edges
    there = {"input_ids": kwargs["input_ids"].to("meta")}
    first = cut.modules[0]({}, (), {"input_ids": kwargs["input_ids"]})
    mine = {edge.value: first[edge.value] for edge in edges if 1 in edge.targets}
    assert list(cut.modules[1](mine, (), there)) == [edges[1].value]


def test_hidden_states_of_other_stages_are_refused() -> None:
    model, kwargs, _ = made("llama")
    with pytest.raises(PartitionError, match="such as hidden states, are not available here"):
        pipeline(model).predict(**kwargs, output_hidden_states=True)


def test_a_model_without_data_is_cut() -> None:
    with torch.device("meta"):
        model = AUTHORS["llama"].make()
    cut = partition(model, 4)
    kwargs = AUTHORS["llama"].kwargs()
    assert len(describe(cut, (), kwargs).edges) == 3
    assert all(parameter.is_meta for part in cut.modules for parameter in part.parameters())
