"""Lightning's Trainer and Fabric, as a pipeline and without."""

from __future__ import annotations

import json
import os
import sys
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss

pytest.importorskip("lightning")

from lightning.fabric import Fabric
from torchmetrics import MeanMetric

from penstock import Pipeline, PipelineModule
from penstock.errors import PartitionError, UsageError
from penstock.integrations.lightning import FabricPipelineStrategy, PipelineStrategy
from tests.integrations.lightnings import (
    Classifier,
    LanguageModel,
    classify,
    count_labels,
    images,
    model_language,
    trainer_of,
)
from tests.scripts import run_script

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]


@cache
def plain() -> dict[str, Any]:
    return classify()


@cache
def plain_tokens() -> dict[str, Any]:
    return model_language()


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    keys = {"losses", "metrics", "norms", "outputs", "evaluated"} & expected.keys()
    assert keys <= found.keys()
    for key in keys:
        assert found[key] == pytest.approx(expected[key], abs=1e-5, rel=1e-5, nan_ok=True), key


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("schedule", ["1F1B", "ZB-V"])
def test_a_classifier_with_the_trainer(schedule: str, ranks: int) -> None:
    assert len(plain()["losses"]) == 20
    assert {"loss_step", "loss_epoch", "val_right", "batch", "nan"} < plain()["metrics"].keys()
    assert_equal(
        classify(PipelineStrategy(schedule=schedule, ranks=ranks, microbatches=4)), plain()
    )


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("schedule", ["1F1B", "ZB-V"])
def test_a_language_model_with_fabric(schedule: str, ranks: int) -> None:
    """Its loss is a mean over labels, of which microbatches have different numbers."""
    strategy = FabricPipelineStrategy(
        ranks=ranks, schedule=schedule, microbatches=4, loss_weight=count_labels
    )
    assert_equal(model_language(strategy), plain_tokens())


def test_microbatches_count_by_samples_unless_loss_weight_says() -> None:
    found = model_language(FabricPipelineStrategy(ranks=2, microbatches=4))["losses"]
    assert found[0] != pytest.approx(plain_tokens()["losses"][0], abs=1e-4)


@pytest.mark.parametrize("options", [{"accumulate_grad_batches": 2}, {"precision": "64-true"}])
def test_options_of_the_trainer(options: dict[str, Any]) -> None:
    assert_equal(
        classify(PipelineStrategy(ranks=2, microbatches=4), **options), classify(**options)
    )


def test_bfloat16() -> None:
    options: dict[str, Any] = {"precision": "bf16-mixed"}
    found = classify(PipelineStrategy(ranks=2, microbatches=1), **options, max_steps=6)["losses"]
    assert found == pytest.approx(classify(**options, max_steps=6)["losses"], abs=1e-4)
    assert found != pytest.approx(plain()["losses"][:6], abs=1e-3)


# ---- checkpoints


def test_checkpoints_are_those_of_the_plain_trainer(tmp_path: Path) -> None:
    strategies = {"plain": "auto", "cut": PipelineStrategy(ranks=2, microbatches=4)}
    files = {}
    for name, strategy in strategies.items():
        classify(strategy, max_steps=10)["trainer"].save_checkpoint(tmp_path / name)
        files[name] = torch.load(tmp_path / name, weights_only=False)
    assert files["cut"].keys() - files["plain"].keys() == {"penstock"}
    for part in ("state_dict", "optimizer_states", "lr_schedulers"):
        torch.testing.assert_close(files["cut"][part], files["plain"][part], atol=1e-5, rtol=1e-4)
    assert_resumed(tmp_path / "cut", "auto")
    for name in strategies:
        assert_resumed(tmp_path / name, PipelineStrategy(schedule="ZB-V", ranks=3, microbatches=4))


def assert_resumed(file: Path, strategy: Any) -> None:
    found = classify(strategy, resume=file)
    assert_equal(found, {**plain(), "losses": plain()["losses"][10:]})


def test_random_numbers_go_on_after_a_checkpoint(tmp_path: Path) -> None:
    def run(schedule: str, **options: Any) -> Any:
        strategy = PipelineStrategy(schedule=schedule, ranks=2, microbatches=4)
        return classify(strategy, dropout=0.5, **options)

    whole = run("1F1B")
    run("1F1B", max_steps=10)["trainer"].save_checkpoint(tmp_path / "half")
    resumed = run("ZB-V", resume=tmp_path / "half")
    assert resumed["losses"] == pytest.approx(whole["losses"][10:], abs=1e-6)


