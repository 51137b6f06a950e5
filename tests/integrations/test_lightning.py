"""Lightning's Trainer and Fabric, as a pipeline and without."""

from __future__ import annotations

import json
import os
import sys
from functools import cache
from itertools import pairwise
from pathlib import Path
from pickle import UnpicklingError
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader

pytest.importorskip("lightning")

from lightning.fabric import Fabric
from torchmetrics import MeanMetric

from penstock import Checkpoints, Pipeline, PipelineModule
from penstock.errors import InputFileError, PartitionError, UsageError
from penstock.integrations.lightning import FabricPipelineStrategy, PipelineStrategy
from tests.integrations.lightnings import (
    HALF,
    STEPS,
    Classifier,
    LanguageModel,
    Thaw,
    Tokens,
    classify,
    count_labels,
    images,
    measure,
    model_language,
    trainer_of,
)
from tests.processes import run_script

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


@pytest.mark.parametrize(("schedule", "ranks"), [("1F1B", 2), ("ZB-V", 4)])
def test_a_classifier_with_the_trainer(schedule: str, ranks: int) -> None:
    assert len(plain()["losses"]) == STEPS
    assert {"loss_step", "loss_epoch", "val_right", "batch", "nan"} < plain()["metrics"].keys()
    assert_equal(
        classify(PipelineStrategy(schedule=schedule, ranks=ranks, microbatches=4)), plain()
    )


@pytest.mark.parametrize(("schedule", "ranks"), [("1F1B", 2), ("ZB-V", 4)])
def test_a_language_model_with_fabric(schedule: str, ranks: int) -> None:
    """Its loss is a mean over labels, of which microbatches have different numbers."""
    strategy = FabricPipelineStrategy(
        ranks=ranks, schedule=schedule, microbatches=4, loss_weight=count_labels
    )
    assert_equal(model_language(strategy), plain_tokens())


def test_a_loss_that_is_no_mean_over_samples_is_told() -> None:
    with pytest.raises(UsageError, match=r"the loss of the first microbatch is .*loss_weight="):
        model_language(FabricPipelineStrategy(ranks=2, microbatches=4))


@pytest.mark.parametrize(
    ("options", "microbatches", "gap"),
    [
        ({"accumulate_grad_batches": 2}, 4, 1e-5),
        pytest.param({"precision": "64-true"}, 4, 1e-5, marks=pytest.mark.nightly),
        pytest.param({"precision": "bf16-mixed"}, 1, 1e-4, marks=pytest.mark.nightly),
    ],
)
def test_options_of_the_trainer(options: dict[str, Any], microbatches: int, gap: float) -> None:
    strategy = PipelineStrategy(ranks=2, microbatches=microbatches)
    actual, expected = (classify(of, **options)["losses"] for of in (strategy, "auto"))
    assert actual == pytest.approx(expected, abs=gap)
    assert actual != pytest.approx(plain()["losses"], abs=1e-9)


# ---- checkpoints


FILE = {"save_distributed_checkpoint": False}


def test_a_checkpoint_in_one_file_is_that_of_the_plain_trainer(tmp_path: Path) -> None:
    strategies = {"plain": "auto", "cut": PipelineStrategy(ranks=2, microbatches=4, **FILE)}
    files = {}
    for name, strategy in strategies.items():
        classify(strategy, max_steps=HALF)["trainer"].save_checkpoint(tmp_path / name)
        files[name] = torch.load(tmp_path / name, weights_only=False)
    assert files["cut"].keys() - files["plain"].keys() == {"penstock"}
    for part in ("state_dict", "optimizer_states", "lr_schedulers"):
        # AdamW makes much of the rounding of a small gradient.
        torch.testing.assert_close(files["cut"][part], files["plain"][part], atol=2e-4, rtol=1e-3)
    assert_resumed(tmp_path / "cut", "auto")
    for name in strategies:
        assert_resumed(tmp_path / name, PipelineStrategy(schedule="ZB-V", ranks=3, microbatches=4))


def test_a_checkpoint_in_parts_is_a_folder_for_any_layout(tmp_path: Path) -> None:
    path = tmp_path / "parts.ckpt"
    trainer = classify(PipelineStrategy(ranks=2, microbatches=4), max_steps=HALF)["trainer"]
    trainer.save_checkpoint(path)
    trainer.save_checkpoint(path)
    # The new one has taken the place of the first, with the file that belongs to it.
    assert len(list(path.glob("step-*"))) == len(list(path.glob("lightning-*.pt"))) == 1
    assert_resumed(path, PipelineStrategy(schedule="ZB-V", ranks=3, microbatches=4))
    (tmp_path / "other").mkdir()
    with pytest.raises(UsageError, match="a folder without a checkpoint of Lightning's loop"):
        assert_resumed(tmp_path / "other", PipelineStrategy(ranks=2, microbatches=4))


