"""Settings: which source wins, what is refused, and whose mistake it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.errors import ConfigError, InputFileError
from penstock.train import TrainConfig, ranks_of, resolve
from penstock.train.config import to_toml


def write(folder: Path, text: str) -> Path:
    path = folder / "run.toml"
    path.write_bytes(text.encode(errors="surrogateescape"))
    return path


def test_flags_win_over_the_file_and_the_file_over_the_defaults(tmp_path: Path) -> None:
    config = resolve({"steps": 3}, write(tmp_path, "steps = 5\nbatch = 32\nclip = 1"))
    assert (config.steps, config.batch, config.seed) == (3, 32, TrainConfig().seed)
    assert isinstance(config.clip, float)
    assert resolve({}) == TrainConfig()
    # A flag may heal what the file says.
    assert resolve({"microbatches": 2}, write(tmp_path, "batch = 4")).batch == 4


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        ({"steps": 0}, ("steps=0: ", "greater than or equal to 1")),
        ({"steps": 10**10}, ("steps=10000000000: ", "less than or equal to 1000000000")),
        ({"steps": "many"}, ("steps='many': ", "valid integer")),
        ({"data": "x" * 200 + "\0", "steps": "y" * 1000}, ("steps='yyyyy", "…: ")),
        ({"learning_rate": 0.0}, ("learning_rate=0.0: ", "greater than 0")),
        ({"clip": float("nan")}, ("clip=nan: ", "finite number")),
        ({"data": ""}, ("data='': ", "at least 1 character")),
        ({"device": "tpu9"}, ("device='tpu9': ", "match pattern")),
        ({"steps": 0, "batch": 0}, ("steps=0: ", "; batch=0: ")),
        ({"stepps": 1}, ("unknown setting 'stepps'; did you mean 'steps'? Known: ranks, ",)),
        ({"microbatches": 9, "batch": 8}, ("microbatches=9", "batch=8", "at most 8 microbatches")),
        ({"ranks": 5, "layers": 4}, ("5 stages", "layers=4", "fewer ranks")),
        ({"schedule": "ZB-V"}, ("8 stages for layers=4",)),
        ({"schedule": "forward-only"}, ("'forward-only'", "no backward", "choose one that trains")),
        ({"width": 30}, ("width=30", "heads=4", "8 divides")),
        (
            {"microbatches": 10**6, "batch": 10**6, "sequence": 1},
            ("microbatches=1000000 in 4 stages", "fewer microbatches"),
        ),
        ({"ranks": 10**9, "layers": 10**9, "width": 8}, ("layers=1000000000", "fewer layers")),
        ({"replicas": 10**6}, ("over replicas=1000000", "a batch of 8000000")),
        ({"batch": 10**6, "sequence": 10**6}, ("batch=1000000", "a smaller batch")),
        ({"shard": True}, ("shard=True without replicas", "at least 2")),
        ({"replicas": 2, "plan": "auto"}, ("plan='auto' with replicas=2", "one pipeline")),
        ({"recompute": "all", "plan": "auto"}, ("recompute='all'", "the plan decides")),
        ({"resume": "auto"}, ("resume='auto'", "name it with out=")),
    ],
)
def test_a_wrong_flag_is_named_with_what_it_must_be(
    flags: dict[str, Any], parts: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(flags)
    assert all(part in str(caught.value) for part in parts), caught.value


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("steps = \nbatch = 3", ("not TOML", "line 1", "write lines such as steps = 100")),
        ("\udcff", ("byte 0 is not UTF-8 text",)),
        ("steps = " + "9" * 20_000, ("not TOML",)),
        ("steps = 0x" + "f" * 20_000, ("steps=<a number of 80000 bits>: ",)),
        ("steps = 0", ("steps=0: ",)),
        ("lerning_rate = 1.0", ("unknown setting 'lerning_rate'", "did you mean 'learning_rate'?")),
        ("ranks = 9", ("9 stages for layers=4",)),
    ],
)
def test_a_wrong_file(tmp_path: Path, text: str, parts: tuple[str, ...]) -> None:
    with pytest.raises(InputFileError, match=r"run\.toml: ") as caught:
        resolve({}, write(tmp_path, text))
    assert all(part in str(caught.value) for part in parts), caught.value


def test_the_mistake_is_the_flag_s_where_there_is_none_without_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^microbatches=8 of batch=4"):
        resolve({"microbatches": 8}, write(tmp_path, "batch = 4\nmicrobatches = 4"))
    with pytest.raises(ConfigError, match=r"^steps=0: "):
        resolve({"steps": 0}, write(tmp_path, "batch = 0"))
    with pytest.raises(ConfigError, match=r"'no\.toml': there is no such file"):
        resolve({}, Path("no.toml"))
    with pytest.raises(InputFileError, match=r"mem: cannot be read: "):
        resolve({}, Path("/proc/self/mem"))


def test_the_ranks_follow_from_the_world_size(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [ranks_of(TrainConfig()), ranks_of(TrainConfig(ranks=2))] == [4, 2]
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert ranks_of(TrainConfig(replicas=2)) == 2


def test_a_plan_decides_the_microbatches() -> None:
    """So those of the defaults need not fit the batch."""
    assert resolve({"plan": "plan.json", "batch": 4}).plan == "plan.json"
    with pytest.raises(ConfigError, match="microbatches=8 of batch=4"):
        resolve({"plan": "auto", "batch": 4})


def test_a_config_survives_its_file(tmp_path: Path) -> None:
    config = TrainConfig(data='say "\\ö\n\x7f\x1b😀', learning_rate=1e-5, ranks=2, out="somewhere")
    again = resolve({}, write(tmp_path, to_toml(config)))
    assert again == config.model_copy(update={"out": None})
