"""What people combine with a pipeline on a GPU. With ``PENSTOCK_TEST_DEVICE=cpu`` this runs on a CPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from penstock import Checkpoints, LossScaler, Pipeline
from penstock._engine.devices import use
from penstock.testing import Case, WorkerPool, judge, plain_loop
from tests import played
from tests.device import DEVICE, HAS_DEVICE, device_of_rank

pytestmark = pytest.mark.skipif(not HAS_DEVICE, reason=f"needs {DEVICE}")
ON_CPU = DEVICE in {"cpu", played.NAME}
"""Whether the CPU's kernels run."""
WIDTH, HEADS, LENGTH, BATCH = 32, 2, 16, 8
MICROBATCHES = 4


class Block(nn.Module):
    """Attention of some kind, and a layer."""

    def __init__(self, attend: Callable[..., Tensor]) -> None:
        super().__init__()
        self.attend = attend
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).view(len(x), -1, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        mixed = self.attend(*parts).transpose(1, 2).flatten(2)
        return x + torch.tanh(self.out(mixed))


def causal(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(query, key, value, is_causal=True)


def model(attend: Callable[..., Tensor] = causal) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(attend) for _ in range(4)))


def batch(device: str) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    x, y = torch.randn(BATCH, LENGTH, WIDTH), torch.randn(BATCH, LENGTH, WIDTH)
    return x.to(device), y.to(device)


def pipeline(net: nn.Module, schedule: str = "ZB-V", **options: Any) -> Pipeline:
    options = {"device": DEVICE, "loss_fn": functional.mse_loss, **options}
    return Pipeline(net, schedule=schedule, ranks=2, microbatches=MICROBATCHES, **options)


def case(attend: Callable[..., Tensor] = causal, device: str = DEVICE) -> Case:
    x, y = batch(device)
    return Case(model(attend).to(device), [x], y, functional.mse_loss)


def norm(gradients: Iterable[Tensor | None]) -> float:
    return float(nn.utils.get_total_norm([grad for grad in gradients if grad is not None]))


def compare(
    options: dict[str, Any], around: Callable[[], Any] = nullcontext, rtol: float = 1e-4
) -> None:
    """Steps beside the plain loop; later ones are like the second."""
    attend = options.pop("attend", causal)
    with around():
        verdict = judge(case(attend), pipeline(model(attend), **options), steps=2)
    assert verdict.loss == pytest.approx(verdict.expected["loss"], rel=rtol)
    check_gradients(verdict.gradients, verdict.expected_gradients, rtol)


def check_gradients(
    actual: Mapping[str, Tensor | None], expected: Mapping[str, Tensor | None], rtol: float
) -> None:
    """All of them together, as far as that is from the expected ones."""
    gaps = [(actual[name] - grad) for name, grad in expected.items()]  # type: ignore[operator]
    assert norm(gaps) <= rtol * norm(expected.values())


def test_bfloat16_autocast() -> None:
    kind = torch.device(DEVICE).type
    compare({}, lambda: torch.autocast(kind, dtype=torch.bfloat16), rtol=2e-2)


def test_float16_autocast_with_a_loss_scaler() -> None:
    kind = torch.device(DEVICE).type
    (x,), y = case().args, case().target
    pipe, scaler = pipeline(model()), LossScaler(device=kind)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.0)
    with torch.autocast(kind, dtype=torch.float16):
        pipe.step(x, target=y, scaler=scaler)
    scaler.unscale_(optimizer)
    actual = {name: weight.grad for name, weight in pipe.weights.here.named_parameters()}
    check_gradients(actual, plain_loop(case())[1], rtol=2e-2)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() > 0


def test_compiled_stages() -> None:
    compare({"compile": {"backend": "aot_eager"} if ON_CPU else True}, rtol=1e-3)


def test_flash_attention() -> None:
    def flash(*parts: Tensor) -> Tensor:
        half = [part.bfloat16() for part in parts]
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return causal(*half).to(parts[0].dtype)

    compare({"attend": flash}, rtol=2e-2)


@pytest.mark.skipif(ON_CPU, reason="flex attention has no backward on a CPU")
def test_flex_attention() -> None:
    flex = pytest.importorskip("torch.nn.attention.flex_attention")

    def later(score: Tensor, _b: Tensor, _h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return torch.where(query >= key, score, -torch.inf)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        result: Tensor = flex.flex_attention(query, key, value, score_mod=later)
        return result

    compare({"attend": attend}, rtol=1e-3)


def test_a_save_in_the_background_holds_the_step_that_it_was_asked_for(tmp_path: Path) -> None:
    x, y = batch(DEVICE)
    pipe = pipeline(model())
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    pipe.step(x, target=y)
    optimizer.step()
    before = {name: value.cpu().clone() for name, value in pipe.weights.state_dict().items()}
    with Checkpoints(tmp_path, asynchronous=True) as checkpoints:
        checkpoints.save(1, pipe=pipe, optimizer=optimizer)
        for _ in range(3):  # the weights change while the copies, in pinned memory, are written
            pipe.step(x, target=y)
            optimizer.step()
    other = pipeline(model())
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.load(pipe=other, optimizer=torch.optim.SGD(other.parameters(), lr=0.1))
    for name, value in other.weights.state_dict().items():
        assert torch.equal(value.cpu(), before[name]), name


def test_generation() -> None:
    transformers = pytest.importorskip("transformers")
    from penstock.integrations import PipelineModule

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0,
    )  # fmt: skip
    net = transformers.LlamaForCausalLM(config).to(DEVICE).eval()
    tokens = torch.arange(1, 9, device=DEVICE)[None]
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False}
    wanted = net.generate(tokens, attention_mask=torch.ones_like(tokens), **options).tolist()
    pipe = Pipeline(net, ranks=2, microbatches=1, device=DEVICE)
    pipe.cut(input_ids=tokens)
    module: Any = PipelineModule(pipe)
    generated = module.generate(tokens, attention_mask=torch.ones_like(tokens), **options)
    assert generated.tolist() == wanted


def sharded(group: Any) -> float:
    """A worker's task: two replicas of a pipeline of one rank, whose weights are sharded over both."""
    rank = dist.get_rank(group)
    device = device_of_rank(rank)
    use(torch.device(device))
    mesh = init_device_mesh(torch.device(device).type, (2, 1), mesh_dim_names=("dp", "pp"))

    def wrap(stage: nn.Module, _: int) -> nn.Module:
        blocks: list[Any] = [part for part in stage.modules() if isinstance(part, Block)]
        for block in blocks:
            fully_shard(block, mesh=mesh["dp"])
        for block, following in pairwise(blocks):
            block.set_modules_to_forward_prefetch([following])
        whole: Any = fully_shard(stage, mesh=mesh["dp"])
        return cast("nn.Module", whole)

    cases = [
        dataclasses.replace(case(device=device), args=[x], target=y)
        for x, y in zip(*(tensor.chunk(2) for tensor in batch(device)), strict=True)
    ]
    with Pipeline(
        model(), schedule="1F1B", mesh=mesh, replicas="dp", microbatches=2, device=device,
        wrap=wrap, loss_fn=functional.mse_loss,
    ) as pipe:  # fmt: skip
        pipe.cut(cases[0].args[0][:1])
        return max(judge(cases, pipe).differences().values())


@pytest.mark.skipif(
    DEVICE != "cpu" and (ON_CPU or torch.accelerator.device_count() < 2),
    reason="needs two devices with collectives",
)
def test_fsdp_with_prefetch() -> None:
    with WorkerPool(2) as workers:
        assert max(workers.run(f"{__name__}:sharded", 2, timeout=100)) < 1e-4
