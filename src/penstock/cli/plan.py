"""``penstock plan``: the fastest ways to run a model that fit into memory, found before it runs."""

from __future__ import annotations

import math
import re
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from penstock import plan as planning
from penstock import train
from penstock.cli.output import check_folder, write, write_text
from penstock.errors import ConfigError

Config = Annotated[
    Path | None, typer.Option("--config", help="TOML file with the settings of penstock train.")
]
Hf = Annotated[
    Path | None,
    typer.Option(
        "--hf", help="A config.json of transformers: a causal language model, no weights."
    ),
]
Ranks = Annotated[int | None, typer.Option("--ranks", min=1, help="How many devices there are.")]
Memory = Annotated[
    str | None,
    typer.Option(
        "--memory", help="What each may hold, such as 80GB or 512MiB. Default: the device's."
    ),
]
Batch = Annotated[int | None, typer.Option("--batch", min=1, help="Samples of a step.")]
Sequence = Annotated[int | None, typer.Option("--sequence", min=1, help="Tokens of a sample.")]
Dtype = Annotated[str, typer.Option("--dtype", help="Type of the weights, with --hf.")]
OnDevice = Annotated[
    str | None,
    typer.Option(
        "--device", help="Predict for this device, such as h100. Default: measure on this machine."
    ),
]
Efficiency = Annotated[
    float | None,
    typer.Option("--efficiency", help="The share of the device's peak that matrix products reach."),
]
Schedules = Annotated[
    list[str] | None, typer.Option("--schedule", help="Choose among these only; may be repeated.")
]
Pipeline = Annotated[
    int | None,
    typer.Option(
        "--pipeline",
        min=1,
        help="Ranks of a pipeline; the others are replicas. Default: all with --config, else any.",
    ),
]
Microbatches = Annotated[
    int | None,
    typer.Option("--microbatches", min=1, help="Microbatches of a pipeline. Default: any."),
]
Checkpoint = Annotated[
    str | None,
    typer.Option("--checkpoint", help="Units to recompute: none, needed or all. Default: any."),
]
Keep = Annotated[int, typer.Option("--keep", min=1, help="How many plans to show.")]
Seconds = Annotated[float, typer.Option("--seconds", help="How long to improve the best plans.")]
Report = Annotated[Path | None, typer.Option("--report", help="Write an HTML file with pictures.")]
Json = Annotated[Path | None, typer.Option("--json", help="Write the best plan as JSON.")]


def plan(  # noqa: PLR0913 - one parameter for each flag
    config: Config = None,
    hf: Hf = None,
    ranks: Ranks = None,
    memory: Memory = None,
    batch: Batch = None,
    sequence: Sequence = None,
    dtype: Dtype = "bfloat16",
    device: OnDevice = None,
    efficiency: Efficiency = None,
    schedule: Schedules = None,
    pipeline: Pipeline = None,
    microbatches: Microbatches = None,
    checkpoint: Checkpoint = None,
    keep: Keep = 10,
    seconds: Seconds = 10.0,
    report: Report = None,
    json: Json = None,
) -> None:
    """Find the fastest ways to run a model on a number of devices, before it runs.

    The model is the one of penstock train (--config), or one of transformers (--hf) without its weights.
    """
    check_folder(report)
    check_folder(json)
    if (config is None) == (hf is None):
        raise ConfigError(
            "give the settings of penstock train as --config, or a model's config as --hf"
        )
    if efficiency is not None and device is None:
        raise ConfigError("--efficiency is of a device to predict for; give its name as --device")
    limit = None if memory is None else bytes_of(memory)
    described = None
    if device is not None:
        described = planning.device_named(device, compute_efficiency=efficiency or 0.0)
    if config is not None:
        flags = {"ranks": ranks, "batch": batch, "sequence": sequence}
        chosen = {name: value for name, value in flags.items() if value is not None}
        settings = train.resolve(chosen, config)
        profile = partial(train.profile_of, settings, described)
        ranks, batch = train.ranks_of(settings), settings.batch
        pipeline = pipeline or ranks
    else:
        if ranks is None or batch is None or described is None or hf is None:
            needed = {"--ranks": ranks, "--batch": batch, "--device": described}
            lacking = ", ".join(flag for flag, value in needed.items() if value is None)
            raise ConfigError(f"--hf needs {lacking} too")
        profile = partial(
            planning.predict_hf,
            hf,
            batch=batch,
            device=described,
            sequence=sequence,
            dtype=dtype,
            stages=ranks,
        )
    plans = planning.search(
        profile,
        ranks=ranks,
        batch=batch,
        memory=limit,
        schedules=schedule or None,
        pipeline=pipeline,
        microbatches=microbatches,
        checkpoint=checkpoint,
        keep=keep,
        seconds=seconds,
    )
    typer.echo(str(plans))
    write(report, plans.report)
    write_text(json, lambda: plans[0].to_json() + "\n")


_SIZE = re.compile(r"(\d+(?:\.\d+)?(?:e\d+)?)\s*([kmgt]?)(i?)b?", re.IGNORECASE)


def bytes_of(text: str) -> float:
    """The bytes of a size such as ``80GB``, ``512MiB`` or ``1000``.

    Raises:
        ConfigError: the text is not a size of at least one byte.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ConfigError(
            f"memory={text!r}: must be a size such as 80GB, 512MiB or a number of bytes"
        )
    number, prefix, binary = match.groups()
    base = 1024.0 if binary else 1000.0
    size: float = float(number) * base ** " kmgt".index(prefix.lower() or " ")
    if not 1 <= size < math.inf:
        raise ConfigError(f"memory={text!r}: must be a number of at least one byte, such as 80GB")
    return size
