"""The settings of a training run: one table for flags, config file and docs, checked in one place.

Flags win over the config file, and the file over the defaults. Nothing here needs torch, so a mistake is
reported at once.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from penstock._engine.launchers import check_launcher
from penstock.errors import ConfigError, InputFileError
from penstock.schedule import Schedule, build
from penstock.schedule.reading import read_text
from penstock.train.runfolder import AUTO

# ---- the table

Count = Annotated[int, Field(ge=1, le=1_000_000_000)]
Amount = Annotated[int, Field(ge=0, le=1_000_000_000)]
Threads = Annotated[int, Field(ge=1, le=4096)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Text = Annotated[str, Field(min_length=1)]
Device = Annotated[str, Field(pattern=r"^[a-z]+(:\d{1,4})?$")]

NOT_OF_RUN = {"out", "resume"}
"""Settings that a run folder does not keep: where a run is stored."""
DEFAULT_RANKS = 4
LARGEST_SCHEDULE = 1_000_000
"""Microbatches times stages. A larger schedule would take minutes to build."""
LARGEST_MODEL = 100_000_000_000
"""Weights in the matrices. A larger model is a typo, and would run out of memory."""
LARGEST_BATCH = 100_000_000
"""Bytes of text in a step. A larger batch is a typo, too."""


def _setting(default: Any, group: str, description: str) -> Any:
    return Field(default, description=description, json_schema_extra={"group": group})


class TrainConfig(BaseModel):
    """Every setting of ``penstock train``: the keys of a config file, and the names of the flags.

    Raises:
        pydantic.ValidationError: an unknown key, a value of the wrong type or range, or settings that
            contradict each other. :func:`penstock.train.resolve` turns it into one line.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    ranks: Count | None = _setting(
        None,
        "Pipeline",
        "Ranks of the pipeline. Default: the world size under torchrun, else those of the plan, or 4.",
    )
    stages_per_rank: Count | None = _setting(
        None, "Pipeline", "Stages on each rank. Default: what the schedule needs."
    )
    replicas: Count = _setting(
        1, "Pipeline", "Copies of the pipeline that share each batch, each in its own processes."
    )
    shard: bool = _setting(False, "Pipeline", "Shard the weights over the replicas (FSDP2).")
    schedule: Text = _setting("1F1B", "Pipeline", "Name of the schedule.")
    plan: Text | None = _setting(
        None,
        "Pipeline",
        "A plan written by penstock plan --json, which sets schedule, stages and microbatches; or auto: "
        "measure the model, and use the fastest schedule and stages for this many microbatches.",
    )
    microbatches: Count = _setting(8, "Pipeline", "Microbatches per batch.")
    recompute: Text | None = _setting(
        None,
        "Pipeline",
        "Modules whose activations backward recomputes, to save memory: all, or paths such as "
        "blocks.0,blocks.1.",
    )
    device: Device = _setting(
        "cpu",
        "Pipeline",
        "Where to compute: cpu, cuda, cuda:<index>, or another accelerator.",
    )
    threads: Threads = _setting(
        1,
        "Pipeline",
        "Threads per process. With 1, any number of processes gives the same bits.",
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
    seed: Seed = _setting(0, "Training", "Seed of weights and batches.")

    save_every: Count | None = _setting(
        None,
        "Checkpoints",
        "Steps between checkpoints. Default: save only when the run stops early.",
    )
    keep: Count = _setting(2, "Checkpoints", "How many checkpoints are kept.")
    resume: Text | None = _setting(
        None,
        "Checkpoints",
        "Resume the run of this folder; auto: that of --out, if it has a checkpoint.",
    )
    time_limit: Positive | None = _setting(
        None,
        "Checkpoints",
        "Save and stop after this many seconds. A resumed run gets a fresh limit.",
    )

    data: Text | None = _setting(
        None, "Text and output", "File or folder to train on. Default: Python's standard library."
    )
    held_out_batches: Count = _setting(
        16, "Text and output", "Batches of held-out text at the end."
    )
    log_every: Count = _setting(10, "Text and output", "Steps between printed lines.")
    watch_every: Count | None = _setting(
        None, "Text and output", "Steps between those that are recorded to warn of what is slow."
    )
    out: Text | None = _setting(None, "Text and output", "Run folder. Default: runs/<date-time>.")

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        """Refuse settings that contradict each other; causes come before their consequences."""
        for text in chain(self._contradictions(), self._misfits()):
            raise ConfigError(text)
        return self

    def _contradictions(self) -> Iterator[str]:
        replicas, microbatches, batch = self.replicas, self.microbatches, self.batch
        samples = batch // replicas
        over = f" over replicas={replicas}" if replicas > 1 else ""
        if self.shard and replicas == 1:
            yield "shard=True without replicas: weights are sharded over replicas; set replicas to at least 2"
        if self.plan is not None and replicas > 1:
            yield f"plan={self.plan!r} with replicas={replicas}: a plan is for one pipeline; leave one out"
        if self.plan is not None and self.recompute is not None:
            yield (
                f"plan={self.plan!r} with recompute={self.recompute!r}: the plan decides what is "
                "recomputed; leave one out"
            )
        if microbatches > samples and not self._is_planned:
            yield (
                f"microbatches={microbatches} of batch={batch}{over}: a microbatch needs a sample; ask for "
                f"at most {samples} microbatches or a batch of {microbatches * replicas} or more"
            )
        if self.width % (2 * self.heads):
            yield (
                f"width={self.width} with heads={self.heads}: each head needs an even number of features; "
                f"choose a width that {2 * self.heads} divides"
            )
        if 12 * self.layers * self.width**2 > LARGEST_MODEL:
            yield (
                f"layers={self.layers} with width={self.width}: a model of more than {LARGEST_MODEL} "
                "weights; choose fewer layers or a smaller width"
            )
        if batch * self.sequence > LARGEST_BATCH:
            yield (
                f"batch={batch} with sequence={self.sequence}: more than {LARGEST_BATCH} bytes in a step; "
                "choose a smaller batch or sequence"
            )
        if self.resume == AUTO and self.out is None:
            yield "resume='auto' continues in the run folder; name it with out="

    @property
    def _is_planned(self) -> bool:
        """Whether the schedule and the number of microbatches are those of a plan that was made before."""
        return self.plan not in (None, AUTO)

    def _misfits(self) -> Iterator[str]:
        """The problems with the schedule; one of a billion actions is refused before it is built."""
        if self._is_planned:
            return
        stages = ranks_of(self) * (self.stages_per_rank or 1)
        if stages <= self.layers:
            if stages * self.microbatches > LARGEST_SCHEDULE:
                yield (
                    f"microbatches={self.microbatches} in {stages} stages: a schedule of more than "
                    f"{LARGEST_SCHEDULE} forward passes; ask for fewer microbatches or stages"
                )
            schedule = schedule_of(self)
            if not schedule.trains:
                yield f"schedule={self.schedule!r} has no backward; choose one that trains"
            stages = schedule.stages
        if stages > self.layers:
            yield (
                f"{stages} stages for layers={self.layers}: every stage needs a layer; "
                f"ask for fewer ranks or stages per rank, or for at least {stages} layers"
            )


def ranks_of(config: TrainConfig) -> int:
    """The ranks of a pipeline: as set; else, under ``torchrun``, the world size over the replicas; else 4."""
    if config.ranks:
        return config.ranks
    world = world_size()
    return DEFAULT_RANKS if world is None else max(1, world // config.replicas)


def world_size() -> int | None:
    """The number of processes that torchrun started; None without torchrun.

    Raises:
        UsageError: another launcher has started several processes, without torch's variables.
    """
    check_launcher()
    world = os.environ.get("WORLD_SIZE")
    return None if world is None else int(world)


def schedule_of(config: TrainConfig) -> Schedule:
    """The schedule that the settings name."""
    return build(
        config.schedule,
        ranks=ranks_of(config),
        microbatches=config.microbatches,
        stages_per_rank=config.stages_per_rank,
    )


def group_of(name: str) -> str:
    """The heading under which a setting is listed."""
    extra = TrainConfig.model_fields[name].json_schema_extra
    return str(extra["group"]) if isinstance(extra, Mapping) else ""


# ---- from flags and a file to settings


def resolve(flags: Mapping[str, Any], file: Path | None = None) -> TrainConfig:
    """Combine flags, config file and defaults into the settings of a run.

    Args:
        flags: settings by name that win over the file.
        file: a TOML file with settings; by default that of the run folder to resume.

    Raises:
        ConfigError: the flags are wrong, or contradict the file or the defaults.
        InputFileError: the file is not TOML, or its settings are wrong whatever the flags are.
    """
    resume = flags.get("resume")
    is_of_run = file is None and isinstance(resume, str) and resume != AUTO
    if is_of_run:
        settings = Path(str(resume), "config.toml")
        file = settings if settings.is_file() else None
    table = {} if file is None else read(file)
    if is_of_run and (elsewhere := sorted(NOT_OF_RUN & table.keys())):
        raise InputFileError(
            f"{file}: {elsewhere[0]}= is no setting that a run folder keeps: somebody has changed the file, "
            "and the run would be written elsewhere; delete the line, or give it as a flag"
        )
    complaint = _complaint({**table, **flags})
    if complaint and file is not None and complaint == _complaint(table):
        raise InputFileError(f"{file}: {complaint}")
    if complaint:
        raise ConfigError(complaint)
    return TrainConfig(**{**table, **flags})


def _complaint(settings: Mapping[str, Any]) -> str:
    """The problems with settings, in one line; empty if there are none."""
    try:
        TrainConfig(**settings)
    except ValidationError as error:
        return "; ".join(map(_sentence, error.errors()))
    return ""


def _sentence(detail: ErrorDetails) -> str:
    """An error of pydantic, in our words."""
    if detail["type"] == "value_error":
        return str(detail["ctx"]["error"])
    name = str(detail["loc"][0])
    if detail["type"] == "extra_forbidden":
        near = get_close_matches(name, TrainConfig.model_fields, n=1)
        known = f"did you mean {near[0]!r}? Known" if near else "known"
        return f"unknown setting {name!r}; {known}: {', '.join(TrainConfig.model_fields)}"
    return f"{name}={_shown(detail['input'])}: {detail['msg'].replace('Input', 'it', 1)}"


def _shown(value: Any) -> str:
    """A value as text, cut short if it is too long to read; Python refuses to print huge integers."""
    if isinstance(value, int) and value.bit_length() > 256:
        return f"<a number of {value.bit_length()} bits>"
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}…"


def read(file: Path) -> dict[str, Any]:
    """The contents of a TOML file.

    Raises:
        ConfigError: there is no such file.
        InputFileError: the file cannot be read, or is not TOML in UTF-8.
    """
    if not file.is_file():
        raise ConfigError(
            f"config={str(file)!r}: there is no such file; give the path of a TOML file"
        )
    text = read_text(file)
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputFileError(
            f"{file}: not TOML: {error}; write lines such as steps = 100"
        ) from error


def to_toml(config: TrainConfig) -> str:
    """The settings as a config file that repeats the run; it leaves out where the run is stored."""
    values = config.model_dump(exclude_none=True, exclude=NOT_OF_RUN)
    return "".join(f"{name} = {_toml(value)}\n" for name, value in values.items())


def _toml(value: str | float) -> str:
    """A value in TOML, which writes these types as JSON does, but also escapes DEL."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
