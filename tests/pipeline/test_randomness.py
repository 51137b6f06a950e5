"""What steps draw depends on seed, step, microbatch and unit, not on how they are run."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock import Loss, Pipeline, PipelineStage
from penstock.errors import PartitionError, UsageError
from penstock.testing import WorkerPool, compare
from tests.catalogue.draws import WIDTH, chain, noisy
from tests.catalogue.making import Does


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("name", ["between, all", "checkpoint of reentrant ones"])
def test_all_that_a_model_draws_is_what_the_plain_loop_draws_bit_by_bit(name: str) -> None:
    """The catalogue's matrix has the other models that draw."""
    one, two = (
        compare(noisy(name), schedule=schedule, ranks=2, stages=4, microbatches=4, evaluate=False)
        for schedule in ("ZB-V", "Interleaved1F1B")
    )
    one.check(1e-12)
    assert {n for n, gap in one.differences().items() if gap and n.startswith("grad")} == set()
    assert one.digest() == two.digest()


def test_each_step_and_microbatch_draws_anew() -> None:
    pipe = dropping(seed=1)
    first, second = (masks(pipe) for _ in range(2))
    assert len({*first, *second}) == 8
    state, torchs = pipe.randomness.state_dict(), torch.get_rng_state()
    assert state == {"seed": 1, "step": 2}
    ones = torch.ones(8, 16)
    assert torch.equal(pipe.predict(ones), ones)
    # A later pipeline of another shape goes on; an evaluation has taken no part.
    again = dropping(seed=6, ranks=1)
    again.randomness.load_state_dict(state)
    assert masks(again) == masks(pipe)
    assert torch.equal(torch.get_rng_state(), torchs), "the caller's generator goes on"


def twice(m: Any, x: Tensor) -> Tensor:
    ones = m.first(x) * 0 + 1
    return torch.stack([m.drop(ones), m.drop(ones)], 1)


def test_each_call_of_a_module_draws_anew() -> None:
    model = Does(twice, first=nn.Linear(4, 4), drop=nn.Dropout(0.5))
    pipe = Pipeline(
        model, stages=[["first"], ["drop"]], microbatches=2, loss_fn=lambda y, _: y.mean()
    )
    outputs = pipe.step(torch.ones(16, 4), target=torch.zeros(16), outputs=True).outputs
    assert not torch.equal(outputs[:, 0], outputs[:, 1])


def test_switched_off_it_draws_from_the_callers_generator() -> None:
    pipe = dropping(seed="off", ranks=1)
    torch.manual_seed(4)
    ones = torch.ones(8, 16)
    expected = [nn.functional.dropout(part, 0.5) for part in ones.chunk(4)]
    after = torch.get_rng_state()
    torch.manual_seed(4)
    assert masks(pipe) == [part.numpy().tobytes() for part in expected]
    assert torch.equal(torch.get_rng_state(), after), "the next step draws anew"
    assert pipe.randomness.state_dict() == {"seed": "off", "step": 1}


def seed_by_rank(group: Any) -> Any:
    """A worker's task: the seed that a pipeline takes where each rank's torch has another."""
    with torch.random.fork_rng():
        torch.manual_seed(100 + torch.distributed.get_rank(group))
        with Pipeline(chain(), schedule="GPipe", loss_fn=mean, mesh=group) as pipe:
            return pipe.randomness.seed


def test_without_a_seed_it_is_the_one_that_rank_0_s_torch_was_given(workers: WorkerPool) -> None:
    torch.manual_seed(77)
    pipe = dropping()
    torch.manual_seed(78)
    assert pipe.randomness.seed == 77
    assert masks(pipe) == masks(dropping(seed=77)) != masks(dropping(seed=78))
    assert workers.run(f"{__name__}:seed_by_rank", 2) == [100, 100]


def test_what_is_no_state() -> None:
    states: list[Any] = [{"seed": 5}, {"seed": 5, "step": -1}, {"seed": 1.5, "step": 0}]
    for state in states:
        with pytest.raises(UsageError, match=r"step|seed"):
            dropping(seed=5).randomness.load_state_dict(state)


