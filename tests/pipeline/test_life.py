"""A Pipeline's life: in one process or several, closed twice, used after others."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from penstock import Pipeline
from penstock.errors import PeerFailed, StageError
from penstock.pipeline.pipeline import Pipeline as Engine
from penstock.testing import WorkerPool
from tests.pipeline.models import X, Y, chain, gradients, make, mean_loss


def test_it_closes_with_its_block_and_twice() -> None:
    with make() as pipe:
        pipe.step(X, target=Y)
    pipe.close()


def test_several_pipelines_live_side_by_side() -> None:
    pipes = [make(), make(ranks=3)]
    losses = [pipe.step(X, target=Y).loss for _ in range(2) for pipe in pipes]
    assert losses == [pytest.approx(losses[0], abs=1e-15)] * 4


def test_one_model_may_be_cut_anew() -> None:
    model = chain()
    first = make(model).step(X, target=Y).loss
    model.zero_grad()
    assert make(model, ranks=3).step(X, target=Y).loss == pytest.approx(first, abs=1e-15)


def test_in_one_process_it_holds_and_leads_everything() -> None:
    pipe = make(ranks=3)
    assert pipe.leads
    assert [stage.index for stage in pipe.stages] == [0, 1, 2]
    assert dict(pipe.named_parameters()).keys() == dict(chain().named_parameters()).keys()
    assert len(list(pipe.parameters())) == len(list(chain().parameters()))


def test_its_schedule_has_its_messages() -> None:
    assert make().schedule.communicates
    assert make(ranks=1).schedule.ranks == 1


def test_ranks_exchange_values() -> None:
    assert make().agree({"same": True}) == [{"same": True}] * 2


def test_gradient_mode_of_the_caller_does_not_matter() -> None:
    pipe = make()
    with torch.no_grad():
        pipe.step(X, target=Y)
    assert len(gradients(pipe)) == 6
    assert torch.is_grad_enabled()


def test_the_name_at_the_front_door_is_the_class() -> None:
    assert Pipeline is Engine


@pytest.mark.parametrize(
    ("device", "rank", "expected"),
    [
        ("cpu", "3", "cpu"),
        ("meta", "3", "meta:3"),
        ("meta:1", "3", "meta:1"),
        ("meta", None, "meta:0"),
    ],
)
def test_a_device_without_index_is_that_of_the_local_rank(
    monkeypatch: pytest.MonkeyPatch, device: str, rank: str | None, expected: str
) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("LOCAL_RANK", rank)
    pipe = make(chain(), ranks=1, device=device)
    assert pipe.stages[0].device == torch.device(expected)


# ---- over processes


def live(group: Any) -> dict[str, Any]:
    from_model = make(chain(), ranks=3, microbatches=4, group=group)
    loss = from_model.step(X, target=Y).loss
    norm = from_model.clip_grad_norm_(1e-3)
    values = from_model.agree(from_model.leads)
    # What is raised after a close, in a context that closes again, passes through.
    with suppress(KeyError), from_model:
        from_model.close()
        raise KeyError("of the user's")
    other = make(chain(), ranks=3, schedule="ZB-H1", group=group)
    return {
        "loss": loss,
        "norm": norm,
        "names": sorted(gradients(from_model)),
        "values": values,
        "other": other.step(X, target=Y).loss,
        "clipped": other.clip_grad_norm_(1.0),
    }


def test_processes_hold_their_part_and_know_the_whole(workers: WorkerPool) -> None:
    plain = chain()
    loss = mean_loss(plain(X), Y)
    loss.backward()
    norm = float(torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0))
    answers = workers.run(f"{__name__}:live", 3, 30.0)
    assert [answer["names"] for answer in answers] == [
        [f"{stage}.0.bias", f"{stage}.0.weight"] for stage in range(3)
    ]
    for answer in answers:
        assert answer["loss"] == answer["other"] == pytest.approx(float(loss.detach()))
        assert answer["norm"] == answer["clipped"] == pytest.approx(norm)
        assert answer["values"] == [True, False, False]


def fail_and_go_on(group: Any) -> dict[str, Any]:
    """A worker's task: one rank's loss raises; then the user's group and a new pipeline on it are used."""

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        raise ValueError("this loss is broken")

    said = ""
    with make(chain(), ranks=3, loss_fn=loss_fn, group=group) as broken:
        try:
            broken.step(X, target=Y)
        except (ValueError, PeerFailed, StageError) as error:
            said = str(error)
    total = torch.ones(1)
    dist.all_reduce(total, group=group)
    with make(chain(), ranks=3, group=group) as other, make(chain(), ranks=3, group=group) as third:
        losses = [pipe.step(X, target=Y).loss for pipe in (other, third, other)]
    return {"said": said, "total": float(total), "losses": losses}


def test_a_failure_breaks_no_connection_but_its_pipeline_s(workers: WorkerPool) -> None:
    expected = float(mean_loss(chain()(X), Y).detach())
    for answer in workers.run(f"{__name__}:fail_and_go_on", 3, 30.0):
        assert "this loss is broken" in answer["said"]
        assert answer["total"] == 3.0
        assert answer["losses"] == [pytest.approx(expected)] * 3
