"""Weights that stages share: the plain loop's numbers, and the same bits wherever the stages live."""

from __future__ import annotations

import copy
import logging
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

from penstock import Pipeline, PipelineStage
from penstock import schedule as ps
from penstock.errors import AgreementError, UsageError
from penstock.partition import Shared, partition
from penstock.testing import WorkerPool, compare
from tests.pipeline.models import X, Y, mean_loss
from tests.pipeline.sharing import (
    DTYPES,
    SHAPES,
    case,
    cut_of,
    gap,
    pipeline,
    train,
    train_plain,
)

NAMES = ("1F1B", "GPipe", "Interleaved1F1B", "ZBVZeroBubble", "DualPipeV")
EXTRA = ("InterleavedZeroBubble",)


def stages_of(name: str, ranks: int) -> int:
    return ps.build(name, ranks=ranks, microbatches=8).stages


# ---- gradients


@pytest.mark.parametrize(("shape", "name"), list(product(SHAPES, NAMES + EXTRA)))
def test_gradients_are_those_of_the_plain_loop(shape: str, name: str) -> None:
    stages = cut_of(shape, stages_of(name, 2))
    for steps in (1, 2):
        verdict = compare(case(shape), schedule=name, stages=stages, microbatches=8, steps=steps)
        verdict.check(1e-12)


def bits(shape: str, name: str, ranks: int, **options: Any) -> dict[str, str]:
    found = compare(
        case(shape, torch.float32),
        schedule=name,
        ranks=ranks,
        stages=cut_of(shape, 4),
        microbatches=8,
        steps=2,
        **options,
    )
    return found.digest()


@pytest.mark.parametrize("shape", SHAPES)
def test_float32_bits_do_not_depend_on_who_lives_where(shape: str) -> None:
    expected = bits(shape, "GPipe", 4)
    found = [bits(shape, name, 2) for name in ("Interleaved1F1B", "ZBVZeroBubble", "DualPipeV")]
    assert [*found, bits(shape, "1F1B", 4)] == [expected] * 4


def run_bits(group: Any, shape: str, name: str) -> dict[str, Any]:
    """A worker's task."""
    stages = cut_of(shape, 4)
    exact = compare(case(shape), schedule=name, stages=stages, microbatches=8, steps=2, group=group)
    return {
        "gap": max(exact.differences().values()),
        "bits": bits(shape, name, group.size(), group=group),
    }


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("name", "ranks"), [("1F1B", 4), ("ZBVZeroBubble", 2), ("DualPipeV", 2)])
def test_processes_have_the_same_bits(
    workers: WorkerPool, shape: str, name: str, ranks: int
) -> None:
    expected = bits(shape, "GPipe", 4)
    for answer in workers.run(f"{__name__}:run_bits", ranks, 60.0, shape=shape, name=name):
        assert answer["gap"] < 1e-12
        assert answer["bits"].items() <= expected.items()


# ---- training


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", ["tied", "looped"])
def test_five_steps_are_those_of_the_plain_loop(shape: str, name: str) -> None:
    of = case(shape)
    pipe = pipeline(of, shape, stages_of(name, 2), schedule=name)
    norms, expected = train_plain(of, 5)
    assert train(pipe, of, 5) == pytest.approx(norms, rel=1e-6)
    assert pipe.state_dict().keys() == expected.keys()
    assert gap(pipe.state_dict(), expected) < 1e-10


def run_training(group: Any, shape: str, name: str, steps: int, dtype: str) -> dict[str, Any]:
    """A worker's task: norms, the distance from the plain loop, and the bits of what is shared."""
    of = case(shape, DTYPES[dtype])
    norms, expected = train_plain(of, steps)
    with pipeline(of, shape, 2 if name == "1F1B" else 4, schedule=name, group=group) as pipe:
        found, held = train(pipe, of, steps), pipe.state_dict()
    shared = {n: t.tolist() for n, t in held.items() if "block." in n or n == "embed.weight"}
    return {"norms": [found, norms], "gap": gap(held, expected), "shared": shared}


@pytest.mark.parametrize(("shape", "name"), [("tied", "1F1B"), ("looped", "ZBVZeroBubble")])
def test_copies_stay_bit_equal(workers: WorkerPool, shape: str, name: str) -> None:
    one, two = workers.run(
        f"{__name__}:run_training", 2, 60.0, shape=shape, name=name, steps=20, dtype="float32"
    )
    common = one["shared"].keys() & two["shared"].keys()
    assert common
    assert {n: one["shared"][n] for n in common} == {n: two["shared"][n] for n in common}
    assert one["norms"][0] == two["norms"][0]


