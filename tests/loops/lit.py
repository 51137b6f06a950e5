"""Loops of Lightning: the Trainer with its callbacks and options, and Fabric."""

from __future__ import annotations

import logging
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import (
    Callback,
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LambdaCallback,
    LearningRateFinder,
    ModelCheckpoint,
    ModelPruning,
    ModelSummary,
    StochasticWeightAveraging,
    Timer,
)
from lightning.pytorch.utilities import grad_norm
from torch import nn
from torch.nn.functional import cross_entropy, normalize
from torch.utils.data import DataLoader, DistributedSampler

from penstock.integrations.lightning import FabricPipelineStrategy, PipelineStrategy
from tests.integrations.lightnings import (
    Classifier,
    Curve,
    LanguageModel,
    Measured,
    Thaw,
    Tokens,
    count_labels,
    images,
)
from tests.loops.setting import STEPS, Outcome, Setting, program


def shared(setting: Setting, rows: int) -> DataLoader[Any]:
    """Images, of which each replica has its part; Lightning itself would shuffle them for replicas."""
    data = images(rows).dataset
    sampler: Any = DistributedSampler(data, setting.replicas, setting.index, shuffle=False)
    return DataLoader(data, batch_size=setting.each, sampler=sampler)


def fit(
    setting: Setting,
    module: Any = Classifier,
    *callbacks: Callback,
    strategy: dict[str, Any] | None = None,
    saves: bool = False,
    resume: Any = None,
    **options: Any,
) -> Outcome:
    """Twenty steps of the Trainer, with validation."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.manual_seed(0)
    model, curve = module(), Curve()
    cut: Any = PipelineStrategy(**setting.options(**(strategy or {}))) if setting.cut else "auto"
    usual: dict[str, Any] = {
        "max_steps": STEPS, "logger": False, "enable_progress_bar": False,
        "enable_model_summary": False, "use_distributed_sampler": False,
        "enable_checkpointing": saves, "num_sanity_val_steps": 0,
    }  # fmt: skip
    trainer = Trainer(
        accelerator="cpu", devices=setting.processes, strategy=cut,
        callbacks=[curve, *callbacks], default_root_dir=setting.folder, **usual | options,
    )  # fmt: skip
    trainer.fit(model, shared(setting, 80), shared(setting, 16), ckpt_path=resume)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    state = cut.pipelined.state() if setting.cut else model.state_dict()
    return Outcome(curve.losses, {n: v for n, v in metrics.items() if "nan" not in n}, state)


def add(name: str, *args: Any, **options: Any) -> None:
    """A program that differs from the first by a few arguments; functions of the setting are called."""

    @program("Lightning", name)
    def _(setting: Setting) -> Outcome:
        made = [one(setting) if i else one for i, one in enumerate(args)]
        return fit(setting, *made, **options)


add("plain")
add("gradient_clip_val=0.1", gradient_clip_val=0.1)
add("gradient_clip_algorithm='value'", gradient_clip_val=0.01, gradient_clip_algorithm="value")
add("accumulate_grad_batches=2", accumulate_grad_batches=2, max_steps=10)
add("precision='bf16-mixed'", precision="bf16-mixed")
add("val_check_interval, limit_val_batches", val_check_interval=5, limit_val_batches=1)
add("torchmetrics, lists and hooks", Measured)
add("EarlyStopping", Classifier, lambda _: EarlyStopping("val_loss", patience=0, min_delta=10.0))
add(
    "ModelCheckpoint", Classifier,
    lambda s: ModelCheckpoint(s.folder / "saved", monitor="val_loss", save_last=True), saves=True,
)  # fmt: skip
add("StochasticWeightAveraging", Classifier, lambda _: StochasticWeightAveraging(0.05, 1))
add("EMAWeightAveraging", Classifier, lambda _: EMAWeightAveraging(decay=0.9))
add(
    "GradientAccumulationScheduler",
    Classifier,
    lambda _: GradientAccumulationScheduler({1: 2}),
    max_steps=12,
)
add("ModelPruning", Classifier, lambda _: ModelPruning("l1_unstructured", amount=0.3))


class Found(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.lr = 0.01

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


add("LearningRateFinder", Found, lambda _: LearningRateFinder(num_training_steps=5))
add("Timer, ModelSummary, LambdaCallback", Classifier,
    lambda _: Timer(), lambda _: ModelSummary(),
    lambda _: LambdaCallback(on_fit_start=lambda *_: None))  # fmt: skip


class Thawed(Classifier):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.01)


add("BaseFinetuning", Thawed, lambda _: Thaw())


class Normed(Classifier):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log_dict(grad_norm(self, 2))


add("grad_norm(self, 2) in a hook", Normed)


class ClipsItself(Classifier):
    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        nn.utils.clip_grad_norm_(self.parameters(), 0.1)


add("configure_gradient_clipping with torch's own", ClipsItself)


class Weighed(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        images, labels = batch
        return cross_entropy(self(images), labels, torch.arange(1.0, 6.0, dtype=torch.float64))


add("class weights, nothing said", Weighed)
add(
    "class weights, loss_weight=", Weighed,
    strategy={"loss_weight": lambda batch: (batch[1] + 1).sum()},
)  # fmt: skip


class Contrasts(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        rows = normalize(self(batch[0]))
        return cross_entropy(rows @ rows.roll(1, 1).T, torch.arange(len(rows)))


add("contrastive, nothing said", Contrasts)


class ByHand(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


# By hand no step is counted, so that epochs end the run.
add("automatic_optimization=False", ByHand, max_epochs=1)


class Evaluates(Callback):
    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, idx: int
    ) -> None:
        if idx == 3:
            module(batch[0])


add("a callback that calls the module", Classifier, lambda _: Evaluates())


class LogsNumbers(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("number", loss.item())
        return loss


add("self.log of loss.item()", LogsNumbers)


@program("Lightning", "checkpoint and resume")
def _(setting: Setting) -> Outcome:
    saver = ModelCheckpoint(setting.folder / "half", save_last=True, save_top_k=0)
    first = fit(setting, Classifier, saver, saves=True, max_steps=10)
    second = fit(setting, Classifier, saves=True, resume=setting.folder / "half/last.ckpt")
    return Outcome(first.losses + second.losses, second.metrics, second.weights)


def fabric(setting: Setting, *, saves: bool = False, **options: Any) -> Outcome:
    cut: Any = FabricPipelineStrategy(**setting.options(**options)) if setting.cut else "auto"
    fabric = Fabric(accelerator="cpu", devices=setting.processes, strategy=cut)
    fabric.launch()
    torch.manual_seed(0)
    module = LanguageModel()
    model, optimizer = fabric.setup(module, module.configure_optimizers())
    sampler: Any = DistributedSampler(Tokens(), setting.replicas, setting.index, shuffle=False)
    loader: Any = DataLoader(Tokens(), batch_size=setting.each, sampler=sampler)
    batches = list(fabric.setup_dataloaders(loader, use_distributed_sampler=False)) * 4
    losses, norms = [], []
    for number, batch in enumerate(batches):
        loss = model.training_step(batch, number)["loss"]
        fabric.backward(loss)
        norm: Any = fabric.clip_gradients(model, optimizer, max_norm=0.5)
        norms.append(float(norm))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        if saves and number == 10:
            state = {"model": model, "optimizer": optimizer}
            fabric.save(setting.folder / "state", state)
            fabric.load(setting.folder / "state", state)
    state = cut.pipelined.state() if setting.cut else module.state_dict()
    return Outcome(losses, {f"norm {p}": n for p, n in enumerate(norms)}, state)


@program("Lightning", "Fabric, loss_weight=")
def _(setting: Setting) -> Outcome:
    return fabric(setting, loss_weight=count_labels if setting.cut else None)


@program("Lightning", "Fabric, tokens to ignore, nothing said")
def _(setting: Setting) -> Outcome:
    return fabric(setting)


@program("Lightning", "Fabric, save and load")
def _(setting: Setting) -> Outcome:
    return fabric(setting, saves=True, loss_weight=count_labels if setting.cut else None)
