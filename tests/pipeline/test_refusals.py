"""Every refusal of Pipeline names the value and the remedy, before anything runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from penstock import REPLICATE, Loss, Microbatches, Pipeline, PipelineStage, Timeouts
from penstock._engine.devices import placed_on
from penstock.errors import (
    MicrobatchError,
    PartitionError,
    PenstockError,
    PoisonedError,
    ScheduleError,
    SpecError,
    StageError,
    UnknownArgumentError,
    UsageError,
)
from penstock.partition import partition
from penstock.schedule import Action, Op, Placement, Schedule, build
from tests.catalogue.making import Does
from tests.pipeline.models import STAGES, X, Y, chain, gradients, make, mean_loss, named
from tests.processes import in_processes

Refusal = tuple[Callable[[], Any], type[PenstockError], str]


def stages(*indices: int, count: int = 2) -> list[PipelineStage]:
    return [PipelineStage(nn.Linear(2, 2), index, count) for index in indices]


def by_hand(*parts: PipelineStage, **options: Any) -> Pipeline:
    return Pipeline.from_stages(parts, schedule="1F1B", loss_fn=mean_loss, **options)


def mesh_of(*names: str) -> DeviceMesh:
    """A mesh without process groups."""
    ranks = torch.arange(4).reshape(2, 2)
    return DeviceMesh("cpu", ranks, mesh_dim_names=names, _init_backend=False, _rank=0)


def forwards(ranks: int, microbatches: int) -> Schedule:
    """1F1B without its backwards."""
    made = build("1F1B", ranks=ranks, microbatches=microbatches)
    programs = [[a for a in made.actions(rank) if a.op is Op.F] for rank in range(ranks)]
    return made.with_programs(programs)


def sometimes_forward(ranks: int, microbatches: int) -> Schedule:
    made = build("1F1B", ranks=ranks, microbatches=microbatches)
    return made if microbatches == 4 else forwards(ranks, microbatches)


def turned_round(ranks: int, microbatches: int) -> Schedule:
    made = build("1F1B", ranks=ranks, microbatches=microbatches)
    if microbatches == 4:
        return made
    return replace(made, placement=Placement((1, 0)), programs=made.programs[::-1])


THREE = build("1F1B", ranks=3, microbatches=4)
HALF = Schedule(
    "half", Placement((0, 1)), 1, ((Action(0, Op.F, 0),), (Action(1, Op.F, 0), Action(1, Op.B, 0)))
)
"""Microbatch 0 has a forward and no backward on rank 0."""
MAKING: list[tuple[dict[str, Any], type[PenstockError], str]] = [
    ({"schedule": "1F1"}, ScheduleError, "did you mean '1F1B'"),
    ({"schedule": 3}, UsageError, "schedule=3: must be a name, a file, a Schedule, or a function"),
    ({"ranks": 0, "stages": 2}, UsageError, "ranks=0: must be at least 1"),
    ({"ranks": None}, UsageError, "the number of ranks is not known"),
    ({"microbatches": 0}, ScheduleError, "microbatches=0"),
    ({"stages": 3}, PartitionError, "3 stages cannot be divided evenly among 2 ranks; use a multiple of 2"),
    ({"stages": ["1", ["2"]]}, PartitionError, "must hold the module paths to cut before"),
    ({"stages": partition(chain(), 2)}, PartitionError, "in no stage: 0.0.weight"),
    ({"stages": partition(chain(), 2), "recompute": True}, UsageError, "but stages= is a Partition"),
    ({"model": "chain"}, UsageError, "model: must be an nn.Module, not a str"),
    ({"recompute": True, "compile": True}, UsageError, "cannot be used with compile="),
    ({"schedule": THREE}, UsageError, "'1F1B' has ranks=3, but ranks=2 was asked for"),
    ({"schedule": HALF, "microbatches": None}, ScheduleError, "'half' cannot run:\n"),
    ({"schedule": "auto", "stages": 2}, UsageError, "the plan in schedule= decides stages= itself"),
    ({"schedule": "auto", "loss_fn": Loss(mean_loss, over="batch"), "ranks": 0}, UsageError, "ranks=0"),
    ({"num_microbatches": 4}, UnknownArgumentError, r"num_microbatches=; did you mean microbatches=\?"),
    ({"criterion": mean_loss}, UnknownArgumentError, r"no argument criterion=; did you mean loss_fn=\?"),
    ({"reduction": "sum"}, UnknownArgumentError, r"loss_fn=penstock.Loss\(function, reduction=...\)"),
    ({"accumulate": 2}, UnknownArgumentError, r"it is an argument of pipe.step\(...\)"),
    ({"balance": "flops"}, UnknownArgumentError, r"partition\(model, stages, balance=...\)"),
    ({"device": "xpu"}, UsageError, r"device='xpu': torch.xpu.is_available\(\) is False"),
    ({"device": "gpu"}, UsageError, "device='gpu': Expected one of cpu, cuda"),
    ({"loss_fn": lambda output: output.mean()}, UsageError, "which it does not accept: too many"),
    ({"loss_fn": nn.MSELoss}, UsageError, r"give an object of it, MSELoss\(\)"),
    ({"loss_fn": "mse"}, UsageError, "loss_fn='mse': must be a function"),
    ({"replicas": 2}, UsageError, "replicas=2: must be the name of a dimension of mesh=, a process group"),
    ({"replicas": "dp"}, UsageError, "replicas='dp': must name dimensions of mesh=.* there is no mesh"),
    ({"replicas": "pp", "mesh": mesh_of("dp", "pp")}, UsageError, "that lie across .* the mesh has dp, pp"),
    ({"mesh": 2}, UsageError, "mesh=2: must be a DeviceMesh with a dimension 'pp'"),
    ({"mesh": mesh_of("dp", "tp")}, UsageError, r"\('dp', 'tp'\); the one along which .* named 'pp'"),
    ({"wrap": "fsdp"}, UsageError, "wrap='fsdp': must be a function of a stage's module"),
    ({"timeout": "1"}, UsageError, "timeout='1': must be more than 0 seconds"),
    ({"split": {0: 1.5}}, MicrobatchError, r"split={0: 1.5}: must be a dimension"),
    ({"schedule": lambda ranks, microbatches: THREE}, ScheduleError, "gave a schedule of ranks=3"),
]  # fmt: skip
"""What a pipeline is asked for, and why it is refused."""
ALL_OUTPUTS = Loss(mean_loss, metrics={"all": lambda output, target: output})
CALLING: list[Refusal] = [
    (by_hand, UsageError, "was given no stages"),
    (lambda: by_hand(*stages(0)), UsageError, r"holds stages \[0\]; 1F1B places \[0, 1\] there"),
    (lambda: by_hand(*stages(0, 1), n_microbatches=4), UnknownArgumentError, r"did you mean microbatches=\?"),
    (lambda: make(schedule=forwards).step(X, target=Y), UsageError, "so it cannot train; use evaluate"),
    (lambda: make(schedule=sometimes_forward).step(X[:3], target=Y[:3]), ScheduleError, "no backward for 3"),
    (lambda: make(schedule=turned_round).step(X[:3], target=Y[:3]), ScheduleError, r"on ranks \[1, 0\]"),
    (lambda: make(schedule="DualPipeV", stages=4, model=chain(4)).step(X[:3], target=Y[:3]), ScheduleError,
        "this step has 3 microbatches instead of 4: DualPipeV on ranks=2 needs microbatches=4"),
    (lambda: make(loss_fn=None).step(X, target=Y), UsageError, "needs a loss; make the Pipeline with"),
    (lambda: make(split={"mask": REPLICATE}).step(X, target=Y), MicrobatchError, "by its number, as in"),
    (lambda: make(named(), stages=STAGES).predict(X, mask={1, 2}), SpecError, "'mask' is a set, which"),
    (lambda: make(loss_fn=lambda *_: torch.zeros(2, 1)).step(X, target=Y), UsageError,
        r"must return a scalar tensor, not \[2, 1\]"),
    (lambda: make(loss_fn=lambda *_: torch.zeros(())).step(X, target=Y), UsageError, "requires no grad for"),
    (lambda: make(loss_fn=lambda x, y: x if y is None else x.mean()).step(X), UsageError,
        "no target was given, .* must return a scalar"),
    (lambda: Loss(mean_loss, reduction="max"), UsageError, "reduction='max': must be 'mean' or 'sum'"),  # type: ignore[arg-type]
    (lambda: Loss(mean_loss, over="all"), UsageError, "over='all': must be 'samples', 'tokens' or 'batch'"),  # type: ignore[arg-type]
    (lambda: Loss(mean_loss, metrics={"right": 3}), UsageError, r"metrics\['right'\]=3: must be a function"),  # type: ignore[dict-item]
    (lambda: make(split={"output": "cat"}), MicrobatchError, r"a function \(parts, sizes\) -> whole"),
    (lambda: make(loss_fn=Loss(mean_loss, target="y")).step(X), UsageError, "pass y=, at least on"),
    (lambda: Timeouts(step=0), UsageError, r"Timeouts\(step=0\): must be more than 0 seconds"),
    (lambda: make(loss_fn=ALL_OUTPUTS).step(X, target=Y), UsageError, r"the metric 'all' must return a"),
]  # fmt: skip


@pytest.mark.parametrize("case", range(len(MAKING) + len(CALLING)))
def test_refusals(case: int) -> None:
    """Code that catches the built-in errors keeps working."""
    if case < len(MAKING):
        options, kind, says = MAKING[case]
        call: Callable[[], Any] = lambda: make(**options)  # noqa: E731 - one of two
    else:
        call, kind, says = CALLING[case - len(MAKING)]
    with pytest.raises(kind, match=says) as caught:
        call()
    assert isinstance(caught.value, ValueError)


# ---- a refused call leaves the Pipeline as it was


def refusing(error: Exception) -> Callable[..., Any]:
    def refuse(*_: Any) -> Any:
        raise error

    return refuse


Slip = tuple[Callable[[Any], Any], type[PenstockError], str]
SLIPS: dict[str, Slip] = {
    "no batch": (lambda pipe: pipe.step(target=Y), UsageError, r"step\(\) was given no batch"),
    "no samples": (lambda pipe: pipe.predict(X[:0]), MicrobatchError, "the batch is empty"),
    "no target": (lambda pipe: pipe.step(X), UsageError, r"pass target="),
    "no target but None": (lambda pipe: pipe.step(X, target=None), UsageError, r"pass target="),
    "a positional target": (lambda pipe: pipe.step(X, Y), StageError, "by name, as target="),
    "a misspelt target": (lambda pipe: pipe.step(X, targets=Y), StageError, r"did you mean target=\?"),
    "a numpy array": (lambda pipe: pipe.step(X.numpy(), target=Y), MicrobatchError, "torch.as_ten"),
    "a wrong width": (lambda pipe: pipe.step(X[:, :3], target=Y), StageError, r"'0.0' \(Linear\)"),
    "a wrong type": (lambda pipe: pipe.step(X.float(), target=Y), StageError, "the same dtype"),
    "too few targets": (lambda pipe: pipe.evaluate(X, target=Y[:3]), MicrobatchError,
        r"8 samples \(argument 0 of .* but the target of shape \[3, 4\] has 3 in dimension 0"),
    "no number of microbatches": (lambda pipe: pipe.step(X, target=Y, microbatches="4"), UsageError,
        "microbatches='4': must be a whole number"),
    "two divisors": (lambda pipe: pipe.step(X, target=Y, accumulate=2, total_weight=3.0), UsageError,
        "not both: each says what the loss is divided by"),
    "no number of times": (lambda pipe: pipe.step(X, target=Y, accumulate=0), UsageError,
        "accumulate=0: must be at least 1 step"),
    "one name twice": (lambda pipe: pipe.step(X, target=Y, mask=X, model_kwargs={"mask": X}), UsageError,
        "mask given by name and in model_kwargs="),
    "an argument of step": (lambda pipe: pipe.evaluate(X, target=Y, accumulate=2), StageError,
        "keyword argument 'accumulate'; step alone takes it"),
    "too few weights": (lambda pipe: pipe.step(X, target=Y, loss_weight=[1.0]), UsageError, "1 numbers for"),
    "a weight below nothing": (lambda pipe: pipe.step(X, target=Y, loss_weight=lambda _: -1), UsageError,
        "the weight of the loss of microbatch 0 is -1.0"),
    "a weight that fails": (
        lambda pipe: pipe.step(X, target=Y, loss_weight=refusing(KeyError("tokens"))), StageError,
        "the weight of the loss, called with a target, raised KeyError: 'tokens'"),
    "torch's scaler": (lambda pipe: pipe.step(X, target=Y, scaler=torch.amp.GradScaler("cpu")), UsageError,
        "scaler=GradScaler: must be a penstock.LossScaler, .* decides for all ranks"),
    "no gradients": (lambda pipe: torch.inference_mode()(pipe.step)(X, target=Y), UsageError,
        "step needs gradients, and under torch.inference_mode"),
    "no gradients wanted": (lambda pipe: torch.no_grad()(pipe.step)(X, target=Y), UsageError,
        r"under torch.no_grad\(\) there are none; call it outside, or use evaluate"),
}  # fmt: skip


@cache
def after_two_steps() -> tuple[Any, float, dict[str, Tensor]]:
    """The state of the random numbers after a step; the loss of another, and the gradients of both."""
    pipe = make()
    pipe.step(X, target=Y)
    return pipe.randomness.state_dict(), pipe.step(X, target=Y).loss, gradients(pipe)


@pytest.mark.parametrize("name", sorted(SLIPS))
def test_a_refused_call_leaves_the_pipeline_as_it_was(name: str) -> None:
    call, kind, says = SLIPS[name]
    pipe, (state, loss, wanted) = make(), after_two_steps()
    for first in (True, False):
        with pytest.raises(kind, match=says) as caught:
            call(pipe)
        assert not isinstance(caught.value, PoisonedError)
        if first:
            assert gradients(pipe) == {}, "nothing ran"
            pipe.step(X, target=Y)
    assert pipe.randomness.state_dict() == state
    assert pipe.step(X, target=Y).loss == loss
    assert all(torch.equal(gradient, wanted[name]) for name, gradient in gradients(pipe).items())


def test_an_output_that_cannot_travel_is_refused_where_it_is_asked_for() -> None:
    model = nn.Sequential(chain(), Does(lambda _, x: {x}))
    pipe = make(model, loss_fn=lambda output, target: mean_loss(next(iter(output)), target))
    expected = pipe.step(X, target=Y).loss
    for call in (lambda: pipe.predict(X), lambda: pipe.evaluate(X, target=Y, outputs=True)):
        with pytest.raises(MicrobatchError, match="outputs that are not tensors and differ"):
            call()
    assert pipe.step(X, target=Y).loss == expected


def test_a_function_that_splits_and_fails_refuses_the_call() -> None:
    def split(args: Any, kwargs: Any, target: Any, count: int) -> Microbatches:
        return Microbatches([(part,) for part in args[0].split(2)], targets=target["y"].split(2))

    pipe = make(split=split)
    with pytest.raises(StageError, match="before the first microbatch: KeyError: 'y'") as caught:
        pipe.step(X, target={"labels": Y})
    assert isinstance(caught.value.__cause__, KeyError)
    assert pipe.step(X, target={"y": Y}).loss == pytest.approx(make().step(X, target=Y).loss)


def attends(m: Any, x: Tensor, mask: Tensor | None = None) -> Tensor:
    """Fails for any mask, in a way that its path has to tell."""
    for block in m.blocks:
        x = block(x)
        if mask is not None:
            x = m.blocks[2][0](mask)
    return x


def test_the_path_of_the_failing_module_is_named() -> None:
    says = r"^module 'blocks.2.0' \(Linear\), before the first"
    with pytest.raises(StageError, match=says) as caught:
        make(Does(attends, blocks=[*chain()])).step(X, target=Y, mask=X[:, :2])
    assert caught.value.__cause__ is not None


def test_what_modules_have_is_told() -> None:
    pipe: Any = make()
    for name, says in {
        "train": "step trains, .* evaluate and pre",
        "eval": "evaluate gives the loss of a batch",
    }.items():
        with pytest.raises(AttributeError, match=f"no attribute '{name}': {says}"):
            getattr(pipe, name)
    assert not hasattr(pipe, "forward")


def test_a_loss_that_needs_no_target_is_given_none() -> None:
    """As of models of transformers, which give their loss with what they compute."""
    model = nn.Sequential(chain(), Does(lambda _, x: {"loss": x.square().mean(), "logits": x}))
    pipe = make(model, loss_fn=lambda output, _: output["loss"])
    expected = pytest.approx(float(model(X)["loss"].detach()))
    assert pipe.step(X).loss == pipe.step(X, target=None).loss == expected
    assert pipe.evaluate(X).loss == expected


# ---- over processes

ALONE = ("a numpy array", "no number of microbatches", "too few weights", "a weight that fails")
"""Slips of which others can only hear."""
WITH_DATA = {"a wrong type"}
"""Slips that show only when stages run with data; between processes they end the pipeline."""


@pytest.mark.parametrize("culprit", [None, 0, 1])
@in_processes(2, 100.0)
def test_every_rank_refuses_alike_and_the_next_step_works(group: Any, culprit: int | None) -> None:
    """One rank slips, or all."""
    pipe, rank = make(mesh=group), group.rank()
    loss = pipe.step(X, target=Y).loss
    pipe.zero_grad()
    for name in sorted(SLIPS.keys() - WITH_DATA) if culprit is None else ALONE:
        call, kind, says = SLIPS[name]
        with pytest.raises(kind, match=says) as caught:
            call(pipe) if culprit in (None, rank) else pipe.step(X, target=Y)
        error, told = caught.value, [str(caught.value), caught.value.rank]
        mine, other = pipe.job.meet(partial(list, told))
        assert mine == other, name
        if culprit is not None:
            assert str(error).startswith(f"rank {culprit}: ")
            assert error.rank == culprit
            assert rank == culprit or error.__cause__ is None, "the cause is told once"
        assert pipe.step(X, target=Y).loss == loss
        pipe.zero_grad()
    pipe.close()


@in_processes(2)
def test_every_process_is_told_and_moves_its_own_stages_alone(group: Any) -> None:
    """Of too many ranks and another process's stages."""
    rank = group.rank()
    with pytest.raises(UsageError, match="2 processes were started for a pipeline of 3 ranks"):
        make(ranks=3, mesh=group)
    says = rf"rank {rank} holds stages \[{1 - rank}\]; 1F1B places \[{rank}\] there"
    with pytest.raises(UsageError, match=says):
        Pipeline.from_stages(stages(1 - rank), schedule="1F1B", mesh=group)
    # No stage has data to move but this one, so a move of the other is an error.
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1 - rank].to("meta")
    make(model, device="cpu", mesh=group).close()
    are_meta = [parameter.is_meta for parameter in model.parameters()]
    assert are_meta[::2] == [rank == 1, rank == 0]


