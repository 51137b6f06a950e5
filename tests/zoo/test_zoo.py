"""A few models of the zoo, each beside its own plain loop; the campaign ``zoo`` runs them all."""

from __future__ import annotations

import pytest

from tests.catalogue.models import MODELS
from tests.zoo.judging import judge

FEW = (
    "memories of segments",
    "U-Net",
    "an exit after each block",
    "capsules that vote in rounds",
    "weights made by a network",
)


@pytest.mark.parametrize("name", FEW)
def test_is_its_plain_loop(name: str) -> None:
    rows = list(judge(name, MODELS[name], ["1F1B"]))
    assert [row.kind for row in rows] == ["right"], rows[0].text
