"""Every refusal of Pipeline names the value and the remedy, before anything runs."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from penstock import REPLICATE, Microbatches, Pipeline, PipelineStage
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
from penstock.pipeline.setup import placed_on
from penstock.schedule import Action, Op, Placement, Schedule, build
from penstock.testing import WorkerPool
from tests.pipeline.models import STAGES, X, Y, chain, gradients, make, mean_loss, named

Refusal = tuple[Callable[[], Any], type[PenstockError], str]


def stages(*indices: int, count: int = 2) -> list[PipelineStage]:
    return [PipelineStage(nn.Linear(2, 2), index, count) for index in indices]


def by_hand(*parts: PipelineStage, **options: Any) -> Pipeline:
    return Pipeline.from_stages(parts, schedule="1F1B", loss_fn=mean_loss, **options)


class OfOthers(nn.Sequential):
    def forward(self, x: Any) -> Any:
        return -super().__getitem__(0)(x)


def mesh_of(*names: str) -> DeviceMesh:
    """A mesh without process groups."""
    ranks = torch.arange(4).reshape(2, 2)
    return DeviceMesh("cpu", ranks, mesh_dim_names=names, _init_backend=False, _rank=0)


def incomplete() -> Schedule:
    """Microbatch 0 has a forward and no backward on rank 0."""
    rows = ((Action(0, Op.F, 0),), (Action(1, Op.F, 0), Action(1, Op.B, 0)))
    return Schedule("half", Placement((0, 1)), 1, rows)


def without_backward(stage: int | None) -> Schedule:
    """1F1B whose backwards are left out, of one stage or of all."""
    made = build("1F1B", ranks=2, microbatches=4)
    return made.with_programs(
        [a for a in made.actions(rank) if a.op is Op.F or stage not in (None, a.stage)]
        for rank in range(2)
    )


MAKING: dict[str, tuple[dict[str, Any], type[PenstockError], str]] = {
    "unknown schedule": ({"schedule": "1F1"}, ScheduleError, "did you mean '1F1B'"),
    "no ranks": ({"ranks": 0, "stages": 2}, UsageError, "ranks=0: must be at least 1"),
    "fewer ranks": ({"ranks": -1}, UsageError, "ranks=-1"),
    "ranks unsaid": ({"ranks": None}, UsageError, "the number of ranks is not known"),
    "half a rank": ({"ranks": 2.0}, UsageError, "ranks=2.0: must be a whole number"),
    "microbatches": ({"microbatches": 0}, ScheduleError, "microbatches=0"),
    "uneven stages": (
        {"stages": 3}, PartitionError, "3 stages cannot be divided evenly among 2 ranks; use a multiple of 2"
    ),
    "too few modules": (
        {"model": OfOthers(*chain()), "ranks": 8}, PartitionError,
        "a OfOthers has 3 modules that can be placed, too few for 8 stages; use from 1 to 3",
    ),
    "another reduction": ({"reduction": "max"}, UsageError, "must be 'mean' or 'sum'"),
    "nothing to call": (
        {"model": nn.ModuleDict({"a": chain()})}, PartitionError, "a ModuleDict has no forward; .*stages="
    ),
    "an unknown path": (
        {"model": named(), "stages": [["embed"], ["tail"]]}, PartitionError,
        "no module 'tail' in the model; did you mean embed",
    ),
    "a partition of another model": ({"stages": partition(chain(), 2)}, PartitionError,
        "in no stage: 0.0.weight"),
    "schedule and ranks": (
        {"schedule": build("1F1B", ranks=3, microbatches=4)}, UsageError,
        "'1F1B' has ranks=3, but ranks=2 was asked for"
    ),
    "schedule and microbatches": (
        {"schedule": build("1F1B", ranks=2, microbatches=3)}, UsageError,
        "has microbatches=3, but microbatches=4"
    ),
    "schedule and stages": (
        {"model": named(), "stages": [["embed"]], "schedule": build("1F1B", ranks=2, microbatches=4)},
        UsageError,
        "has stages=2, but stages=1",
    ),
    "an incomplete schedule": (
        {"schedule": incomplete(), "microbatches": None}, ScheduleError, "'half' cannot run:\n"
    ),
    "a stage without backward": (
        {"schedule": without_backward(stage=0), "microbatches": None}, ScheduleError, "rank 0, 0B0: missing"
    ),
    "torch's name of an argument": (
        {"num_microbatches": 4}, UnknownArgumentError,
        r"there is no argument num_microbatches=; did you mean microbatches=\?",
    ),
    "a loss by another name": (
        {"criterion": mean_loss}, UnknownArgumentError, r"no argument criterion=; did you mean loss_fn=\?"
    ),
    "a nameless argument": (
        {"zzz": 1}, UnknownArgumentError, "no argument zzz=; there are schedule=, ranks=, .* nonfinite=$"
    ),
    "what a cut is told": (
        {"balance": "flops"}, UnknownArgumentError,
        r"stages=penstock.partition.partition\(model, stages, balance=...\)",
    ),
    "a device that is not there": (
        {"device": "xpu"}, UsageError, r"device='xpu': torch.xpu.is_available\(\) is False"
    ),
    "no device": ({"device": "gpu"}, UsageError, "device='gpu': Expected one of cpu, cuda"),
    "a loss that takes one": (
        {"loss_fn": lambda output: output.mean()}, UsageError,
        r"loss_fn is called with \(output, target\), which it does not accept: too many",
    ),
    "a class for a loss": ({"loss_fn": nn.MSELoss}, UsageError, r"give an object of it, MSELoss\(\)"),
    "no loss": ({"loss_fn": "mse"}, UsageError, "loss_fn='mse': must be a function"),
    "no metric": ({"metrics": {"accuracy": 3}}, UsageError, r"metrics\['accuracy'\]=3: must be a function"),
    "no metrics": ({"metrics": [mean_loss]}, UsageError, "functions by name, in a dict"),
    "no replicas": ({"replicas": 2}, UsageError, "replicas=2: must be a process group"),
    "no mesh": ({"mesh": 2}, UsageError, "mesh=2: must be a DeviceMesh with a dimension 'pp'"),
    "a mesh without the pipeline": (
        {"mesh": mesh_of("dp", "tp")}, UsageError,
        r"the mesh has the dimensions \('dp', 'tp'\); the one along which .* named 'pp'",
    ),
    "replicas of several dimensions": (
        {"replicas": mesh_of("dp", "pp")}, UsageError,
        r"the mesh has the dimensions \('dp', 'pp'\); give the dimension of the replicas",
    ),
    "a mesh and a group": ({"mesh": 2, "group": 2}, UsageError, "give group= or mesh=, not both"),
    "no weight": ({"loss_weight": "a"}, UsageError, "loss_weight='a': must be a number"),
    "no step to accumulate": ({"accumulate": 0}, UsageError, "accumulate=0: must be at least 1 step"),
    "no seconds": ({"timeout": "1"}, UsageError, "timeout='1': must be more than 0 seconds"),
    "no rule": ({"rules": {0: 1}}, MicrobatchError, r"rules=\{0: 1\}: must be Split\(dim\)"),
    "no rules": ({"rules": [1]}, MicrobatchError, r"rules=\[1\]: must be a mapping"),
    "no answer to what is not finite": ({"nonfinite": "never"}, UsageError, "nonfinite='never'"),
    "a function that gives no schedule": (
        {"schedule": lambda ranks, microbatches: "1F1B"}, ScheduleError,
        "for ranks=2, microbatches=4 the function <lambda> gave a str, which is no",
    ),
    "a function that gives another schedule": (
        {"schedule": lambda ranks, microbatches: build("1F1B", ranks=3, microbatches=9)}, ScheduleError,
        "for ranks=2, microbatches=4 the function <lambda> gave a schedule of ranks=3, microbatches=9",
    ),
}  # fmt: skip
"""What a pipeline is asked for, and why it is refused."""
BY_HAND: dict[str, Refusal] = {
    "no stages": (lambda: by_hand(), UsageError, "was given no stages"),
    "a missing stage": (lambda: by_hand(*stages(0)), UsageError,
        r"holds stages \[0\]; 1F1B places \[0, 1\] there"),
    "a stage twice": (lambda: by_hand(*stages(0, 1, 1)), UsageError, r"holds stages \[0, 1, 1\]"),
    "stages of others": (
        lambda: by_hand(*stages(0), *stages(1, count=3)), UsageError,
        r"made for pipelines of \[2, 3\] stages; 1F1B has 2",
    ),
    "an argument of stages": (
        lambda: by_hand(*stages(0, 1), n_microbatches=4), UnknownArgumentError,
        r"did you mean microbatches=\?"
    ),
}  # fmt: skip


def sometimes_forward(ranks: int, microbatches: int) -> Schedule:
    name = "1F1B" if microbatches == 4 else "forward-only"
    return build(name, ranks=ranks, microbatches=microbatches)


def turned_round(ranks: int, microbatches: int) -> Schedule:
    made = build("1F1B", ranks=ranks, microbatches=microbatches)
    if microbatches == 4:
        return made
    return replace(made, placement=Placement((1, 0)), programs=made.programs[::-1])


CALLING: dict[str, Refusal] = {
    "step with forwards alone": (
        lambda: make(schedule=without_backward(stage=None)).step(X, target=Y), UsageError,
        "the schedule '1F1B' has no backward, so it cannot train; use eval",
    ),
    "a short batch with forwards alone": (
        lambda: make(schedule=sometimes_forward).step(X[:3], target=Y[:3]), ScheduleError,
        "3 microbatches instead of 4: 'forward-only' has no backward for 3 microbatches",
    ),
    "a short batch on other ranks": (
        lambda: make(schedule=turned_round).step(X[:3], target=Y[:3]), ScheduleError,
        r"places the stages on ranks \[1, 0\] for 3 microbatches, and on \[0, 1\] for 4",
    ),
    "step without a loss": (
        lambda: make(loss_fn=None).step(X, target=Y), UsageError,
        "step needs a loss; make the Pipeline with loss_fn="
    ),
    "eval without a loss": (
        lambda: make(loss_fn=None).eval(X, target=Y), UsageError, "eval needs a loss; .* or use predict"
    ),
    "too few samples": (
        lambda: make(schedule="DualPipeV", stages=4, model=chain(4)).step(X[:3], target=Y[:3]), ScheduleError,
        "this step has 3 microbatches instead of 4: DualPipeV on ranks=2 needs microbatches=4",
    ),
    "no samples": (lambda: make().predict(X[:0]), MicrobatchError, "the batch is empty"),
    "another target": (
        lambda: make().step(X, target=Y[:7]), MicrobatchError,
        r"8 samples \(argument 0 of .* but the target of shape \[7, 4\] has 7 in dimension 0",
    ),
    "a rule for nothing": (
        lambda: make(rules={"mask": REPLICATE}).step(X, target=Y), MicrobatchError,
        r"rules for \['mask'\], but the arguments are \[0\]",
    ),
    "an argument that cannot travel": (
        lambda: make(named(), stages=STAGES).predict(X, mask={1, 2}), SpecError,
        "argument 'mask' is a set, which cannot travel",
    ),
    "no scalar": (
        lambda: make(loss_fn=lambda *_: torch.zeros(2, 1)).step(X, target=Y), UsageError,
        r"must return a scalar tensor, not \[2, 1\]",
    ),
    "no tensor": (
        lambda: make(loss_fn=lambda *_: 1.5).step(X, target=Y), UsageError,
        "must return a scalar tensor, not float"
    ),
    "a loss without gradient": (
        lambda: make(loss_fn=lambda *_: torch.zeros(())).step(X, target=Y), UsageError,
        "requires no grad for an output that does",
    ),
    "a metric that gives no number": (
        lambda: make(metrics={"all": lambda output, target: output}).step(X, target=Y), UsageError,
        r"the metric 'all' must return a number .* not \[2, 4\]",
    ),
}  # fmt: skip


class Attended(nn.Module):
    """Fails for any mask, in a way that its path has to tell."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks: Any = nn.ModuleList(chain().double().children())

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        for block in self.blocks:
            x = block(x)
            if mask is not None:
                x = self.blocks[2][0](mask)
        return x


