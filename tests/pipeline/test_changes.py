"""What a user changes in a model between two steps, as in a loop of his own."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize

from penstock import Pipeline
from penstock.errors import StageError, UsageError
from penstock.partition import partition
from penstock.testing import WorkerPool

WIDTH = 6
SCHEDULES = {"1F1B": 2, "ZB-H1": 2, "ZB-V": 4}
"""Their names, and how many stages they have on two ranks."""


class Own(nn.Module):
    """A forward of its own, with parameters between the modules."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.third, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.shift, self.scale = nn.Parameter(torch.randn(WIDTH)), nn.Parameter(torch.randn(WIDTH))

    def forward(self, value: Tensor) -> Any:
        hidden = self.second(self.first(value) + self.shift).tanh()
        return self.last(self.third(hidden).relu() * self.scale)


class Chain(nn.Sequential):
    """The same modules one after the other."""

    def __init__(self) -> None:
        super().__init__()
        for name in "first", "second", "third", "last":
            self.add_module(name, nn.Linear(WIDTH, WIDTH))
            self.add_module(f"after_{name}", nn.Tanh())


Model = Any


def made(kind: type[nn.Module], *, tied: bool = False) -> Model:
    torch.manual_seed(0)
    model: Any = kind().double()
    if tied:
        model.last.weight = model.first.weight
    return model


def drawn(*shape: int) -> nn.Parameter:
    generator = torch.Generator().manual_seed(1)
    return nn.Parameter(torch.randn(*shape, generator=generator, dtype=torch.float64))


def x() -> Tensor:
    return torch.linspace(-1, 1, 8 * WIDTH, dtype=torch.float64).view(8, WIDTH)


Change = Callable[[Any, int], None]
Found = list[tuple[float, dict[str, Tensor | None]]]


def of_loop(model: Model, change: Change) -> Found:
    found: Found = []
    for step in range(3):
        change(model, step)
        model.zero_grad()
        loss = functional.mse_loss(model(x()), x())
        loss.backward()
        found.append((loss.item(), {name: p.grad for name, p in model.named_parameters()}))
    return found


def of_pipe(model: Model, change: Change, schedule: str, **options: Any) -> Found:
    found: Found = []
    stages = options.pop("stages", SCHEDULES[schedule])
    with Pipeline(
        model,
        stages=stages,
        schedule=schedule,
        microbatches=4,
        loss_fn=functional.mse_loss,
        **options,
    ) as pipe:
        for step in range(3):
            change(model, step)
            model.zero_grad()
            loss = pipe.step(x(), target=x()).loss
            if "group" not in options:
                assert {id(p) for p in pipe.parameters()} == {id(p) for p in model.parameters()}
            found.append((loss, {name: p.grad for name, p in model.named_parameters()}))
    return found


# ---- weights


def replaced(model: Any, step: int) -> None:
    if step == 1:
        model.second.weight = drawn(WIDTH, WIDTH)


def replaced_between_modules(model: Any, step: int) -> None:
    if step == 1:
        model.scale, model.shift = drawn(WIDTH), nn.Parameter(-drawn(WIDTH).detach())


def frozen(model: Any, step: int) -> None:
    model.second.weight.requires_grad_(step != 1)
    model.third.requires_grad_(step != 2)


def parametrised(model: Any, step: int) -> None:
    if step == 1:
        parametrizations.weight_norm(model.second)
        parametrizations.orthogonal(model.first)
    if step == 2:
        parametrize.remove_parametrizations(model.second, "weight")


def forward_replaced(model: Any, step: int) -> None:
    layer = model.second
    if step == 1:
        layer.forward = lambda value: functional.linear(value, 2 * layer.weight, layer.bias)
    if step == 2:
        del layer.forward


def tied(model: Any, step: int) -> None:
    if step == 1:
        model.last.weight = model.first.weight


def untied(model: Any, step: int) -> None:
    if step == 1:
        model.last.weight = nn.Parameter(model.last.weight.detach().clone())
    if step == 2:
        model.last.weight = model.first.weight


def replaced_and_tied(model: Any, step: int) -> None:
    if step == 1:
        model.last.weight = model.first.weight = drawn(WIDTH, WIDTH)


def parametrised_apart(model: Any, step: int) -> None:
    if step == 1:
        parametrizations.weight_norm(model.last)


def inside_of_a_hook(model: Any, step: int) -> None:
    if step == 1:
        model.second.register_forward_hook(lambda *args: args[2] * 2)


ALL: list[Change] = [replaced, frozen, parametrised, forward_replaced, inside_of_a_hook]
OF_TIED: list[Change] = [untied, replaced_and_tied, parametrised_apart]


