"""Weights that stages share, where the model was cut by tracing a call."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock import Pipeline, read_weights
from penstock.partition import Partition
from penstock.partition.traced import Cuts, Point, SplitPoint, cut_traced
from penstock.testing import Case, WorkerPool
from tests.pipeline.models import assert_same
from tests.pipeline.sharing import case, gap, train, train_plain


def cut(of: Case) -> tuple[torch.nn.Module, Partition]:
    """The tied model in three stages; the first and the last hold the weight."""
    model = copy.deepcopy(of.model)
    points = (Point("blocks.1", SplitPoint.BEGINNING), Point("blocks.2", SplitPoint.BEGINNING))
    example = tuple(argument[:1] for argument in of.args)
    return model, cut_traced(model, example, {}, Cuts(points)).partition


def made(of: Case, **options: Any) -> Pipeline:
    model, partition = cut(of)
    (found,) = partition.shared
    assert (found.names, found.stages) == (("embed.weight", "head.weight"), (0, 2))
    return Pipeline(model, stages=partition, loss_fn=of.loss_fn, microbatches=8, **options)


def test_training_is_that_of_the_plain_loop(tmp_path: Path) -> None:
    of = case("tied")
    pipe = made(of)
    norms, expected = train_plain(of, 5)
    assert train(pipe, of, 5) == pytest.approx(norms, rel=1e-6)
    assert pipe.state_dict().keys() == expected.keys()
    assert gap(pipe.state_dict(), expected) < 1e-10
    pipe.save(tmp_path)
    copy.deepcopy(of.model).load_state_dict(read_weights(tmp_path))
    before = pipe.state_dict(full=True)
    pipe.load_state_dict(of.model.state_dict())
    pipe.load(tmp_path)
    assert_same(pipe.state_dict(), before)


def run_traced(group: Any) -> dict[str, Any]:
    """A worker's task."""
    of = case("tied")
    norms, expected = train_plain(of, 2)
    with made(of, group=group) as pipe:
        found, held = train(pipe, of, 2), pipe.state_dict()
    return {
        "norms": [found, norms],
        "gap": gap(held, expected),
        "shared": held["embed.weight"].tolist() if "embed.weight" in held else None,
    }


@pytest.mark.slow
def test_processes_train_so_too(workers: WorkerPool) -> None:
    first, middle, last = workers.run(f"{__name__}:run_traced", 3, 100.0)
    assert first["shared"] == last["shared"] != middle["shared"]
    for answer in (first, middle, last):
        assert answer["norms"][0] == pytest.approx(answer["norms"][1], rel=1e-6)
        assert answer["gap"] < 1e-10
