"""What stages hold, and no longer than they must."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn

from penstock import Pipeline
from tests.catalogue.making import Does


def test_a_stage_drops_a_value_after_its_last_use() -> None:
    """It is used between units, and dropped there."""
    layers = {name: nn.Linear(4, 4) for name in ("first", "second", "third")}
    model: Any = Does(lambda m, x: m.third(m.second(m.first(x) * 2 + 1)), **layers)
    freed = list[bool]()
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
