"""The Trainer of transformers, as a pipeline and without."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch

pytest.importorskip("accelerate")

from transformers import Trainer

from penstock.integrations.transformers import PipelineTrainer
from tests.integrations.trainers import FAMILIES, Examples, make, report, saved
from tests.scripts import run_script

pytestmark = pytest.mark.filterwarnings("ignore")


STEPS = 6


@cache
def plain(family: str, steps: int = STEPS) -> dict[str, Any]:
    """What the Trainer itself gives."""
    folder = Path(mkdtemp())
    return report(make(Trainer, family, folder, steps), folder)


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["loss"] == pytest.approx(expected["loss"], abs=1e-5)
    assert found["norm"] == pytest.approx(expected["norm"], rel=1e-3)
    assert found["eval"] == pytest.approx(expected["eval"], abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1F1B", "ZB-V"])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_in_one_process(family: str, schedule: str, tmp_path: Path) -> None:
    pipeline = {"schedule": schedule, "ranks": 2, "microbatches": 4}
    trainer = make(PipelineTrainer, family, tmp_path, STEPS, pipeline=pipeline)
    assert_equal(report(trainer, tmp_path), plain(family))
    weights = trainer.pipe.state_dict()
    for name, parameter in saved(family, tmp_path).named_parameters():
        assert torch.equal(parameter, weights[name])


def launch(folder: Path, *said: Any, processes: int) -> dict[str, Any]:
    command = ["-m", "tests.integrations.trainers", str(folder), *map(str, said)]
    ran = run_script(*command, processes=processes)
    assert [one.status for one in ran] == [0] * processes, ran
    # One rank prints what is logged.
    assert ["'loss'" in one.out for one in ran] == [True] + [False] * (processes - 1)
    found: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return found


LAYOUTS = [("1F1B", 2, 1), ("ZB-V", 2, 1), ("1F1B", 4, 1), ("ZB-V", 4, 1), ("1F1B", 4, 2)]


def check_launched(
    folder: Path, family: str, layout: tuple[str, int, int], steps: int = STEPS
) -> None:
    schedule, processes, replicas = layout
    found = launch(folder, family, schedule, replicas, steps, processes=processes)
    assert_equal(found, plain(family, steps))
    if "tokens" in found:
        tokens = Examples("text", 4, 3).tokens
        assert found["tokens"] == saved(family, folder).generate(tokens, max_new_tokens=8).tolist()


@pytest.mark.slow
def test_in_processes_and_resumed_in_one(tmp_path: Path) -> None:
    check_launched(tmp_path, "gpt2", ("ZB-V", 2, 1))
    pipeline = {"schedule": "1F1B", "ranks": 4, "microbatches": 2}
    trainer = make(PipelineTrainer, "gpt2", tmp_path / "again", STEPS, pipeline=pipeline)
    resumed = report(trainer, tmp_path, str(tmp_path / f"checkpoint-{STEPS // 2}"))
    # The log of the checkpoint comes first.
    assert_equal(resumed, plain("gpt2"))


@pytest.mark.slow
def test_replicas_see_other_batches_than_each_other(tmp_path: Path) -> None:
    check_launched(tmp_path, "bert", ("1F1B", 4, 2))


@pytest.mark.nightly
@pytest.mark.whole
@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_layout(family: str, layout: tuple[str, int, int], tmp_path: Path) -> None:
    check_launched(tmp_path, family, layout, 20)
