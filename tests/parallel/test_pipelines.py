"""Pipeline over meshes: stages wrapped after the cut, over two by two processes, beside a plain loop."""

from __future__ import annotations

import copy
import dataclasses
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

from penstock import ActionEvent, Loss, Microbatches, Pipeline
from penstock.errors import PeerFailed, UsageError
from penstock.testing import Case, WorkerPool, judge
from tests.catalogue.models import MODELS
from tests.parallel.bodies import Collectives, Mlp, X, Y, adamw, chain, halves_of, mesh_of, wrap
from tests.processes import in_processes

SCHEDULES = ("1F1B", "Interleaved1F1B", "ZB-H1", "ZB-V")
HOWS = ("ddp", "fsdp", "blocks", "mixed", "tp")
MICROBATCHES = 4


class Blocks(nn.Module):
    """Blocks one after the other, and a value that goes past all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Mlp() for _ in range(4)])
        self.head = nn.Linear(4, 4)

    def forward(self, hidden: Tensor) -> Tensor:
        before = hidden
        for block in self.blocks:
            hidden = block(hidden)
        result: Tensor = self.head(hidden + before.mean(-1, keepdim=True))
        return result


class Lowered(Blocks):
    """Computes with its weights in half the precision."""

    inside = False

    def forward(self, hidden: Tensor) -> Any:
        if self.inside:
            return super().forward(hidden)
        self.inside = True
        low = {name: parameter.bfloat16() for name, parameter in self.named_parameters()}
        result = torch.func.functional_call(self, low, (hidden.bfloat16(),))
        self.inside = False
        return result


def check_wrapped(schedule: str, how: str) -> tuple[DeviceMesh, Pipeline, int]:
    """Some steps with clipping and an optimizer, beside the same in a plain loop.

    Returns:
        The mesh and the pipeline, which is closed, and how many ranks of the job are its main process.
    """
    mesh = mesh_of(*{"tp": ("tp", "pp"), "tp and fsdp": ("dp", "pp", "tp")}.get(how, ("dp", "pp")))
    torch.manual_seed(0)
    kind = torch.float32 if how == "mixed" else torch.float64
    model = Blocks().to(kind)
    plain = Lowered() if how == "mixed" else copy.deepcopy(model)
    plain.load_state_dict(model.state_dict())
    metrics = {"largest": lambda output, target: output.amax()}
    case = Case(plain, (X.to(kind),), Y.to(kind), Loss(mse_loss, metrics=metrics))
    cases = [case] if how == "tp" else halves_of(case, X.to(kind), Y.to(kind))
    pipe = Pipeline(
        model, schedule=schedule, microbatches=MICROBATCHES, loss_fn=case.loss, mesh=mesh,
        wrap=lambda module, stage: wrap(module, how, mesh), replicas=None if how == "tp" else "dp",
    )  # fmt: skip
    if how != "ddp":  # the others replace weights
        pipe.cut(X[:2].to(kind))
    mine, waits = cases[pipe.replicas.index], list[bool]()

    def look(event: ActionEvent) -> None:
        """Whether the gradient of a matrix still waits after the inputs' half."""
        waits.append(next(p for p in event.module.parameters() if p.dim() > 1).grad is None)

    with pipe:
        with pipe.on("*I0", after=look), Collectives() as collectives:
            pipe.step(*mine.args, target=mine.target)
        pipe.zero_grad()
        verdict = judge(cases, pipe, steps=3, optimizer=adamw, evaluate=how != "mixed")
        full = pipe.weights.state_dict(full=True)
        pipe.weights.load_state_dict({n: v + 1 for n, v in plain.state_dict().items()})
        moved = pipe.weights.state_dict(full=True)
        main = sum(pipe.job.meet(lambda: pipe.is_main_process, among=pipe.job.pipeline))
    assert full.keys() == moved.keys()
    assert full.keys() in (set(), plain.state_dict().keys())
    assert all(torch.equal(value, plain.state_dict()[n] + 1) for n, value in moved.items())
    verdict.check(1e-5 if how == "mixed" else 1e-12)
    # DTensors that are multiplied as such do not wait.
    assert waits == [not how.startswith("tp")] * (schedule.startswith("ZB") * len(pipe.stages))
    for part, wanted in least(how, pipe).items():
        assert sum(n for name, n in collectives.counts.items() if part in name) == wanted
    return mesh, pipe, main


def least(how: str, pipe: Pipeline) -> dict[str, int]:
    """How many gathers and reductions a step of a rank needs at least."""
    stages = len(pipe.stages)
    blocks = sum(isinstance(m, Mlp) for s in pipe.stages for m in s.code.modules())
    head = any(name.startswith("head") for name, _ in pipe.weights.here.named_parameters())
    if how == "ddp":
        return {"allreduce_": stages}
    if how == "tp":
        # Nothing goes back through what has the batch as its input.
        first = any(stage.index == 0 for stage in pipe.stages)
        return {"all_reduce": MICROBATCHES * (2 * blocks - first)}
    groups = blocks + head if how == "blocks" else stages
    return {"allgather_base": groups, "reduce_scatter_base": groups}


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("schedule", SCHEDULES)
@in_processes(4)
def test_wrapped_stages_are_right_and_reduce_once_a_step(
    group: Any, schedule: str, how: str
) -> None:
    check_wrapped(schedule, how)


