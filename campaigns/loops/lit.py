"""Loops of Lightning: the Trainer with its callbacks and options, and Fabric."""

from __future__ import annotations

import logging
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BasePredictionWriter,
    BatchSizeFinder,
    Callback,
    DeviceStatsMonitor,
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LambdaCallback,
    LearningRateFinder,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelPruning,
    ModelSummary,
    OnExceptionCheckpoint,
    RichModelSummary,
    RichProgressBar,
    SpikeDetection,
    StochasticWeightAveraging,
    ThroughputMonitor,
    Timer,
    TQDMProgressBar,
    WeightAveraging,
)
from lightning.pytorch.utilities import grad_norm
from torch import nn
from torch.nn.functional import cross_entropy, normalize
from torch.utils.data import DataLoader, DistributedSampler

from campaigns.loops.setting import STEPS, Outcome, Setting, program
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
    language_step,
)


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
    loads: bool = True,
    resume: Any = None,
    **options: Any,
) -> Outcome:
    """Twenty steps of the Trainer, with validation."""
    curve = Curve()
    usual: dict[str, Any] = {"max_steps": STEPS, "enable_checkpointing": saves}
    trainer = trainer_of(setting, curve, *callbacks, strategy=strategy, **usual | options)
    model = module()
    train, val = (shared(setting, rows) if loads else None for rows in (80, 16))
    trainer.fit(model, train, val, ckpt_path=resume)
    metrics = metrics_of(trainer)
    # A metric's value for a step is that of a replica.
    metrics.pop("accuracy_step", None)
    metrics |= {f"lr {n}": g["lr"] for n, g in enumerate(trainer.optimizers[0].param_groups)}
    metrics = {name: value for name, value in metrics.items() if "nan" not in name}
    return Outcome(curve.losses, metrics, state_of(setting, trainer, model))


def trainer_of(
    setting: Setting, *callbacks: Callback, strategy: dict[str, Any] | None = None, **options: Any
) -> Trainer:
    """The Trainer, without what differs from run to run; seeds torch, as for its module."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.manual_seed(0)
    cut: Any = PipelineStrategy(**setting.options(**(strategy or {}))) if setting.cut else "auto"
    usual: dict[str, Any] = {
        "logger": False, "enable_progress_bar": False, "enable_model_summary": False,
        "use_distributed_sampler": False, "enable_checkpointing": False, "num_sanity_val_steps": 0,
    }  # fmt: skip
    return Trainer(
        accelerator="cpu", devices=setting.processes, strategy=cut, callbacks=list(callbacks),
        default_root_dir=setting.folder, **usual | options,
    )  # fmt: skip


def metrics_of(trainer: Trainer) -> dict[str, float]:
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def state_of(setting: Setting, trainer: Any, module: nn.Module) -> Any:
    """The state dict of all weights, on rank 0."""
    return trainer.strategy.pipelined.state() if setting.cut else module.state_dict()


def add(name: str, *args: Any, **options: Any) -> None:
    """A program that differs from the first by a few arguments; functions of the setting are called."""

    @program("Lightning", name)
    def _(setting: Setting) -> Outcome:
        if "precision" in options:
            torch.set_default_dtype(torch.float32)
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
add("progress bars", Classifier, lambda _: TQDMProgressBar(), enable_progress_bar=True)
add("RichProgressBar, RichModelSummary", Classifier, lambda _: RichProgressBar(),
    lambda _: RichModelSummary(), enable_progress_bar=True)  # fmt: skip
add("LearningRateMonitor, DeviceStatsMonitor, CSVLogger", Classifier,
    lambda _: LearningRateMonitor("step"), lambda _: DeviceStatsMonitor(), logger=True)  # fmt: skip
add("ThroughputMonitor", Classifier,
    lambda _: ThroughputMonitor(batch_size_fn=lambda batch: len(batch[0])), logger=True)  # fmt: skip
add("OnExceptionCheckpoint", Classifier, lambda s: OnExceptionCheckpoint(s.folder), saves=True)


class Sized(Classifier):
    """Its batches have a size that a callback finds."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_size = 2

    def train_dataloader(self) -> Any:
        return DataLoader(images(80).dataset, batch_size=self.batch_size)

    def val_dataloader(self) -> Any:
        return images(16)


add("BatchSizeFinder", Sized, lambda _: BatchSizeFinder(max_trials=2), loads=False)
add("WeightAveraging", Classifier, lambda _: WeightAveraging())
add("SpikeDetection", Classifier, lambda s: Spikes(exclude_batches_path=s.folder / "skip"))
add("precision='bf16-true'", precision="bf16-true")
add("precision='32-true'", precision="32-true")
add("precision='16-mixed'", precision="16-mixed")
add("detect_anomaly, deterministic", detect_anomaly=True, deterministic=True)
add("fast_dev_run=5", fast_dev_run=5)
add("limit_train_batches, max_epochs", limit_train_batches=3, max_epochs=3, max_steps=-1)
add("profiler='simple', barebones", profiler="simple")
add("inference_mode=False, sanity steps", inference_mode=False, num_sanity_val_steps=2)
add("reload_dataloaders_every_n_epochs=1", reload_dataloaders_every_n_epochs=1)
add("sync_batchnorm=True", sync_batchnorm=True)


