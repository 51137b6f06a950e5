"""Pipeline over meshes: stages wrapped after the cut, over two by two processes, beside one process."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from penstock import ActionEvent, Pipeline
from penstock.errors import PeerFailed, UsageError
from penstock.testing import WorkerPool
from tests.parallel.bodies import Collectives, Mlp, X, Y
from tests.pipeline.cases import LANGUAGE, SAMPLES, pipeline

SCHEDULES = ("1F1B", "Interleaved1F1B", "ZB-H1", "ZB-V")
HOWS = ("ddp", "fsdp", "blocks", "mixed", "tp")
MICROBATCHES = 4
STEPS = 3


class Blocks(nn.Module):
    """Blocks one after the other, and a value that goes past all of them."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Mlp() for _ in range(count)])
        self.head = nn.Linear(4, 4)

    def forward(self, hidden: Tensor) -> Tensor:
        before = hidden
        for block in self.blocks:
            hidden = block(hidden)
        found: Tensor = self.head(hidden + before.mean(-1, keepdim=True))
        return found


def wrap(module: Any, how: str, mesh: DeviceMesh) -> Any:
    """As a user would write it; some give the module back and some do not."""
    blocks = [part for part in module.modules() if isinstance(part, Mlp)]
    if how == "ddp":
        return DistributedDataParallel(module, process_group=mesh.get_group("dp"))
    if how == "tp":
        for block in blocks:
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(block, mesh["tp"], plan)
        return None
    if how == "mixed":
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        return fully_shard(module, mesh=mesh["dp"], mp_policy=policy)
    if how == "blocks":
        for block in blocks:
            fully_shard(block, mesh=mesh["dp"])
    return fully_shard(module, mesh=mesh["dp"])


def made(schedule: str, how: str, mesh: DeviceMesh) -> tuple[Pipeline, nn.Module]:
    """A pipeline, and the model in one process."""
    torch.manual_seed(0)
    model = Blocks(8).to(torch.float32 if how == "mixed" else torch.float64)
    whole = copy.deepcopy(model)
    pipe = Pipeline(
        model,
        schedule=schedule,
        microbatches=MICROBATCHES,
        loss_fn=mse_loss,
        metrics={"largest": lambda output, target: output.amax()},
        mesh=mesh,
        wrap=lambda module, stage: wrap(module, how, mesh),
        replicas=None if how == "tp" else mesh["dp"],
    )
    return pipe, whole


def backward(whole: nn.Module, how: str) -> float:
    """A step's backward in one process; with mixed precision as each microbatch of each replica does it."""
    if how != "mixed":
        loss = mse_loss(whole(X), Y)
        loss.backward()
        return float(loss)
    total = 0.0
    inputs, targets = X.float().chunk(2 * MICROBATCHES), Y.float().chunk(2 * MICROBATCHES)
    for x, y in zip(inputs, targets, strict=True):
        low = copy.deepcopy(whole).bfloat16()
        low.zero_grad()
        loss = mse_loss(low(x.bfloat16()), y) / len(inputs)
        loss.backward()
        total += float(loss)
        for into, out in zip(whole.parameters(), low.parameters(), strict=True):
            assert out.grad is not None
            into.grad = out.grad.float() + (0 if into.grad is None else into.grad)
    return total