@pytest.mark.filterwarnings("ignore:The error may be caused:UserWarning")
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("kind", "change"),
    [(kind, change) for kind in (Own, Chain) for change in [*ALL, tied, *OF_TIED]]
    + [(Own, replaced_between_modules)],
)
def test_changes_count_as_in_a_loop(kind: type[nn.Module], change: Change, schedule: str) -> None:
    is_tied = change in OF_TIED
    expected = of_loop(made(kind, tied=is_tied), change)
    found = of_pipe(made(kind, tied=is_tied), change, schedule)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def gap(group: Any, kind: str, change: str) -> float:
    """A worker's task: how far the losses and the gradients that are here are from those of a loop."""
    expected = of_loop(made(globals()[kind]), globals()[change])
    found = of_pipe(made(globals()[kind]), globals()[change], "ZB-H1", group=group)
    gaps: list[Any] = [0.0]
    for (loss, grads), (other, wanted) in zip(found, expected, strict=True):
        here: Any = [(grads[n], wanted[n]) for n in wanted if grads[n] is not None]
        assert here
        gaps += [abs(loss - other), *(float((a - b).abs().max()) for a, b in here)]
    return float(max(gaps))


@pytest.mark.parametrize(
    ("kind", "change"),
    [("Own", "replaced"), ("Own", "replaced_between_modules"), ("Chain", "frozen")],
)
def test_changes_count_in_processes(workers: WorkerPool, kind: str, change: str) -> None:
    answers = workers.run(f"{__name__}:gap", 2, 60.0, kind=kind, change=change)
    assert max(answers) < 1e-12


def exchanged(model: Any, step: int) -> None:
    if step == 1:
        model.second = nn.Linear(WIDTH, WIDTH).double()


def parametrised_between_modules(model: Any, step: int) -> None:
    if step == 1:
        parametrize.register_parametrization(model, "scale", nn.Tanh())