@in_processes(2)
def test_a_model_whose_weights_went_to_other_ranks_is_not_cut_again(group: Any) -> None:
    """By a second pipeline, made before the cut or after it."""
    model = named()
    pipe, early = make(model, mesh=group), make(model, mesh=group)
    pipe.step(X, target=Y)
    for other in (early, make(model, mesh=group)):
        with pytest.raises(UsageError, match="an earlier Pipeline has cut this model"):
            other.step(X, target=Y)
    pipe.step(X, target=Y)


def test_a_device_of_this_machine_goes_to_each_local_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert placed_on("cuda") == torch.device("cuda:1")
    assert placed_on("cuda:0") == torch.device("cuda:0")
    assert make(ranks=1, device="meta:1").stages[0].device == torch.device("meta")
    assert make(ranks=1, device="cpu:0").stages[0].device == torch.device("cpu")
    monkeypatch.setenv("LOCAL_RANK", "2")
    for device, says in {
        "cuda": "number 2, by LOCAL_RANK, but there are only 2; start at most 2",
        "cuda:7": "device='cuda:7': .* take number 7, but there are only 2",
    }.items():
        with pytest.raises(UsageError, match=says):
            placed_on(device)


def averages(m: Any, x: Tensor) -> Any:
    """Changes in place a buffer that it computes with."""
    m.mean.mul_(0.9)
    return m.layer(x) * m.mean


def test_a_buffer_that_a_later_microbatch_changes_before_backward_is_named() -> None:
    says = r"needs 1.mean \(Does\) as forward left it.*new tensor"
    for schedule in ("GPipe", "ZB-H1"):
        unit = Does(averages, layer=nn.Linear(2, 2), mean=torch.ones(2))
        model = nn.Sequential(nn.Linear(2, 2), unit, nn.Linear(2, 2))
        options: dict[str, Any] = {"stages": ["2"], "ranks": 2, "microbatches": 4}
        pipe = Pipeline(model, schedule=schedule, loss_fn=nn.MSELoss(), **options)
        with pytest.raises(UsageError, match=says):
            pipe.step(torch.ones(4, 2), target=torch.ones(4, 2))
