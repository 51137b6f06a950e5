"""What stages hold, and no longer than they must."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn

from penstock import Pipeline


class Doubles(nn.Module):
    """Uses between its units what it drops there."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        more = self.first(x) * 2 + 1
        output: Tensor = self.third(self.second(more))
        return output


def test_a_stage_drops_a_value_after_its_last_use() -> None:
    model, freed = Doubles(), list[bool]()
    made: list[weakref.ref[Tensor]] = []

    def note(module: Any, args: Any, output: Tensor) -> None:
        if type(output) is Tensor:
            made.append(weakref.ref(output))

    def look(module: Any, args: Any) -> None:
        if type(args[0]) is Tensor:
            freed.append(made[-1]() is None)

    model.first.register_forward_hook(note)
    model.second.register_forward_pre_hook(look)
    stages = [["first", "second"], ["third"]]
    with Pipeline(model, stages=stages, ranks=2, microbatches=2) as pipe:
        pipe.predict(torch.ones(4, 4))
    assert freed == [True, True]