def run(group: Any, schedule: str, how: str) -> dict[str, Any]:  # noqa: PLR0915 - one story
    """A worker's task: some steps with clipping and an optimizer, beside the same in one process."""
    spread = ("tp" if how == "tp" else "dp", "pp")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=spread)
    pipe, whole = made(schedule, how, mesh)
    replica = mesh.get_local_rank(spread[0])
    half = slice(None) if how == "tp" else slice(8 * replica, 8 * replica + 8)
    kind = torch.float32 if how == "mixed" else torch.float64
    x, y = X[half].to(kind), Y[half].to(kind)
    options: Any = {"fused": True} if schedule == "ZB-V" else {"foreach": True}
    # Each kind for itself, where only some weights are spread: torch's kernels for many take no mixture.
    kinds = [[p for p in pipe.parameters() if isinstance(p, DTensor) is of] for of in (True, False)]
    optimizer = torch.optim.AdamW([{"params": of} for of in kinds], lr=0.01, **options)
    plain = torch.optim.AdamW(whole.parameters(), lr=0.01)
    gaps = dict.fromkeys(("loss", "norm", "gradients", "weights", "evaluated"), 0.0)
    waits: list[bool] = []

    def look(event: ActionEvent) -> None:
        """Whether the gradient of a matrix still waits after the inputs' half."""
        matrix = next(p for p in event.module.parameters() if p.dim() > 1)
        waits.append(matrix.grad is None)

    with pipe:
        with pipe.on("*I0", after=look):
            pipe.step(x, target=y)
        pipe.zero_grad()
        for _ in range(STEPS):
            with Collectives() as told:
                result = pipe.step(x, target=y)
            gaps["loss"] = max(gaps["loss"], abs(result.loss - backward(whole, how)))
            gaps["gradients"] = max(gaps["gradients"], gap_of(pipe.named_parameters(), whole))
            norm = float(nn.utils.clip_grad_norm_(whole.parameters(), 0.1))
            gaps["norm"] = max(gaps["norm"], abs(pipe.clip_grad_norm_(0.1) / norm - 1))
            clipped = nn.utils.get_total_norm(
                [p.grad for p in whole.parameters() if p.grad is not None]
            )
            gaps["norm"] = max(gaps["norm"], abs(pipe.grad_norm() / float(clipped) - 1))
            for one in (optimizer, plain):
                one.step()
                one.zero_grad()
        if how != "mixed":
            found = pipe.predict(x)
            gaps["evaluated"] = float((found - whole(x)).abs().max())
        names = [name for name, _ in pipe.named_parameters()]
        full = pipe.state_dict(full=True)
        local = pipe.state_dict()
        pipe.load_state_dict({name: value + 1 for name, value in whole.state_dict().items()})
        moved = pipe.state_dict(full=True)
    for name, value in whole.state_dict().items() if full else ():
        gaps["weights"] = max(gaps["weights"], float((full[name] - value).abs().max()))
        assert torch.equal(moved[name], value + 1)
    stages = [stage.index for stage in pipe.stages]
    return {
        "gaps": gaps,
        "waits": waits,
        "counts": dict(told.counts),
        "stages": stages,
        "blocks": sum(isinstance(m, Mlp) for s in pipe.stages for m in s.code.modules()),
        "head": any(name.startswith("head") for name in names),
        "strange": sorted({*names, *local, *full} - {name for name, _ in whole.named_parameters()}),
    }


def gap_of(parameters: Iterator[tuple[str, nn.Parameter]], whole: nn.Module) -> float:
    """How far gradients are from those of the same name."""
    largest = 0.0
    for name, parameter in parameters:
        found, expected = parameter.grad, whole.get_parameter(name).grad
        assert found is not None
        assert expected is not None
        part = found.full_tensor() if isinstance(found, DTensor) else found
        largest = max(largest, float((part - expected).abs().max()))
    return largest


def least(how: str, answer: dict[str, Any]) -> dict[str, int]:
    """How many gathers and reductions a step of a rank needs at least."""
    stages, blocks = len(answer["stages"]), answer["blocks"]
    if how == "ddp":
        return {"allreduce_": stages}
    if how == "tp":
        # Nothing goes back through what has the batch as its input.
        first = 0 in answer["stages"]
        return {"all_reduce": MICROBATCHES * (2 * blocks - first)}
    groups = blocks + answer["head"] if how == "blocks" else stages
    return {"allgather_base": groups, "reduce_scatter_base": groups}


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_wrapped_stages_equal_one_process(workers: WorkerPool, schedule: str, how: str) -> None:
    answers = workers.run(f"{__name__}:run", 4, 60.0, schedule=schedule, how=how)
    for answer in answers:
        limits = dict.fromkeys(answer["gaps"], 1e-5 if how == "mixed" else 1e-12)
        assert {n: g for n, g in answer["gaps"].items() if g > limits[n]} == {}
        assert answer["strange"] == []
        # DTensors that are multiplied as such do not wait.
        halves = schedule.startswith("ZB") * len(answer["stages"])
        assert answer["waits"] == [how != "tp"] * halves
        found = {
            kind: sum(n for name, n in answer["counts"].items() if kind in name)
            for kind in least(how, answer)
        }
        assert found == least(how, answer), answer["counts"]


