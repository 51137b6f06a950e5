"""Settle the settings of a run: where each is from, what follows from them, and which contradict each other.

Flags win over the config file, and the file over the defaults. A wrong value is reported for the place it is
from, since that is where it can be changed.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from penstock.errors import ConfigError, InputFileError, UsageError
from penstock.schedule import Schedule, build
from penstock.train.config import TrainConfig
from penstock.train.model import Shape, cut
from penstock.train.runfolder import AUTO, run_folder_of

# ---- what follows from the settings: schedule, model size, cut


DEFAULT_RANKS = 4


@dataclass(frozen=True)
class Contradiction:
    """Settings that do not go together.

    Args:
        settings: their names.
        text: what is wrong and what to do, in one line.
    """

    settings: frozenset[str]
    text: str


def ranks_of(config: TrainConfig) -> int:
    """The ranks of a pipeline: as set, or under ``torchrun`` the world size over the replicas, or else 4."""
    if config.ranks:
        return config.ranks
    world = os.environ.get("WORLD_SIZE")
    return DEFAULT_RANKS if world is None else max(1, int(world) // config.replicas)


def processes_of(config: TrainConfig) -> int:
    """How many processes all replicas need."""
    return ranks_of(config) * config.replicas


def shape_of(config: TrainConfig) -> Shape:
    """The model's size."""
    return Shape(config.layers, config.width, config.heads, config.sequence)


def schedule_of(config: TrainConfig) -> Schedule:
    """The schedule; one without backward is refused."""
    own = {} if config.stages_per_rank is None else {"stages_per_rank": config.stages_per_rank}
    schedule = build(
        config.schedule, ranks=ranks_of(config), microbatches=config.microbatches, **own
    )
    if not schedule.trains:
        raise ConfigError(f"schedule={config.schedule!r} has no backward; choose one that trains")
    return schedule


def stages_of(config: TrainConfig) -> list[list[str]]:
    """The module paths of every stage."""
    return cut(config.layers, schedule_of(config).stages)


def device_of(config: TrainConfig) -> torch.device:
    """The device; one that this machine does not have is refused."""
    try:
        device = torch.device(config.device)
    except RuntimeError:
        device = torch.device("meta")
    usable = {"cpu": 1, "cuda": torch.cuda.device_count()}
    if (device.index or 0) >= usable.get(device.type, 0):
        raise ConfigError(
            f"device={config.device!r}: there is no such device here; "
            f"use cpu" + (" or cuda" if usable["cuda"] else "")
        )
    return device


def _replicas_fit(config: TrainConfig) -> None:
    world, needed = int(os.environ.get("WORLD_SIZE", 1)), processes_of(config)
    if config.shard and config.replicas == 1:
        raise ConfigError(
            "shard=True without replicas: weights are sharded over replicas; set replicas to at least 2"
        )
    if config.replicas > 1 and world != needed:
        raise ConfigError(
            f"replicas={config.replicas} of {ranks_of(config)} ranks need {needed} processes, not {world}; "
            f"start them with --processes {needed}"
        )


def _microbatches_fit(config: TrainConfig) -> None:
    samples = config.batch // config.replicas
    if config.replicas > 1 and config.microbatches > samples:
        raise ConfigError(
            f"microbatches={config.microbatches} of batch={config.batch} over replicas={config.replicas}: a "
            f"microbatch needs a sample; ask for at most {samples} microbatches or a batch of "
            f"{config.microbatches * config.replicas} or more"
        )
    if config.microbatches > config.batch:
        raise ConfigError(
            f"microbatches={config.microbatches} of batch={config.batch}: a microbatch needs a sample; "
            f"ask for at most {config.batch} microbatches or a batch of {config.microbatches} or more"
        )


def _auto_has_a_folder(config: TrainConfig) -> None:
    if config.resume == AUTO and config.out is None:
        raise ConfigError("resume='auto' continues in the run folder; name it with out=")


_CHECKS: dict[Callable[[TrainConfig], object], str] = {
    _replicas_fit: "replicas shard ranks",
    _microbatches_fit: "microbatches batch replicas",
    shape_of: "width heads",
    device_of: "device",
    _auto_has_a_folder: "resume out",
    schedule_of: "schedule ranks stages_per_rank microbatches",
    stages_of: "layers schedule ranks stages_per_rank",
}


def contradictions(config: TrainConfig) -> Iterator[Contradiction]:
    """What is wrong with settings that are valid one by one; causes come before their consequences."""
    for check, settings in _CHECKS.items():
        try:
            check(config)
        except UsageError as error:
            yield Contradiction(frozenset(settings.split()), str(error))


# ---- settings from three places


LARGEST_CONFIG = 64 << 10
"""Bytes. Settings need far less; a larger file is not a config file."""

