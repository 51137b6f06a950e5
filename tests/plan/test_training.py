"""Plans in a Pipeline that finds its own, in training runs, and on the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from penstock import Pipeline, train
from penstock.cli.main import main
from penstock.cli.plan import bytes_of
from penstock.errors import ConfigError, InputFileError, PartitionError, UsageError
from penstock.plan import Plan
from tests.plan.models import Tower

mse = nn.functional.mse_loss
SMALL: dict[str, Any] = {
    "layers": 2, "ranks": 2, "width": 16, "heads": 2, "sequence": 16, "batch": 8, "microbatches": 4,
    "steps": 2, "log_every": 1, "sample_length": 0, "held_out_batches": 1,
}  # fmt: skip


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "text.txt"
    path.write_text("to be or not to be, that is the question. " * 100)
    return str(path)


def config(path: Path, **changes: Any) -> Path:
    rows = [f"{name} = {json.dumps(value)}" for name, value in {**SMALL, **changes}.items()]
    path.write_text("\n".join(rows))
    return path


def test_a_pipeline_plans_itself() -> None:
    torch.manual_seed(0)
    model, x, y = Tower(), torch.randn(8, 16), torch.randn(8, 64)
    mse(model(x), y).backward()
    expected = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    with Pipeline(
        model, schedule="auto", ranks=2, microbatches=4, example=((x[:2],), {}), loss_fn=mse
    ) as pipe:
        assert pipe.plan is not None
        assert (pipe.plan.ranks, pipe.plan.microbatches) == (2, 4)
        pipe.step(x, target=y)
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)
    with pytest.raises(UsageError, match="give example="):
        Pipeline(model, schedule="auto", ranks=2, loss_fn=mse)
    with pytest.raises(UsageError, match="decides stages="):
        Pipeline(model, schedule="auto", ranks=2, stages=2, example=((x,), {}), loss_fn=mse)


@pytest.mark.parametrize("target", [True, False])
def test_the_loss_counts_for_the_last_stage(target: bool) -> None:
    """With the target of the example, or where it needs none; the loss alone costs as much as many blocks."""

    def slow(output: torch.Tensor, _: object = None) -> torch.Tensor:
        for _ in range(2000):
            output = output.sin()
        return output.sum()

    model, x = Tower(blocks=6), torch.randn(2, 16)
    rest = (torch.randn(2, 64),) if target else ()
    auto: dict[str, Any] = {"schedule": "auto", "ranks": 2, "microbatches": 2}
    with Pipeline(model, **auto, example=((x,), {}, *rest), loss_fn=slow) as pipe:
        assert pipe.plan is not None
        forward = pipe.plan.stage_costs.costs.per_stage("forward", len(pipe.plan.stages))
        assert forward[-1] > 2 * forward[0]


def test_a_run_plans_itself(tmp_path: Path, text: str) -> None:
    """The losses are those of the run without a plan."""

    def losses(name: str, **more: Any) -> tuple[float, ...]:
        settings = train.resolve({**SMALL, "data": text, "out": str(tmp_path / name), **more})
        return train.train(settings).losses

    found, plain = losses("planned", plan="auto"), losses("plain")
    assert found == pytest.approx(plain, rel=1e-5)
    for name in ("planned", "plain"):
        page = (tmp_path / name / "report.html").read_text()
        assert '"label":"simulated"' in page
        assert '"label":"measured"' in page


def test_the_command_plans_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    file, plan = config(tmp_path / "run.toml"), tmp_path / "plan.json"
    wrote = ["--json", str(plan), "--report", str(tmp_path / "plan.html")]
    assert main(["plan", "--config", str(file), "--device", "h100", "--seconds", "0", *wrote]) == 0
    out = capsys.readouterr().out
    assert "predicted for h100" in out
    assert "the fastest" in out
    assert (tmp_path / "plan.html").read_text().startswith("<!doctype html>")
    best = Plan.from_json(plan.read_text())
    assert (best.ranks, best.microbatches * best.shape.samples) == (2, 8)
    settings = train.resolve(
        {**SMALL, "data": text, "out": str(tmp_path / "out"), "plan": str(plan)}
    )
    assert len(train.train(settings).losses) == 2
    with pytest.raises(ConfigError, match="is for batch=8, but this run has 16"):
        train.train(train.resolve({**SMALL, "batch": 16, "data": text, "plan": str(plan)}))
    with pytest.raises(ConfigError, match="there is no such file"):
        train.train(train.resolve({**SMALL, "data": text, "plan": "nowhere.json"}))
    (tmp_path / "wrong.json").write_text("{}")
    with pytest.raises(InputFileError, match=r"wrong\.json: not a plan"):
        train.train(train.resolve({**SMALL, "data": text, "plan": str(tmp_path / "wrong.json")}))


def test_the_command_plans_a_model_of_transformers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shape = {
        "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 1000,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(shape))
    asked = ["plan", "--hf", str(tmp_path / "config.json"), "--ranks", "4", "--batch", "8"]
    asked += ["--sequence", "128", "--seconds", "0", "--device", "h100"]
    assert main([*asked, "--pipeline", "4", "--schedule", "ZB-H1"]) == 0
    assert "ZB-H1" in capsys.readouterr().out
    assert main([*asked, "--memory", "1KB"]) == 2
    told = capsys.readouterr().err
    assert told.startswith("penstock: nothing fits into memory=1000")
    assert len(told.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "status", "told"),
    [
        ([], 2, "give the settings"),
        (["--hf", "nowhere.json"], 2, "needs --ranks, --batch, --device"),
        (["--hf", "nowhere.json", "--ranks=2", "--batch=2", "--device=h100"], 2, "no such file"),
        (
            ["--hf", "nowhere.json", "--ranks=2", "--batch=2", "--device=h1000"],
            2,
            "did you mean 'h100'",
        ),
        (["--config", "nowhere.toml"], 2, "no such file"),
        (["--config", "nowhere.toml", "--memory", "much"], 2, "such as 80GB"),
        (["--config", "nowhere.toml", "--memory", "0GB"], 2, "at least one byte"),
        (["--config", "nowhere.toml", "--efficiency", "0.5"], 2, "as --device"),
        (
            ["--config", "run.toml", "--report", "nowhere/plan.html"],
            2,
            "there is no folder nowhere",
        ),
    ],
)
def test_wrong_calls_are_told_in_a_line(
    arguments: list[str], status: int, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *arguments]) == status
    found = capsys.readouterr().err
    assert told in found
    assert len(found.splitlines()) == 1


def test_a_file_that_is_no_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", "--ranks=2", "--batch=2", "--device=h100", "--hf"]
    for number, content in enumerate(
        ("nonsense", '{"model_type": "nothing"}', '{"model_type": "vit"}')
    ):
        file = tmp_path / f"{number}.json"
        file.write_text(content)
        assert main([*asked, str(file)]) == 65
        assert len(capsys.readouterr().err.splitlines()) == 1


def test_sizes() -> None:
    assert bytes_of("80GB") == 80e9
    assert bytes_of("80 GiB") == 80 * 2**30
    assert bytes_of("512m") == 512e6
    assert bytes_of("1e9") == 1e9
    for none in ("0GB", "0", "0.5", "1e999"):
        with pytest.raises(ConfigError, match="a number of at least one byte"):
            bytes_of(none)


def test_modules_that_are_computed_again_give_the_same_gradients() -> None:
    """Dropout draws the same again; hooks and the model are as they were; a wrong path is told."""

    def gradients(again: Any, schedule: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(
            *(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Tanh()) for _ in range(4))
        )
        x = torch.randn(8, 8)
        with Pipeline(
            model, schedule=schedule, ranks=2, microbatches=4, loss_fn=mse, checkpoint=again, seed=1
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
