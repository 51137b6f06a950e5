"""Weights that stages share: the plain loop's numbers, and the same bits wherever the stages live."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from penstock import Pipeline, PipelineStage
from penstock.errors import AgreementError, UsageError
from penstock.partition import Shared
from penstock.testing import WorkerPool, judge
from tests.catalogue.cases import LANGUAGE, LOOPED, pipeline
from tests.pipeline.models import X, Y, gradients, logged, mean_loss
from tests.processes import in_processes

TIED = LANGUAGE["tied"]


@in_processes(2, 100.0)
def test_copies_stay_bit_equal(group: Any) -> None:
    """After some steps, and so are the norms."""
    of = LANGUAGE["looped"]()
    with pipeline(of, LOOPED, schedule="ZB-V", mesh=group) as pipe:
        optimizer, norms = torch.optim.AdamW(pipe.parameters(), lr=1e-2), []
        for _ in range(5):
            pipe.step(*of.args, target=of.target)
            norms.append(pipe.clip_grad_norm_(0.5))
            optimizer.step()
            optimizer.zero_grad()
        held = pipe.weights.state_dict()
        shared = {name: t.tolist() for name, t in held.items() if "blocks." in name}
        one, two = pipe.job.meet(lambda: [norms, shared])
    assert shared
    assert one == two


def test_hooks_see_the_share_of_their_stage_and_thawing_takes_effect() -> None:
    of, seen = LANGUAGE["frozen"](), list[float]()
    pipe = pipeline(of, 2)
    weight: Any = next(pipe.parameters())
    pipe.step(*of.args, target=of.target)
    assert "embed.weight" not in gradients(pipe)
    weight.requires_grad_(True)
    weight.register_post_accumulate_grad_hook(lambda p: seen.append(float(p.grad.norm())))
    pipe.step(*of.args, target=of.target)
    assert len(seen) == 16
    assert float(weight.grad.norm()) not in seen


@pytest.mark.parametrize("action", ["1F2", "1I1", "0I0", "0W0"])
def test_an_interrupted_step_leaves_nothing_to_the_next(action: str) -> None:
    """As after Ctrl-C in a notebook."""
    of = TIED()
    pipe = pipeline(of, 2, schedule="ZB-H1")
    pipe.step(*of.args, target=of.target)
    expected = gradients(pipe)
    pipe.zero_grad()

    def interrupts(event: Any) -> None:
        raise KeyboardInterrupt

    with pipe.on(action, after=interrupts), pytest.raises(KeyboardInterrupt):
        pipe.step(*of.args, target=of.target)
    assert [stage.in_flight for stage in pipe.stages] == [0, 0]
    pipe.zero_grad()
    pipe.step(*of.args, target=of.target)
    torch.testing.assert_close(gradients(pipe), expected, rtol=0, atol=0)


# ---- set-up


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


def test_of_the_names_of_a_weight_the_last_one_is_loaded_as_in_the_plain_model() -> None:
    plain = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    plain[2].weight = plain[0].weight
    state = {name: torch.full_like(t, i) for i, (name, t) in enumerate(plain.state_dict().items())}
    pipe = Pipeline(copy.deepcopy(plain), ranks=2, microbatches=2, loss_fn=mean_loss)
    pipe.cut(torch.ones(2, 4))
    pipe.weights.load_state_dict(state)
    plain.load_state_dict(state)
    assert pipe.weights.state_dict().keys() == state.keys()
    for name, tensor in pipe.weights.state_dict().items():
        assert torch.equal(tensor, plain.state_dict()[name])


def test_a_tie_that_was_undone_is_made_again() -> None:
    """As ``to_empty`` does, stage by stage."""
    shared = nn.Linear(4, 4)
    stages = [PipelineStage(module, i, 2) for i, module in enumerate((shared, nn.Linear(4, 4)))]
    table = [Shared((name,), ((0, name), (1, name))) for name in ("weight", "bias")]
    pipe = Pipeline.from_stages(stages, schedule="1F1B", loss_fn=mean_loss, shared=table)
    assert stages[1].module.weight is shared.weight
    assert len(list(pipe.parameters())) == 2


def replace_here(group: Any = None) -> None:
    """A shared weight becomes another tensor in one stage of this process."""
    of = TIED()
    with pipeline(of, 2, mesh=group, cut=True) as pipe:
        if group is None:
            head = pipe.stages[1].module.get_submodule("head")
            head.weight = nn.Parameter(head.get_parameter("weight").detach())
            says = r"'head.weight' of stage 1 was replaced.*embed.weight"
        else:
            assert pipe.model is not None
            pipe.model.load_state_dict(pipe.model.state_dict(), assign=True)
            says = "was replaced, but it is one tensor"
        with pytest.raises(UsageError, match=says):
            pipe.step(*of.args, target=of.target)


def test_a_shared_weight_that_was_replaced_is_named() -> None:
    replace_here()


@in_processes(2)
def test_so_it_is_between_processes(group: Any) -> None:
    replace_here(group)


def test_stages_that_were_filled_one_by_one_are_tied_before_they_are_loaded() -> None:
    of = TIED()
    with torch.device("meta"):
        empty = TIED()
    pipe = pipeline(empty, 2, cut=True)
    for stage in pipe.stages:
        stage.module.to_empty(device="cpu")
    assert len(list(pipe.parameters())) == len(list(of.model.parameters()))
    pipe.weights.load_state_dict(of.model.state_dict())
    judge(of, pipe).check(1e-12)


def test_stages_of_one_process_share_on_one_device() -> None:
    shared = nn.Linear(4, 4)
    stages = [PipelineStage(shared, 0, 2, "cpu"), PipelineStage(shared, 1, 2, "meta")]
    with pytest.raises(UsageError, match=r"'weight' is shared by stages \[0, 1\].*one device"):
        Pipeline.from_stages(stages, schedule="1F1B")


def test_a_shared_buffer_that_a_step_changes_is_refused() -> None:
    block = nn.BatchNorm1d(4)
    model = nn.Sequential(block, nn.Linear(4, 4), block).double()
    pipe = Pipeline(model, stages=3, loss_fn=mean_loss, microbatches=2)
    pipe.evaluate(X, target=Y)
    with pytest.raises(UsageError, match=r"share: '0.running_mean' \(stages \[0, 2\]\)"):
        pipe.step(X, target=Y)
    block.eval()
    pipe.step(X, target=Y)


def run_unlike(group: Any, odd: int) -> tuple[list[str], list[float]]:
    """A worker's task: what the log says where one rank has made another model, and its first weights."""
    torch.manual_seed(group.rank() == odd)
    layers = [nn.Linear(3, 3) for _ in range(3)]
    for layer in layers[1:]:
        layer.weight = layers[0].weight
    with logged() as lines, Pipeline(nn.Sequential(*layers), ranks=3, mesh=group) as pipe:
        pipe.cut(torch.ones(2, 3))
        (stage,) = pipe.stages
        weight = next(p for p in stage.module.parameters() if p.dim() == 2)
    return [line for line in lines if "differed" in line], weight.flatten().tolist()


