"""What follows from the settings before anything is loaded: schedule, model size, cut."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from penstock.errors import ConfigError, UsageError
from penstock.schedule import Schedule, build
from penstock.train.config import TrainConfig
from penstock.train.model import Shape, cut
from penstock.train.resuming import AUTO

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
    """The ranks of a pipeline: as set, else the world size under ``torchrun`` over the replicas, else 4."""
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
    """The schedule, which must train."""
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
    """The device, which must be there."""
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
    """What is wrong with settings that are fine one by one, the cause before what follows from it."""
    for check, settings in _CHECKS.items():
        try:
            check(config)
        except UsageError as error:
            yield Contradiction(frozenset(settings.split()), str(error))
