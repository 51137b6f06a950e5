"""A complete run, small, in one process."""

from __future__ import annotations

import io
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from penstock import read_weights
from penstock.errors import UsageError
from penstock.schedule import build
from penstock.train import GPT, Outcome, train
from penstock.train.corpus import load
from penstock.train.display import say, summary
from penstock.train.model import learning_rate, make_optimizer, next_byte_loss
from tests.train.runs import config_for, records, run


@pytest.fixture(scope="module")
def finished(text: Path) -> tuple[Outcome, str]:
    """A run and what it printed."""
    return run(config_for(text, out=str(text.parent / "run")))


def test_every_step_is_recorded_and_some_are_printed(finished: tuple[Outcome, str]) -> None:
    outcome, shown = finished
    *steps, last = records(outcome.folder)
    assert [record["step"] for record in steps] == [1, 2, 3, 4, 5, 6]
    assert tuple(record["loss"] for record in steps) == outcome.losses
    assert last["held_out_loss"] == outcome.held_out_loss
    assert outcome.held_out_loss is not None
    assert outcome.held_out_loss < outcome.losses[0] == pytest.approx(math.log(256))
    assert all(0 < record["bubble"] < 1 and record["memory"] > 1e6 for record in steps)
    assert {(record["clocks"], record["rank"]) for record in steps} == {("replayed", 0)}
    assert sorted(record["time"] for record in steps) == [record["time"] for record in steps]
    lines = shown.splitlines()
    assert [line[:8] for line in lines if line.startswith("step")] == ["step 4/6", "step 6/6"]
    assert lines[-1] == f"run folder: {outcome.folder}"
    assert "2 layers in 2 stages on 2 ranks" in shown
    assert "1F1B, 2 microbatches" in shown
    weights = read_weights(outcome.folder / "weights").values()
    assert f"model: {sum(weight.numel() for weight in weights):,} parameters" in shown


def test_the_losses_are_those_of_the_plain_loop(finished: tuple[Outcome, str], text: Path) -> None:
    config, corpus = config_for(text), load(str(text), 16)
    model = GPT(config.layers, config.width, config.heads, config.sequence, config.seed)
    optimizer = make_optimizer(model.named_parameters(), config)
    losses = []
    for step in range(1, 7):
        tokens, target = corpus.training_batch(step, seed=3, batch=4, sequence=16)
        loss = next_byte_loss(model(tokens), target)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, config)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert finished[0].losses == pytest.approx(losses, rel=1e-5)
    # The held-out loss is that of the weights that were saved.
    model.load_state_dict(read_weights(finished[0].folder / "weights"))
    batches = corpus.held_out_batches(2, batch=4, sequence=16)
    held_out = [next_byte_loss(model(tokens), target).item() for tokens, target in batches]
    assert finished[0].held_out_loss == pytest.approx(sum(held_out) / len(held_out), rel=1e-5)


def test_the_timeline_says_that_it_is_replayed(finished: tuple[Outcome, str]) -> None:
    outcome, shown = finished
    svg = (outcome.folder / "timeline.svg").read_text()
    assert "1F1B: step 6, 2 ranks, 2 microbatches" in svg
    assert "replayed" in svg
    assert "replayed: measured durations on one clock per rank" in shown
    trace = json.loads((outcome.folder / "timeline.json").read_text())
    assert {event["tid"] for event in trace["traceEvents"]} == {0, 1}
    page = (outcome.folder / "report.html").read_text()
    assert re.findall(r">(simulated|measured)<", page) == ["simulated", "measured"]


@pytest.mark.parametrize(
    "settings",
    [{"schedule": "ZB-V"}, {"recompute": "blocks.0,blocks.1"}],
    ids=lambda settings: "-".join(settings.values()),
)
def test_neither_schedule_nor_checkpointing_changes_a_bit(
    settings: dict[str, Any], finished: tuple[Outcome, str], text: Path, tmp_path: Path
) -> None:
    """What schedules do is shown elsewhere; here, that a run takes their stages and their halves."""
    stages = build(settings.get("schedule", "1F1B"), ranks=1, microbatches=2).stages
    config = config_for(text, **settings, ranks=2 // stages, out=str(tmp_path))
    outcome = train(config, Console(quiet=True))
    assert outcome.losses == finished[0].losses
    assert outcome.held_out_loss == finished[0].held_out_loss


@pytest.mark.parametrize(
    ("settings", "gist"),
    [
        (
            {"device": "cuda:9"},
            "device='cuda:9': torch.cuda.is_available.. is False in this process; use",
        ),
        ({"recompute": "nix"}, "recompute='nix'"),
        ({"plan": "nowhere.json"}, "plan='nowhere.json': there is no such file"),
        ({"replicas": 2}, "need 4 processes, not 1: torchrun --standalone --nproc-per-node 4"),
    ],
)
def test_what_cannot_be_had_here(settings: dict[str, Any], gist: str, text: Path) -> None:
    with pytest.raises(UsageError, match=gist):
        train(config_for(text, **settings), Console(quiet=True))


def test_on_a_terminal_the_latest_step_is_shown_meanwhile(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, finished: tuple[Outcome, str]
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    out, config = io.StringIO(), config_for(text, steps=2, log_every=9, out=str(tmp_path))
    train(config, Console(file=out, force_terminal=True, width=200))
    for shown, last, terminal in ((out.getvalue(), "2/2", True), (finished[1], "6/6", False)):
        # The line that refreshes is drawn once more before the lasting line takes its place.
        assert (shown.count(f"step {last}") > 1) == terminal
        assert ("\x1b[" in shown) == terminal


def test_a_line_has_the_numbers_of_a_step_and_is_printed_as_it_is() -> None:
    metrics: dict[str, Any] = {
        "step": 10, "loss": 2.5, "tokens_per_second": 12345.6, "gradient_norm": 0.25, "memory": 2**29,
        "bubble": 0.25, "clocks": "replayed", "mfu": 0.314,
    }  # fmt: skip
    line = summary(metrics, 500)
    for number in ("10/500", "2.500000", "12,346", "0.250", "512 MiB", "25.0%", "31.4%"):
        assert number in line
    assert summary({**metrics, "bubble": None, "mfu": None}, 500).endswith("MiB")
    out = io.StringIO()
    say(Console(file=out, width=20), f"[red]{line}")
    assert out.getvalue() == f"[red]{line}\n"
