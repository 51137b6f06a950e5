"""The settings of a training run: one table for the flags, the config file and the docs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=1)]
Amount = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Text = Annotated[str, Field(min_length=1)]


def _setting(default: Any, group: str, description: str) -> Any:
    return Field(default, description=description, json_schema_extra={"group": group})


class TrainConfig(BaseModel):
    """Every setting of ``penstock train``: the keys of a config file, and the names of the flags.

    Raises:
        pydantic.ValidationError: an unknown key, or a value of the wrong type or range.
            :func:`penstock.train.resolve` turns it into one line.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    ranks: Count | None = _setting(
        None, "Pipeline", "Ranks of the pipeline. Default: the world size under torchrun, else 4."
    )
    stages_per_rank: Count | None = _setting(
        None, "Pipeline", "Stages on each rank. Default: what the schedule needs."
    )
    replicas: Count = _setting(
        1, "Pipeline", "Copies of the pipeline, each with its own processes; they share each batch."
    )
    shard: bool = _setting(
        False, "Pipeline", "Whether each replica holds only a part of each weight (FSDP2)."
    )
    schedule: Text = _setting("1F1B", "Pipeline", "Name of the schedule.")
    plan: Text | None = _setting(
        None,
        "Pipeline",
        "A file written by penstock plan --json, or auto: the fastest plan, found from measured costs. It "
        "decides schedule, stages and microbatches.",
    )
    microbatches: Count = _setting(8, "Pipeline", "Number of parts that each batch is split into.")
    device: Text = _setting("cpu", "Pipeline", "Where to compute: cpu, cuda or cuda:<index>.")
    threads: Count = _setting(
        1,
        "Pipeline",
        "Threads of each process; with 1, several processes give the same bits as one.",
    )

    layers: Count = _setting(4, "Model", "Transformer blocks.")
    width: Count = _setting(128, "Model", "Features of the residual stream.")
    heads: Count = _setting(4, "Model", "Attention heads in each block.")
    sequence: Count = _setting(128, "Model", "Bytes in each sample.")

    steps: Count = _setting(300, "Training", "Optimizer steps.")
    batch: Count = _setting(16, "Training", "Samples in each step.")
    learning_rate: Positive = _setting(4e-3, "Training", "Peak learning rate of AdamW.")
    warmup: Amount = _setting(
        50, "Training", "Steps of linear warm-up; then a cosine down to a tenth of the peak."
    )
    weight_decay: NotNegative = _setting(0.05, "Training", "Weight decay of the matrices.")
    clip: Positive = _setting(1.0, "Training", "Largest gradient norm.")
    seed: Amount = _setting(0, "Training", "Seed of weights, batches and sample.")

    save_every: Count | None = _setting(
        None, "Checkpoints", "Steps between checkpoints. Default: only when the run is stopped."
    )
    keep: Count = _setting(2, "Checkpoints", "How many checkpoints are kept.")
    resume: Text | None = _setting(
        None,
        "Checkpoints",
        "Go on from a run folder or a folder of checkpoints; auto: from --out if that has one.",
    )
    time_limit: Positive | None = _setting(
        None, "Checkpoints", "Seconds after which the run is saved and stops."
    )

    data: Text | None = _setting(
        None, "Text and output", "File or folder to train on. Default: Python's standard library."
    )
    held_out_batches: Count = _setting(
        16, "Text and output", "Batches of held-out text at the end."
    )
    prompt: Text = _setting("def ", "Text and output", "Beginning of the sample text.")
    sample_length: Amount = _setting(200, "Text and output", "Bytes of generated text.")
    temperature: Positive = _setting(0.7, "Text and output", "Randomness of the sample.")
    log_every: Count = _setting(10, "Text and output", "Steps between printed lines.")
    out: Text | None = _setting(None, "Text and output", "Run folder. Default: runs/<date-time>.")


def group_of(name: str) -> str:
    """The heading under which a setting is listed."""
    extra = TrainConfig.model_fields[name].json_schema_extra
    return str(extra["group"]) if isinstance(extra, Mapping) else ""