# ---- three dimensions


def run_in_three(group: Any, schedule: str) -> dict[str, Any]:
    """A worker's task: tensor parallelism inside of replicas that are sharded, along a pipeline."""
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "pp", "tp"))

    def both(module: Any, stage: int) -> Any:
        wrap(module, "tp", mesh)
        return fully_shard(module, mesh=mesh["dp"])

    torch.manual_seed(0)
    model = Blocks(4).double()
    whole = copy.deepcopy(model)
    pipe = Pipeline(
        model,
        schedule=schedule,
        microbatches=MICROBATCHES,
        loss_fn=mse_loss,
        mesh=mesh,
        wrap=both,
        replicas=mesh["dp"],
    )
    replica = mesh.get_local_rank("dp")
    half = slice(8 * replica, 8 * replica + 8)
    optimizer = torch.optim.AdamW([{"params": [p]} for p in pipe.parameters()], lr=0.01)
    plain = torch.optim.AdamW(whole.parameters(), lr=0.01)
    gaps = dict.fromkeys(("loss", "norm", "gradients", "weights"), 0.0)
    with pipe:
        for _ in range(STEPS):
            result = pipe.step(X[half], target=Y[half])
            gaps["loss"] = max(gaps["loss"], abs(result.loss - backward(whole, "dp")))
            gaps["gradients"] = max(gaps["gradients"], gap_of(pipe.named_parameters(), whole))
            norm = float(nn.utils.clip_grad_norm_(whole.parameters(), 0.1))
            gaps["norm"] = max(gaps["norm"], abs(pipe.clip_grad_norm_(0.1) / norm - 1))
            for one in (optimizer, plain):
                one.step()
                one.zero_grad()
        full = pipe.state_dict(full=True)
        leads = sum(pipe.agree(pipe.leads))
    for name, value in whole.state_dict().items() if full else ():
        gaps["weights"] = max(gaps["weights"], float((full[name] - value).abs().max()))
    return {"gaps": gaps, "leads": leads, "first": not any(mesh.get_coordinate() or [1])}


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(200)
def test_pipeline_replicas_and_tensor_parallelism_together() -> None:
    with WorkerPool(8) as pool:
        answers = [
            answer
            for schedule in ("1F1B", "ZB-V")
            for answer in pool.run(f"{__name__}:run_in_three", 8, 90.0, schedule=schedule)
        ]
    for answer in answers:
        assert max(answer["gaps"].values()) < 1e-12, answer
    # Of each eight one prints and writes.
    assert [bool(answer["first"]) for answer in answers].count(True) == 2
    assert sum(answer["leads"] for answer in answers) == 2 * 2


# ---- weights that stages share


