"""A pipeline as a module: its loss, its gradients and its weights in a loop that knows no pipeline."""

from __future__ import annotations

import copy
import io
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save as save_file
from torch import Tensor, nn, optim
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from penstock import Pipeline, PipelineModule
from penstock._engine.placeholders import is_placeholder
from penstock.errors import AgreementError, PenstockError, UsageError
from penstock.testing import WorkerError, WorkerPool
from tests.catalogue.making import Does
from tests.pipeline.models import (
    WIDTH,
    X,
    Y,
    assert_same,
    chain,
    gradients,
    make,
    mean_loss,
    restless,
)
from tests.processes import in_processes

LOOPS: dict[str, Callable[[Any, Tensor], Any]] = {
    "two forwards": lambda loss, x: (loss(x) + loss(x * 2)).backward(),
    "scaled": lambda loss, x: (loss(x) / 3 * 128).backward(),
    "a function of it": lambda loss, x: (loss(x).exp() + loss(x * 2) ** 2).backward(),
    "accumulated": lambda loss, x: [(loss(part) / 2).backward() for part in (x, x * 2)],
    "in the other order": lambda loss, x: [
        one.backward() for one in reversed([loss(x), loss(x * 2)])
    ],
    "one that is dropped": lambda loss, x: (loss(x), (loss(x * 2) * 2).backward()),
}
"""Loops over a function that computes the loss."""


def as_module(**options: Any) -> PipelineModule:
    return PipelineModule(make(**options))