def test_fabric_loads_what_another_layout_saved(tmp_path: Path) -> None:
    def strategy(ranks: int) -> Any:
        return FabricPipelineStrategy(ranks=ranks, microbatches=4, loss_weight=count_labels)

    expected = plain_tokens()["losses"][12:]
    model_language(strategy(4), save=tmp_path / "cut")
    for other in (strategy(2), "auto"):
        resumed = model_language(other, load=tmp_path / "cut")
        assert resumed["losses"] == pytest.approx(expected, abs=1e-5)


# ---- between processes


def launched(folder: Path, processes: int) -> dict[str, Any]:
    ran = run_script("-m", "tests.integrations.lightnings", str(folder), processes=processes)
    assert [one.status for one in ran] == [0] * processes, ran
    found: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return found


def test_replicas_share_the_data(tmp_path: Path) -> None:
    """Each of two pipelines has half of each batch; the loss and the gradients are those of the whole."""
    found = launched(tmp_path, 4)
    assert_equal(found, {key: plain_tokens()[key] for key in ("losses", "norms", "evaluated")})


@pytest.mark.timeout(150)
def test_between_processes(tmp_path: Path) -> None:
    model_language(save=tmp_path / "plain.ckpt")
    found = launched(tmp_path, 2)
    assert_equal(found["images"], plain())
    rest = {key: plain_tokens()[key][12:] for key in ("losses", "norms")}
    assert_equal(found["tokens"], {**plain_tokens(), **rest})
    assert "different batches" in found["refusal"]
    file = torch.load(tmp_path / "trained.ckpt", weights_only=False)
    Classifier().load_state_dict(file["state_dict"])
    states = plain()["trainer"].optimizers[0].state_dict()["state"]
    torch.testing.assert_close(file["optimizer_states"][0]["state"], states, atol=1e-5, rtol=1e-4)


# ---- wrong use


class Skips(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        super().training_step(batch, batch_idx)


class Sums(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("labels", batch[1].sum(), reduce_fx="sum")
        return super().training_step(batch, batch_idx)


class Measures(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("metric", MeanMetric())
        return super().training_step(batch, batch_idx)


class Collects(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.seen.append(loss.detach())
        return loss


class Manual(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Partly(Classifier):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.head.parameters(), lr=0.1)


def fit(module: Any, **options: Any) -> None:
    trainer_of(PipelineStrategy(ranks=2, microbatches=4), max_steps=2, **options).fit(
        module, images()
    )


def set_up(strategy: Any, *arguments: Any) -> Any:
    fabric = Fabric(accelerator="cpu", devices=1, strategy=strategy)
    fabric.launch()
    return fabric.setup(*arguments)


def on_top() -> None:
    pipe = Pipeline(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), ranks=2, loss_fn=mse_loss)
    set_up("ddp", PipelineModule(pipe))


def with_others_weights() -> None:
    optimizer = torch.optim.SGD(Classifier().parameters(), lr=0.1)
    set_up(FabricPipelineStrategy(ranks=2), LanguageModel(), optimizer)


WRONG: dict[str, tuple[Any, str]] = {
    "no loss": (lambda: fit(Skips()), "training_step returned None"),
    "a sum": (lambda: fit(Sums()), "log a mean"),
    "a metric": (lambda: fit(Measures()), "MeanMetric"),
    "manual": (lambda: fit(Manual()), "automatic_optimization=False"),
    "clipped in part": (lambda: fit(Partly(), gradient_clip_val=1.0), "clips the whole module"),
    "batch norms": (lambda: fit(Classifier(), sync_batchnorm=True), "sync_batchnorm=True"),
    "a loss": (lambda: PipelineStrategy(loss_fn=mse_loss), "what training_step returns"),
    "an output": (
        lambda: set_up(FabricPipelineStrategy(ranks=2), Classifier())(torch.ones(4, 1, 8, 8)),
        "forward returned a tensor",
    ),
    "DDP on top": (on_top, "DistributedDataParallel around a PipelineModule"),
    "other weights": (with_others_weights, "fabric.setup\\(module, optimizer\\)"),
    "too early": (lambda: PipelineStrategy().pipe, "no pipeline yet"),
}


@pytest.mark.parametrize("name", sorted(WRONG))
def test_wrong_use_is_named(name: str) -> None:
    call, message = WRONG[name]
    # Lightning's DDP starts a process group, says in the environment where, and sets the threads.
    with patch.dict(os.environ), pytest.raises(UsageError, match=message):
        call()
    torch.set_num_threads(1)
    if dist.is_initialized():
        dist.destroy_process_group()


def test_what_a_step_keeps_is_refused() -> None:
    with pytest.raises(PartitionError, match="seen"):
        fit(Collects())


def test_without_lightning_the_import_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lightning.fabric.strategies.ddp", None)
    monkeypatch.delitem(sys.modules, "penstock.integrations.lightning")
    with pytest.raises(ImportError, match=r"penstock\[lightning\]"):
        __import__("penstock.integrations.lightning")
