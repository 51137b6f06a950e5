"""Buffers between the units of a model: one entry in what is saved, however many stages use them."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

import penstock


class Biased(nn.Module):
    """Uses buffers of its own between its layers, one that is saved and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.register_buffer("bias", torch.linspace(0, 1, 4))
        self.register_buffer("scale", torch.full((4,), 0.5), persistent=False)
        self.bias: Tensor
        self.scale: Tensor

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden)) * self.scale + self.bias
        return hidden


def make() -> Biased:
    torch.manual_seed(0)
    return Biased()


def test_each_is_saved_once(tmp_path: Path) -> None:
    x = torch.linspace(-1, 1, 32).reshape(8, 4)
    with penstock.Pipeline(make(), schedule="Interleaved1F1B", ranks=2, stages=4) as pipe:
        torch.testing.assert_close(pipe.predict(x), make()(x))
        assert pipe.state_dict().keys() == make().state_dict().keys()
        pipe.save(tmp_path)
        changed = make().state_dict()
        changed["bias"] += 1
        pipe.load_state_dict(changed)
        whole = make()
        whole.load_state_dict(changed)
        torch.testing.assert_close(pipe.predict(x), whole(x))
        pipe.load(tmp_path)
        torch.testing.assert_close(pipe.predict(x), make()(x))
    plain = make()
    plain.load_state_dict(penstock.read_weights(tmp_path), strict=True)
