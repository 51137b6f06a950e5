"""Settings: which source wins, what is refused, and whose mistake it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.errors import ConfigError, InputFileError
from penstock.train import TrainConfig, ranks_of, resolve
from penstock.train.config import LARGEST_CONFIG, to_toml


def write(folder: Path, text: str) -> Path:
    path = folder / "run.toml"
    path.write_bytes(text.encode(errors="surrogateescape"))
    return path


def refusal(flags: dict[str, Any], file: Path | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve(flags, file)
    return str(caught.value)


def file_refusal(folder: Path, text: str, **flags: Any) -> str:
    with pytest.raises(InputFileError) as caught:
        resolve(flags, write(folder, text))
    return str(caught.value)


def test_defaults() -> None:
    assert resolve({}) == TrainConfig()


def test_flags_win_over_the_file_and_the_file_over_the_defaults(tmp_path: Path) -> None:
    config = resolve({"steps": 3}, write(tmp_path, "steps = 5\nbatch = 32\nclip = 1"))
    assert (config.steps, config.batch, config.seed) == (3, 32, TrainConfig().seed)
    assert isinstance(config.clip, float)


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ({"steps": 0}, "steps=0 must be at least 1"),
        ({"steps": -4}, "steps=-4 must be at least 1"),
        ({"steps": "many"}, "steps='many' must be a whole number"),
        ({"learning_rate": 0.0}, "learning_rate=0.0 must be more than 0"),
        ({"learning_rate": "fast"}, "learning_rate='fast' must be a number"),
        ({"clip": float("nan")}, "clip=nan must be a finite number"),
        ({"seed": -1}, "seed=-1 must be at least 0"),
        ({"data": ""}, "data='' must not be empty"),
        ({"schedule": 7}, "schedule=7 must be text"),
        ({"steps": True}, "steps=True must be a whole number"),
        ({"seed": 2**63}, f"seed={2**63} must be less than {2**63}"),
        ({"steps": 10**10}, "steps=10000000000 must be at most 1000000000"),
    ],
)
def test_a_wrong_value_is_named_with_what_it_must_be(flags: dict[str, Any], text: str) -> None:
    assert refusal(flags) == text


def test_a_number_that_python_does_not_write_out_is_named_by_its_size() -> None:
    giant = 1 << 20_000
    assert refusal({"steps": giant}) == (
        "steps=<a number of 20001 bits> must be at most 1000000000"
    )
    assert "batch=<a number of 20001 bits>" in refusal({"batch": -giant})


def test_all_wrong_values_are_told_at_once() -> None:
    assert (
        refusal({"steps": 0, "batch": 0})
        == "steps=0 must be at least 1; batch=0 must be at least 1"
    )


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        ({"microbatches": 9, "batch": 8}, ("microbatches=9", "batch=8", "at most 8 microbatches")),
        ({"ranks": 5, "layers": 4}, ("5 stages", "layers=4", "fewer ranks")),
        ({"schedule": "1F2B"}, ("'1F2B'", "did you mean '1F1B'")),
        ({"schedule": "forward-only"}, ("'forward-only'", "no backward", "choose one that trains")),
        ({"width": 30}, ("width=30", "heads=4", "8 divides")),
        (
            {"microbatches": 10**6, "batch": 10**6, "sequence": 1},
            ("microbatches=1000000 in 4 stages", "fewer microbatches"),
        ),
        ({"ranks": 10**9, "layers": 10**9, "width": 8}, ("layers=1000000000", "fewer layers")),
        (
            {"ranks": 10**6, "layers": 10**6, "width": 8},
            ("in 1000000 stages", "fewer microbatches"),
        ),
        ({"replicas": 10**6}, ("over replicas=1000000", "a batch of 8000000")),
        ({"batch": 10**6, "sequence": 10**6}, ("batch=1000000", "a smaller batch")),
        ({"batch": 4}, ("microbatches=8 of batch=4", "at most 4 microbatches")),
        ({"shard": True}, ("shard=True without replicas", "at least 2")),
        ({"replicas": 2, "plan": "auto"}, ("plan='auto' with replicas=2", "one pipeline")),
        ({"checkpoint": "all", "plan": "auto"}, ("checkpoint='all'", "the plan decides")),
        ({"resume": "auto"}, ("resume='auto'", "name it with out=")),
    ],
)
def test_settings_that_contradict_each_other(flags: dict[str, Any], parts: tuple[str, ...]) -> None:
    text = refusal(flags)
    assert all(part in text for part in parts)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("steps = \nbatch = 3", ("run.toml: not TOML", "line 1")),
        ("steps = 0", ("run.toml: steps=0 must be at least 1",)),
        ("lerning_rate = 1.0", ("unknown setting 'lerning_rate'", "did you mean 'learning_rate'?")),
        ("qqq = 1", ("unknown setting 'qqq' Known: ranks,",)),
        ("ranks = 9", ("run.toml: 9 stages for layers=4",)),
        ('steps = "3"', ("steps='3' must be a whole number",)),
        ("#" * LARGEST_CONFIG + "#", ("larger than",)),
        ("\udcff", ("not TOML",)),
        ("steps = 0x" + "f" * 20_000, ("steps=<a number of 80000 bits> must be at most",)),
        ("steps = " + "9" * 20_000, ("not TOML",)),
    ],
)
def test_a_wrong_file(tmp_path: Path, text: str, parts: tuple[str, ...]) -> None:
    message = file_refusal(tmp_path, text)
    assert all(part in message for part in parts)


def test_a_flag_that_contradicts_the_file_is_the_flag_s_mistake(tmp_path: Path) -> None:
    file = write(tmp_path, "batch = 4\nmicrobatches = 4")
    assert "batch=4" in refusal({"microbatches": 8}, file)


@pytest.mark.parametrize("world", ["many", "0", "", "9" * 5000])
def test_a_world_size_that_is_no_number(world: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", world)
    assert "must be a number of processes; start with torchrun" in refusal({})


def test_the_ranks_follow_from_the_world_size(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [ranks_of(TrainConfig()), ranks_of(TrainConfig(ranks=2))] == [4, 2]
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert ranks_of(TrainConfig(replicas=2)) == 2


def test_a_flag_heals_what_the_file_says(tmp_path: Path) -> None:
    file = write(tmp_path, "batch = 4")
    assert resolve({"microbatches": 2}, file).batch == 4


def test_a_wrong_flag_is_told_before_a_wrong_file(tmp_path: Path) -> None:
    assert "steps=0 must be at least 1" in refusal({"steps": 0}, write(tmp_path, "batch = 0"))


def test_a_config_survives_its_file(tmp_path: Path) -> None:
    prompt = 'say "\\ö\n\x7f\x1b😀'
    config = TrainConfig(prompt=prompt, learning_rate=1e-5, ranks=2, out="somewhere")
    again = resolve({}, write(tmp_path, to_toml(config)))
    assert again == config.model_copy(update={"out": None})