@pytest.mark.parametrize("shape", ["tied", "looped"])
def test_five_steps_in_processes(workers: WorkerPool, shape: str) -> None:
    arguments = {"shape": shape, "name": "1F1B", "steps": 5, "dtype": "float64"}
    for answer in workers.run(f"{__name__}:run_training", 2, 60.0, **arguments):
        found, expected = answer["norms"]
        assert found == pytest.approx(expected, rel=1e-6)
        assert answer["gap"] < 1e-10


def test_a_step_after_a_step_adds_up() -> None:
    of = case("tied")
    pipe = pipeline(of, "tied", 2)
    weight = next(pipe.parameters())
    pipe.step(*of.args, target=of.target)
    assert weight.grad is not None
    first, kept = weight.grad.clone(), weight.grad
    pipe.step(*of.args, target=of.target)
    assert weight.grad is kept
    assert torch.equal(weight.grad, first * 2)


def test_hooks_see_the_share_of_their_stage() -> None:
    of = case("tied")
    pipe = pipeline(of, "tied", 2)
    weight = next(pipe.parameters())
    seen: list[float] = []
    weight.register_post_accumulate_grad_hook(lambda p: seen.append(float(p.grad.sum())))
    pipe.step(*of.args, target=of.target)
    assert len(seen) == 16
    assert weight.grad is not None
    assert float(weight.grad.sum()) not in seen


def test_thawing_takes_effect_with_the_next_step() -> None:
    of = case("frozen")
    pipe = pipeline(of, "frozen", 2)
    weight = next(pipe.parameters())
    pipe.step(*of.args, target=of.target)
    assert weight.grad is None
    weight.requires_grad_(True)
    pipe.step(*of.args, target=of.target)
    assert weight.grad is not None


def test_evaluation_adds_nothing() -> None:
    of = case("tied")
    pipe = pipeline(of, "tied", 2)
    pipe.eval(*of.args, target=of.target)
    pipe.predict(*of.args)
    assert all(parameter.grad is None for parameter in pipe.parameters())


def test_sparse_gradients_add_up_dense() -> None:
    of = case("tied")
    assert isinstance(of.model.embed, nn.Embedding)
    of.model.embed.sparse = True
    compare(of, schedule="1F1B", stages=cut_of("tied", 2), microbatches=8).check(1e-12)


# ---- set-up


def test_it_is_one_parameter() -> None:
    of = case("looped")
    pipe = pipeline(of, "looped", 4)
    plain = dict(of.model.named_parameters())
    assert [name for name, _ in pipe.named_parameters()] == list(plain)
    assert {n: p.shape for n, p in pipe.named_parameters()} == {
        n: p.shape for n, p in plain.items()
    }


def test_the_users_model_stays_tied() -> None:
    model = case("tied").model
    pipe = Pipeline(model, stages=cut_of("tied", 2), loss_fn=mean_loss)
    assert model.get_parameter("head.weight") is model.get_parameter("embed.weight")
    assert next(pipe.parameters()) is model.get_parameter("embed.weight")


