"""Batch norms in a pipeline: statistics of each microbatch, or once a step of the whole batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock import Pipeline
from penstock.errors import StageError, UsageError
from penstock.testing import WorkerPool
from tests.pipeline.models import mean_loss
from tests.pipeline.vision import SIZES, images, loss_fn, norms, trained, trained_plain, vision

SCHEDULES = [
    ("GPipe", 4, 4),
    ("1F1B", 2, 2),
    ("Interleaved1F1B", 2, 4),
    ("ZB-V", 2, 4),
    ("DualPipeV", 2, 4),
]
STEPS = 5


def assert_equal(found: dict[str, Any], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    gaps = {
        name: float((torch.tensor(found[name], dtype=torch.float64) - wanted[name]).abs().max())
        for name in wanted
    }
    assert max(gaps.values()) < 1e-10, gaps


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize(("schedule", "ranks", "stages"), SCHEDULES)
def test_five_steps_of_a_vision_model(schedule: str, ranks: int, stages: int, whole: bool) -> None:
    found = trained(
        schedule=schedule,
        ranks=ranks,
        stages=stages,
        microbatches=4,
        batch_statistics="batch" if whole else "microbatch",
    )
    assert_equal(found, trained_plain(vision(), [2] * 4, STEPS, whole=whole))
    assert found["0.1.num_batches_tracked"] == (STEPS if whole else 4 * STEPS)


@pytest.mark.parametrize("whole", [False, True])
def test_on_gloo(workers: WorkerPool, whole: bool) -> None:
    answers = workers.run(
        "tests.pipeline.vision:trained",
        2,
        schedule="ZB-V",
        stages=4,
        microbatches=4,
        batch_statistics="batch" if whole else "microbatch",
    )
    together = {name: value for answer in answers for name, value in answer.items()}
    assert_equal(together, trained_plain(vision(), [2] * 4, STEPS, whole=whole))


@pytest.mark.parametrize("options", [{"shared": True}, {"recompute": True}])
def test_norms_that_are_called_twice(options: dict[str, bool]) -> None:
    """By the model they count twice; by recomputation they do not."""
    found = trained(
        model=vision(**options), ranks=2, microbatches=4, batch_statistics="batch", steps=2
    )
    plain = vision(shared=options.get("shared", False))
    assert_equal(found, trained_plain(plain, [2] * 4, 2, whole=True))


def test_microbatches_of_unequal_size() -> None:
    found = trained(samples=11, ranks=2, microbatches=4, batch_statistics="batch")
    assert_equal(found, trained_plain(vision(), [3, 3, 3, 2], STEPS, whole=True))


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("momentum", [0.3, None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_first_norm_has_the_statistics_of_the_whole_batch(
    dims: int, momentum: float | None, dtype: torch.dtype
) -> None:
    kinds: list[Any] = [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d]
    plain, split = (kinds[dims - 1](3, momentum=momentum).to(dtype) for _ in range(2))
    net = nn.Sequential(split, nn.Identity())
    pipe = Pipeline(net, ranks=2, microbatches=4, loss_fn=mean_loss, batch_statistics="batch")
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        x = torch.randn(12, *SIZES[dims], generator=generator).to(dtype) + 2
        plain(x)
        pipe.step(x, target=torch.zeros_like(x))
    tolerance = {torch.bfloat16: 2e-2, torch.float32: 1e-6, torch.float64: 1e-13}[dtype]
    for name, wanted in plain.named_buffers():
        torch.testing.assert_close(split.get_buffer(name), wanted, rtol=tolerance, atol=tolerance)


def test_gradients_do_not_depend_on_it() -> None:
    x, y = images()
    found = []
    for way in ("batch", "microbatch"):
        pipe = Pipeline(vision(), ranks=2, loss_fn=loss_fn, batch_statistics=way)
        pipe.step(x, target=y)
        found.append([p.grad for p in pipe.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_frozen_and_stateless_norms_are_left_alone() -> None:
    net = vision()
    frozen: Any = net.get_submodule("0.1").eval()
    stateless = nn.BatchNorm1d(2, track_running_stats=False).double()
    net.get_submodule("3").add_module("2", stateless)
    before = {name: tensor.clone() for name, tensor in frozen.named_buffers()}
    trained(model=net, ranks=2, microbatches=4, batch_statistics="batch", steps=2)
    assert all(torch.equal(tensor, before[name]) for name, tensor in frozen.named_buffers())
    assert not stateless.track_running_stats


def test_its_step_is_bound_once(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = images()
    pipe = Pipeline(vision(), ranks=2, loss_fn=loss_fn, batch_statistics="batch")
    pipe.step(x, target=y)
    monkeypatch.setattr("penstock.runtime.rank.BoundProgram", None)
    pipe.step(x, target=y)


def test_evaluation_changes_nothing() -> None:
    x, y = images()
    pipe = Pipeline(vision(), ranks=2, loss_fn=loss_fn, batch_statistics="batch")
    pipe.step(x, target=y)
    before = {name: tensor.clone() for name, tensor in pipe.state_dict().items()}
    pipe.eval(x, target=y)
    assert all(torch.equal(before[name], tensor) for name, tensor in pipe.state_dict().items())


def test_a_step_that_fails_changes_no_statistics() -> None:
    def fails(output: Tensor, target: Tensor) -> Tensor:
        raise RuntimeError("mine")

    net, (x, y) = vision(), images()
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    pipe = Pipeline(net, ranks=2, loss_fn=fails, batch_statistics="batch")
    with pytest.raises(StageError):
        pipe.step(x, target=y)
    assert all(torch.equal(before[name], tensor) for name, tensor in net.state_dict().items())
    assert all(getattr(norm, "track_running_stats") for norm in norms(net).values())  # noqa: B009
    assert not any(norm._forward_pre_hooks for norm in norms(net).values())


def compiled(net: nn.Sequential) -> nn.Sequential:
    net[1].compile(backend="eager")
    return net


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (
            lambda: nn.Sequential(nn.SyncBatchNorm(3), nn.Identity()),
            "cannot follow SyncBatchNorm: 0",
        ),
        (lambda: compiled(vision()), "cannot follow what is compiled: 1.norm, 1.again"),
    ],
)
def test_what_cannot_be_followed(model: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        Pipeline(model(), ranks=2, loss_fn=loss_fn, batch_statistics="batch")
    Pipeline(model(), ranks=2, loss_fn=loss_fn).close()


def test_what_is_no_way() -> None:
    with pytest.raises(UsageError, match="'microbatch' or 'batch'"):
        Pipeline(vision(), ranks=2, batch_statistics="step")  # type: ignore[arg-type]