def test_stages_by_hand_whose_modules_have_one_name_draw_apart() -> None:
    seen: list[Tensor] = []
    parts = [nn.Sequential(nn.Dropout(0.5)) for _ in range(2)]
    for part in parts:
        part.register_forward_hook(lambda _, args, output: seen.append(output != 0))
    stages = [PipelineStage(part, index, 2) for index, part in enumerate(parts)]
    pipe = Pipeline.from_stages(stages, schedule="GPipe", microbatches=1, loss_fn=mean, seed=2)
    x = torch.ones(4, 16, requires_grad=True)
    pipe.step(x, target=x)
    assert not torch.equal(seen[-2], seen[-1])


def dropping(ranks: int = 2, **options: Any) -> Pipeline:
    layers = nn.Sequential(nn.Dropout(0.5), *[nn.Identity() for _ in range(3)])
    return Pipeline(layers, ranks=ranks, microbatches=4, loss_fn=mean, **options)


def mean(output: Tensor, target: Tensor) -> Tensor:
    return output.mean()


def masks(pipe: Pipeline) -> list[bytes]:
    """What a step's dropout makes of ones, for each microbatch."""
    seen: list[bytes] = []
    first = pipe.stages[0].module.get_submodule("0")
    handle = first.register_forward_hook(
        lambda _, args, output: seen.append(output.detach().numpy().tobytes())
    )
    x = torch.ones(8, 16, requires_grad=True)
    pipe.step(x, target=x)
    handle.remove()
    # The first time it is also called to find what it gives.
    return seen[-4:]


# ---- generators of the model's own


def adding(own: torch.Generator) -> nn.Module:
    """Draws from a generator that it is given."""
    add = lambda m, x: m.linear(x) + torch.randn(WIDTH, generator=m.own)  # noqa: E731
    return Does(add, own=own, linear=nn.Linear(WIDTH, WIDTH))


def draws_between(m: Any, x: Tensor) -> Tensor:
    """Draws from a generator that it keeps, between its blocks."""
    for block in m.blocks:
        x = block(x) + torch.randn(WIDTH, generator=m.own)
    return x


def test_one_that_several_stages_would_draw_from_is_refused() -> None:
    own = torch.Generator()
    with pytest.raises(
        PartitionError, match=r"stage 1 draws from a torch\.Generator .* in stage 0"
    ):
        outputs(nn.Sequential(adding(own), adding(own)), ranks=2)
    blocks = [nn.Linear(WIDTH, WIDTH) for _ in range(2)]
    model: Any = Does(draws_between, own=torch.Generator().manual_seed(3), blocks=blocks)
    unsplit = copy.deepcopy(model)
    unsplit.own = torch.Generator().manual_seed(3)
    expected = [unsplit(part) for part in BATCH.chunk(2)]
    assert all(map(torch.equal, outputs(copy.deepcopy(model), ranks=1), expected))
    assert all(map(torch.equal, outputs(model, ranks=2), expected))


BATCH = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(5))


def outputs(model: nn.Module, **options: Any) -> list[Tensor]:
    """The output of each microbatch of a step."""
    seen: list[Tensor] = []

    def loss(output: Tensor, target: Tensor) -> Tensor:
        seen.append(output.detach())
        return output.sum()

    options |= {"loss_fn": Loss(loss, reduction="sum", check=False)}
    with Pipeline(model, microbatches=2, seed=1, **options) as pipe:
        pipe.step(BATCH, target=BATCH)
    return seen[-2:]


def test_a_generator_of_a_units_own_gives_what_it_gives_in_a_plain_loop() -> None:
    model = nn.Sequential(*[adding(torch.Generator().manual_seed(seed)) for seed in (3, 4)])
    unsplit = copy.deepcopy(model)
    assert all(
        map(torch.equal, outputs(model, ranks=2), [unsplit(part) for part in BATCH.chunk(2)])
    )