def assert_resumed(file: Path, strategy: Any) -> None:
    found = classify(strategy, resume=file)
    assert_equal(found, {**plain(), "losses": plain()["losses"][HALF:]})


@pytest.mark.nightly
def test_random_numbers_go_on_after_a_checkpoint(tmp_path: Path) -> None:
    def run(schedule: str, **options: Any) -> Any:
        strategy = PipelineStrategy(schedule=schedule, ranks=2, microbatches=4)
        return classify(strategy, dropout=0.5, **options)

    whole = run("1F1B")
    run("1F1B", max_steps=HALF)["trainer"].save_checkpoint(tmp_path / "half")
    resumed = run("ZB-V", resume=tmp_path / "half")
    assert resumed["losses"] == pytest.approx(whole["losses"][HALF:], abs=1e-6)


def test_fabric_loads_what_another_layout_saved(tmp_path: Path) -> None:
    """In one file; parts are loaded below."""

    def strategy(ranks: int) -> Any:
        return FabricPipelineStrategy(ranks=ranks, microbatches=4, loss_weight=count_labels, **FILE)

    expected = plain_tokens()["losses"][HALF + 1 :]
    model_language(strategy(4), save=tmp_path / "cut")
    for other in (strategy(2), "auto"):
        resumed = model_language(other, load=tmp_path / "cut")
        assert resumed["losses"] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("in_parts", [True, False])
def test_fabric_loads_objects_where_they_are_trusted(in_parts: bool, tmp_path: Path) -> None:
    strategy = FabricPipelineStrategy(
        ranks=2, loss_weight=count_labels, save_distributed_checkpoint=in_parts
    )
    fabric, path = Fabric(accelerator="cpu", devices=1, strategy=strategy), tmp_path / "saved"
    fabric.launch()
    model = fabric.setup(LanguageModel())
    fabric.save(path, {"model": model, "kept": complex(1, 2), "place": tmp_path})
    with pytest.raises(UnpicklingError):
        fabric.load(path, {"model": model}, weights_only=True)
    rest = fabric.load(path, {"model": model}, weights_only=False)
    assert (rest["kept"], rest["place"]) == (complex(1, 2), tmp_path)


def test_the_file_beside_a_checkpoint_is_no_path(tmp_path: Path) -> None:
    """What a table names may come from somebody else."""
    other = tmp_path / "other.pt"
    torch.save({}, other)
    strategy = FabricPipelineStrategy(ranks=2)
    fabric = Fabric(accelerator="cpu", devices=1, strategy=strategy)
    fabric.launch()
    model = fabric.setup(LanguageModel())
    with Checkpoints(tmp_path / "run") as checkpoints:
        checkpoints.save(1, extra={"lightning": str(other)}, pipe=strategy.pipe)
    with pytest.raises(InputFileError, match="no file that belongs beside it"):
        fabric.load(tmp_path / "run", {"model": model})


# ---- between processes


@pytest.mark.timeout(400)
def test_between_processes(tmp_path: Path) -> None:
    """One pipeline of all processes; then two, each with half of each batch, and the loss of the whole."""
    ran = run_script("-m", "tests.integrations.lightnings", str(tmp_path), processes=4, limit=350.0)
    assert [one.status for one in ran] == [0] * 4, ran
    report = json.loads((tmp_path / "report.json").read_text())
    whole = {key: plain_tokens()[key] for key in ("losses", "norms", "evaluated")}
    assert_equal(report["replicas"], whole)
    alone = measure(epochs=1, save=tmp_path / "plain.ckpt")
    assert report["measured"] == pytest.approx(alone, abs=1e-5)
    assert "different batches" in report["refusal"]
    # What four processes wrote in parts, another layout loads.
    strategy = FabricPipelineStrategy(ranks=2, microbatches=4, loss_weight=count_labels)
    resumed = model_language(strategy, load=tmp_path / "tokens.ckpt")
    assert resumed["losses"] == pytest.approx(plain_tokens()["losses"][HALF + 1 :], abs=1e-5)
    cut, uncut = (
        torch.load(tmp_path / f"{name}.ckpt", weights_only=False) for name in ("trained", "plain")
    )
    for part in ("state_dict", "optimizer_states"):
        torch.testing.assert_close(cut[part], uncut[part], atol=1e-5, rtol=1e-4)


