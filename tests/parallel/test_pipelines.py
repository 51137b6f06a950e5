"""Pipeline over meshes: stages wrapped after the cut, over two by two processes, beside one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from penstock import ActionEvent, Loss, Pipeline
from penstock.errors import PeerFailed, UsageError
from penstock.testing import WorkerPool
from tests.catalogue.cases import LANGUAGE, SAMPLES, pipeline
from tests.parallel.bodies import Collectives, Mlp, X, Y, chain, gap_of, half_of, mesh_of, wrap

SCHEDULES = ("1F1B", "Interleaved1F1B", "ZB-H1", "ZB-V")
HOWS = ("ddp", "fsdp", "blocks", "mixed", "tp")
MICROBATCHES = 4
STEPS = 2


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
        result: Tensor = self.head(hidden + before.mean(-1, keepdim=True))
        return result


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
    mesh = mesh_of(*{"tp": ("tp", "pp"), "tp and fsdp": ("dp", "pp", "tp")}.get(how, ("dp", "pp")))
    torch.manual_seed(0)
    model = Blocks(4).to(torch.float32 if how == "mixed" else torch.float64)
    whole, kind = copy.deepcopy(model), model.head.weight.dtype
    pipe = Pipeline(
        model,
        schedule=schedule,
        microbatches=MICROBATCHES,
        loss_fn=Loss(mse_loss, metrics={"largest": lambda output, target: output.amax()}),
        mesh=mesh,
        wrap=lambda module, stage: wrap(module, how, mesh),
        replicas=None if how == "tp" else "dp",
    )
    if how != "ddp":  # the others replace weights
        pipe.cut(X[:2].to(kind))
    half = slice(None) if how == "tp" else half_of(mesh)
    x, y = X[half].to(kind), Y[half].to(kind)
    options: Any = {"fused": True} if schedule == "ZB-V" else {"foreach": True}
    # Each for itself, where only some weights are spread: torch's kernels for many take no mixture.
    optimizer = torch.optim.AdamW([{"params": [p]} for p in pipe.parameters()], lr=0.01, **options)
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
            with Collectives() as collectives:
                result = pipe.step(x, target=y)
            gaps["loss"] = max(gaps["loss"], abs(result.loss - backward(whole, how)))
            gaps["gradients"] = max(
                gaps["gradients"], gap_of(pipe.weights.here.named_parameters(), whole)
            )
            norm = float(nn.utils.clip_grad_norm_(whole.parameters(), 0.1))
            gaps["norm"] = max(gaps["norm"], abs(pipe.clip_grad_norm_(0.1) / norm - 1))
            clipped = nn.utils.get_total_norm(
                [p.grad for p in whole.parameters() if p.grad is not None]
            )
            gaps["norm"] = max(gaps["norm"], abs(pipe.weights.grad_norm() / float(clipped) - 1))
            for one in (optimizer, plain):
                one.step()
                one.zero_grad()
        if how != "mixed":
            gaps["evaluated"] = float((pipe.predict(x) - whole(x)).abs().max())
        names = [name for name, _ in pipe.weights.here.named_parameters()]
        full = pipe.weights.state_dict(full=True)
        local = pipe.weights.state_dict()
        pipe.weights.load_state_dict(
            {name: value + 1 for name, value in whole.state_dict().items()}
        )
        moved = pipe.weights.state_dict(full=True)
        leads = sum(pipe.job.agree(pipe.is_main_process))
    for name, value in whole.state_dict().items() if full else ():
        gaps["weights"] = max(gaps["weights"], float((full[name] - value).abs().max()))
        assert torch.equal(moved[name], value + 1)
    return {
        "gaps": gaps,
        "waits": waits,
        "counts": dict(collectives.counts),
        "stages": [stage.index for stage in pipe.stages],
        "blocks": sum(isinstance(m, Mlp) for s in pipe.stages for m in s.code.modules()),
        "head": any(name.startswith("head") for name in names),
        "strange": sorted({*names, *local, *full} - {name for name, _ in whole.named_parameters()}),
        "leads": [leads, not any(mesh.get_coordinate() or [1])],
    }


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
        counts = {
            kind: sum(n for name, n in answer["counts"].items() if kind in name)
            for kind in least(how, answer)
        }
        assert counts == least(how, answer), answer["counts"]


def run_without_sums(group: Any) -> float:
    """A worker's task: mixed precision where only torch's own code can add up, as since torch 2.15."""
    names = ("accumulate_unsharded_grad_if_needed", "to_accumulated_grad_if_needed")
    sums = {name: method for name, method in vars(FSDPParam).items() if name in names}
    post_backward = FSDPParamGroup.post_backward

    def with_sums(group: FSDPParamGroup, *args: Any) -> None:
        with pytest.MonkeyPatch.context() as own:
            for name, method in sums.items():
                own.setattr(FSDPParam, name, method, raising=False)
            post_backward(group, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FSDPParamGroup, "post_backward", with_sums)
        for name in sums:
            patch.delattr(FSDPParam, name)
        gaps: dict[str, float] = run(group, "1F1B", "mixed")["gaps"]
    return max(gaps.values())


def test_mixed_precision_where_only_torch_can_add_up(workers: WorkerPool) -> None:
    assert max(workers.run(f"{__name__}:run_without_sums", 4, 60.0)) < 1e-5


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(200)
@pytest.mark.parametrize("schedule", ["1F1B", "ZB-V"])
def test_pipeline_replicas_and_tensor_parallelism_together(schedule: str) -> None:
    with WorkerPool(8) as pool:
        answers = pool.run(f"{__name__}:run", 8, 90.0, schedule=schedule, how="tp and fsdp")
    for answer in answers:
        assert max(answer["gaps"].values()) < 1e-12, answer
    # Of the two pipelines with the same first rank, one prints and writes.
    leads, first = zip(*(answer["leads"] for answer in answers), strict=True)
    assert (sum(leads), sum(first)) == (2, 1)


# ---- weights that stages share


def run_tied(group: Any, schedule: str, how: str) -> float | str:
    """A worker's task: two steps without zeroing gradients; how far they are from one process."""
    mesh, of = mesh_of("dp", "pp"), LANGUAGE["tied"]()
    half, count = half_of(mesh, SAMPLES), 4 if schedule == "ZB-V" else 2
    try:
        pipe = pipeline(
            of,
            count,
            schedule=schedule,
            microbatches=4,
            mesh=mesh,
            replicas="dp",
            wrap=lambda module, stage: wrap(module, how, mesh),
            cut=True,
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
        return max(
            gap_of(pipe.weights.here.named_parameters(), of.model),
            abs(pipe.weights.grad_norm() / norm - 1),
        )


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
    assert names == {name for name, _ in pipe.weights.here.named_parameters()} - {"gain"}
    assert names == pipe.weights.state_dict().keys() - {"gain"}
    assert pipe.step(X, target=Y).loss == plain.step(X, target=Y).loss
    grads = {name: parameter.grad for name, parameter in plain.named_parameters()}
    for name, parameter in pipe.weights.here.named_parameters():
        assert name == "gain" or torch.equal(parameter.grad, grads[name])  # type: ignore[arg-type]
    pipe.stages[0].module = first
    pipe.weights.load_state_dict(whole.state_dict(), strict=False)
    assert torch.equal(pipe.weights.state_dict()["0.up.weight"], whole.state_dict()["0.up.weight"])


class Lower(Around):
    """A wrapper that computes in another type, which the run without data does not see."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return self.inner(*args, **kwargs)


def test_a_wrapper_may_change_types() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
    x, y = X.float(), Y.float()
    whole = copy.deepcopy(model)
    with torch.autocast("cpu", torch.bfloat16):
        output = whole(x)
    loss = mse_loss(output, y)
    loss.backward()
    pipe = Pipeline(model, stages=2, loss_fn=mse_loss, wrap=lambda module, stage: Lower(module))
    assert pipe.step(x, target=y).loss == pytest.approx(loss.item(), rel=1e-4)
    named = [(n, p) for n, p in pipe.weights.here.named_parameters() if not n.endswith("gain")]
    assert len(named) == 8
    assert gap_of(named, whole) < 1e-2


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (lambda module, stage: "a module", "it must return the wrapped module"),
        (lambda module, stage: Mlp(), "does not contain the stage's module"),
        ("fully_shard", "must be a function of a stage's module and its index"),
    ],
)
def test_what_wrap_must_give(function: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        Pipeline(chain(), stages=2, wrap=function)


def run_wrapped_before(group: Any, how: str) -> str:
    """A worker's task."""
    mesh = mesh_of("dp", "pp")
    with pytest.raises(UsageError) as refusal:
        Pipeline(wrap(chain(), how, mesh), mesh=mesh)
    return str(refusal.value)


@pytest.mark.parametrize("how", ["ddp", "blocks"])
def test_wrapping_before_the_cut_is_refused_with_the_remedy(workers: WorkerPool, how: str) -> None:
    (said, *_) = workers.run(f"{__name__}:run_wrapped_before", 4, 60.0, how=how)
    assert "wrap=lambda module, stage: " in said
    assert ("fully_shard(module" if how == "blocks" else "DistributedDataParallel(module") in said


def run_along_one_dimension(group: Any) -> float:
    """A worker's task: a mesh of nothing but the pipeline."""
    # A mesh made anew would make groups that the pool's other processes lack.
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("pp",))
    pipe = Pipeline(chain(), mesh=mesh, microbatches=2, loss_fn=mse_loss)
    return pipe.step(X, target=Y).loss


def test_a_mesh_may_be_the_pipeline_alone(workers: WorkerPool) -> None:
    wanted = mse_loss(chain()(X), Y).item()
    assert workers.run(f"{__name__}:run_along_one_dimension", 2, 60.0) == pytest.approx(
        [wanted] * 2
    )


def run_wrapped_too_far(group: Any) -> str:
    """A worker's task: DDP averages over four processes, of which two are replicas of each other."""
    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("other", "dp", "pp"))

    def wrapped(module: nn.Module, stage: int) -> nn.Module:
        return DistributedDataParallel(module, process_group=group)

    with pytest.raises(UsageError) as refusal:
        Pipeline(chain(), mesh=mesh, replicas="dp", wrap=wrapped).cut(X)
    return str(refusal.value)


def test_wrapping_over_others_than_the_replicas_is_refused(workers: WorkerPool) -> None:
    for said in workers.run(f"{__name__}:run_wrapped_too_far", 4, 60.0):
        assert "over the processes [0, 1, 2, 3], but replicas= holds" in said
        assert 'replicas="dp"' in said