class Odd(nn.Module):
    def forward(self, x: Any) -> Any:
        return {x}


@pytest.mark.parametrize("name", [*MAKING, *BY_HAND, *CALLING])
def test_refusals(name: str) -> None:
    """Code that catches the built-in errors keeps working."""
    if name in MAKING:
        options, kind, says = MAKING[name]
        call: Callable[[], Any] = lambda: make(**options)  # noqa: E731 - one of two
    else:
        call, kind, says = (BY_HAND | CALLING)[name]
    with pytest.raises(kind, match=says) as caught:
        call()
    assert isinstance(caught.value, ValueError)


# ---- a refused call leaves the Pipeline as it was


def refusing(error: Exception) -> Callable[..., Any]:
    def refuse(*_: Any) -> Any:
        raise error

    return refuse


Slip = tuple[Callable[[Pipeline], Any], type[PenstockError], str]

SLIPS: dict[str, Slip] = {
    "the mode, as torch has it": (
        lambda pipe: pipe.eval(), UsageError,
        r"eval\(\) was given no batch; .* step trains, and eval and predict evaluate"
    ),
    "no batch": (lambda pipe: pipe.step(target=Y), UsageError, r"step\(\) was given no batch"),
    "no target": (
        lambda pipe: pipe.step(X), UsageError,
        r"no target was given, and loss_fn fails without one \(.*\); pass target="
    ),
    "a positional target": (
        lambda pipe: pipe.step(X, Y), StageError,
        "takes 2 positional arguments but 3 were given; the target is given by name, as target=",
    ),
    "a misspelt target": (
        lambda pipe: pipe.step(X, targets=Y), StageError,
        "unexpected keyword argument 'targets'; did you mean target=?"
    ),
    "an unknown keyword": (
        lambda pipe: pipe.step(X, target=Y, mask=X), StageError,
        "before the first microbatch: TypeError: .* keyword argument 'mask'$",
    ),
    "a numpy array": (
        lambda pipe: pipe.step(X.numpy(), target=Y), MicrobatchError,
        "argument 0 is a numpy array, which cannot be split; .* torch.as_tensor",
    ),
    "a numpy array inside": (
        lambda pipe: pipe.step(X, target={"y": [Y.numpy()]}), MicrobatchError,
        r"the target\['y'\]\[0\] is a numpy array"
    ),
    "a set": (lambda pipe: pipe.step({1}, target=Y), SpecError, "argument 0 is a set, which cannot travel"),
    "a wrong width": (
        lambda pipe: pipe.step(X[:, :3], target=Y), StageError,
        r"module '0.0' \(Linear\), before the first microbatch: RuntimeError: mat1 and",
    ),
    "a wrong type": (
        lambda pipe: pipe.step(X.float(), target=Y), StageError,
        r"module '0.0' \(Linear\).* must have the same dtype"
    ),
    "whole numbers": (lambda pipe: pipe.step(X.long(), target=Y), StageError, "same dtype"),
    "a sparse tensor": (
        lambda pipe: pipe.step(X.to_sparse(), target=Y), MicrobatchError,
        "argument 0 is a sparse_coo tensor, which torch does not split",
    ),
    "another number of targets": (lambda pipe: pipe.eval(X, target=Y[:3]), MicrobatchError,
        "the target of shape"),
    "no number of microbatches": (
        lambda pipe: pipe.step(X, target=Y, microbatches="4"), UsageError,  # type: ignore[arg-type]
        "microbatches='4': must be a whole number",
    ),
    "no number of steps": (
        lambda pipe: pipe.step(X, target=Y, accumulate=1.5), UsageError,  # type: ignore[arg-type]
        "accumulate=1.5: must be a whole number",
    ),
    "no step at all": (
        lambda pipe: pipe.step(X, target=Y, accumulate=0), UsageError, "accumulate=0: must be at least 1 step"
    ),
    "no weight": (
        lambda pipe: pipe.step(X, target=Y, loss_weight="a"), UsageError,  # type: ignore[arg-type]
        "loss_weight='a': must be a number for the batch, a list",
    ),
    "too few weights": (
        lambda pipe: pipe.step(X, target=Y, loss_weight=[1.0]), UsageError,
        "loss_weight: 1 numbers for 4 microbatches"
    ),
    "a weight below nothing": (
        lambda pipe: pipe.step(X, target=Y, loss_weight=lambda _: -1), UsageError,
        "loss_weight of microbatch 0 is -1.0"
    ),
    "a weight that is no number": (
        lambda pipe: pipe.step(X, target=Y, loss_weight=[1, float("nan"), 1, 1]), UsageError,
        "of microbatch 1 is nan"
    ),
    "a text for a weight": (
        lambda pipe: pipe.step(X, target=Y, loss_weight=lambda _: "many"), UsageError,
        "loss_weight gave str; it must return a number",
    ),
    "a weight of many numbers": (
        lambda pipe: pipe.step(X, target=Y, loss_weight=lambda target: target), UsageError,
        "loss_weight gave Tensor; it must return a number",
    ),
    "a weight that fails": (
        lambda pipe: pipe.step(X, target=Y, loss_weight=refusing(KeyError("tokens"))), StageError,
        "loss_weight, called with a target, raised KeyError: 'tokens'",
    ),
    "no total weight": (
        lambda pipe: pipe.step(X, target=Y, total_weight="a"), UsageError,  # type: ignore[arg-type]
        "total_weight='a': must be a number",
    ),
    "a total below nothing": (
        lambda pipe: pipe.step(X, target=Y, total_weight=-1.0), UsageError,
        "total_weight=-1.0: must be a number of at least 0",
    ),
    "torch's scaler": (
        lambda pipe: pipe.step(X, target=Y, scaler=torch.amp.GradScaler("cpu")),  # type: ignore[arg-type]
        UsageError,
        r"scaler=GradScaler: must be a penstock.LossScaler, .* decides for all ranks",
    ),
    "no gradients": (
        lambda pipe: torch.inference_mode()(pipe.step)(X, target=Y), UsageError,
        "step needs gradients, and under torch.inference_mode",
    ),
}  # fmt: skip