@pytest.mark.parametrize(
    ("kind", "change", "said"),
    [
        (Own, exchanged, "module 'second' was replaced"),
        (Chain, exchanged, "module 'second' was replaced"),
        (Own, parametrised_between_modules, "'scale' of a .* was taken away or parametrised"),
    ],
)
def test_what_the_stages_cannot_follow_is_said(
    kind: type[nn.Module], change: Change, said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        of_pipe(made(kind), change, "1F1B")


def refusal(group: Any, kind: str, change: str, is_tied: bool, schedule: str) -> str:
    """A worker's task: what a rank says to a change."""
    try:
        of_pipe(made(globals()[kind], tied=is_tied), globals()[change], schedule, group=group)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.parametrize("kind", ["Own", "Chain"])
@pytest.mark.parametrize(
    ("change", "is_tied", "said"),
    [("tied", False, "have become one weight"), ("untied", True, "are no longer one weight")],
)
@pytest.mark.parametrize("schedule", ["1F1B", "ZB-V"])
def test_ranks_cannot_tie_and_untie_later(
    workers: WorkerPool, kind: str, change: str, is_tied: bool, said: str, schedule: str
) -> None:
    given = {"kind": kind, "change": change, "is_tied": is_tied, "schedule": schedule}
    for answer in workers.run(f"{__name__}:refusal", 2, 60.0, **given):
        assert said in answer


def foreign(group: Any) -> str:
    """A worker's task: a loss that uses a weight of the first stage."""
    model = made(Chain)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        penalty: Tensor = model.get_parameter("first.weight").norm()
        return functional.mse_loss(output, target) + penalty

    pipe = Pipeline(model, stages=2, microbatches=4, loss_fn=loss, group=group)
    try:
        pipe.step(x(), target=x())
    except UsageError as error:
        return str(error)
    return "nothing"


def test_a_loss_with_a_weight_of_another_process_is_refused(workers: WorkerPool) -> None:
    _, answer = workers.run(f"{__name__}:foreign", 2, 60.0)
    assert "the loss uses 'first.weight'" in answer


def again(group: Any, trains: bool, schedule: str, loads: bool) -> str:
    """A worker's task: a second Pipeline of a model that a first one has trained."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    options: dict[str, Any] = {"microbatches": 4, "loss_fn": functional.mse_loss, "group": group}
    data = torch.ones(8, 4)
    first = Pipeline(model, **options)
    first.step(data, target=data)
    if trains:
        torch.optim.SGD(first.parameters(), lr=0.1).step()
    second = Pipeline(model, schedule=schedule, **options)
    if loads:
        with torch.no_grad():
            for parameter in second.parameters():
                parameter.copy_(torch.ones_like(parameter))
    try:
        second.step(data, target=data)
    except UsageError as error:
        return str(error)
    return "runs"


@pytest.mark.whole
@pytest.mark.parametrize(
    ("trains", "schedule", "loads", "said"),
    [
        (True, "ZB-V", False, "an earlier Pipeline of this model has trained these weights"),
        (True, "ZB-V", True, "runs"),
        (False, "ZB-V", False, "runs"),
        (True, "GPipe", False, "runs"),
    ],
)
def test_a_second_pipeline_does_not_begin_with_outdated_weights(
    workers: WorkerPool, trains: bool, schedule: str, loads: bool, said: str
) -> None:
    asked = {"trains": trains, "schedule": schedule, "loads": loads}
    for answer in workers.run(f"{__name__}:again", 2, 60.0, **asked):
        assert said in answer


# ---- copies and hooks


@pytest.mark.parametrize("kind", [Own, Chain])
@pytest.mark.parametrize("when", ["in a hook", "in the loss", "after"])
def test_a_copy_trains_by_itself(kind: type[nn.Module], when: str) -> None:
    model, copies = made(kind), list[Model]()

    def copied(*_: Any, where: str) -> None:
        if where == when and not copies:
            copies.append(copy.deepcopy(model))

    def loss(output: Tensor, target: Tensor) -> Tensor:
        copied(where="in the loss")
        return functional.mse_loss(output, target)

    handle = model.third.register_forward_hook(partial(copied, where="in a hook"))
    pipe = Pipeline(model, stages=2, schedule="ZB-H1", microbatches=4, loss_fn=loss)
    pipe.step(x(), target=x())
    handle.remove()
    copied(where="after")
    model.zero_grad()
    (alone,) = copies
    assert type(alone) is kind
    functional.mse_loss(alone(x()), x()).backward()
    assert all(parameter.grad is not None for parameter in alone.parameters())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("kind", [Own, Chain])
def test_hooks_run_once_for_each_microbatch(kind: type[nn.Module]) -> None:
    model, calls = made(kind), Counter[str]()
    for name in "second", "third", "last":
        layer = model.get_submodule(name)
        layer.register_forward_pre_hook(lambda *_, n=name: calls.update([f"{n} before"]))
        layer.register_forward_hook(lambda *_, n=name: calls.update([f"{n} after"]))
        layer.register_full_backward_hook(lambda *_, n=name: calls.update([f"{n} backward"]))
    pipe = Pipeline(model, stages=2, schedule="ZB-H1", microbatches=4, loss_fn=functional.mse_loss)
    for step in 1, 2:
        pipe.step(x(), target=x())
        assert set(calls.values()) == {4 * step}
    assert len(calls) == 3 * 3


def norms_after_changes(group: Any = None) -> list[float]:
    """A worker's task: norms of a step each, with more parameters than at first, and with fewer."""
    model = made(Chain)
    pipe = Pipeline(
        model, schedule="1F1B", ranks=2, microbatches=2, loss_fn=functional.mse_loss, group=group
    )
    batch = torch.linspace(-1, 1, 4 * WIDTH, dtype=torch.float64).reshape(4, WIDTH)
    found = []
    for _ in range(3):
        pipe.step(batch, target=batch)
        found.append(pipe.clip_grad_norm_(1e9))
        pipe.zero_grad()
        if len(found) == 1:
            parametrizations.weight_norm(model.third)
        else:
            model.third.bias = None
    return found


def test_norms_are_of_the_parameters_that_there_are(workers: WorkerPool) -> None:
    model = made(Chain)
    batch = torch.linspace(-1, 1, 4 * WIDTH, dtype=torch.float64).reshape(4, WIDTH)
    expected = []
    for _ in range(3):
        functional.mse_loss(model(batch), batch).backward()
        expected.append(float(nn.utils.clip_grad_norm_(model.parameters(), 1e9)))
        model.zero_grad()
        if len(expected) == 1:
            parametrizations.weight_norm(model.third)
        else:
            model.third.bias = None
    assert norms_after_changes() == pytest.approx(expected, rel=1e-12)
    for told in workers.run(f"{__name__}:norms_after_changes", 2, 60.0):
        assert told == norms_after_changes()


@pytest.mark.parametrize("of_stages", [False, True])
def test_a_trace_does_not_follow_the_mode_of_the_model(*, of_stages: bool) -> None:
    """What it says then helps."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)).double()
    cut = partition(model, ["1"], how="traced", example=((x(),), {}))
    with Pipeline(model, stages=cut, loss_fn=functional.mse_loss) as pipe:
        pipe.step(x(), target=x())
        mean = pipe.state_dict()["1.running_mean"].clone()
        if of_stages:
            for stage in cut.modules:
                stage.eval()
            pipe.step(x(), target=x())
        else:
            model[1].eval()
            with pytest.raises(
                StageError, match=r"1 was put into another mode .* after it was traced"
            ):
                pipe.step(x(), target=x())
        assert torch.equal(mean, pipe.state_dict()["1.running_mean"])
