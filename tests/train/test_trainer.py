"""A complete run, small, in one process."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors import safe_open

from penstock.errors import UsageError
from penstock.schedule import build, names
from penstock.train import GPT, Outcome, TrainConfig, train
from penstock.train.corpus import load
from penstock.train.model import (
    learning_rate,
    make_optimizer,
    next_byte_loss,
    set_learning_rate,
)

SMALL: dict[str, Any] = {
    "ranks": 2,
    "layers": 2,
    "width": 16,
    "heads": 2,
    "sequence": 16,
    "batch": 4,
    "microbatches": 2,
    "steps": 6,
    "log_every": 4,
    "warmup": 2,
    "learning_rate": 0.01,
    "held_out_batches": 2,
    "sample_length": 5,
    "seed": 3,
}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text"
    path.write_text("to be or not to be, that is the question. " * 100)
    return path


def config_for(text: Path, **changes: Any) -> TrainConfig:
    return TrainConfig.model_validate({**SMALL, "data": str(text), **changes})


@pytest.fixture(scope="module")
def finished(text: Path) -> tuple[Outcome, str]:
    """A run and what it printed."""
    out = io.StringIO()
    config = config_for(text, out=str(text.parent / "run"))
    return train(config, Console(file=out, width=80)), out.getvalue()


def records(outcome: Outcome) -> list[dict[str, Any]]:
    return [
        json.loads(line) for line in (outcome.folder / "metrics.jsonl").read_text().splitlines()
    ]


def weights(outcome: Outcome) -> dict[str, torch.Tensor]:
    tensors = {}
    for path in sorted((outcome.folder / "weights").glob("*.safetensors")):
        with safe_open(str(path), "pt") as file:
            tensors.update({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
    return tensors


def plain_losses(
    config: TrainConfig, batches: list[tuple[torch.Tensor, torch.Tensor]]
) -> list[float]:
    """The same training without a pipeline."""
    model = GPT(config.layers, config.width, config.heads, config.sequence, config.seed)
    optimizer = make_optimizer(model.named_parameters(), config)
    losses = []
    for step, (tokens, target) in enumerate(batches, start=1):
        loss = next_byte_loss(model(tokens), target)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip)
        set_learning_rate(optimizer, learning_rate(step, config))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_every_step_is_recorded(finished: tuple[Outcome, str]) -> None:
    outcome, _ = finished
    steps = records(outcome)[:-1]
    assert [record["step"] for record in steps] == [1, 2, 3, 4, 5, 6]
    assert tuple(record["loss"] for record in steps) == outcome.losses
    assert outcome.held_out_loss is not None
    assert outcome.held_out_loss < outcome.losses[0] == pytest.approx(math.log(256))
    assert len(outcome.sample) == 5


def test_every_line_tells_when_by_whom_and_how_well(finished: tuple[Outcome, str]) -> None:
    steps = records(finished[0])[:-1]
    assert all(0 < record["bubble"] < 1 for record in steps)
    assert {record["clocks"] for record in steps} == {"replayed"}
    assert all(record["memory"] > 1e6 and record["rank"] == 0 for record in steps)
    times = [record["time"] for record in steps]
    assert times == sorted(times)
    assert times[0] > 1.7e9
    assert not any("mfu" in record for record in steps)  # no peak of this CPU is known


def test_the_losses_are_those_of_the_plain_loop(finished: tuple[Outcome, str], text: Path) -> None:
    config = config_for(text)
    corpus = load(config.data, config.sequence)
    batches = [corpus.training_batch(step, seed=3, batch=4, sequence=16) for step in range(1, 7)]
    assert finished[0].losses == pytest.approx(plain_losses(config, batches), rel=1e-5)


def test_the_held_out_loss_is_that_of_the_saved_weights(
    finished: tuple[Outcome, str], text: Path
) -> None:
    outcome, _ = finished
    model = GPT(layers=2, width=16, heads=2, sequence=16)
    model.load_state_dict(weights(outcome))
    batches = load(str(text), 16).held_out_batches(2, batch=4, sequence=16)
    losses = [next_byte_loss(model(tokens), target).item() for tokens, target in batches]
    assert outcome.held_out_loss == pytest.approx(sum(losses) / len(losses), rel=1e-5)
    assert records(outcome)[-1]["held_out_loss"] == outcome.held_out_loss


def test_the_timeline_says_that_it_is_replayed(finished: tuple[Outcome, str]) -> None:
    outcome, shown = finished
    svg = (outcome.folder / "timeline.svg").read_text()
    assert "1F1B: step 6, 2 ranks, 2 microbatches" in svg
    assert "replayed" in svg
    assert "replayed: measured durations on one clock per rank" in shown
    trace = json.loads((outcome.folder / "timeline.json").read_text())
    assert {event["tid"] for event in trace["traceEvents"]} == {0, 1}


def test_it_says_what_it_trains(finished: tuple[Outcome, str]) -> None:
    shown = finished[1]
    assert f"model: {sum(w.numel() for w in weights(finished[0]).values()):,} parameters" in shown
    assert "2 layers in 2 stages on 2 ranks" in shown
    assert "1F1B, 2 microbatches" in shown


def ranks_for_two_stages(schedule: str) -> int:
    return 2 // build(schedule, ranks=1, microbatches=2).stages


@pytest.mark.parametrize("schedule", [name for name in names() if name != "forward-only"])
def test_the_schedule_does_not_change_a_bit(
    schedule: str, finished: tuple[Outcome, str], text: Path, tmp_path: Path
) -> None:
    ranks = ranks_for_two_stages(schedule)
    config = config_for(text, schedule=schedule, ranks=ranks, out=str(tmp_path))
    outcome = train(config, Console(quiet=True))
    assert outcome.losses == finished[0].losses
    assert outcome.held_out_loss == finished[0].held_out_loss


@pytest.mark.parametrize("checkpoint", ["all", "blocks.0,blocks.1"])
def test_what_is_computed_again_does_not_change_a_bit(
    checkpoint: str, finished: tuple[Outcome, str], text: Path, tmp_path: Path
) -> None:
    config = config_for(text, checkpoint=checkpoint, out=str(tmp_path))
    assert train(config, Console(quiet=True)).losses == finished[0].losses
    assert f'checkpoint = "{checkpoint}"' in (tmp_path / "config.toml").read_text()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"device": "tpu9"}, "device='tpu9': there is no such device here; use cpu"),
        ({"device": "cpu:1"}, "device='cpu:1': there is no such device"),
        ({"checkpoint": "nix"}, "checkpoint='nix'"),
        ({"plan": "nowhere.json"}, "plan='nowhere.json': there is no such file"),
        ({"replicas": 2}, "need 4 processes, not 1: torchrun --standalone --nproc-per-node 4"),
    ],
)
def test_what_cannot_be_had_here(settings: dict[str, Any], said: str, text: Path) -> None:
    with pytest.raises(UsageError, match=said):
        train(config_for(text, **settings), Console(quiet=True))