def fresh(group: Any = None) -> Pipeline:
    return make(group=group)


@pytest.mark.parametrize("name", sorted(SLIPS))
def test_a_refused_call_leaves_the_pipeline_as_it_was(name: str) -> None:
    call, kind, says = SLIPS[name]
    pipe = fresh()
    for first in (True, False):
        with pytest.raises(kind, match=says) as told:
            call(pipe)
        assert not isinstance(told.value, PoisonedError)
        if first:
            assert gradients(pipe) == {}, "nothing ran"
            pipe.step(X, target=Y)
    assert_like_new(pipe, steps=1)


def assert_like_new(pipe: Pipeline, steps: int) -> None:
    """That a pipeline that has made some steps goes on as one that was never called wrongly."""
    expected = fresh()
    for _ in range(steps):
        expected.step(X, target=Y)
    assert pipe.randomness.state_dict() == expected.randomness.state_dict()
    assert pipe.step(X, target=Y).loss == expected.step(X, target=Y).loss
    found, wanted = gradients(pipe), gradients(expected)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_an_output_that_cannot_travel_is_refused_where_it_is_asked_for() -> None:
    def loss(output: set[Any], target: Any) -> Any:
        (tensor,) = output
        return mean_loss(tensor, target)

    pipe = make(nn.Sequential(chain(), Odd()), loss_fn=loss)
    expected = pipe.step(X, target=Y).loss
    for call in (lambda: pipe.predict(X), lambda: pipe.eval(X, target=Y, outputs=True)):
        with pytest.raises(MicrobatchError, match="outputs that are not tensors and differ"):
            call()
    assert pipe.step(X, target=Y).loss == expected


