"""Any value between stages: the gradients of the unsplit model, in one process and on gloo."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import nn

from penstock import Pipeline, PipelineStage
from penstock._engine.values import Structure
from penstock.errors import PartitionError, SpecError
from penstock.testing import WorkerPool, compare
from tests import played
from tests.device import DEVICE
from tests.catalogue.kinds import (
    KINDS,
    ONLY_CUT,
    REFUSED,
    Frozen,
    Gives,
    Kind,
    Layer,
    State,
    X,
    case_of,
    layers,
    loss,
    refusal,
    run_by_hand,
)

BY_HAND = "tests.catalogue.kinds:run_by_hand"
SPARSE = pytest.mark.skipif(DEVICE == played.NAME, reason="a played device has no sparse tensors")


@pytest.mark.parametrize("kind", [*sorted(KINDS), *ONLY_CUT])
def test_a_model_that_is_cut_has_the_gradients_of_the_unsplit_one(kind: str) -> None:
    case = case_of((KINDS | ONLY_CUT)[kind])
    compare(case, schedule="ZB-V", ranks=2, microbatches=4, steps=2).check(1e-12)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_so_have_stages_by_hand(kind: str) -> None:
    parts = layers(KINDS[kind])
    stages = [PipelineStage(part, index, 4) for index, part in enumerate(layers(KINDS[kind]))]
    pipe = Pipeline.from_stages(stages, schedule="1F1B", microbatches=4, loss_fn=loss)
    pipe.step(X, target=X.flip(0))
    loss(nn.Sequential(*parts)(X), X.flip(0)).backward()
    for part, stage in zip(parts, stages, strict=True):
        for one, other in zip(part.parameters(), stage.module.parameters(), strict=True):
            torch.testing.assert_close(other.grad, one.grad, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "schedule", ["ZB-V", pytest.param("Interleaved1F1B", marks=pytest.mark.nightly)]
)
def test_on_gloo_with_the_same_bits(workers: WorkerPool, schedule: str) -> None:
    names = sorted(KINDS)
    answers = workers.run(BY_HAND, 2, 120.0, schedule=schedule, names=names)
    here = run_by_hand(schedule=schedule, names=names)
    assert {name: answers[0][name] | answers[1][name] for name in names} == here


def test_a_stage_may_change_what_the_one_before_still_needs_for_its_backward() -> None:
    """Which saves its output, as tanh does."""
    doubles = [Kind(lambda h: h, lambda v: v * 2), Kind(lambda h: h, lambda v: v.mul_(2))]
    weights: list[Any] = []
    for kind in doubles:
        stages = [PipelineStage(p, i, 4) for i, p in enumerate(layers(kind))]
        pipe = Pipeline.from_stages(stages, schedule="1F1B", microbatches=2, loss_fn=loss)
        pipe.step(X, target=X.flip(0))
        weights.append([p.grad for stage in stages for p in stage.module.parameters()])
    torch.testing.assert_close(*weights, rtol=0, atol=0)


class Watching(Layer):
    """Notes what has arrived."""

    def forward(self, *values: Any) -> Any:
        self.seen = values[0]
        return super().forward(*values)


def test_structure_and_strides_arrive_as_they_were() -> None:
    kind = Kind(
        lambda h: Frozen(State(h.t(), h[:, None].expand(-1, 3, -1), 2), ("a",)),
        lambda v: v.inner.hidden.t() + v.inner.mask.sum(1),
    )
    taker = Watching(kind, None)
    stages = [PipelineStage(Layer(None, kind), 0, 2), PipelineStage(taker, 1, 2)]
    pipe = Pipeline.from_stages(stages, schedule="1F1B", microbatches=1, loss_fn=loss)
    pipe.step(X, target=X)
    assert isinstance(taker.seen, Frozen)
    assert (taker.seen.names, taker.seen.inner.layer) == (("a",), 2)
    assert taker.seen.inner.hidden.stride() == (1, 4)
    assert taker.seen.inner.mask is not None
    assert taker.seen.inner.mask.stride() == (4, 0, 1)


# ---- what cannot travel is refused by name and path


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=SPARSE if "sparse" in name else ()) for name in sorted(REFUSED)],
)
def test_what_cannot_travel_is_refused(name: str) -> None:
    kind, text = refusal(name=name)
    assert kind == "SpecError"
    assert f"what stage 0 returned{REFUSED[name][1]}" in text


def test_so_it_is_on_every_rank_of_several_processes(workers: WorkerPool) -> None:
    for kind, text in workers.run("tests.catalogue.kinds:refusal", 2, 100.0, name="set"):
        assert kind in {"SpecError", "PeerFailed"}
        assert f"what stage 0 returned{REFUSED['set'][1]}" in text


@pytest.mark.parametrize(
    ("kind", "error", "says"),
    [
        pytest.param(
            Kind(lambda h: [h.to_sparse()], lambda v: v[0].to_dense()),
            SpecError,
            "0 returned.*sparse",
            marks=SPARSE,
        ),
        (
            Kind(lambda h: {h}, lambda v: v.pop()),
            PartitionError,
            "1 in stage 1 reads a (tensor|value) that 0 in",
        ),
        (
            Kind(lambda h: (h, float(h.detach().sum())), lambda v: v[0] * v[1]),
            PartitionError,
            "0 in stage 0 gave .* where the run without data gave",
        ),
    ],
    ids=["sparse", "set", "number of the data"],
)
def test_nor_can_a_model_be_cut_there(kind: Kind, error: type[Exception], says: str) -> None:
    model = nn.Sequential(Gives(kind.wrap), Layer(kind, None))
    pipe = Pipeline(model, ranks=2, microbatches=2, loss_fn=loss)
    with pytest.raises(error, match=says):
        pipe.step(X, target=X)


@pytest.mark.parametrize("name", ["os:system", "builtins:set", "no_such_module:Kind", "nothing"])
def test_a_description_names_containers_that_this_process_knows(name: str) -> None:
    """What another rank sends never makes anything else of a class, and imports nothing."""
    with pytest.raises(SpecError, match=f"does not know .{name}.; define it at the top level"):
        Structure.read([name, None, [None]])
    assert "no_such_module" not in sys.modules


def changing(group: Any) -> str:
    """A worker's task: what a stage returns hangs on the numbers that it is given."""
    gives = Gives(lambda h: {"h": h, "sign": float(h.detach().sum().sign())})
    torch.nn.init.eye_(gives.lin.weight)
    taker = Layer(Kind(lambda h: h, lambda v: v["h"] * v["sign"]), None)
    stage = PipelineStage([gives, taker][group.rank()], group.rank(), 2)
    options: dict[str, Any] = {
        "schedule": "1F1B",
        "microbatches": 2,
        "loss_fn": loss,
        "mesh": group,
    }
    try:
        with Pipeline.from_stages([stage], **options) as pipe:
            pipe.step(X * 9, target=X)
    except Exception as error:
        return str(error)
    return ""


def test_what_differs_from_the_first_message_of_its_kind_is_refused(workers: WorkerPool) -> None:
    for text in workers.run(f"{__name__}:changing", 2, 100.0):
        assert "1.0 where the first message of this kind had -1.0" in text
