"""``penstock train``: the ready-made trainer."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_type_hints

import typer
from pydantic.fields import FieldInfo

from penstock import train
from penstock.cli.run import start
from penstock.train import TrainConfig
from penstock.train.config import group_of

# ---- one flag for every setting, made from the settings, so that the two cannot drift apart


Flags = dict[str, Any]

PROCESSES = "processes"
"""A flag that is not a setting: how many processes to start."""

CONFIG_HELP = "TOML file with settings; flags win over it."


def command(run: Callable[[Flags, Path | None], int | None]) -> Callable[..., int | None]:
    """A function that typer turns into a command.

    Args:
        run: called with the given flags, by setting, and the config file.
    """

    def wrapper(**given: Any) -> int | None:
        config, processes = given.pop("config"), given.pop(PROCESSES, None)
        flags = {name: text for name, text in given.items() if text is not None}
        settings = {name: _value(name, text) for name, text in flags.items()}
        return run(settings if processes is None else settings | {PROCESSES: processes}, config)

    fields = TrainConfig.model_fields
    parameters = [
        _config_flag(),
        _processes_flag(),
        *(_flag(name, field) for name, field in fields.items()),
    ]
    wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapper.__doc__ = run.__doc__
    return wrapper


def flag_name(setting: str) -> str:
    """How a setting is written on the command line."""
    return f"--{setting.replace('_', '-')}"


def _flag(name: str, field: FieldInfo) -> inspect.Parameter:
    if _kind(name) is bool:
        switch = f"{flag_name(name)}/{flag_name(f'no_{name}')}"
        shown = typer.Option(None, switch, help=_help(field), rich_help_panel=group_of(name))
        return _parameter(name, shown, bool)
    option = typer.Option(
        None,
        flag_name(name),
        metavar=f"<{_kind(name).__name__}>",
        help=_help(field),
        rich_help_panel=group_of(name),
    )
    return _parameter(name, option, str)


def _config_flag() -> inspect.Parameter:
    return _parameter("config", typer.Option(None, "--config", help=CONFIG_HELP), Path)


def _processes_flag() -> inspect.Parameter:
    said = "Start this many processes on this machine, one per rank."
    return _parameter(PROCESSES, typer.Option(None, "--processes", help=said, min=1), int)


def _parameter(name: str, option: Any, kind: Any) -> inspect.Parameter:
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=kind | None
    )


def _help(field: FieldInfo) -> str:
    shown = "" if field.default is None else f" Default: {field.default!r}."
    return f"{field.description}{shown}"


def _kind(setting: str) -> type:
    """The type of a setting, ``int``, ``float``, ``str`` or ``bool``, without ``None``."""
    hint = get_type_hints(TrainConfig)[setting]
    kind: type = next((kind for kind in get_args(hint) if kind is not NoneType), hint)
    return kind


def _value(setting: str, text: Any) -> Any:
    """The text of a flag as the setting's type; any other text is refused later, with all mistakes."""
    if isinstance(text, bool):
        return text
    try:
        return _kind(setting)(text)
    except ValueError:
        return text


# ---- the command


app = typer.Typer(add_completion=False)


def run_training(flags: Flags, config: Path | None) -> int:
    """Train a byte-level GPT through pipeline stages.

    All ranks take turns in one process; with --processes, under torchrun, and always with --replicas, each
    rank has its own process.
    """
    processes = flags.pop(PROCESSES, None)
    if processes is None and "WORLD_SIZE" not in os.environ:
        processes = train.processes_needed(flags, config)
    if processes is not None:
        return start(["-m", "penstock", *_without_processes(sys.argv[1:])], processes)
    train.train(train.resolve(flags, config))
    return 0


def _without_processes(arguments: list[str]) -> list[str]:
    """The arguments of each process: those of this one, without the number of processes."""
    found = iter(arguments)
    kept = []
    for argument in found:
        if argument == "--processes":
            next(found, None)
        elif not argument.startswith("--processes="):
            kept.append(argument)
    return kept


app.command()(command(run_training))
