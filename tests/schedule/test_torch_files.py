"""What torch 2.13 writes loads, validates and simulates; what we write, torch loads and runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from torch.distributed.pipelining import schedules as peer
from torch.distributed.pipelining.stage import PipelineStage

from penstock.schedule import (
    add_communication,
    build,
    load,
    names,
    save,
    simulate,
    validate,
)
from penstock.testing import Case, compare
from tests.pipeline.models import X, Y, chain, mean_loss
from tests.scripts import run_script

NAMES = ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
FORMATS = ("compute_only", "compute_comms")
# The dump is not public, so this is for the version named in the test's title.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def peer_schedule(name: str, ranks: int, microbatches: int) -> Any:
    stages = [mock.create_autospec(PipelineStage, instance=True) for _ in range(2)]
    for stage in stages:
        stage.num_stages, stage.group_size = 2 * ranks, ranks
        stage.group_rank, stage.submod = 0, None
    return peer.get_schedule_class(name)(stages, microbatches)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_torchs_files_load_are_proven_and_train(
    name: str, form: str, ranks: int, tmp_path: Path
) -> None:
    path = tmp_path / "torch.csv"
    peer_schedule(name, ranks, 4 * ranks)._dump_csv(path, form)
    read = load(path)
    assert read.placement == build(name, ranks=ranks, microbatches=4 * ranks).placement
    assert read.communicates == (form == "compute_comms")
    validate(read).raise_if_bad()
    validate(add_communication(read)).raise_if_bad()
    assert simulate(read).makespan > 0
    case = Case(chain(2 * ranks), (X.repeat(2, 1),), Y.repeat(2, 1), mean_loss)
    compare(case, schedule=path, microbatches=4 * ranks).check(1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_our_files_are_read_by_torch(name: str, tmp_path: Path) -> None:
    made = build(name, ranks=4, microbatches=8)
    for form, content in zip(FORMATS, (made, add_communication(made)), strict=True):
        save(content, tmp_path / "ours.csv")
        reader = peer_schedule("LoopedBFS", 4, 8)
        reader._load_csv(tmp_path / "ours.csv", form)
        reader._dump_csv(tmp_path / "again.csv", form)
        assert load(tmp_path / "again.csv") == content


@pytest.mark.timeout(180)
def test_torchs_own_runtime_runs_our_files(tmp_path: Path) -> None:
    """Its messages from one rank to another share a queue: receives must follow the order of sends."""
    for name in names():
        schedule = build(name, ranks=2, microbatches=8)
        if schedule.trains:
            save(add_communication(schedule), tmp_path / f"{name}.csv")
    script = Path(__file__).with_name("peer_runtime.py")
    ranks = run_script(str(script), str(tmp_path), processes=2)
    assert [rank.status for rank in ranks] == [0, 0], ranks
