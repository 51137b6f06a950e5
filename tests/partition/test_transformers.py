"""Models of transformers, unedited: outputs and every gradient are the unsplit model's.

``make campaign ARGS=zoo`` cuts one model of each family.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")

import transformers

from penstock import Pipeline
from penstock.partition import partition
from penstock.testing import Case, compare
from tests.catalogue.making import case_of
from tests.integrations.trainers import make_model

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
WORDS = torch.arange(56).reshape(8, 7) % 47 + 3
TOLERANCE = 1e-9


def padded(rows: slice = slice(None), **more: Any) -> dict[str, Any]:
    mask = torch.ones_like(WORDS)
    mask[::2, :2] = 0
    return {"input_ids": WORDS[rows], "attention_mask": mask[rows], **more}


def case(name: str, **more: Any) -> Case:
    model = make_model(name).double()
    calls = [((), padded(slice(2 * i, 2 * i + 2), **more)) for i in range(4)]
    return case_of(model, calls)


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "t5"])
def test_each_is_cut_by_count(name: str) -> None:
    more = {"labels": torch.ones(2, 4, dtype=torch.long)} if name == "t5" else {}
    compare(case(name, **more), schedule="ZB-V", ranks=2, microbatches=4).check(TOLERANCE)


def travels(name: str, stages: Any, **call: Any) -> list[tuple[str, int, tuple[int, ...]]]:
    parts = partition(make_model(name), stages, example=((), call))
    return [(edge.value, edge.source, edge.targets) for edge in parts.plan((), call).edges]


def test_only_hidden_states_travel_and_an_encoder_feeds_all_decoders() -> None:
    """Masks, positions and rotary tables are made anew in each stage."""
    points = ["model.layers.1", "model.layers.2", "model.norm"]
    names = [value for value, *_ in travels("llama", points, **padded())]
    assert names == [f"model.layers.{index}" for index in (0, 1, 3)]
    points = ["encoder.block.1", "decoder.block.0", "decoder.block.2"]
    found = travels("t5", points, **padded(labels=WORDS[:, :5]))
    assert ("encoder.final_layer_norm", 1, (2, 3)) in found


def test_checkpointed_layers() -> None:
    checkpointed = case("llama")
    checkpointed.model.activation_checkpointing_enable()  # type: ignore[operator]
    options: dict[str, Any] = {"schedule": "1F1B", "microbatches": 4, "stages": 3}
    compare(checkpointed, **options).check(TOLERANCE)
    recomputed = case("gpt2", use_cache=False)
    compare(recomputed, **options, recompute=["transformer.h"]).check(TOLERANCE)


def test_lengths_and_full_masks_may_come_later_and_what_layers_collect_is_the_models() -> None:
    model = make_model("llama").eval()
    model.set_attn_implementation("eager")
    pipe = Pipeline(copy.deepcopy(model), stages=3, ranks=3, microbatches=1)
    pipe.cut(**padded())
    for length in (5, 7):
        for full in (True, False):
            call = {name: value[:, :length] for name, value in padded().items()}
            call["attention_mask"] = call["attention_mask"] | int(full)
            with torch.no_grad():
                found, plain = pipe.predict(**call), model(**call)
            torch.testing.assert_close(found.logits, plain.logits, rtol=0, atol=0)
            assert found.past_key_values is None
    asked = padded(output_hidden_states=True, output_attentions=True)
    with torch.no_grad():
        found, plain = pipe.predict(**asked), model(**asked)
    for name in ("hidden_states", "attentions"):
        assert len(plain[name]) >= 4
        assert [*map(torch.equal, found[name], plain[name])] == [True] * len(plain[name])


def test_layers_that_are_left_out_by_chance() -> None:
    config = transformers.M2M100Config(
        d_model=16, encoder_layers=2, decoder_layers=3, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16, vocab_size=50,
        encoder_layerdrop=0.0, decoder_layerdrop=0.5, decoder_start_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.M2M100ForConditionalGeneration(config).double()
    calls = [((), padded(slice(0, 2), labels=WORDS[:2, :5].clone())) for _ in range(4)]
    compare(case_of(model, calls), schedule="1F1B", ranks=2, microbatches=4).check(TOLERANCE)


def test_a_model_that_no_memory_holds_is_cut() -> None:
    """Layers of a model of seventy billion parameters."""
    config = transformers.LlamaConfig(
        hidden_size=8192, intermediate_size=28672, num_hidden_layers=16, num_attention_heads=64,
        num_key_value_heads=8,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    call = {"input_ids": torch.zeros(1, 2048, dtype=torch.long)}
    plan = partition(model, 16, example=((), call)).plan((), call)
    assert [edge.source for edge in plan.edges] == list(range(15))
