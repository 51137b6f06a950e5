"""Weights that lie on other ranks: what users write with them is right or told, never silently a part."""

from __future__ import annotations

import copy
import io
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from penstock import Checkpoints, Loss, Pipeline
from penstock.errors import UsageError
from penstock.testing import WorkerPool
from tests.catalogue.making import Does
from tests.pipeline.models import X, Y, mean_loss
from tests.processes import in_processes

LIMIT = 0.01


def rooms() -> nn.Sequential:
    """Four layers, tied at the ends, with a buffer in the second half."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)]).double()
    model[3].weight = model[0].weight
    model[2].register_buffer("table", torch.arange(4.0))
    return model


def piped(model: nn.Module, group: Any, loss_fn: Any = mean_loss) -> Pipeline:
    return Pipeline(model, ranks=2, microbatches=2, loss_fn=loss_fn, mesh=group)


# ---- what runs as in one process: each task runs in this process too


def trained(group: Any = None, clips: str = "pipe") -> list[Any]:
    """Three steps with an optimizer made before the cut; norms and losses, and what is here after them."""
    model = rooms()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    before, output = list(model.parameters()), model(X).sum()
    pipe = piped(model, group)
    weak = [weakref.ref(p) for p in before]
    assert [id(p) for p in before] == [id(p) for p in pipe.parameters()]
    lists: dict[str, Callable[[], Any]] = {
        "pipe": pipe.parameters,
        "model": model.parameters,
        "before": lambda: before,
    }
    numbers = []
    with pipe:
        pipe.predict(X)
        output.backward()  # of the weights that were; only those that are here learn from it
        pipe.zero_grad()
        for _ in range(3):
            loss = pipe.step(X, target=Y).loss
            numbers += [loss, float(nn.utils.clip_grad_norm_(lists[clips](), LIMIT))]
            optimizer.step()
            optimizer.zero_grad()
        assert [id(p) for p in pipe.parameters()] == [id(p) for p in before]
        assert all(ref() is p for ref, p in zip(weak, before, strict=True))
        held = {name: value.tolist() for name, value in pipe.weights.here.named_parameters()}
        state = pipe.weights.optimizer_state_dict(optimizer, full=True)
    return [numbers, held, sorted(state.get("state", ()))]


@pytest.mark.parametrize("clips", ["pipe", "model", "before"])
def test_torchs_own_clipping_measures_the_whole_model(workers: WorkerPool, clips: str) -> None:
    model = rooms()
    optimizer, expected = torch.optim.AdamW(model.parameters(), lr=0.1), []
    for _ in range(3):
        loss = mean_loss(model(X), Y)
        loss.backward()
        expected += [
            float(loss.detach()),
            float(nn.utils.clip_grad_norm_(model.parameters(), LIMIT)),
        ]
        optimizer.step()
        optimizer.zero_grad()
    ranks = workers.run(f"{__name__}:trained", 2, clips=clips)
    assert ranks[0][0][1::2] == ranks[1][0][1::2], "the norm is the same bits on every rank"
    for numbers, held, _ in ranks:
        assert numbers == pytest.approx(expected, rel=1e-9)
        for name, value in held.items():
            there = model.get_parameter(name).detach()
            torch.testing.assert_close(torch.tensor(value).double(), there)
    assert ranks[0][2] == sorted(name for name, _ in model.named_parameters())


@in_processes(2)
def test_torchs_norm_of_float16_does_not_overflow(group: Any) -> None:
    """Of gradients of up to 6,000."""
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(2))).half()
    for weight in model.parameters():
        weight.data.fill_(2**-6)
    large = Loss(lambda output, target: (output.float() * target).sum(), reduction="sum")
    with piped(model, group, large) as pipe:
        pipe.step(torch.ones(2, 64).half(), target=torch.full((2, 1), 3e3))
        norm = pipe.weights.grad_norm()
        of_torch = nn.utils.clip_grad_norm_(pipe.parameters(), 1.0)
    assert norm == pytest.approx(float(of_torch), rel=1e-6)
    assert 65504 < norm < 1e6


def late() -> nn.Module:
    """Two layers; only a call shows where to cut."""
    torch.manual_seed(0)
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    return Does(lambda m, x: m.second(m.first(x)), first=first, second=second).double()


EARLY: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Adagrad": lambda weights: torch.optim.Adagrad(weights, 0.1, initial_accumulator_value=0.1),
    "AdamW": lambda weights: torch.optim.AdamW(weights, 0.1),
}


def train_plainly(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        loss = mean_loss(model(X), Y)
        loss.backward()
        losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize(("name", "before"), [("Adagrad", 0), ("AdamW", 2)])
@in_processes(2)
def test_states_of_all_weights_before_the_cut_are_each_ranks_own_after_it(
    group: Any, name: str, before: int
) -> None:
    plain, model = late(), late()
    expected = train_plainly(plain, EARLY[name](plain.parameters()), before + 3)[before:]
    optimizer = EARLY[name](model.parameters())
    train_plainly(model, optimizer, before)
    with piped(model, group) as pipe:
        losses = []
        for _ in range(3):
            losses.append(pipe.step(X, target=Y).loss)
            norms = pipe.weights.grad_norms()
            optimizer.step()
            optimizer.zero_grad()
    assert losses == pytest.approx(expected)
    assert list(norms) == [name for name, _ in plain.named_parameters()]
    assert sum(len(state) > 0 for state in optimizer.state.values()) == 2, "those of the others"


def averaged(group: Any = None, folder: str = "") -> dict[str, Any]:
    """The averages of the weights that are here, torch's and by hand; and saved, if there is a folder."""
    model = rooms()
    with piped(model, group) as pipe:
        ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        by_hand = [p.detach().clone() for p in model.parameters()]
        optimizer = torch.optim.SGD(pipe.parameters(), 0.1)
        for _ in range(2):
            pipe.step(X, target=Y)
            optimizer.step()
            pipe.zero_grad()
            ema.update_parameters(model)
            for mine, now in zip(by_hand, model.parameters(), strict=True):
                mine.mul_(0.9).add_(now.detach(), alpha=0.1)
        here = [name for name, _ in pipe.weights.here.named_parameters()]
        named = {n: p.tolist() for n, p in ema.module.named_parameters() if n in here}
        assert sum(not tensor.is_meta for tensor in by_hand) == len(named)
        if folder:
            Checkpoints(folder).save(2, pipe=pipe, ema=ema)
            for tensor in ema.parameters():
                tensor.detach().zero_()
            Checkpoints(folder).load(pipe=pipe, ema=ema)
            again = dict(ema.module.named_parameters())
            assert {name: again[name].tolist() for name in named} == named
        return named