def test_a_function_that_splits_and_fails_refuses_the_call() -> None:
    def split(args: Any, kwargs: Any, target: Any, count: int) -> Microbatches:
        calls = [(part,) for part in args[0].split(2)]
        return Microbatches(calls, targets=target["y"].split(2))

    pipe = make(rules=split)
    with pytest.raises(StageError, match="before the first microbatch: KeyError: 'y'") as told:
        pipe.step(X, target={"labels": Y})
    assert isinstance(told.value.__cause__, KeyError)
    assert pipe.step(X, target={"y": Y}).loss == pytest.approx(fresh().step(X, target=Y).loss)


def test_the_path_of_the_failing_module_is_named() -> None:
    with pytest.raises(
        StageError, match=r"^module 'blocks.2.0' \(Linear\), before the first"
    ) as told:
        make(Attended()).step(X, target=Y, mask=X[:, :2])
    assert told.value.__cause__ is not None
    frames = traceback.extract_tb(told.value.__cause__.__traceback__)
    assert [frame.line for frame in frames] == ["x = self.blocks[2][0](mask)"], "the user's alone"


class Weighs(nn.Module):
    """Gives its loss with what it computes, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = chain()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        out = self.blocks(x)
        return {"loss": out.square().mean(), "logits": out}


def test_what_modules_have_is_told() -> None:
    pipe: Any = fresh()
    with pytest.raises(
        AttributeError, match=r"no attribute 'train': step trains, .* eval and predict"
    ):
        pipe.train()
    with pytest.raises(AttributeError, match=r"no attribute 'nothing'$"):
        _ = pipe.nothing
    assert not hasattr(pipe, "forward")


@pytest.mark.parametrize("target", [{}, {"target": None}])
def test_a_loss_that_needs_no_target_is_given_none(target: dict[str, Any]) -> None:
    model = nn.Sequential(nn.Identity(), Weighs())
    pipe = make(model, loss_fn=lambda output, _: output["loss"])
    expected = float(model(X)["loss"].detach())
    assert pipe.step(X, **target).loss == pytest.approx(expected)
    assert pipe.eval(X, **target).loss == pytest.approx(expected)


def test_a_loss_that_gives_no_scalar_without_a_target_needs_one() -> None:
    with pytest.raises(UsageError, match=r"no target was given, .* must return a scalar"):
        make(loss_fn=lambda output, target: output if target is None else output.mean()).step(X)


# ---- over processes


ALONE = ("a numpy array", "no number of microbatches", "too few weights", "a weight that fails")
"""Slips of which others can only hear."""


WITH_DATA = {"a wrong type", "whole numbers"}
"""Slips that show only when stages run with data; between processes they end the pipeline."""


def slip(group: Any, culprit: int | None, names: list[str]) -> list[Any]:
    """What this process is told of slips of one rank, or all, and the losses of the steps between them."""
    pipe, rank = fresh(group), torch.distributed.get_rank()
    found: list[Any] = []
    for name in names:
        call, kind, says = SLIPS[name]
        try:
            if culprit in (None, rank):
                call(pipe)
            else:
                pipe.step(X, target=Y)
        except PenstockError as error:
            alike = isinstance(error, kind) and re.search(says, str(error)) is not None
            found.append([alike, str(error), error.rank, error.__cause__ is not None])
        found.append(pipe.step(X, target=Y).loss)
        pipe.zero_grad()
    pipe.close()
    return found


@pytest.mark.parametrize("culprit", [None, 0, 1])
def test_every_rank_refuses_alike_and_the_next_step_works(
    workers: WorkerPool, culprit: int | None
) -> None:
    names = sorted(SLIPS.keys() - WITH_DATA) if culprit is None else list(ALONE)
    loss = fresh().step(X, target=Y).loss
    first, second = workers.run(f"{__name__}:slip", 2, 100.0, culprit=culprit, names=names)
    assert first[1::2] == second[1::2] == [loss] * len(names)
    for name, mine, others in zip(names, first[::2], second[::2], strict=True):
        assert mine[:2] == others[:2], name
        assert mine[0], f"{name}: {mine[1]}"
        if culprit is not None:
            assert mine[1].startswith(f"rank {culprit}: ")
            assert mine[2] == others[2] == culprit
            assert [mine[3], others[3]][1 - culprit] is False, "the cause is told once"


# ---- what is asked for


def refuse(group: Any) -> list[str]:
    """What this process is told: too many ranks, and another process's stages."""
    rank = torch.distributed.get_rank()
    calls: list[Callable[[], Any]] = [
        lambda: make(ranks=3, group=group),
        lambda: Pipeline.from_stages(stages(1 - rank), schedule="1F1B", group=group),
    ]
    return [told(call) for call in calls]