class Spikes(SpikeDetection):
    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *args: Any) -> None:
        super().on_train_batch_end(trainer, module, outputs["loss"].float(), *args)


class Plateau(Classifier):
    """A schedule that watches a metric, and one for each step."""

    def configure_optimizers(self) -> Any:
        made = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        kinds = torch.optim.lr_scheduler
        return {
            "optimizer": made,
            "lr_scheduler": {
                "scheduler": kinds.ReduceLROnPlateau(made, patience=0, threshold=1.0),
                "monitor": "val_loss", "interval": "epoch",
            },
        }  # fmt: skip


class EachStep(Classifier):
    def configure_optimizers(self) -> Any:
        made = torch.optim.AdamW(self.parameters(), lr=0.01)
        schedule: Any = torch.optim.lr_scheduler.OneCycleLR(made, 0.05, STEPS)
        return [made], [{"scheduler": schedule, "interval": "step"}]


add("ReduceLROnPlateau", Plateau)
add("OneCycleLR each step", EachStep)


class OwnStep(Classifier):
    """It steps the optimizer itself, and warms up."""

    def optimizer_step(self, epoch: int, idx: int, optimizer: Any, closure: Any = None) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.001 * min(1.0, (self.trainer.global_step + 1) / 5)
        optimizer.step(closure=closure)

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.log("zeroed", 1.0)

    def on_train_epoch_end(self) -> None:
        self.log("epochs", float(self.current_epoch))


add("optimizer_step and hooks overridden", OwnStep)


class Prepared(Classifier):
    """Layers that are made late, hyperparameters that are saved, a step that prints."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.late: Any = None

    def configure_model(self) -> None:
        if self.late is None:
            with torch.random.fork_rng():
                torch.manual_seed(5)
                self.late = nn.Linear(1, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        images, labels = batch
        return super().training_step((self.late(images[..., None])[..., 0], labels), batch_idx)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.print("", end="")


add("configure_model, save_hyperparameters", Prepared)


class Copies(Callback):
    """Keeps clones of the weights in its state."""

    def state_dict(self) -> Any:
        return {"weights": {n: p.detach().clone() for n, p in self.module.named_parameters()}}

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.module = pl_module


add("a callback with clones of weights in its state", Classifier, lambda _: Copies(),
    lambda s: ModelCheckpoint(s.folder / "saved"), saves=True)  # fmt: skip


class Norms(Callback):
    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        module.log("norm", sum(p.detach().norm() for p in module.parameters()))


add("p.norm() in a callback", Classifier, lambda _: Norms())


class SkipsBatches(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx == 3 else loss


add("training_step returns None", SkipsBatches)


class Several(Classifier):
    """Two loaders to validate with, and a largest logit that is logged."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        logits = self(batch[0])
        self.log(f"val_{dataloader_idx}", cross_entropy(logits, batch[1]))
        if dataloader_idx == 0:
            self.log("largest", logits.max(), add_dataloader_idx=False)

    def val_dataloader(self) -> Any:
        return [images(8), images(8, seed=4)]


@program("Lightning", "several loaders to validate, a largest logit that is logged")
def _(setting: Setting) -> Outcome:
    curve = Curve()
    trainer = trainer_of(setting, curve, max_epochs=2)
    trainer.fit(Several(), shared(setting, 80))
    metrics = metrics_of(trainer)
    return Outcome(curve.losses, {n: v for n, v in metrics.items() if "val" in n or n == "largest"})


class Written(BasePredictionWriter):
    def __init__(self) -> None:
        super().__init__("batch")
        self.sums: list[float] = []

    def write_on_batch_end(self, trainer: Any, module: Any, prediction: Any, *_: Any) -> None:
        self.sums.append(float(prediction.square().sum()))


@program("Lightning", "validate, test, predict with BasePredictionWriter")
def _(setting: Setting) -> Outcome:
    writer = Written()
    trainer, model = trainer_of(setting, writer), Classifier()
    model.test_step = model.validation_step  # type: ignore[method-assign]
    batches = images(16, 8)
    metrics: dict[str, float] = {}
    for call in (trainer.validate, trainer.test):
        for row in call(model, batches, verbose=False):
            metrics |= {f"{call.__name__} {name}": of for name, of in row.items()}
    trainer.predict(model, batches)
    return Outcome(writer.sums, metrics, state_of(setting, trainer, model))


class Thawed(Classifier):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.01)


add("BaseFinetuning", Thawed, lambda _: Thaw())


class Backbone(Thawed):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = self.features


add("BackboneFinetuning", Backbone, lambda _: BackboneFinetuning(unfreeze_backbone_at_epoch=1))


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
    strategy={
        "loss_weight": {
            "main": lambda batch: (batch[1] + 1).sum(),
            **dict.fromkeys(("val_loss", "val_right"), lambda batch: len(batch[1])),
        }
    },
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
        loss, norm = language_step(fabric, model, optimizer, batch, number)
        losses.append(loss)
        norms.append(norm)
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