def test_stages_by_hand_are_tied_by_identity() -> None:
    shared = nn.Linear(4, 4).double()
    plain = nn.Sequential(shared, nn.Tanh(), shared)
    parts = [nn.Sequential(shared, nn.Tanh()), nn.Sequential(shared)]
    stages = [PipelineStage(part, index, 2) for index, part in enumerate(parts)]
    pipe = Pipeline.from_stages(stages, schedule="1F1B", microbatches=4, loss_fn=mean_loss)
    expected = copy.deepcopy(plain)
    mean_loss(expected(X), Y).backward()
    pipe.step(X, target=Y)
    for found, other in zip(shared.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(found.grad, other.grad)
    assert len(list(pipe.parameters())) == 2


def test_a_tie_that_was_undone_is_made_again() -> None:
    """As ``to_empty`` does, stage by stage."""
    shared = nn.Linear(4, 4)
    stages = [PipelineStage(module, i, 2) for i, module in enumerate((shared, nn.Linear(4, 4)))]
    table = [Shared((name,), ((0, name), (1, name))) for name in ("weight", "bias")]
    pipe = Pipeline.from_stages(stages, schedule="1F1B", loss_fn=mean_loss, shared=table)
    assert stages[1].module.weight is shared.weight
    assert len(list(pipe.parameters())) == 2


@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_a_shared_weight_that_was_replaced_in_one_stage_is_named(factor: float) -> None:
    of = case("tied")
    pipe = pipeline(of, "tied", 2)
    head = pipe.stages[1].module.get_submodule("head")
    head.weight = nn.Parameter(head.get_parameter("weight").detach() * factor)
    with pytest.raises(UsageError, match=r"'head.weight' of stage 1 was replaced.*embed.weight"):
        pipe.step(*of.args, target=of.target)


def test_stages_that_were_filled_one_by_one_are_tied_before_they_are_loaded() -> None:
    of = case("tied")
    state = of.model.state_dict()
    with torch.device("meta"):
        empty = SHAPES["tied"].make().double()
    pipe = Pipeline(empty, stages=cut_of("tied", 2), microbatches=8, loss_fn=of.loss_fn)
    for stage in pipe.stages:
        stage.module.to_empty(device="cpu")
    assert len(list(pipe.parameters())) == len(list(of.model.parameters()))
    pipe.load_state_dict(state)
    expected = pipeline(of, "tied", 2).step(*of.args, target=of.target).loss
    assert pipe.step(*of.args, target=of.target).loss == expected


def test_stages_of_one_process_share_on_one_device() -> None:
    shared = nn.Linear(4, 4)
    stages = [PipelineStage(shared, 0, 2, "cpu"), PipelineStage(shared, 1, 2, "meta")]
    with pytest.raises(UsageError, match=r"'weight' is shared by stages \[0, 1\].*one device"):
        Pipeline.from_stages(stages, schedule="1F1B")


class Counting(nn.Module):
    """Has a buffer that each forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, value: torch.Tensor) -> Any:
        return self.norm(value)


def test_a_shared_buffer_that_a_step_changes_is_refused() -> None:
    block = Counting().double()
    model = nn.Sequential(block, nn.Linear(4, 4).double(), block)
    pipe = Pipeline(model, stages=3, loss_fn=mean_loss, microbatches=2)
    pipe.eval(X, target=Y)
    with pytest.raises(UsageError, match=r"share: '0.norm.*' \(stages \[0, 2\]\)"):
        pipe.step(X, target=Y)


def test_a_shared_buffer_that_stays_is_used() -> None:
    block = Counting().double().eval()
    model = nn.Sequential(block, nn.Linear(4, 4).double(), block)
    pipe = Pipeline(model, stages=3, loss_fn=mean_loss, microbatches=2)
    pipe.step(X, target=Y)


def run_unlike(group: Any) -> dict[str, Any]:
    """A worker's task: models that differ between the processes."""
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("penstock").addHandler(handler)
    of = case("tied")
    with torch.no_grad():
        of.model.get_parameter("embed.weight").add_(group.rank())
    with pipeline(of, "tied", 2, group=group) as pipe:
        held = pipe.state_dict()["embed.weight"]
    logging.getLogger("penstock").removeHandler(handler)
    return {
        "sum": float(held.sum()),
        "said": records,
        "plain": float(case("tied").model.get_parameter("embed.weight").sum()),
    }


def test_copies_start_equal_and_it_is_said(workers: WorkerPool) -> None:
    one, two = workers.run(f"{__name__}:run_unlike", 2, 30.0)
    assert one["sum"] == two["sum"] == one["plain"]
    assert one["said"] == [
        "'embed.weight' differed between the ranks that share it: ranks [1] got that of rank 0"
    ]
    assert two["said"] == []


def run_by_hand(group: Any, told: list[int], width: int) -> str:
    """A worker's task: stages by hand, some ranks told of what they share."""
    rank = group.rank()
    module = nn.Linear(4, 4 + width * rank, bias=False)
    table = [Shared(("weight",), ((0, "weight"), (1, "weight")))] if rank in told else []
    try:
        Pipeline.from_stages(
            [PipelineStage(module, rank, 2)], schedule="1F1B", shared=table, group=group
        ).close()
    except AgreementError as error:
        return str(error)
    return "made"


def test_what_ranks_are_told_must_agree(workers: WorkerPool) -> None:
    for answer in workers.run(f"{__name__}:run_by_hand", 2, 30.0, told=[0], width=0):
        assert "were given different tables of shared weights" in answer
    for answer in workers.run(f"{__name__}:run_by_hand", 2, 30.0, told=[0, 1], width=1):
        assert "share 'weight', but it differs between them" in answer
    assert workers.run(f"{__name__}:run_by_hand", 2, 30.0, told=[0, 1], width=0) == ["made"] * 2


def test_the_chain_may_come_back_to_a_module() -> None:
    of = case("looped")
    made = partition(of.model, cut_of("looped", 4))
    assert {one.stages for one in made.shared} == {(0, 1, 2, 3)}
