"""``penstock plan``: the fastest ways to run a model that fit into memory, found before it runs."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock import plan as planning
from penstock import train
from penstock.cli.output import check_folder, read_text, write, write_text
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
Ranks = Annotated[
    str | None,
    typer.Option("--ranks", help="How many devices there are, or which: 4xh100-80GB,4xa100-40GB."),
]
ClusterFile = Annotated[
    Path | None,
    typer.Option("--cluster", help="The ranks and links that penstock doctor --out has measured."),
]
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
Recompute = Annotated[
    str | None,
    typer.Option(
        "--recompute", help="Units to recompute: none, needed or all; or offload. Default: any."
    ),
]
Host = Annotated[
    str | None,
    typer.Option(
        "--host-bandwidth",
        help="What a device and its host exchange per second, such as 50GB: activations may wait there.",
    ),
]
Keep = Annotated[int, typer.Option("--keep", min=1, help="How many plans to show.")]
Seconds = Annotated[float, typer.Option("--seconds", help="How long to improve the best plans.")]
Report = Annotated[Path | None, typer.Option("--report", help="Write an HTML file with pictures.")]
Json = Annotated[Path | None, typer.Option("--json", help="Write the best plan as JSON.")]


def plan(  # noqa: PLR0913 - one parameter for each flag
    config: Config = None,
    hf: Hf = None,
    ranks: Ranks = None,
    cluster: ClusterFile = None,
    memory: Memory = None,
    batch: Batch = None,
    sequence: Sequence = None,
    dtype: Dtype = "bfloat16",
    device: OnDevice = None,
    efficiency: Efficiency = None,
    schedule: Schedules = None,
    pipeline: Pipeline = None,
    microbatches: Microbatches = None,
    recompute: Recompute = None,
    host_bandwidth: Host = None,
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
    limit = None if memory is None else size_from(memory)
    count, machines = _cluster_of(ranks, cluster)
    measures = machines is None or (config is not None and cluster is not None)
    described = None if measures or machines is None else machines.devices[0]
    if device is not None:
        described = planning.device_named(device, compute_efficiency=efficiency)
    asked: dict[str, Any] = {"schedules": schedule or None, "keep": keep, "seconds": seconds}
    asked |= {"memory": limit, "microbatches": microbatches, "recompute": recompute}
    asked["host_bandwidth"] = None if host_bandwidth is None else size_from(host_bandwidth)
    if config is not None:
        flags = {
            "ranks": count,
            "batch": batch,
            "sequence": sequence,
            # The search chooses; the number in the file would only be checked against the batch.
            "microbatches": microbatches or 1,
        }
        chosen = {name: value for name, value in flags.items() if value is not None}
        settings = train.resolve(chosen, config)
        profile = partial(train.profile_of, settings, described)
        count, batch = train.ranks_of(settings), settings.batch
        if machines is not None and len(machines) != count:
            raise ConfigError(f"the cluster has {len(machines)} ranks, and the run {count}")
        pipeline = pipeline or count
    else:
        if count is None or batch is None or described is None or hf is None:
            needed = {"--ranks": count, "--batch": batch, "--device": described}
            lacking = ", ".join(flag for flag, value in needed.items() if value is None)
            raise ConfigError(f"--hf needs {lacking} too")
        profile = partial(
            planning.predict_hf,
            hf,
            batch=batch,
            device=described,
            sequence=sequence,
            dtype=dtype,
            stages=count,
        )
    asked |= {"batch": batch, "pipeline": pipeline, "cluster": machines}
    plans = planning.search(profile, **asked, ranks=count)
    typer.echo(str(plans))
    write(report, plans.report)
    write_text(json, lambda: plans[0].to_json() + "\n")


def _cluster_of(ranks: str | None, file: Path | None) -> tuple[int | None, planning.Cluster | None]:
    """The number of ranks, and their devices if these are given."""
    if file is not None:
        if ranks is not None:
            raise ConfigError("--cluster says which ranks there are; leave --ranks out")
        cluster = planning.Cluster.from_json(read_text(file))
        return len(cluster), cluster
    if ranks is None or ranks.strip().isdecimal():
        count = None if ranks is None else int(ranks)
        if count == 0:
            raise ConfigError("--ranks must be at least 1")
        return count, None
    cluster = planning.Cluster.parse(ranks)
    return len(cluster), cluster


def size_from(text: str) -> float:
    """The bytes of a size such as ``80GB``, ``512MiB`` or ``1000``.

    Raises:
        ConfigError: the text is not a size of at least one byte.
    """
    size = planning.bytes_of(text)
    if size is None:
        raise ConfigError(
            f"memory={text!r}: must be a size such as 80GB, 512MiB or a number of bytes"
        )
    if not 1 <= size < math.inf:
        raise ConfigError(f"memory={text!r}: must be a number of at least one byte, such as 80GB")
    return size
