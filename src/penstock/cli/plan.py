"""``penstock plan``: the fastest ways to run a model that fit into memory, found before it runs."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock import plan as planning
from penstock import train
from penstock.errors import ConfigError, UsageError

if TYPE_CHECKING:
    from penstock.plan import Device, Plans, Profile

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?(?:e\d+)?)\s*([kmgt]?i?b?)\s*", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}

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

app = typer.Typer(add_completion=False)


@app.command()
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
    for path in (report, json):
        if path is not None and not path.absolute().parent.is_dir():
            raise UsageError(f"{path}: cannot be written: there is no folder {path.parent}")
    if (config is None) == (hf is None):
        raise ConfigError(
            "give the settings of penstock train as --config, or a model's config as --hf"
        )
    if efficiency is not None and device is None:
        raise ConfigError("--efficiency is of a device to predict for; give its name as --device")
    on = (
        None
        if device is None
        else planning.device_named(device, compute_efficiency=efficiency or 0.0)
    )
    limit = None if memory is None else bytes_of(memory)
    if config is not None:
        profile, ranks, batch = _of_config(config, on, ranks=ranks, batch=batch, sequence=sequence)
        pipeline = pipeline or ranks
    else:
        profile, ranks, batch = _of_hf(hf, on, dtype, ranks=ranks, batch=batch, sequence=sequence)
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
    _write(plans, report, json)


def _of_config(config: Path, device: Device | None, **flags: Any) -> tuple[Profile, int, int]:
    given = {name: value for name, value in flags.items() if value is not None}
    settings = train.resolve(given, config)
    return train.profile_of(settings, device), train.ranks_of(settings), settings.batch


def _of_hf(
    config: Path | None, device: Device | None, dtype: str, **flags: Any
) -> tuple[Profile, int, int]:
    lacking = [name for name in ("ranks", "batch") if flags[name] is None]
    if device is None:
        lacking.append("device")
    if lacking or device is None or config is None:
        raise ConfigError(f"--hf needs {', '.join(f'--{name}' for name in lacking)} too")
    profile = planning.predict_hf(
        config,
        batch=flags["batch"],
        device=device,
        sequence=flags["sequence"],
        dtype=dtype,
        stages=flags["ranks"],
    )
    return profile, flags["ranks"], flags["batch"]


def _write(plans: Plans, report: Path | None, json: Path | None) -> None:
    if report is not None:
        _written(report, lambda: plans.report(report))
    if json is not None:
        _written(json, lambda: json.write_text(plans[0].to_json() + "\n", encoding="utf-8"))


def _written(path: Path, write: Callable[[], object]) -> None:
    try:
        write()
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror}") from error
    typer.echo(f"wrote {path}")


def bytes_of(text: str) -> float:
    """The bytes of a size such as ``80GB``, ``512MiB`` or ``1000``.

    Raises:
        ConfigError: the text is not a size.
    """
    found = _SIZE.fullmatch(text)
    if found is None:
        raise ConfigError(
            f"memory={text!r}: must be a size such as 80GB, 512MiB or a number of bytes"
        )
    number, unit = float(found[1]), found[2].lower()
    base = 1024 if "i" in unit else 1000
    return float(number * base ** _POWERS[unit.rstrip("b").rstrip("i")])