# ---- wrong use


class Odd(Classifier):
    """Its training step does something else with the batch and the loss."""

    def __init__(self, change: Any) -> None:
        super().__init__()
        self.change, self.seen = change, list[Any]()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.change(self, batch, super().training_step(batch, batch_idx))


def changed(**attributes: Any) -> Classifier:
    module = Classifier()
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


def with_an_optimizer_of_the_head() -> Classifier:
    module = Classifier()
    optimizer = torch.optim.SGD(module.head.parameters(), lr=0.1)
    return changed(head=module.head, configure_optimizers=lambda: optimizer)


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


WRONG: list[tuple[Any, str]] = [
    (lambda: fit(Odd(lambda module, batch, loss: None)), "training_step returned None"),
    (
        lambda: fit(Odd(lambda module, batch, loss: module.log("sum", loss, reduce_fx="sum"))),
        "log a mean",
    ),
    (
        lambda: fit(Odd(lambda module, batch, loss: module.log("metric", MeanMetric()))),
        "MeanMetric",
    ),
    (lambda: fit(changed(automatic_optimization=False)), "automatic_optimization=False"),
    (
        lambda: fit(with_an_optimizer_of_the_head(), gradient_clip_val=1.0),
        "clips the whole model",
    ),
    (lambda: fit(Classifier(), sync_batchnorm=True), "sync_batchnorm=True"),
    (
        lambda: trainer_of(PipelineStrategy(ranks=2), devices=3),
        "no whole number of pipelines of ranks=2",
    ),
    (lambda: PipelineStrategy(loss_fn=mse_loss), "what training_step returns"),
    (
        lambda: set_up(FabricPipelineStrategy(ranks=2), Classifier())(torch.ones(4, 1, 8, 8)),
        "forward returned a tensor",
    ),
    (on_top, "DistributedDataParallel around a PipelineModule"),
    (with_others_weights, r"fabric.setup\(module, optimizer\)"),
    (lambda: PipelineStrategy().pipe, "no pipeline yet"),
]


def test_wrong_use_is_named() -> None:
    for call, message in WRONG:
        # Lightning's DDP starts a process group, says in the environment where, and sets the threads.
        with patch.dict(os.environ), pytest.raises(UsageError, match=message):
            call()
        torch.set_num_threads(1)
        if dist.is_initialized():
            dist.destroy_process_group()


def test_a_number_of_a_tensor_is_refused_and_the_tensor_recommended() -> None:
    with pytest.raises(PartitionError, match=r'self.log\("loss", loss\), without item'):
        fit(Odd(lambda module, batch, loss: module.log("loss", loss.item()) or loss))


def test_a_logged_number_that_is_no_mean_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    def change(module: Any, batch: Any, loss: Any) -> Any:
        module.log("spread", module(batch[0]).std())
        return loss

    module = Odd(change)
    trainer_of(PipelineStrategy(ranks=2, microbatches=4), max_steps=11).fit(module, images())
    (told,) = [record.getMessage() for record in caplog.records if record.name == "penstock"]
    assert "self.log('spread', ...) of training_step is" in told
    assert "in the hook after the step, which gets the whole batch" in told


def keeps(module: Any, batch: Any, loss: Any) -> Any:
    module.seen.append(loss.detach())
    return loss


def measures(module: Any, batch: Any, loss: Any) -> Any:
    module.mean.update(loss)
    return loss


def measures_and_logs(module: Any, batch: Any, loss: Any) -> Any:
    module.log("mean", module.mean)
    return loss


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda module, batch, loss: {"loss": loss, "more": torch.ones(3, 3)}, "first dimension"),
        (keeps, r"list self\.seen .* append it in on_train_batch_end"),
        (measures, r"metric self\.mean is used in training_step.* in on_train_batch_end"),
        (measures_and_logs, r"metric self\.mean is used in training_step"),
    ],
)
def test_what_belongs_into_a_hook_is_refused_with_its_name(change: Any, says: str) -> None:
    module = Odd(change)
    module.mean = MeanMetric()
    with pytest.raises(Exception, match=says):
        fit(module)


# ---- metrics, lists, hooks, and the way of a step


def test_metrics_lists_and_hooks_see_the_whole_batch() -> None:
    """A step that does something else in odd batches and later epochs is planned anew for these."""
    found = measure(PipelineStrategy(schedule="ZB-V", ranks=2, microbatches=4))
    assert found == pytest.approx(measure(), abs=1e-5)


