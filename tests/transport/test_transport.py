"""Transports alone: the order in which channels connect, copies of one rank's value, and what is posted."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from penstock import Microbatches
from penstock._engine.transport.nccl import in_rounds
from penstock.schedule import add_communication, build
from penstock.testing import Case, compare
from tests.catalogue.making import Does
from tests.pipeline.models import X, Y, chain, make, mean_loss
from tests.processes import in_processes
from tests.transport.recording import record_messages


def depth(ranks: int) -> int:
    """How many connections follow one another when neighbours connect both ways, for values and gradients."""
    chained = [c for a, b in pairwise(range(ranks)) for c in ((a, b, 0), (b, a, 1))]
    order = in_rounds(reversed(chained))
    assert sorted(order) == sorted(chained)
    done = [0] * ranks
    for source, target, _ in order:
        done[source] = done[target] = max(done[source], done[target]) + 1
    return max(done)


def test_channels_connect_in_as_many_rounds_however_long_the_chain_is() -> None:
    assert depth(4) == depth(64) == 4


@pytest.mark.parametrize("name", ["1F1B", "Interleaved1F1B", "ZB-V"])
def test_every_channel_of_a_schedule_connects_once(name: str) -> None:
    schedule = add_communication(build(name, ranks=4, microbatches=4))
    rank_of = schedule.placement.rank_of
    pairs = {(rank_of[a.stage], rank_of[a.peer_stage], 0) for r in range(4) for a in schedule.actions(r)
             if a.op.name.startswith("SEND")}  # fmt: skip
    order = in_rounds([*pairs, *pairs])
    assert sorted(order) == sorted(pairs)


@in_processes(4)
def test_one_ranks_value_reaches_all(group: Any) -> None:
    """Small and large."""
    with make(chain(4), ranks=4, mesh=group) as pipe:
        for source in range(4):
            for size in (8, 50_000):
                value = torch.full((size,), float(pipe.rank), dtype=torch.float64)
                sent, text = pipe.job.share([value, "text"], source)
                assert (float(sent.mean()), text) == (source, "text")


@pytest.mark.parametrize("width", [8, 2_500, 10_000])
@in_processes(2)
def test_a_message_of_several_tensors_arrives_whatever_its_size(group: Any, width: int) -> None:
    torch.manual_seed(0)
    three = Does(lambda _, x: (x * 2, x.flip(1), x[:0]))
    summed = Does(lambda _, of: of[0] - of[1] + len(of[2]))
    layers = nn.Linear(2, width), three, summed, nn.Linear(width, 2)
    case = Case(nn.Sequential(*layers).double(), (X[:, :2],), Y[:, :2], mean_loss)
    compare(case, schedule="1F1B", stages=["2"], microbatches=2, mesh=group).check(1e-10)


@in_processes(2)
def test_no_more_is_posted_at_once_than_a_step_receives(group: Any) -> None:
    """In microbatches of all sizes."""
    sizes = [4, 2, 1, 1]
    with make(chain(4), ranks=2, microbatches=4, mesh=group) as pipe:
        recording = record_messages(pipe)
        pipe.step(Microbatches(X.split(sizes)), target=Y.split(sizes))
    assert recording.pending == 0
    assert X[:4].nbytes <= recording.most <= X.nbytes