def run_tied(group: Any, schedule: str, how: str) -> float | str:
    """A worker's task: two steps without zeroing gradients; how far they are from one process."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    of = LANGUAGE["tied"]()
    replica, count = mesh.get_local_rank("dp"), 4 if schedule == "ZB-V" else 2
    half = slice(replica * SAMPLES // 2, (replica + 1) * SAMPLES // 2)
    try:
        pipe = pipeline(
            of,
            count,
            schedule=schedule,
            microbatches=4,
            mesh=mesh,
            replicas=mesh["dp"],
            wrap=lambda module, stage: wrap(module, how, mesh),
        )
    except (UsageError, PeerFailed) as error:
        return str(error)
    with pipe:
        for _ in range(2):
            pipe.step(of.args[0][half], target=of.target[half])
            of.loss_fn(of.model(*of.args), of.target).backward()
        norm = float(
            nn.utils.get_total_norm([p.grad for p in of.model.parameters() if p.grad is not None])
        )
        return max(gap_of(pipe.named_parameters(), of.model), abs(pipe.grad_norm() / norm - 1))


@pytest.mark.parametrize(
    ("schedule", "how"), [("1F1B", "ddp"), ("1F1B", "fsdp"), ("ZB-V", "ddp"), ("ZB-V", "fsdp")]
)
def test_weights_that_stages_share(workers: WorkerPool, schedule: str, how: str) -> None:
    answers = workers.run(f"{__name__}:run_tied", 4, 60.0, schedule=schedule, how=how)
    if (schedule, how) == ("ZB-V", "fsdp"):
        # One tensor in a process cannot be two that are sharded by themselves.
        assert all("replicate these stages" in str(answer) for answer in answers)
    else:
        assert max(answers) < 1e-12


# ---- names


class Around(nn.Module):
    """A wrapper of the user's, with a weight of its own."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


def chain() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[Mlp() for _ in range(4)]).double()


def test_names_are_those_of_the_unsplit_model_whatever_is_around() -> None:
    model = chain()
    whole, plain = copy.deepcopy(model), Pipeline(copy.deepcopy(model), stages=2, loss_fn=mse_loss)

    def around(module: nn.Module, stage: int) -> nn.Module | None:
        for name, block in module.named_children():
            setattr(module, name, checkpoint_wrapper(block))
        return Around(module) if stage == 0 else None

    pipe = Pipeline(model, stages=2, loss_fn=mse_loss, wrap=around)
    first = pipe.stages[0].module
    pipe.stages[0].module = Around(pipe.stages[0].code)
    names = set(whole.state_dict())
    assert names == {name for name, _ in pipe.named_parameters()} - {"gain"}
    assert names == pipe.state_dict().keys() - {"gain"}
    assert pipe.step(X, target=Y).loss == plain.step(X, target=Y).loss
    grads = {name: parameter.grad for name, parameter in plain.named_parameters()}
    for name, parameter in pipe.named_parameters():
        assert name == "gain" or torch.equal(parameter.grad, grads[name])  # type: ignore[arg-type]
    pipe.stages[0].module = first
    pipe.load_state_dict(whole.state_dict(), strict=False)
    assert torch.equal(pipe.state_dict()["0.up.weight"], whole.state_dict()["0.up.weight"])


def test_what_wrap_must_give() -> None:
    made: list[tuple[Any, str]] = [
        (lambda module, stage: "a module", "it must return the wrapped module"),
        (lambda module, stage: Mlp(), "does not contain the stage's module"),
        (fully_shard, "must be a function of a stage's module and its index"),
    ]
    for given, said in made[:2]:
        with pytest.raises(UsageError, match=said):
            Pipeline(chain(), stages=2, wrap=given)
    with pytest.raises(UsageError, match=made[2][1]):
        Pipeline(chain(), stages=2, wrap="fully_shard")  # type: ignore[arg-type]


def run_wrapped_before(group: Any, how: str) -> str:
    """A worker's task."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    model = wrap(chain(), how, mesh)
    with pytest.raises(UsageError) as told:
        Pipeline(model, mesh=mesh)
    return str(told.value)


@pytest.mark.parametrize("how", ["ddp", "blocks"])
def test_wrapping_before_the_cut_is_refused_with_the_remedy(workers: WorkerPool, how: str) -> None:
    (said, *_) = workers.run(f"{__name__}:run_wrapped_before", 4, 60.0, how=how)
    assert "wrap=lambda module, stage: " in said
    assert ("fully_shard(module" if how == "blocks" else "DistributedDataParallel(module") in said