def test_copies_start_equal_and_the_ranks_with_another_one_are_named(workers: WorkerPool) -> None:
    alike, unlike = (workers.run(f"{__name__}:run_unlike", 3, 60.0, odd=odd) for odd in (-1, 2))
    first = alike[0][1]
    assert all(weight == first for _, weight in (*alike, *unlike))
    assert [line for lines, _ in alike for line in lines] == []
    (said,) = (line for lines, _ in unlike for line in lines)
    assert (
        "'0.weight' differed between the ranks that share it: ranks [2] got that of rank 0" in said
    )


@pytest.mark.whole
@pytest.mark.parametrize(
    ("told", "width", "says"),
    [
        ([0], 0, "were given different tables of shared weights"),
        ([0, 1], 1, "share 'weight', but it differs between them"),
        ([0, 1], 0, ""),
    ],
)
@in_processes(2)
def test_what_ranks_are_told_must_agree(group: Any, told: list[int], width: int, says: str) -> None:
    """Of stages by hand, of which some ranks are told what they share."""
    rank = group.rank()
    stage = PipelineStage(nn.Linear(4, 4 + width * rank, bias=False), rank, 2)
    table = [Shared(("weight",), ((0, "weight"), (1, "weight")))] if rank in told else []
    with pytest.raises(AgreementError, match=says) if says else nullcontext():
        Pipeline.from_stages([stage], schedule="1F1B", shared=table, mesh=group).close()


def test_layers_of_two_stages_with_one_weight_run_under_autocast() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    model[0].weight = model[2].weight
    plain, x = copy.deepcopy(model), torch.randn(4, 4)
    pipe = Pipeline(model, stages=["2"], ranks=2, microbatches=1, loss_fn=nn.MSELoss())
    with torch.autocast("cpu", torch.bfloat16):
        loss = pipe.step(x, target=x).loss
        expected = nn.functional.mse_loss(plain(x), x)
    expected.backward()
    assert loss == pytest.approx(float(expected.detach()))
    torch.testing.assert_close(model[0].weight.grad, plain[0].weight.grad, rtol=1e-2, atol=1e-3)