def told(call: Callable[[], Any]) -> str:
    try:
        call()
    except UsageError as error:
        return str(error)
    return ""


def test_every_process_is_told(workers: WorkerPool) -> None:
    for rank, (ranks, others) in enumerate(workers.run(f"{__name__}:refuse", 2, 100.0)):
        assert ranks.startswith(
            "2 processes were started for a pipeline of 3 ranks; start one process per rank"
        )
        assert others == f"rank {rank} holds stages [{1 - rank}]; 1F1B places [{rank}] there"


def move(group: Any) -> list[bool]:
    """Which stages came from the meta device; none has data to move, so a move is an error."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1 - torch.distributed.get_rank()].to("meta")
    make(model, device="cpu", group=group)
    return [parameter.is_meta for parameter in model.parameters()][::2]


def test_a_process_moves_its_own_stages_alone(workers: WorkerPool) -> None:
    assert workers.run(f"{__name__}:move", 2, 100.0) == [[False, True], [True, False]]


def test_a_device_of_this_machine_goes_to_each_local_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert placed_on("cuda") == torch.device("cuda:1")
    assert placed_on("cuda:0") == torch.device("cuda:0")
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(
        UsageError, match=r"number 2, by LOCAL_RANK, but there are only 2; start at most 2"
    ):
        placed_on("cuda")
    with pytest.raises(
        UsageError, match=r"device='cuda:7': .* take number 7, but there are only 2"
    ):
        placed_on("cuda:7")


class Averages(nn.Linear):
    """Changes in place a buffer that it computes with."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.register_buffer("mean", torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.mul_(0.9)
        return super().forward(x) * self.mean


@pytest.mark.parametrize("schedule", ["GPipe", "ZB-H1"])
def test_a_buffer_that_a_later_microbatch_changes_before_backward_is_named(schedule: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2), Averages(), nn.Linear(2, 2))
    pipe = Pipeline(
        model, stages=["2"], ranks=2, schedule=schedule, microbatches=4, loss_fn=nn.MSELoss()
    )
    with pytest.raises(
        UsageError, match=r"needs 1.mean \(Averages\) as forward left it.*new tensor"
    ):
        pipe.step(torch.ones(4, 2), target=torch.ones(4, 2))
