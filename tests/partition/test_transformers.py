"""Models of transformers, unedited: the output bit by bit, and every gradient, are the unsplit model's."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from tests.partition.driver import check_equal, cut, forwards
from tests.partition.families import FAMILIES, make

pytestmark = pytest.mark.slow
torch.set_num_threads(1)

USUAL = {"gpt2", "llama tied", "bert", "t5"}
"""What `make test` runs; `make test-all` runs the others."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("stages", "training"), [(2, True), (4, True), (4, False)])
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[] if n in USUAL else pytest.mark.nightly) for n in sorted(FAMILIES)],
)
def test_by_count(name: str, stages: int, training: bool) -> None:
    model, kwargs, tolerance = make(name, training=training)
    check_equal(model, stages, (), kwargs, tolerance=tolerance, draws=True)


def values(model: Any, stages: Any, kwargs: Any) -> list[Any]:
    edges = cut(model, stages, (), kwargs).plan((), kwargs).edges
    return [(edge.value, edge.source, edge.targets) for edge in edges]


def test_only_hidden_states_travel() -> None:
    """Masks, positions and rotary tables are made anew in each stage."""
    model, kwargs, _ = make("llama")
    points = ["model.layers.1", "model.layers.2", "model.norm"]
    names = [value for value, *_ in values(model, points, kwargs)]
    assert names == [f"model.layers.{index}" for index in (0, 1, 3)]


def test_an_encoder_feeds_all_decoders() -> None:
    model, kwargs, _ = make("t5", training=False)
    points = ["encoder.block.1", "decoder.block.0", "decoder.block.2"]
    assert ("encoder.final_layer_norm", 1, (2, 3)) in values(model, points, kwargs)


def test_checkpointed_layers() -> None:
    model, kwargs, tolerance = make("llama")
    model.activation_checkpointing_enable()  # type: ignore[operator]
    check_equal(model, 3, (), kwargs, tolerance=tolerance, draws=True)
    model, kwargs, tolerance = make("gpt2")
    kwargs["use_cache"] = False
    options: dict[str, Any] = {"recompute": ["transformer.h"]}
    check_equal(model, 3, (), kwargs, **options, tolerance=tolerance, draws=True)


def test_a_new_length_and_a_mask_that_is_full() -> None:
    model, kwargs, _ = make("llama", training=False)
    parts, plain = cut(model, 3, (), kwargs), copy.deepcopy(model)
    for length in (5, 7):
        for full in (True, False):
            mask = torch.ones(2, length, dtype=torch.long)
            mask[0, 0] = int(full)
            call = {"input_ids": kwargs["input_ids"][:, :length], "attention_mask": mask}
            with torch.no_grad():
                assert torch.equal(forwards(parts, (), call).output.logits, plain(**call).logits)


def test_a_cache_is_in_no_output() -> None:
    model, kwargs, _ = make("llama", training=False)
    assert forwards(cut(model, 2, (), kwargs), (), kwargs).output.past_key_values is None


def test_what_is_collected_from_layers_reaches_the_last_stage() -> None:
    model, kwargs, _ = make("llama", training=False)
    model.set_attn_implementation("eager")  # type: ignore[operator]
    asked = {**kwargs, "output_hidden_states": True, "output_attentions": True}
    with torch.no_grad():
        output, plain = forwards(cut(model, 2, (), kwargs), (), asked).output, model(**asked)
    for name in ("hidden_states", "attentions"):
        assert len(plain[name]) >= 4
        assert [*map(torch.equal, output[name], plain[name])] == [True] * len(plain[name])


def test_layers_that_are_left_out_by_chance() -> None:
    model, kwargs, _ = make("m2m")
    model.model.decoder.layerdrop = 0.5  # type: ignore[union-attr]
    check_equal(model, 2, (), kwargs, draws=True, repeat=4)


@pytest.mark.parametrize("layers", [16, pytest.param(80, marks=pytest.mark.nightly)])
def test_a_model_that_no_memory_holds_is_cut(layers: int) -> None:
    """The layers of a model of seventy billion parameters."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=layers,
        num_attention_heads=64,
        num_key_value_heads=8,
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    kwargs = {"input_ids": torch.zeros(1, 2048, dtype=torch.long)}
    plan = cut(model, 16, (), kwargs).plan((), kwargs)
    assert [edge.source for edge in plan.edges] == list(range(15))