class OddBatches(Classifier):
    """Only its odd batches return something, which a hook keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self(batch[0])
        loss = nn.functional.cross_entropy(logits, batch[1])
        return {"loss": loss, "logits": logits} if batch_idx % 2 else loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if "logits" in outputs:
            self.kept.append(outputs["logits"])


def test_batches_that_return_nothing_do_not_decide_for_those_that_do() -> None:
    kept = []
    for strategy in ("auto", PipelineStrategy(ranks=2, microbatches=4)):
        torch.manual_seed(0)
        module = OddBatches()
        trainer_of(strategy, max_steps=5).fit(module, images())
        kept.append([float(one.square().sum()) for one in module.kept])
    assert len(kept[0]) == 2
    assert kept[1] == pytest.approx(kept[0], rel=1e-4)


class Counted(nn.Linear):
    calls = 0

    def forward(self, value: Any) -> Any:
        Counted.calls += 1
        return super().forward(value)


def test_a_step_may_ask_for_its_batch_and_is_not_planned_for_each_number() -> None:
    counts = []

    class Asking(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return loss * 0.9 if self.global_step % 2 else loss

        def on_train_batch_end(self, *_: Any) -> None:
            counts.append(Counted.calls)

    module = Asking()
    module.head = Counted(16, 5)
    trainer_of(PipelineStrategy(ranks=2, microbatches=4), max_steps=6).fit(module, images())
    assert [b - a for a, b in pairwise(counts[2:])] == [4] * 3


class Labelled(LanguageModel):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", self.training_step(batch, batch_idx)["loss"])


def test_an_epoch_s_value_is_the_plain_trainers() -> None:
    """Within a batch microbatches weigh what the loss counts, and batches what Lightning counts."""
    logged = []
    for strategy in ("auto", PipelineStrategy(ranks=2, microbatches=2, loss_weight=count_labels)):
        torch.manual_seed(0)
        batches = DataLoader(Tokens(), batch_size=10)
        (metrics,) = trainer_of(strategy).validate(Labelled(), batches, verbose=False)
        logged.append(metrics["loss"])
    assert len({len(batch["tokens"]) for batch in batches}) > 1
    assert logged[1] == pytest.approx(logged[0], rel=1e-6)


class HeadFirst(LanguageModel):
    """The name that comes first is that of the stage that comes last."""

    def __init__(self) -> None:
        super().__init__()
        embed = self.net.embed
        del self.net.embed
        self.net.embed = embed


def test_a_tied_weight_s_state_is_where_the_plain_trainer_looks(tmp_path: Path) -> None:
    files = []
    for strategy in (
        "auto",
        PipelineStrategy(ranks=2, microbatches=4, loss_weight=count_labels, **FILE),
    ):
        torch.manual_seed(0)
        trainer = trainer_of(strategy, max_steps=1)
        trainer.fit(HeadFirst(), DataLoader(Tokens(), batch_size=8))
        trainer.save_checkpoint(tmp_path / "file")
        files.append(torch.load(tmp_path / "file", weights_only=False)["optimizer_states"][0])
    plain, cut = files
    assert cut["param_groups"] == plain["param_groups"]
    torch.testing.assert_close(cut["state"], plain["state"], atol=1e-5, rtol=1e-4)


@pytest.mark.nightly
def test_groups_that_an_optimizer_gets_later_are_saved(tmp_path: Path) -> None:
    files = []
    for strategy in ("auto", PipelineStrategy(ranks=2, microbatches=4, **FILE)):
        module = Classifier()
        torch.manual_seed(0)
        module.configure_optimizers = lambda module=module: torch.optim.AdamW(  # type: ignore[method-assign,misc]
            [p for p in module.parameters() if p.requires_grad]
        )
        trainer = trainer_of(strategy, callbacks=[Thaw()], max_epochs=2, max_steps=-1)
        torch.manual_seed(0)
        for parameter in module.parameters():
            nn.init.uniform_(parameter, -0.3, 0.3)
        trainer.fit(module, images())
        trainer.save_checkpoint(tmp_path / "file")
        files.append(torch.load(tmp_path / "file", weights_only=False))
    plain, cut = (file["optimizer_states"][0] for file in files)
    assert cut["param_groups"][1]["params"] == plain["param_groups"][1]["params"]
    torch.testing.assert_close(cut["state"], plain["state"], atol=1e-5, rtol=1e-4)


def test_without_lightning_the_import_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lightning.fabric.strategies.ddp", None)
    monkeypatch.delitem(sys.modules, "penstock.integrations.lightning")
    with pytest.raises(ImportError, match=r"penstock-pipeline\[lightning\]"):
        __import__("penstock.integrations.lightning")
