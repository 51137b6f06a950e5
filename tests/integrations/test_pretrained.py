"""Models of transformers as modules: their loss, their output class, and what they generate."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_outputs import CausalLMOutputWithPast

from penstock import Pipeline, PipelineModule
from penstock.errors import AgreementError, UsageError
from tests.integrations.trainers import SIZES, TOKENS, Examples, answering, make_model
from tests.processes import in_processes

pytestmark = pytest.mark.filterwarnings("ignore")
ROWS = Examples("text", 8, 1)
BATCH = {name: torch.stack([ROWS[i][name] for i in range(8)]) for name in ("input_ids", "labels")}
# One microbatch without any label, and one whose first row has a label in front of all.
BATCH["labels"][1:5] = -100


def as_module(model: Any, **options: Any) -> Any:
    defaults: dict[str, Any] = {"ranks": 2, "microbatches": 4}
    return PipelineModule(Pipeline(model, **(defaults | options)))


@pytest.mark.parametrize("items", [None, 1000])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_the_loss_is_the_models(family: str, items: int | None) -> None:
    module, plain = as_module(make_model(family)), make_model(family)
    module.train()
    output = module(**BATCH, num_items_in_batch=items, outputs=True)
    expected = plain.train()(**BATCH, num_items_in_batch=items)
    assert type(output) is type(expected)
    torch.testing.assert_close(output.loss, expected.loss)
    torch.testing.assert_close(output.logits, expected.logits)
    output.loss.backward()
    expected.loss.backward()
    named = dict(plain.named_parameters())
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(parameter.grad, named[name].grad)


def test_the_output_class_is_the_models() -> None:
    module = as_module(make_model("llama")).train()
    output = module(**BATCH)
    assert type(output) is CausalLMOutputWithPast
    assert output.logits is None
    evaluated = module.eval()(**BATCH)
    assert type(evaluated) is CausalLMOutputWithPast
    assert "loss" not in module(input_ids=BATCH["input_ids"])
    assert module.config.vocab_size == TOKENS["vocab_size"]


@pytest.mark.parametrize("name", ["step", "evaluate"])
def test_outputs_of_a_pipeline_hold_the_loss_of_the_batch(name: str) -> None:
    plain = make_model("llama")
    pipe = Pipeline(make_model("llama"), ranks=2, microbatches=4)
    output = getattr(pipe, name)(**BATCH, outputs=True).outputs
    expected = plain(**BATCH)
    torch.testing.assert_close(output.loss, expected.loss.detach())
    torch.testing.assert_close(output.logits, expected.logits.detach())


def test_labels_may_have_other_names() -> None:
    model, places = answering().eval(), torch.arange(8) % 5
    batch: dict[str, Any] = {"start_positions": places, "end_positions": places + 1}
    batch["input_ids"] = BATCH["input_ids"]
    expected = copy.deepcopy(model)(**batch).loss.item()
    found = Pipeline(model, ranks=2, microbatches=4).evaluate(**batch)
    assert found.loss == pytest.approx(expected)


def test_a_step_without_the_models_loss_says_what_it_needs() -> None:
    labels = BATCH["labels"]
    wrong: list[tuple[dict[str, Any], str]] = [
        ({}, "LlamaForCausalLM computed no loss, .* give it labels=.*; pass labels="),
        ({"target": labels}, "LlamaForCausalLM computed no loss, .* give it labels="),
        ({"labels": labels, "return_dict": False}, "returned a tuple, .* with return_dict=True"),
    ]
    for given, says in wrong:
        pipe = Pipeline(make_model("llama"), ranks=2, microbatches=4)
        with pytest.raises(UsageError, match=says):
            pipe.step(BATCH["input_ids"], **given)
    with pytest.raises(AttributeError, match="resize_token_embeddings"):
        as_module(make_model("llama")).resize_token_embeddings(60)


def test_a_loss_of_the_logits() -> None:
    module, plain = as_module(make_model("llama")).train(), make_model("llama").train()
    for model in (module, plain):
        logits = model(input_ids=BATCH["input_ids"]).logits
        (logits.logsumexp(0).mean() + logits.std()).backward()
    named = dict(plain.named_parameters())
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(parameter.grad, named[name].grad)


HOW: list[dict[str, Any]] = [
    {"do_sample": False},
    {"do_sample": True, "top_k": 10},
    {"num_beams": 2},
    {"use_cache": False},
]
MADE: dict[str, Any] = {
    "gpt2": lambda: make_model("gpt2"),
    "t5": lambda: make_model("t5"),
    "mistral": lambda: transformers.MistralForCausalLM(
        transformers.MistralConfig(
            **SIZES, **TOKENS, num_attention_heads=4, num_key_value_heads=2, sliding_window=6
        )
    ),
}


def generated(name: str, group: Any = None, rank: int = 0, plain: bool = False) -> Any:
    torch.manual_seed(0)
    model = MADE[name]()
    module: Any = model.eval() if plain else as_module(model, mesh=group)
    if group is not None and name != "gpt2":
        # Of a model that is not cut yet, each process has all.
        module.pipe.cut(input_ids=ROWS.tokens, labels=ROWS.tokens)
    generate = module.generate
    mask = torch.ones(3, 10, dtype=torch.long)
    mask[0, :3] = 0
    rows = []
    for how in HOW:
        # Only what rank 0 draws counts.
        torch.manual_seed(7 + rank)
        tokens = ROWS.tokens[:3]
        options = {"max_new_tokens": 4, "eos_token_id": None, "pad_token_id": 2, **how}
        rows.append(generate(tokens, attention_mask=mask, **options).tolist())
    return rows


@pytest.mark.slow
@in_processes(2, 100.0)
def test_processes_generate_what_the_plain_model_does(group: Any) -> None:
    for name in MADE:
        found = generated(name, group, group.rank())
        assert found == generated(name, plain=True), name


def test_one_process_generates_what_the_plain_model_does() -> None:
    assert generated("gpt2") == generated("gpt2", plain=True)


@pytest.mark.slow
@in_processes(2, 100.0)
def test_a_cache_that_cannot_be_split_is_refused_on_every_rank(group: Any) -> None:
    config = transformers.Qwen3NextConfig(
        **SIZES, **TOKENS, num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_experts=0,
        linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=8, linear_value_head_dim=8,
    )  # fmt: skip
    module = as_module(transformers.Qwen3NextForCausalLM(config), mesh=group)
    module.pipe.cut(input_ids=ROWS.tokens)
    differing = ROWS.tokens[group.rank() : group.rank() + 2]
    with pytest.raises(UsageError, match=r"cannot split the cache of model.layers.0"):
        module.generate(ROWS.tokens[:2], max_new_tokens=3)
    with pytest.raises(AgreementError, match="different arguments"):
        module.generate(differing, max_new_tokens=3)
    assert module.generate(ROWS.tokens[:2], max_new_tokens=3, use_cache=False).shape == (2, 13)


@pytest.mark.parametrize("labels", [False, True])
def test_outputs_that_do_not_count_samples_are_those_of_the_model(labels: bool) -> None:
    """The balance loss and the logits of the router, which has a row for each token; and memories."""
    config = transformers.MixtralConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, vocab_size=31,
        num_key_value_heads=2, num_local_experts=2, output_router_logits=True,
    )  # fmt: skip
    plain = transformers.MixtralForCausalLM(config).eval()
    batch = {"input_ids": torch.arange(30).view(6, 5)}
    batch |= {"labels": batch["input_ids"]} if labels else {}
    expected = plain(**batch, use_cache=False)
    with torch.no_grad():
        output = as_module(copy.deepcopy(plain)).eval()(**batch)
    for name in ("aux_loss", "router_logits", "logits"):
        torch.testing.assert_close(output[name], expected[name], atol=1e-4, rtol=1e-3)
    remembers = transformers.XLNetModel(
        transformers.XLNetConfig(
            d_model=16, n_layer=2, n_head=2, d_inner=16, vocab_size=31, mem_len=3
        )
    ).eval()
    pipe = Pipeline(copy.deepcopy(remembers), ranks=2, microbatches=3)
    found = pipe.predict(input_ids=batch["input_ids"])
    torch.testing.assert_close(found.mems, remembers(input_ids=batch["input_ids"]).mems)
