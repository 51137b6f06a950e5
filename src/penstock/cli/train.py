"""``penstock train``: the ready-made trainer, with a flag for every setting."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, get_args, get_type_hints

import typer

from penstock import train as trainer
from penstock.train.config import TrainConfig, group_of


def train(config: Path | None, **flags: Any) -> None:
    """Train a byte-level GPT through pipeline stages.

    One process does the work of all ranks; under torchrun each rank is a process.
    """
    # Resolve the settings before the trainer is imported, and torch with it.
    settings = trainer.resolve(
        {name: value for name, value in flags.items() if value is not None}, config
    )
    trainer.train(settings)


def _parameters() -> Iterator[inspect.Parameter]:
    """The parameters that typer turns into flags: one per setting, so that the two cannot drift apart."""
    file = typer.Option("--config", help="TOML file with settings; flags win over it.")
    yield _parameter("config", Path, file)
    hints = get_type_hints(TrainConfig)
    for name, field in TrainConfig.model_fields.items():
        kind = next((one for one in get_args(hints[name]) if one is not NoneType), hints[name])
        flag = f"--{name.replace('_', '-')}"
        names = f"{flag}/--no{flag[1:]}" if kind is bool else flag
        default = "" if field.default is None else f" Default: {field.default!r}."
        option = typer.Option(
            names, help=f"{field.description}{default}", rich_help_panel=group_of(name)
        )
        yield _parameter(name, kind, option)


def _parameter(name: str, kind: type, option: Any) -> inspect.Parameter:
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[kind | None, option],
    )


train.__signature__ = inspect.Signature(list(_parameters()))  # type: ignore[attr-defined]