def plain_loss(model: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda x: mean_loss(model(x), Y)


def called(model: PipelineModule) -> Callable[[Tensor], Any]:
    return lambda x: model(x, target=Y)


def gap(name: str, **options: Any) -> float:
    """How far gradients, of the input too, are from the plain loop's, as far as they are here."""
    model, plain = as_module(model=chain(4), **options), chain(4)
    inputs = [X.clone().requires_grad_() for _ in range(2)]
    LOOPS[name](called(model), inputs[0])
    LOOPS[name](plain_loss(plain), inputs[1])
    found, expected = gradients(model), gradients(plain)
    assert found
    pairs = [(gradient, expected[name]) for name, gradient in found.items()]
    pairs.append((inputs[0].grad, inputs[1].grad))  # type: ignore[arg-type]
    return max(float((a - b).abs().max()) for a, b in pairs)


@pytest.mark.parametrize("schedule", ["1F1B", "ZB-V"])
@pytest.mark.parametrize("loop", LOOPS)
def test_gradients_are_those_of_the_plain_loop(loop: str, schedule: str) -> None:
    assert gap(loop, schedule=schedule) < 1e-12


@in_processes(3)
def test_processes_train_together(group: Any) -> None:
    for name in LOOPS:
        assert gap(name, mesh=group, ranks=3) < 1e-12, name


def clashing() -> nn.Module:
    """Names its arguments as a pipeline's methods name theirs."""
    return Does(lambda m, x, target, record: m.chain(x + target) * record, chain=chain())


@pytest.mark.parametrize("loss_fn", [nn.functional.mse_loss, None])
def test_arguments_of_the_model_may_have_any_name(loss_fn: Any) -> None:
    plain, names = clashing(), {"target": Y, "record": 2.0}
    wanted = plain(X, **names)
    loss = nn.functional.mse_loss(wanted, Y)
    loss.backward()
    pipe = Pipeline(clashing(), ranks=2, microbatches=4, loss_fn=loss_fn)
    pipe.cut(X, model_kwargs=names)
    torch.testing.assert_close(pipe.predict(X, model_kwargs=names), wanted.detach())
    model = PipelineModule(pipe)
    if loss_fn is None:
        found = nn.functional.mse_loss(model(X, model_kwargs=names), Y)
    else:
        pipe.step(X, target=Y, model_kwargs=names)
        assert pipe.find_nonfinite(X, target=Y, model_kwargs=names) is None
        pipe.zero_grad()
        found = model(X, target=Y, model_kwargs=names)
    found.backward()
    torch.testing.assert_close(found, loss)
    assert_same(gradients(model), gradients(plain))


def test_a_forward_leaves_gradients_alone_and_a_backward_adds() -> None:
    model, plain = as_module(), chain()
    LOOPS["scaled"](called(model), X)
    LOOPS["scaled"](plain_loss(plain), X)
    before = {name: gradient.clone() for name, gradient in gradients(model).items()}
    tensors = list(gradients(model).values())
    loss = model(X, target=Y)
    assert_same(gradients(model), before)
    assert all(a is b for a, b in zip(gradients(model).values(), tensors, strict=True))
    (loss * 2).backward()
    assert_same(gradients(model), {n: g * (1 + 2 * 3 / 128) for n, g in gradients(plain).items()})


def test_it_evaluates_without_training_or_gradients() -> None:
    model, plain = PipelineModule(make(restless())), restless()
    assert model.training
    with torch.no_grad():
        loss = model(X, target=Y)
        loss_and_output = model(X, target=Y, outputs=True)
    model.eval()
    assert not any(m.training for stage in model.pipe.stages for m in stage.module.modules())
    output = model(X)
    expected = plain.eval()(X)
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(loss_and_output, (loss, output))
    torch.testing.assert_close(loss, mean_loss(expected, Y).detach())
    assert not gradients(model)


def test_weights_have_the_names_of_the_unsplit_model() -> None:
    model, plain = as_module(schedule="ZB-V", model=chain(4)), chain(4)
    assert [name for name, _ in model.named_parameters()] == list(plain.state_dict())
    assert [name for name, _ in model.named_modules()] == [n for n, _ in plain.named_modules()]
    assert_same(model.state_dict(), plain.state_dict())
    outer = nn.Module()
    outer.inner = model
    assert outer.state_dict().keys() == {f"inner.{name}" for name in plain.state_dict()}
    assert {name for name, _ in outer.named_parameters()} == outer.state_dict().keys()
    assert model.to("cpu").double() is model
    zeros = {name: torch.zeros_like(value) for name, value in plain.state_dict().items()}
    model.load_state_dict(zeros)
    assert_same(model.state_dict(), zeros)


def step_twice() -> None:
    loss = as_module()(X, target=Y)
    loss.backward(retain_graph=True)
    loss.backward()


def change_a_weight() -> None:
    model = as_module()
    loss = model(X, target=Y)
    with torch.no_grad():
        next(model.parameters()).mul_(2)
    loss.backward()


WRONG: list[tuple[Any, str]] = [
    (lambda: as_module()(X, target=Y).backward(create_graph=True), "create_graph"),
    (step_twice, "second time"),
    (change_a_weight, "0.0.weight was changed in place"),
    (lambda: as_module()(X), "no target was given"),
    (lambda: as_module().float(), r"Pipeline\(device="),
    (lambda: as_module()(X, target=Y, accumulate=2), "divide or scale the loss"),
]


def test_wrong_use_is_named() -> None:
    for call, message in WRONG:
        with pytest.raises(UsageError, match=message):
            call()


# ---- gradients through outputs, and those of weights that the user looks at


def mixed(model: Any, x: Tensor) -> Tensor:
    """Of two outputs, and no mean over samples."""
    first, second = model(x), model(x * 2)
    similar = (first @ second.T).logsumexp(0).sum()
    loss: Tensor = similar * (first - Y).square().mean().sqrt()
    return loss


@pytest.mark.parametrize("schedule", ["1F1B", "ZB-H1"])
def test_gradients_flow_through_outputs(schedule: str) -> None:
    model = PipelineModule(
        make(restless(), schedule=schedule, loss_fn=None, microbatches=1, seed=3)
    )
    plain = restless()
    x, z = X.clone().requires_grad_(), X.clone().requires_grad_()
    for one in (model, plain):
        one.get_submodule("0.2").p = 0.0  # type: ignore[assignment]
    found, expected = mixed(model, x), mixed(plain, z)
    found.backward()
    expected.backward()
    torch.testing.assert_close(found, expected)
    assert_same(gradients(model), gradients(plain))
    torch.testing.assert_close(x.grad, z.grad)
    # The second forward, for the backward, leaves no trace.
    assert_same(dict(model.named_buffers()), dict(plain.named_buffers()))


def test_the_forward_that_runs_again_draws_what_the_first_drew() -> None:
    for seed in (3, "off"):
        model = PipelineModule(make(restless(), loss_fn=None, seed=seed))
        with torch.no_grad():  # so that what is dropped is not 0
            model.get_parameter("0.1.bias").fill_(1.0)
        kept = model(torch.ones_like(X).requires_grad_())
        other = model(X)
        grad = torch.autograd.grad(kept.sum(), list(model.parameters()), allow_unused=True)
        weight, bias = grad[-2:]
        assert not torch.equal(kept, other)
        # Behind the dropout lies one linear layer.
        hidden = (kept - model.get_parameter("1.bias")) @ model.get_parameter(
            "1.weight"
        ).inverse().T
        torch.testing.assert_close(weight, hidden.sum(0).expand(4, 4).detach())
        torch.testing.assert_close(bias, torch.full_like(bias, 8.0))


def test_the_forward_that_runs_again_is_in_the_mode_of_the_first() -> None:
    found = []
    for evaluates in (False, True):
        model = PipelineModule(make(restless(), loss_fn=None)).train()
        output = model(X)
        model.train(not evaluates)
        output.square().sum().backward()
        assert model.training is not evaluates
        found.append(gradients(model))
    assert_same(*found)


def test_a_loss_and_a_term_of_its_outputs() -> None:
    model, plain = as_module(), chain()
    loss, output = model(X, target=Y, outputs=True)
    (loss + output.square().mean()).backward()
    expected = plain(X)
    (mean_loss(expected, Y) + expected.square().mean()).backward()
    assert_same(gradients(model), gradients(plain))


def test_hooks_of_weights_run_once_on_the_scaled_gradient() -> None:
    model, plain = as_module(schedule="ZB-H1"), chain()
    seen: list[list[float]] = []
    for one in (model, plain):
        norms: list[float] = []
        for parameter in one.parameters():
            parameter.register_hook(lambda g: g.clamp(-0.01, 0.01))
            parameter.register_post_accumulate_grad_hook(
                lambda p, norms=norms: norms.append(float(p.grad.norm()))
            )
        seen.append(norms)
    (called(model)(X) * 5).backward()
    (mean_loss(plain(X), Y) * 5).backward()
    assert_same(gradients(model), gradients(plain))
    assert sorted(seen[0]) == pytest.approx(sorted(seen[1]))


def test_hooks_of_weights_without_a_gradient_are_not_called() -> None:
    ends = Does(lambda m, x: m.layer(x).detach(), layer=nn.Linear(4, 4))
    model = nn.Sequential(ends, nn.Linear(4, 4))
    calls: list[Tensor] = []
    for weight in model.parameters():
        weight.register_hook(lambda gradient: calls.append(gradient * 2))
    pipe = Pipeline(model, ranks=2, microbatches=2, loss_fn=nn.functional.mse_loss)
    loss = PipelineModule(pipe)(torch.randn(4, 4), target=torch.randn(4, 4))
    loss.backward()
    assert len(calls) == 2


def test_a_weight_that_is_frozen_before_backward_gets_no_gradient() -> None:
    model = as_module()
    loss = called(model)(X)
    name, weight = next(model.named_parameters())
    weight.requires_grad_(False)
    loss.backward()
    assert weight.grad is None
    assert gradients(model).keys() == {n for n, _ in model.named_parameters()} - {name}
    model.requires_grad_(False)
    assert not called(model)(X).requires_grad


# ---- float16


def faint() -> nn.Module:
    """In float16 its gradients vanish unless the loss is scaled before its backward."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)).half()


def faint_loss(output: Tensor, target: Tensor) -> Tensor:
    return (output.float() - target).square().mean() * 1e-6


def test_scaled_gradients_in_float16_do_not_vanish() -> None:
    x, y = torch.randn(8, 8).half(), torch.randn(8, 8)
    model = PipelineModule(make(faint(), loss_fn=faint_loss))
    plain = faint()
    # A loss that does not count says nothing about the scale of the next one.
    for scale in (2.0**16, 0.0, 2.0**14):
        (model(x, target=y) * scale).backward()
        (faint_loss(plain(x), y) * scale).backward()
    norm = sum(float(g.abs().sum()) for g in gradients(model).values())
    assert norm == pytest.approx(
        sum(float(g.abs().sum()) for g in gradients(plain).values()), rel=0.02
    )


# ---- between processes


@in_processes(2)
def test_a_state_dict_names_all_weights_and_no_file_has_holes(group: Any) -> None:
    model, plain = as_module(mesh=group, ranks=2), chain().state_dict()
    state = model.state_dict()
    assert list(state) == list(plain)
    kept = copy.deepcopy(state)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    model.load_state_dict(kept)
    found = {name: t for name, t in model.state_dict().items() if not is_placeholder(t)}
    assert 0 < len(found) < len(plain)
    assert_same(found, {name: plain[name] for name in found})
    mine, others = model.pipe.job.meet(lambda: list(found))
    assert {*mine, *others} == plain.keys()
    for save in (lambda: torch.save(state, io.BytesIO()), lambda: save_file(state)):
        with pytest.raises(UsageError, match=r"pipe.weights.state_dict\(full=True\)"):
            save()


def skips() -> nn.Module:
    """Both its stages use the input; without a pipeline, it computes the loss itself."""

    def run(m: Any, x: Tensor, target: Tensor | None = None) -> Any:
        output = m.second(m.first(x).tanh()) + x
        return output if target is None else mean_loss(output, target)

    torch.manual_seed(1)
    return Does(run, first=nn.Linear(WIDTH, WIDTH), second=nn.Linear(WIDTH, WIDTH)).double()


class Stepped(nn.Module):
    """A pipeline that returns the loss of a step, whose backward is done."""

    def __init__(self, pipe: Pipeline) -> None:
        super().__init__()
        self.pipe = pipe

    def named_parameters(self, *_: Any, **__: Any) -> Any:
        return self.pipe.named_parameters()

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        loss = self.pipe.step(x, target=target).loss
        return torch.tensor(loss, requires_grad=True)


def follow(front: Any, back: Any, update: Any) -> None:
    mean_loss(back(front(X)), Y).backward()
    update(front, back)


def follow_with_loss(front: Any, back: Any, update: Any) -> None:
    back(front(X), target=Y).backward()
    update(front, back)


def make_targets(front: Any, back: Any, update: Any) -> None:
    back(X, target=front(Y)).backward()
    update(front, back)


def oppose(front: Any, back: Any, update: Any) -> None:
    made = front(X)
    (mean_loss(back(Y), Y) - mean_loss(back(made.detach()), Y)).backward()
    update(back)
    mean_loss(back(made), Y).backward()
    update(front)


BEHIND: dict[str, tuple[Any, bool, Any]] = {
    "a module behind a module": (follow, True, PipelineModule),
    "a module with a loss behind a module": (follow_with_loss, True, PipelineModule),
    "adversaries": (oppose, True, PipelineModule),
    "a module behind an encoder": (follow, False, PipelineModule),
    "a step behind an encoder": (follow_with_loss, False, Stepped),
    "a step with an encoder of targets": (make_targets, False, Stepped),
    "a module with an encoder of targets": (make_targets, False, PipelineModule),
}
"""The loop; whether the model in front is a pipeline, or copied on each rank; and what the one behind is."""


def gap_behind(group: Any, loop: Any, cut: bool, kind: Any) -> float:
    loss_fn = mean_loss if loop in (follow_with_loss, make_targets) else None
    front: nn.Module = chain(2)
    if cut:
        front = PipelineModule(make(front, mesh=group, loss_fn=None))
    sides = [(front, kind(make(skips(), mesh=group, loss_fn=loss_fn))), (chain(2), skips())]
    trained = []
    for models in sides:
        weights = [[w for _, w in m.named_parameters() if not is_placeholder(w)] for m in models]

        def update(*of: nn.Module, models: Any = models, weights: Any = weights) -> None:
            for model, here in zip(models, weights, strict=True):
                if model in of:
                    optim.SGD(here, lr=1.0).step()
                for weight in here:
                    weight.grad = None

        for _ in range(2):
            loop(*models, update)
        trained.append([dict(model.named_parameters()) for model in models])
    return sum(
        float((weight - plain[name]).abs().max())
        for here, plain in zip(*trained, strict=True)
        for name, weight in here.items()
        if not is_placeholder(weight)
    )


@in_processes(2)
def test_gradients_flow_through_inputs_on_every_rank(group: Any) -> None:
    """The weights here are those of the plain loop, after two steps."""
    for name, case in BEHIND.items():
        assert gap_behind(group, *case) < 1e-12, name


@in_processes(3)
def test_ranks_with_a_batch_have_the_gradients_of_all(group: Any) -> None:
    """Two of three ranks have a batch that requires grad; then one has it without."""
    pipe, plain, rank = make(mesh=group, ranks=3), chain(), dist.get_rank(group)
    x, z = X.clone().requires_grad_(), X.clone().requires_grad_()
    pipe.step(*([] if rank == 1 else [x]), target=Y)
    mean_loss(plain(z), Y).backward()
    with pytest.raises(AgreementError, match="that requires grad on rank 0 and"):
        pipe.step(x.detach() if rank == 1 else x, target=Y)
    torch.testing.assert_close(x.grad, None if rank == 1 else z.grad)


def shifted() -> nn.Module:
    """Takes its arguments by name, and does nothing with one of them."""
    return Does(lambda m, x, *, scale, shift, spare: m.chain(x * scale) + shift, chain=chain(2))


@in_processes(2)
def test_arguments_that_are_named_in_any_order_get_their_own_gradients(group: Any) -> None:
    """Each rank names them in an order of its own."""
    names = ["scale", "shift", "spare"]
    named, of_plain = (
        {name: X.sin().add(place).requires_grad_() for place, name in enumerate(names)}
        for _ in range(2)
    )
    order = names if group.rank() else names[::-1]
    inputs: dict[str, Any] = {name: named[name] for name in order}
    make(shifted(), mesh=group, ranks=2).step(X, target=Y, **inputs)
    mean_loss(shifted()(X, **of_plain), Y).backward()
    for name in names:
        torch.testing.assert_close(named[name].grad, of_plain[name].grad)


def clip(model: Any, with_loss: bool) -> list[float]:
    """A loop that empties gradients between forward and backward; their norms."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    norms = []
    for _ in range(2):
        loss = model(X, target=Y) if with_loss else mean_loss(model(X), Y)
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.01)))
        optimizer.step()
    return norms