def test_averages_of_weights_are_those_of_one_process(workers: WorkerPool, tmp_path: Path) -> None:
    one, two = workers.run(f"{__name__}:averaged", 2, folder=str(tmp_path))
    expected, plain = averaged(), AveragedModel(rooms())
    assert (one | two).keys() == expected.keys()
    Checkpoints(tmp_path).load(model=rooms(), ema=plain)
    for name, value in expected.items():
        torch.testing.assert_close(torch.tensor((one | two)[name]), torch.tensor(value))
        assert dict(plain.module.named_parameters())[name].tolist() == (one | two)[name]
    assert plain.n_averaged == 2


# ---- what is told


def _norms_in_a_dict(model: Any) -> None:
    torch.tensor([p.grad.data.norm(2) for p in model.parameters()]).norm().item()


def _l2(model: Any) -> None:
    (torch.ones(()) + sum(p.pow(2).sum() for p in model.parameters())).item()


NEEDS_ALL: dict[str, Callable[[Any], Any]] = {
    "norms in a dict": _norms_in_a_dict,
    "norm of a part": lambda model: nn.utils.clip_grad_norm_([*model.parameters()][:-1], 1.0),
    "L2": _l2,
    "to numbers": lambda model: [p.tolist() for p in model.parameters()],
    "into a file": lambda model: torch.save(model.state_dict(), io.BytesIO()),
    "into a safetensors file": lambda model: save(model.state_dict()),
    "compared": lambda model: [torch.equal(p, torch.zeros_like(p)) for p in model.parameters()],
    "in one vector": lambda model: nn.utils.parameters_to_vector(model.parameters()),
    "the model called": lambda model: model(X),
    "mixed": lambda model: [X[:4] + p for p in model.parameters()],
    "a function that nobody has listed": lambda model: [p.unique() for p in model.parameters()],
    "one of several results": lambda model: [p.max(-1)[0].tolist() for p in model.parameters()],
    "LBFGS": lambda model: torch.optim.LBFGS(model.parameters()).step(lambda: X.sum()),
    "a list of both": lambda model: torch._foreach_mul([*model.parameters()], 0.5),
    "gradients of a loss": lambda model: torch.autograd.grad(X.sum(), [*model.parameters()]),
}  # fmt: skip


