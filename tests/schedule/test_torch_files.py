"""What torch writes loads, validates and simulates; what we write, torch loads and runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from torch.distributed.pipelining import schedules as peer
from torch.distributed.pipelining.stage import PipelineStage

from penstock.schedule import (
    Schedule,
    add_communication,
    build,
    from_csv,
    load,
    names,
    save,
    simulate,
    validate,
    wait_for_sends,
)
from penstock.testing import Case, compare
from tests.pipeline.models import X, Y, chain, mean_loss
from tests.processes import run_script

NAMES = ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
FORMATS = ("compute_only", "compute_comms")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def for_torch(made: Schedule) -> Schedule:
    """With its messages, and with a wait for each send where torch knows such actions, and demands them."""
    knows = hasattr(peer._ComputationType, "WAIT_SEND_F")
    return wait_for_sends(made) if knows else add_communication(made)


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
    for form, content in zip(FORMATS, (made, for_torch(made)), strict=True):
        save(content, tmp_path / "ours.csv")
        reader = peer_schedule("LoopedBFS", 4, 8)
        reader._load_csv(tmp_path / "ours.csv", form)
        reader._dump_csv(tmp_path / "again.csv", form)
        assert load(tmp_path / "again.csv") == content


OF_TORCH_2_15 = """\
0UNSHARD,0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0WAIT_SEND_F0,0B0,0RECV_B1,0WAIT_SEND_F1,0B1,0REDUCE_GRAD,\
0WAIT_REDUCE_GRAD,0RESHARD
1UNSHARD,1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1,1REDUCE_GRAD,1WAIT_SEND_B0,1WAIT_SEND_B1,\
1WAIT_REDUCE_GRAD,1RESHARD
"""


def test_waits_for_sends_and_for_the_sums_of_gradients_are_read_and_run(tmp_path: Path) -> None:
    path = tmp_path / "torch.csv"
    path.write_text(OF_TORCH_2_15)
    validate(load(path)).raise_if_bad()
    early = OF_TORCH_2_15.replace(
        "0REDUCE_GRAD,0WAIT_REDUCE_GRAD", "0WAIT_REDUCE_GRAD,0REDUCE_GRAD"
    )
    assert "0WAIT_REDUCE_GRAD: needs 0REDUCE_GRAD" in str(validate(from_csv(early)))
    case = Case(chain(2), (X,), Y, mean_loss)
    compare(case, schedule=path, microbatches=2).check(1e-12)


@pytest.mark.timeout(180)
def test_torchs_own_runtime_runs_our_files(tmp_path: Path) -> None:
    """Its messages from one rank to another share a queue: receives must follow the order of sends."""
    for name in names():
        schedule = build(name, ranks=2, microbatches=8)
        if schedule.trains:
            save(for_torch(schedule), tmp_path / f"{name}.csv")
    script = Path(__file__).with_name("peer_runtime.py")
    ranks = run_script(str(script), str(tmp_path), processes=2)
    assert [rank.status for rank in ranks] == [0, 0], ranks