@in_processes(2)
def test_gradients_emptied_before_backward_are_clipped_whole(group: Any) -> None:
    norms = pytest.approx(clip(chain(), with_loss=False), rel=1e-9)
    for loss_fn in (mean_loss, None):
        assert clip(as_module(mesh=group, loss_fn=loss_fn), loss_fn is not None) == norms


def alone(group: Any, then: str) -> str:
    """Rank 0 makes a call alone; the other goes on, or is in its own code."""
    pipe = make(mesh=group, ranks=2, timeout=1.5)
    pipe.step(X, target=Y)
    try:
        with pipe.job.calling("save_model") if not group.rank() else nullcontext():
            if not group.rank():
                pipe.weights.state_dict(full=True)
            elif then == "sleeps":
                time.sleep(3.0)
            elif then == "waits in a collective":
                dist.all_reduce(torch.ones(()), group=group)
            pipe.step(X, target=Y)
    except PenstockError as error:
        return str(error)
    finally:
        pipe.close()
    return "silent"


@pytest.mark.parametrize("then", ["goes on", pytest.param("sleeps", marks=pytest.mark.nightly)])
def test_a_call_on_one_rank_alone_is_named_on_all(workers: WorkerPool, then: str) -> None:
    for text in workers.run(f"{__name__}:alone", 2, 30.0, then=then):
        assert "rank 0 is in save_model, which every rank must call" in text


