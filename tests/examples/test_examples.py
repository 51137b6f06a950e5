"""The examples run as their first lines say, and give the same either way."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.scripts import run_script

EXAMPLES = Path(__file__).parents[2] / "examples"
PROCESSES = {"llama": 2, "lora": 2, "unet": 2, "hand_placed": 3, "mesh": 4}
NEEDS = {"llama": "transformers", "lora": "peft"}


def steps(*command: str, processes: int = 1) -> list[str]:
    """The lines of the steps that a script prints."""
    ran = run_script(*command, processes=processes)
    assert [found.status for found in ran] == [0] * processes, ran
    printed = "".join(found.out for found in ran)
    return [line for line in printed.splitlines() if line.startswith("step")]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    sorted(PROCESSES),
)
def test_examples_run_in_one_process_and_in_several(name: str) -> None:
    if name in NEEDS and find_spec(NEEDS[name]) is None:
        pytest.skip(f"{NEEDS[name]} is not installed")
    script = str(EXAMPLES / f"{name}.py")
    alone = steps(script)
    assert len(alone) == 10
    assert float(alone[-1].split()[3]) < float(alone[0].split()[3])
    assert steps(script, processes=PROCESSES[name]) == alone


def test_the_first_example_is_short() -> None:
    assert len((EXAMPLES / "llama.py").read_text().splitlines()) < 40


@pytest.mark.slow
def test_torchs_names_run_with_either_package() -> None:
    script = str(EXAMPLES / "torch_names.py")
    ours = steps(script, "--package", "penstock", processes=2)
    assert len(ours) == 5
    assert steps(script, "--package", "torch", processes=2) == ours
    assert steps(script, "--package", "penstock") == ours
