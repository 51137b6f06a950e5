"""Plans in a Pipeline that finds its own, in training runs, and on the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from penstock import Loss, Pipeline, train
from penstock.cli.main import main
from penstock.cli.plan import size_from
from penstock.errors import ConfigError, InputFileError, PartitionError, UsageError
from penstock.plan import Plan, predict_hf
from tests.plan.models import Tower, unimproved

Capture = pytest.CaptureFixture[str]
mse = nn.functional.mse_loss
SMALL: dict[str, Any] = {
    "layers": 2, "ranks": 2, "width": 16, "heads": 2, "sequence": 16, "batch": 8, "microbatches": 4,
    "steps": 2, "log_every": 1, "held_out_batches": 1,
}  # fmt: skip


def test_a_pipeline_plans_itself() -> None:
    model, x = Tower(), torch.randn(8, 16)
    auto: dict[str, Any] = {"schedule": "auto", "ranks": 2}
    pipe = Pipeline(model, **auto, microbatches=4, loss_fn=mse)
    assert "auto" in repr(pipe)
    with pytest.raises(UsageError, match="decided when the model is cut"):
        _ = pipe.schedule
    assert pipe.step(x, target=torch.zeros(8, 64)).loss > 0
    plan = pipe.plan
    assert plan is not None
    assert (plan.ranks, plan.microbatches) == (2, 4)
    assert (pipe.schedule.ranks, pipe.schedule.stages) == (2, len(plan.stages))
    with pytest.raises(UsageError, match="decides stages="):
        Pipeline(model, **auto, loss_fn=mse, stages=2)


def test_a_plan_for_a_loss_over_the_batch_runs_all_forwards_first() -> None:
    model, x, target = Tower(), torch.randn(8, 16), torch.zeros(8, 64)
    expected = mse(model(x), target).sqrt()
    over_batch = Loss(lambda output, target: mse(output, target).sqrt(), over="batch")
    with Pipeline(model, schedule="auto", ranks=2, microbatches=4, loss_fn=over_batch) as pipe:
        assert pipe.step(x, target=target).loss == pytest.approx(float(expected.detach()))


@pytest.mark.parametrize("target", [True, False])
def test_the_loss_counts_for_the_last_stage(target: bool) -> None:
    """With the target of the example, or where it needs none; the loss alone costs as much as many blocks."""

    def slow(output: torch.Tensor, _: object = None) -> torch.Tensor:
        for _ in range(2000):
            output = output.sin()
        return output.sum()

    model, x = Tower(blocks=6), torch.randn(4, 16)
    rest: dict[str, Any] = {"target": torch.randn(4, 64)} if target else {}
    auto: dict[str, Any] = {"schedule": "auto", "ranks": 2, "microbatches": 2}
    with unimproved(), Pipeline(model, **auto, loss_fn=slow) as pipe:
        pipe.cut(x, **rest)
        assert pipe.plan is not None
        forward = pipe.plan.stage_costs.costs.per_stage("forward", len(pipe.plan.stages))
        assert forward[-1] > 2 * forward[0]


def test_a_run_is_planned_by_the_command_or_by_itself(tmp_path: Path, capsys: Capture) -> None:
    """The losses are those of the run without a plan."""
    text, file, plan = (tmp_path / name for name in ("text", "run.toml", "plan.json"))
    text.write_text("to be or not to be, that is the question. " * 100)
    file.write_text("\n".join(f"{name} = {value}" for name, value in SMALL.items()))
    wrote = ["--json", str(plan), "--report", str(tmp_path / "plan.html")]
    assert main(["plan", "--config", str(file), "--device", "h100", "--seconds", "0", *wrote]) == 0
    out = capsys.readouterr().out
    assert "predicted for h100" in out
    assert "the fastest" in out
    assert (tmp_path / "plan.html").read_text().startswith("<!doctype html>")
    best = Plan.from_json(plan.read_text())
    assert (best.ranks, best.microbatches * best.shape.samples) == (2, 8)
    # The search chooses the microbatches, so two samples need not fill the four of the file.
    assert (
        main(["plan", "--config", str(file), "--device", "h100", "--batch", "2", "--seconds", "0"])
        == 0
    )

    def losses(**changes: Any) -> tuple[float, ...]:
        out = str(tmp_path / f"run{len(list(tmp_path.iterdir()))}")
        settings = train.resolve({**SMALL, "data": str(text), "out": out, **changes})
        return train.train(settings).losses

    plain = losses()
    with unimproved():
        assert losses(plan="auto") == pytest.approx(plain, rel=1e-5)
    assert losses(plan=str(plan)) == pytest.approx(plain, rel=1e-5)
    # The plan says how many ranks there are.
    assert losses(plan=str(plan), ranks=None) == pytest.approx(plain, rel=1e-5)
    with pytest.raises(ConfigError, match="is for batch=8, but this run has 16"):
        losses(plan=str(plan), batch=16)
    with pytest.raises(ConfigError, match="is for ranks=2, but this run has 3"):
        losses(plan=str(plan), ranks=3)
    plan.write_text("{}")
    with pytest.raises(InputFileError, match=r"plan\.json: not a plan"):
        losses(plan=str(plan))


def test_the_command_plans_a_model_of_transformers(tmp_path: Path, capsys: Capture) -> None:
    shape = {
        "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 1000,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(shape))
    asked = ["plan", "--ranks=2", "--batch=4", "--device=h100", "--sequence=128", "--seconds=0"]
    asked += ["--pipeline=2", "--hf", str(tmp_path / "config.json")]
    mixed = [one for one in asked if not one.startswith(("--ranks", "--device"))]
    devices = ["--ranks=1xh100,1xa100", "--schedule=ZB-H1", "--keep=1"]
    assert main([*mixed, *devices]) == 0
    shown = capsys.readouterr().out
    assert "ZB-H1" in shown
    assert main([*asked, "--schedule=1F1B", "--memory", "1KB"]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("penstock: nothing fits into memory=1000")
    for content in ("nonsense", '{"model_type": "nothing"}', '{"model_type": "vit"}'):
        (tmp_path / "config.json").write_text(content)
        assert main(asked) == 65
        shown = capsys.readouterr().err
        assert "not the config of a causal language model" in shown
        assert shown.count("\n") == 1


def test_a_model_of_transformers_that_takes_any_number_of_tokens(tmp_path: Path) -> None:
    shape = {"model_type": "xlnet", "d_model": 8, "n_layer": 2, "n_head": 2, "vocab_size": 100}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    assert predict_hf(tmp_path / "config.json", batch=2, device="h100").tokens == 4096


HF = ["--hf", "nowhere.json", "--ranks=2", "--batch=2"]


@pytest.mark.parametrize(
    ("arguments", "gist"),
    [
        ([], "give the settings"),
        (["--hf", "nowhere.json"], "needs --ranks, --batch, --device"),
        (["--hf", "nowhere.json", "--ranks", "0"], "--ranks must be at least 1"),
        (
            ["--hf", "nowhere.json", "--ranks", "4", "--cluster", "c"],
            "leave --ranks out",
        ),
        (["--hf", "nowhere.json", "--cluster", "nowhere"], "nowhere: cannot be read"),
        ([*HF, "--device=h100"], "no such file"),
        ([*HF, "--device=h1000"], "did you mean 'h100'"),
        ([*HF, "--device=h100", "--dtype=int8"], "dtype='int8': must be one of"),
        (["--config", "nowhere.toml"], "no such file"),
        (["--config", "nowhere.toml", "--memory", "much"], "such as 80GB"),
        (["--config", "nowhere.toml", "--efficiency", "0.5"], "as --device"),
        (["--config", "run.toml", "--report", "nowhere/plan.html"], "there is no folder nowhere"),
    ],
)
def test_a_wrong_call_is_told_in_a_line(arguments: list[str], gist: str, capsys: Capture) -> None:
    assert main(["plan", *arguments]) == 2
    shown = capsys.readouterr().err
    assert gist in shown
    assert shown.count("\n") == 1


def test_sizes() -> None:
    sizes = {"80GB": 80e9, "80 GiB": 80 * 2**30, "512m": 512e6, "1e9": 1e9}
    assert {text: size_from(text) for text in sizes} == sizes
    for none in ("0GB", "0.5", "1e999"):
        with pytest.raises(ConfigError, match="a number of at least one byte"):
            size_from(none)


def test_modules_that_are_computed_again_give_the_same_gradients() -> None:
    """Dropout draws the same again; hooks and the model are as they were; a wrong path is told."""

    def gradients(again: Any, schedule: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(
            *(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Tanh()) for _ in range(4))
        )
        x = torch.randn(8, 8)
        with Pipeline(
            model, schedule=schedule, ranks=2, microbatches=4, loss_fn=mse, recompute=again, seed=1
        ) as pipe:
            pipe.step(x, target=x)
        assert not any("forward" in vars(module) for module in model.modules())
        return [p.grad for p in model.parameters() if p.grad is not None]

    for schedule in ("1F1B", "ZB-H1"):
        plain = gradients(False, schedule)
        for again in (True, ["1", "2"]):
            assert all(map(torch.equal, plain, gradients(again, schedule)))
    with pytest.raises(PartitionError, match="'7'"):
        gradients(["7"], "1F1B")