@pytest.mark.nightly  # it ends the pool's workers
def test_it_is_named_to_a_rank_in_a_collective_of_its_own(workers: WorkerPool) -> None:
    # A wait that is the program's own cannot be ended: the process ends itself.
    with pytest.raises(WorkerError, match="rank 0 is in save_model, which every rank must call"):
        workers.run(f"{__name__}:alone", 2, 30.0, then="waits in a collective")


@in_processes(2)
def test_wrong_use_is_named_on_every_rank(group: Any) -> None:
    model = as_module(mesh=group, ranks=2)
    model(X, target=Y)
    for trains in (True, False):
        model.train(trains)
        with pytest.raises(AgreementError, match="different batches"):
            model(X + group.rank(), target=Y)
    # Nothing was sent or changed.
    model(X, target=Y)
    with pytest.raises(UsageError, match="DistributedDataParallel around a PipelineModule"):
        DistributedDataParallel(model, process_group=group)


def two() -> nn.Module:
    """What is infinite behind the second layer does not reach the first."""

    def run(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = m.a(x)
        return hidden, m.b(hidden.detach())

    torch.manual_seed(0)
    return Does(run, a=nn.Linear(8, 8), b=nn.Linear(8, 8))


def overflowing(output: tuple[Tensor, Tensor], target: Any) -> Tensor:
    return output[0].float().sum() * 1e-6 + output[1].float().sum()


@in_processes(2)
def test_all_ranks_skip_a_step_that_is_infinite_on_one(group: Any) -> None:
    options: Any = {"microbatches": 1, "loss_fn": overflowing}
    pipe = make(two(), mesh=group, **options)
    pipe.cut(torch.ones(2, 8))
    model = PipelineModule(pipe)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    held = [p for p in model.parameters() if not is_placeholder(p)]
    before = [p.clone() for p in held]
    rows = []
    for _ in range(3):
        with torch.autocast("cpu", torch.float16):
            loss = model(torch.ones(2, 8))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        moved = not all(map(torch.equal, held, before))
        rows.append([float(scaler.get_scale()), moved])
    assert rows == [[2.0**15, False], [2.0**14, False], [2.0**14, True]]


@pytest.mark.parametrize("views", [pytest.param(False, marks=pytest.mark.nightly), True])
@in_processes(4)
def test_replicas_wrapped_by_ddp(group: Any, views: bool) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))

    def wrap(module: nn.Module, stage: int) -> nn.Module:
        replicas = mesh["dp"].get_group()
        return DistributedDataParallel(
            module, process_group=replicas, gradient_as_bucket_view=views
        )

    pipe = make(chain(4), mesh=mesh, replicas="dp", wrap=wrap)
    half = slice(mesh.get_local_rank("dp") * 4, None if mesh.get_local_rank("dp") else 4)
    model = PipelineModule(pipe)
    losses = [model((X * k)[half], target=Y[half]) for k in (1, 2)]
    (losses[0].exp() + losses[1] ** 2).backward()
    by_output = PipelineModule(make(chain(4), mesh=mesh, replicas="dp", loss_fn=None))
    mean_loss(by_output(X[half]), Y[half]).backward()
    assert float(losses[0].detach()) == pytest.approx(float(mean_loss(chain(4)(X), Y).detach()))
    for found, loop in (
        (model, LOOPS["a function of it"]),
        (by_output, lambda f, x: f(x).backward()),
    ):
        plain = chain(4)
        loop(plain_loss(plain), X)
        wanted = gradients(plain)
        assert_same(gradients(found), {name: wanted[name] for name in gradients(found)})