@in_processes(2)
def test_what_needs_all_weights_is_refused_by_name(group: Any) -> None:
    model = rooms()
    with piped(model, group) as pipe:
        pipe.step(X, target=Y)
        for line in NEEDS_ALL.values():
            with pytest.raises(UsageError, match=f"lies on rank {1 - group.rank()}"):
                line(model)
        pipe.step(X, target=Y)


def _unscale(model: Any) -> None:
    scaler, optimizer = torch.amp.GradScaler("cpu"), torch.optim.SGD(model.parameters(), 0.0)
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)
    scaler.step(optimizer)


def _foreach(model: Any) -> None:
    weights = [p.detach() for p in model.parameters()]
    torch._foreach_mul_(weights, 0.5)


def _copies(model: Any) -> None:
    """A copy is another tensor, and one that shares a weight shares its copy."""
    for weight in model.parameters():
        assert weight.to("cpu") is weight
        assert weight.to("cpu", copy=True) is not weight
        first, second = copy.deepcopy([weight, weight])
        assert first is second is not weight


HARMLESS: dict[str, Callable[[Any, Any], Any]] = {
    "values clipped": lambda model, pipe: nn.utils.clip_grad_value_(model.parameters(), 1.0),
    "a whole state dict loaded": lambda model, pipe: model.load_state_dict(rooms().state_dict()),
    "copied": lambda model, pipe: _copies(model),
    "gradients emptied": lambda model, pipe: model.zero_grad(set_to_none=False),
    "frozen": lambda model, pipe: model.requires_grad_(False).requires_grad_(True),
    "clamped": lambda model, pipe: [p.data.clamp_(-1, 1) for p in model.parameters()],
    "fused, foreach": lambda model, pipe: [
        torch.optim.AdamW(model.parameters(), foreach=True).step(),
        torch.optim.AdamW(model.parameters(), fused=True).step(),
    ],
    "unscaled": lambda model, pipe: _unscale(model),
    "views": lambda model, pipe: [p.detach().view(-1).sub(1).abs().T for p in model.parameters()],
    "a closure": lambda model, pipe: torch.optim.AdamW(model.parameters()).step(
        lambda: pipe.step(X, target=Y).loss
    ),
    "foreach in place": lambda model, pipe: _foreach(model),
}  # fmt: skip


@in_processes(2)
def test_what_needs_no_numbers_runs(group: Any) -> None:
    model = rooms()
    with piped(model, group) as pipe:
        for line in HARMLESS.values():
            pipe.step(X, target=Y)
            line(model, pipe)
        assert {str(parameter.device) for parameter in pipe.parameters()} == {"cpu"}
        assert pipe.step(X, target=Y).loss > 0