_MUST_BE = {
    "greater_than_equal": "must be at least {ge}",
    "greater_than": "must be more than {gt:g}",
    "int_type": "must be a whole number",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "bool_type": "must be true or false",
    "string_type": "must be text",
    "string_too_short": "must not be empty",
}


def resolve(flags: Mapping[str, Any], file: Path | None = None) -> TrainConfig:
    """Settle the settings of a run.

    Args:
        flags: settings by name that win over the file.
        file: a TOML file with settings; by default that of the run folder from which to go on.

    Raises:
        ConfigError: the flags are wrong, or contradict the file or the defaults.
        InputFileError: the file is not TOML, or its settings are wrong.
    """
    file = file or _of_run(flags.get("resume"))
    table = {} if file is None else read(file)
    try:
        config = TrainConfig.model_validate({**table, **flags})
        problems = list(contradictions(config))[:1]
    except ValidationError as error:
        problems = [_problem(detail) for detail in error.errors()]
    _refuse([problem.text for problem in problems if not _by_file(problem, table, flags)], None)
    _refuse([problem.text for problem in problems], file)
    return config


def processes_needed(flags: Mapping[str, Any], file: Path | None = None) -> int | None:
    """How many processes a run needs if it has replicas, one for each rank of each; None otherwise."""
    table = {**({} if file is None else read(file)), **flags}
    replicas, ranks = table.get("replicas", 1), table.get("ranks", DEFAULT_RANKS)
    # Values that are not numbers are reported later, with all other mistakes.
    known = isinstance(replicas, int) and isinstance(ranks, int) and ranks > 0
    return replicas * ranks if known and replicas > 1 else None


def _of_run(resume: Any) -> Path | None:
    """The settings of the run that goes on, if there are any."""
    found = run_folder_of(resume) if isinstance(resume, str) else None
    path = None if found is None else found / "config.toml"
    return path if path is not None and path.is_file() else None


def read(file: Path) -> dict[str, Any]:
    """The contents of a TOML file.

    Raises:
        ConfigError: there is no such file.
        InputFileError: it is too large, not UTF-8 or not TOML.
    """
    if not file.is_file():
        raise ConfigError(
            f"config={str(file)!r}: there is no such file; give the path of a TOML file"
        )
    try:
        with file.open("rb") as stream:
            content = stream.read(LARGEST_CONFIG + 1)
        if len(content) > LARGEST_CONFIG:
            raise InputFileError(
                f"{file}: larger than {LARGEST_CONFIG} bytes; such a file is not a config file"
            )
        return tomllib.loads(content.decode("utf-8"))
    except OSError as error:
        raise InputFileError(
            f"{file}: cannot be read: {error.strerror}; check its permissions"
        ) from error
    except InputFileError:
        raise
    except (ValueError, RecursionError) as error:
        raise InputFileError(
            f"{file}: not TOML: {error}; write lines such as steps = 100"
        ) from error


def to_toml(config: TrainConfig) -> str:
    """The settings as a config file that repeats the run, without those of where it is stored."""
    values = config.model_dump(exclude_none=True, exclude={"out", "resume"})
    return "".join(f"{name} = {_toml(value)}\n" for name, value in values.items())


def _toml(value: str | float) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{_escaped(value)}"' if isinstance(value, str) else repr(value)


def _escaped(text: str) -> str:
    """Text with quotes, backslashes and control characters escaped as in TOML's basic strings."""
    plain = (c if c.isprintable() and c not in '"\\' else f"\\U{ord(c):08x}" for c in text)
    return "".join(plain)


def _by_file(problem: Contradiction, table: Mapping[str, Any], flags: Mapping[str, Any]) -> bool:
    return not problem.settings & flags.keys() and bool(problem.settings & table.keys())


def _refuse(problems: list[str], file: Path | None) -> None:
    if problems and file is None:
        raise ConfigError("; ".join(problems))
    if problems:
        raise InputFileError(f"{file}: {'; '.join(problems)}")


def _problem(detail: ErrorDetails) -> Contradiction:
    """One of pydantic's findings, in our words."""
    name = str(detail["loc"][0])
    if detail["type"] == "extra_forbidden":
        return Contradiction(frozenset({name}), "".join(_unknown(name)))
    rule = _MUST_BE.get(detail["type"], detail["msg"])
    text = f"{name}={detail['input']!r} {rule.format(**detail.get('ctx', {}))}"
    return Contradiction(frozenset({name}), text)


def _unknown(name: str) -> Iterator[str]:
    known = list(TrainConfig.model_fields)
    yield f"unknown setting {name!r}"
    if near := get_close_matches(name, known, n=1):
        yield f"; did you mean {near[0]!r}?"
    yield f" Known: {', '.join(known)}"
