"""The flags are the settings."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from penstock.cli.train import Flags, command, flag_name
from penstock.train import TrainConfig

CALLS: list[tuple[Flags, Path | None]] = []


def note(flags: Flags, config: Path | None) -> None:
    """The help."""
    CALLS.append((flags, config))


def test_a_flag_for_every_setting() -> None:
    given = list(inspect.signature(command(note)).parameters)
    assert given == ["config", "processes", *TrainConfig.model_fields]


def test_the_help_is_the_command_s() -> None:
    assert command(note).__doc__ == "The help."


def test_a_flag_s_name() -> None:
    assert flag_name("learning_rate") == "--learning-rate"


@pytest.mark.parametrize(
    ("setting", "text", "value"),
    [
        ("steps", "3", 3),
        ("ranks", "3", 3),
        ("learning_rate", "1e-3", 1e-3),
        ("schedule", "GPipe", "GPipe"),
        ("steps", "many", "many"),
        ("steps", "1.5", "1.5"),
    ],
)
def test_text_becomes_the_setting_s_type_where_it_can(
    setting: str, text: str, value: object
) -> None:
    command(note)(config=None, **{setting: text})
    assert CALLS.pop() == ({setting: value}, None)


def test_flags_that_were_not_given_are_left_to_the_file() -> None:
    command(note)(config=Path("run.toml"), steps=None, batch="4")
    assert CALLS.pop() == ({"batch": 4}, Path("run.toml"))
