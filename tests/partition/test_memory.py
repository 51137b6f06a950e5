"""What stages hold, and no longer than they must."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor, nn

from penstock import Pipeline


class Notes:
    """Whether something was freed, each time."""

    freed: tuple[bool, ...] = ()

    def note(self, freed: bool) -> None:
        self.freed = (*self.freed, freed)


NOTES = Notes()


class Drops(nn.Module):
    """Notes whether what it drops between its units is freed at once."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        doubled = self.first(x) * 2
        there = weakref.ref(doubled)
        more = doubled + 1
        del doubled
        NOTES.note(there() is None)
        second: Tensor = self.second(more)
        return second


def test_a_stage_holds_nothing_that_the_code_between_units_has_dropped() -> None:
    x = torch.ones(3, 4)
    stages = [["first"], ["second"]]
    with Pipeline(Drops(), stages=stages, ranks=2, loss_fn=nn.functional.mse_loss) as pipe:
        pipe.step(x, target=x)
    # The other stage has a placeholder, which it keeps.
    assert any(NOTES.freed)
