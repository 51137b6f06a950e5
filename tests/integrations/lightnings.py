"""Small modules of Lightning, and runs of its Trainer and Fabric on them; as a script, what tests launch.

``python -m tests.integrations.lightnings FOLDER`` trains both under torchrun, with Fabric also as two
replicas, and rank 0 writes what came out into ``FOLDER/report.json``.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BaseFinetuning, Callback
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torchmetrics import Accuracy, F1Score, MeanMetric, MetricCollection

from penstock.errors import AgreementError
from penstock.integrations.lightning import FabricPipelineStrategy, PipelineStrategy
from tests.catalogue.models import Gpt

PROCESSES = int(os.environ.get("WORLD_SIZE", "1"))
STEPS = 6
HALF = STEPS // 2


class Classifier(LightningModule):
    """Of small images; it logs, schedules, draws and evaluates."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU(), nn.Conv2d(4, 8, 3)),
            *(nn.Flatten(), nn.Dropout(dropout), nn.Linear(32, 16), nn.ReLU()),
        )
        self.between = nn.ModuleList([nn.Linear(16, 16) for _ in range(3)])
        self.head = nn.Linear(16, 5)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.features(images)
        for layer in self.between:
            hidden = hidden + layer(hidden).tanh()
        logits: Tensor = self.head(hidden)
        return logits

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        images, labels = batch
        logits = self(images)
        loss = cross_entropy(logits, labels)
        right = (logits.argmax(-1) == labels).float().mean()
        self.log_dict({"loss": loss, "right": right}, on_step=True, on_epoch=True)
        self.log_dict({"batch": batch_idx, "bright": images.mean(), "nan": loss * float("nan")})
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        images, labels = batch
        logits = self(images)
        self.log("val_loss", cross_entropy(logits, labels))
        self.log("val_right", (logits.argmax(-1) == labels).float().mean(), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits: Tensor = self(batch[0])
        return logits

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class Measured(Classifier):
    """It keeps metrics and lists, returns more than the loss, and asks for epochs and batches."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = Accuracy(task="multiclass", num_classes=5)
        f1 = F1Score("multiclass", num_classes=5)
        self.measures = MetricCollection({"f1": f1}, prefix="val_")
        self.size, self.right, self.seen = MeanMetric(), list[Any](), list[Any]()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        images, labels = batch
        logits = self(images)
        loss = cross_entropy(logits, labels)
        if self.current_epoch >= 1:
            loss = loss * 1.5
        if batch_idx % 2:
            loss = loss * 0.9
            self.log("odd", loss)
        return {"loss": loss, "logits": logits.detach(), "mean": logits.mean(), "by": "hand"}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        values = (outputs["loss"], outputs["logits"].square().sum(), outputs["mean"])
        self.seen += [float(value) for value in values]
        self.accuracy(outputs["logits"], batch[1])
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self(batch[0])
        return {"logits": logits, "size": cross_entropy(logits, batch[1])}

    def on_validation_batch_end(
        self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        logits, labels = outputs["logits"], batch[1]
        self.measures.update(logits, labels)
        self.log_dict(self.measures)
        self.size.update(outputs["size"])
        self.log("size", self.size)
        self.right.append(logits.argmax(-1) == labels)

    def on_validation_epoch_end(self) -> None:
        self.log("right", torch.cat(self.right).float().mean())
        self.right.clear()


class LanguageModel(LightningModule):
    """The catalogue's GPT; sequences have different lengths, with ``-1`` behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Gpt()

    def forward(self, tokens: Tensor) -> Any:
        return self.net(tokens.clamp(min=0))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits, labels = self(batch["tokens"])[:, :-1], batch["tokens"][:, 1:]
        loss = cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-1)
        return {"loss": loss}

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return self.training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        groups = [[p for p in self.parameters() if (p.ndim > 1) == many] for many in (True, False)]
        decays = zip(groups, (0.1, 0.0), strict=True)
        return torch.optim.AdamW([{"params": p, "weight_decay": d} for p, d in decays], lr=0.01)


def count_labels(batch: Any) -> Tensor:
    """What the loss of the language model is a mean over."""
    tokens: Tensor = batch["tokens"]
    return (tokens[:, 1:] != -1).sum()


def images(count: int = 24, batch: int = 8, seed: int = 1) -> Any:
    draw = torch.Generator().manual_seed(seed)
    pixels = torch.randn(count, 1, 8, 8, generator=draw)
    labels = torch.randint(5, (count,), generator=draw)
    return DataLoader(TensorDataset(pixels, labels), batch_size=batch)


class Tokens(Dataset[Any]):
    def __init__(self) -> None:
        self.tokens = torch.randint(20, (24, 12), generator=torch.Generator().manual_seed(3))
        for row in range(24):
            self.tokens[row, 4 + row * 7 % 9 :] = -1

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        return {"tokens": self.tokens[index]}