@in_processes(4)
def test_mixed_precision_where_only_torch_can_add_up(group: Any) -> None:
    """As since torch 2.15."""
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
        check_wrapped("1F1B", "mixed")


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(200)
@pytest.mark.parametrize("schedule", ["1F1B", "ZB-V"])
def test_pipeline_replicas_and_tensor_parallelism_together(schedule: str) -> None:
    with WorkerPool(8) as pool:
        answers = pool.run(f"{__name__}:run_together", 8, 90.0, schedule=schedule)
    # Of the two pipelines with the same first rank, one prints and writes.
    main, first = zip(*answers, strict=True)
    assert (sum(main), sum(first)) == (2, 1)


def run_together(group: Any, schedule: str) -> list[Any]:
    """A worker's task."""
    mesh, _, main = check_wrapped(schedule, "tp and fsdp")
    return [main, not any(mesh.get_coordinate() or [1])]


@pytest.mark.parametrize(
    ("schedule", "how"), [("1F1B", "ddp"), ("1F1B", "fsdp"), ("ZB-V", "ddp"), ("ZB-V", "fsdp")]
)
@in_processes(4)
def test_weights_that_stages_share(group: Any, schedule: str, how: str) -> None:
    """Two steps without zeroing gradients."""
    mesh, case = mesh_of("dp", "pp"), MODELS["gpt"]()
    calls = case.args[0].calls
    cases = [
        dataclasses.replace(case, args=[Microbatches(half, samples=[2, 2])])
        for half in (calls[:2], calls[2:])
    ]
    pipe = Pipeline(
        copy.deepcopy(case.model), schedule=schedule, mesh=mesh, replicas="dp", loss_fn=case.loss,
        stages=4 if schedule == "ZB-V" else 2, wrap=lambda module, stage: wrap(module, how, mesh),
    )  # fmt: skip
    with pipe:
        if (schedule, how) == ("ZB-V", "fsdp"):
            # One tensor in a process cannot be two that are sharded by themselves.
            with pytest.raises((UsageError, PeerFailed), match="replicate these stages"):
                pipe.cut(cases[0].args[0])
        else:
            pipe.cut(cases[0].args[0])
            judge(cases, pipe, steps=2).check(1e-12)


# ---- names


class Around(nn.Module):
    """A wrapper of the user's, perhaps with a weight of its own."""

    def __init__(self, inner: nn.Module, gain: Tensor | None = None) -> None:
        super().__init__()
        self.inner = inner
        self.gain = None if gain is None else nn.Parameter(gain)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


def test_names_are_those_of_the_unsplit_model_whatever_is_around() -> None:
    model = chain()
    whole, plain = copy.deepcopy(model), Pipeline(copy.deepcopy(model), stages=2, loss_fn=mse_loss)

    def around(module: nn.Module, stage: int) -> nn.Module | None:
        for name, block in module.named_children():
            setattr(module, name, checkpoint_wrapper(block))
        return Around(module, torch.ones(())) if stage == 0 else None

    pipe = Pipeline(model, stages=2, loss_fn=mse_loss, wrap=around)
    names = set(whole.state_dict())
    assert names == {name for name, _ in pipe.weights.here.named_parameters()} - {"gain"}
    assert names == pipe.weights.state_dict().keys() - {"gain"}
    assert pipe.step(X, target=Y).loss == plain.step(X, target=Y).loss
    grads = {name: parameter.grad for name, parameter in plain.named_parameters()}
    for name, parameter in pipe.weights.here.named_parameters():
        assert name == "gain" or torch.equal(parameter.grad, grads[name])  # type: ignore[arg-type]
    pipe.weights.load_state_dict(whole.state_dict(), strict=False)
    assert torch.equal(pipe.weights.state_dict()["0.up.weight"], whole.state_dict()["0.up.weight"])


in_bfloat16 = torch.autocast("cpu", torch.bfloat16)


class Lower(Around):
    """Computes in another type, which the run without data does not see."""

    forward = in_bfloat16(Around.forward)


class LowerModel(nn.Sequential):
    forward = in_bfloat16(nn.Sequential.forward)


def test_a_wrapper_may_change_types() -> None:
    torch.manual_seed(0)
    plain = LowerModel(*[nn.Linear(4, 4) for _ in range(4)])
    model = nn.Sequential(*copy.deepcopy(plain))
    pipe = Pipeline(model, stages=2, loss_fn=mse_loss, wrap=lambda module, stage: Lower(module))
    verdict = judge(Case(plain, (X.float(),), Y.float(), mse_loss), pipe, evaluate=False)
    verdict.check(1e-2)
    assert len(verdict.gradients) == 8


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


@in_processes(4)
def test_wrapping_too_early_or_too_far_is_refused_with_the_remedy(group: Any) -> None:
    """Before the cut, and over four processes of which two are replicas."""
    mesh = mesh_of("dp", "pp")
    for how, wrapper in (("ddp", "DistributedDataParallel"), ("blocks", "fully_shard")):
        with pytest.raises(UsageError, match=rf"wrap=lambda module, stage: {wrapper}\(module"):
            Pipeline(wrap(chain(), how, mesh), mesh=mesh)
    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("other", "dp", "pp"))

    def wrapped(module: nn.Module, stage: int) -> nn.Module:
        return DistributedDataParallel(module, process_group=group)

    says = r"over the processes \[0, 1, 2, 3\], but replicas= holds.*replicas=\"dp\""
    with pytest.raises(UsageError, match=says):
        Pipeline(chain(), mesh=mesh, replicas="dp", wrap=wrapped).cut(X)


@in_processes(2)
def test_a_mesh_may_be_the_pipeline_alone(group: Any) -> None:
    # A mesh made anew would make groups that the pool's other processes lack.
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("pp",))
    with Pipeline(chain(), mesh=mesh, microbatches=2, loss_fn=mse_loss) as pipe:
        assert pipe.step(X, target=Y).loss == pytest.approx(mse_loss(chain()(X), Y).item())
