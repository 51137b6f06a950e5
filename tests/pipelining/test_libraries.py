"""What torchtitan and NeMo AutoModel take from torch's package, with ours in its place."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock.pipelining import PipelineStage, schedules
from tests.pipelining.either import PACKAGES, Layer, X, Y

TAKEN = {
    # torchtitan 0.3.0
    "": "PipelineStage",
    "schedules": "_PipelineSchedule _PipelineScheduleRuntime PipelineScheduleMulti PipelineScheduleSingle "
    "ScheduleDualPipeV ScheduleZBVZeroBubble get_schedule_class _Action _PipelineContext _wait_batch_p2p "
    "FORWARD BACKWARD_INPUT BACKWARD_WEIGHT FULL_BACKWARD OVERLAP_F_B REDUCE_GRAD RESHARD UNSHARD",
    "microbatch": "_split_block_mask",
    "stage": "PipelineStage _normalize_model_output_as_tuple",
    # besides these, NeMo AutoModel 0.7
    "microbatch ": "BlockMask TensorChunkSpec _Replicate",
    "stage ": "_PipelineStageBase extract_tensor_metas",
    "_backward": "stage_backward stage_backward_input stage_backward_weight",
    "_schedule_visualizer": "get_schedule_ops visualize_schedule",
}


@pytest.mark.parametrize("package", ["torch", "penstock"])
@pytest.mark.parametrize("module", TAKEN)
def test_names_that_libraries_import(module: str, package: str) -> None:
    found = import_module(f"{PACKAGES[package]}.{module.strip()}".rstrip("."))
    assert [name for name in TAKEN[module].split() if not hasattr(found, name)] == []


def summed(output: Tensor, target: Tensor, tokens: int = 1) -> Tensor:
    return nn.functional.mse_loss(output, target, reduction="sum") / tokens


@pytest.mark.parametrize("name", ["GPipe", "Interleaved1F1B", "ZBVZeroBubble"])
def test_a_batch_that_is_split_already(name: str) -> None:
    """As torchtitan passes it, with loss_kwargs and without outputs."""
    torch.manual_seed(0)
    modules = [Layer() for _ in range(1 if name == "GPipe" else 2)]
    stages = [PipelineStage(m, i, len(modules), "cpu") for i, m in enumerate(modules)]
    kind: Any = schedules.get_schedule_class(name)
    schedule = kind(
        stages if issubclass(kind, schedules.PipelineScheduleMulti) else stages[0],
        n_microbatches=4,
        loss_fn=summed,
        scale_grads=False,
    )
    losses: list[Tensor] = []
    batch: dict[str, Any] = {
        "arg_mbs": [(part,) for part in X.chunk(4)],
        "kwarg_mbs": [{"scale": torch.full((2, 1), 0.5)} for _ in range(4)],
        "target_mbs": list(Y.chunk(4)),
        "losses": losses,
        "loss_kwargs": {"tokens": 7},
        "return_outputs": False,
    }
    assert schedule.step(**batch) is None
    hidden = X
    for module in modules:
        hidden = module(hidden, torch.tensor(0.5))
    loss = summed(hidden, Y, 7)
    expected = torch.autograd.grad(loss, [p for m in modules for p in m.parameters()])
    torch.testing.assert_close([p.grad for m in modules for p in m.parameters()], list(expected))
    torch.testing.assert_close(torch.stack(losses).sum(), loss.detach())
    with torch.no_grad():
        schedule.eval(**batch)
    torch.testing.assert_close(torch.stack(losses).sum(), loss.detach())
    with pytest.raises(RuntimeError, match="a whole batch and one that is split already"):
        schedule.step(X, **batch)
