"""transformers loads what a pipeline saved, and a pipeline what transformers saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from penstock import Pipeline, read_weights
from penstock.weights import save_index, save_stage
from tests.pipeline.models import assert_same

transformers: Any = pytest.importorskip("transformers")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def tiny(seed: int) -> Any:
    torch.manual_seed(seed)
    config = transformers.GPT2Config(
        n_layer=2, n_head=2, n_embd=8, vocab_size=32, n_positions=16, tie_word_embeddings=True
    )
    return transformers.GPT2LMHeadModel(config).eval()


TOKENS = torch.arange(12).reshape(2, 6)


def test_transformers_loads_a_folder_of_ours(tmp_path: Path) -> None:
    model = tiny(0)
    Pipeline(model, ranks=1, microbatches=1).save(tmp_path)
    model.config.save_pretrained(tmp_path)
    found = transformers.GPT2LMHeadModel.from_pretrained(tmp_path).eval()
    assert torch.equal(found(TOKENS).logits, model(TOKENS).logits)
    assert found.lm_head.weight is found.transformer.wte.weight


def test_of_several_stages_too(tmp_path: Path) -> None:
    """Each block in a file of its own, the tied weight in the first."""
    model = tiny(1)
    state = {n: t for n, t in model.state_dict().items() if n != "lm_head.weight"}
    first = {n: t for n, t in state.items() if ".h." not in n}
    rest = {n: t for n, t in state.items() if ".h." in n}
    sizes = {i: save_stage(held, tmp_path, i, 2) for i, held in enumerate((first, rest))}
    save_index(tmp_path, sizes, {"lm_head.weight": "transformer.wte.weight"})
    model.config.save_pretrained(tmp_path)
    found = transformers.GPT2LMHeadModel.from_pretrained(tmp_path).eval()
    assert torch.equal(found(TOKENS).logits, model(TOKENS).logits)
    assert_same(dict(read_weights(tmp_path)), model.state_dict())


def test_a_pipeline_loads_a_folder_of_transformers(tmp_path: Path) -> None:
    tiny(2).save_pretrained(tmp_path)
    pipe = Pipeline(tiny(3), ranks=1, microbatches=1)
    assert pipe.load(tmp_path) == ([], [])
    assert_same(pipe.state_dict(), tiny(2).state_dict())