class Curve(Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        if outputs:
            self.losses.append(float(outputs["loss"]))


class Thaw(BaseFinetuning):
    def freeze_before_training(self, module: Any) -> None:
        self.freeze(module.features)

    def finetune_function(self, module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(module.features, optimizer)


def trainer_of(strategy: Any = "auto", **options: Any) -> Trainer:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    usual: dict[str, Any] = dict.fromkeys(("logger", "enable_progress_bar"), False)
    usual |= {"enable_checkpointing": False, "enable_model_summary": False, "max_steps": STEPS}
    usual["devices"] = PROCESSES
    return Trainer(accelerator="cpu", strategy=strategy, **usual | options)


def classify(strategy: Any = "auto", resume: Any = None, **options: Any) -> dict[str, Any]:
    """What the Trainer gives: losses, metrics, predictions; and itself."""
    torch.manual_seed(0)
    module, curve = Classifier(options.pop("dropout", 0.0)), Curve()
    trainer = trainer_of(strategy, callbacks=[curve], gradient_clip_val=0.5, **options)
    trainer.fit(module, images(), images(12, 6), ckpt_path=resume)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    outputs: Any = trainer.predict(module, images(12, 6))
    return {
        "losses": curve.losses,
        "metrics": metrics,
        "outputs": [float(one.square().sum()) for one in outputs],
        "trainer": trainer,
    }


def measure(
    strategy: Any = "auto", epochs: int = 2, save: Any = None, **options: Any
) -> dict[str, float]:
    """What metrics, lists and hooks saw, and the size of the predictions."""
    torch.manual_seed(0)
    module = Measured()
    trainer = trainer_of(strategy, max_epochs=epochs, max_steps=-1, **options)
    trainer.fit(module, images(), images(11, 6))
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    if save is not None:
        trainer.save_checkpoint(save)
    outputs: Any = trainer.predict(module, images(12, 6))
    metrics["predicted"] = sum(float(one.square().sum()) for one in outputs)
    return metrics | {f"seen {place}": value for place, value in enumerate(module.seen)}


def language_step(
    fabric: Fabric, model: Any, optimizer: Any, batch: Any, number: int
) -> tuple[float, float]:
    """A step of a loop with Fabric: its loss, and the norm of the gradients."""
    loss = model.training_step(batch, number)["loss"]
    fabric.backward(loss)
    norm: Any = fabric.clip_gradients(model, optimizer, max_norm=0.5)
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach()), float(norm)


def model_language(
    strategy: Any = "auto", load: Any = None, save: Any = None, batch: int = 8
) -> dict[str, Any]:
    """What a loop with Fabric gives: losses, norms, a loss and outputs in evaluation."""
    fabric = Fabric(accelerator="cpu", devices=PROCESSES, strategy=strategy)
    fabric.launch()
    torch.manual_seed(0)
    module = LanguageModel()
    model, optimizer = fabric.setup(module, module.configure_optimizers())
    loader: Any = fabric.setup_dataloaders(DataLoader(Tokens(), batch_size=batch))
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "step": 0}
    if load is not None:
        fabric.load(load, state)
    losses, norms = [], []
    batches = [one for _ in range(2) for one in loader]
    for number, one in list(enumerate(batches))[state["step"] :]:
        loss, norm = language_step(fabric, model, optimizer, one, number)
        losses.append(loss)
        norms.append(norm)
        if save is not None and number == HALF:
            fabric.save(save, {**state, "step": number + 1})
    model.eval()
    with torch.no_grad():
        loss = model.validation_step(batches[0], 0)["loss"]
        outputs = model(batches[0]["tokens"])
    found = {"losses": losses, "norms": norms}
    return {**found, "evaluated": float(loss), "outputs": float(outputs.square().sum())}


def report(folder: Path) -> dict[str, Any]:
    options: dict[str, Any] = {"ranks": PROCESSES, "microbatches": 4}
    whole = PipelineStrategy(schedule="1F1B", save_distributed_checkpoint=False, **options)
    measured = measure(whole, epochs=1, save=folder / "trained.ckpt")
    halves = FabricPipelineStrategy(
        schedule="ZB-V", ranks=PROCESSES // 2, microbatches=2, loss_weight=count_labels
    )
    replicas = model_language(halves, batch=4, save=folder / "tokens.ckpt")
    message = ""
    try:
        others = images(seed=int(os.environ["RANK"]))
        trainer_of(PipelineStrategy(**options)).fit(Classifier(), others)
    except AgreementError as error:
        message = str(error)
    return {"replicas": replicas, "measured": measured, "refusal": message}


if __name__ == "__main__":
    to = Path(sys.argv[1])
    written = json.dumps(report(to))
    if os.environ["RANK"] == "0":
        (to / "report.json").write_text(written)
