"""The examples run as their first lines say, and give the same either way."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
PROCESSES = {"llama": 2, "unet": 2, "hand_placed": 3, "mesh": 4}
LAUNCH = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]


def steps(*command: str) -> list[str]:
    """The lines of the steps that a script prints."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=110, env=environment
    )
    assert done.returncode == 0, done.stderr
    return [line for line in done.stdout.splitlines() if line.startswith("step")]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in ("llama", "mesh") else [pytest.mark.nightly])
        for name in sorted(PROCESSES)
    ],
)
def test_examples_run_in_one_process_and_in_several(name: str) -> None:
    if name == "llama" and find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    script = str(EXAMPLES / f"{name}.py")
    alone = steps(script)
    assert len(alone) == 10
    assert float(alone[-1].split()[3]) < float(alone[0].split()[3])
    assert steps(*LAUNCH, str(PROCESSES[name]), script) == alone


def test_the_first_example_is_short() -> None:
    assert len((EXAMPLES / "llama.py").read_text().splitlines()) < 40


@pytest.mark.slow
def test_torchs_names_run_with_either_package() -> None:
    script = str(EXAMPLES / "torch_names.py")
    ours = steps(*LAUNCH, "2", script, "--package", "penstock")
    assert len(ours) == 5
    assert steps(*LAUNCH, "2", script, "--package", "torch") == ours
    assert steps(script, "--package", "penstock") == ours
