"""Processes of launchers that know nothing of torch."""

from __future__ import annotations

import re

import pytest
from torch import nn

from penstock import Pipeline
from penstock.cli.main import main
from penstock.errors import UsageError

LAUNCHED = {
    "srun": {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3", "SLURM_LOCALID": "1"},
    "mpirun": {
        f"OMPI_COMM_WORLD_{name}": value
        for name, value in (("SIZE", "4"), ("RANK", "3"), ("LOCAL_RANK", "1"))
    },
    "mpiexec": {"PMI_SIZE": "4", "PMI_RANK": "3", "MPI_LOCALRANKID": "1"},
}


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", *(n for of in LAUNCHED.values() for n in of)):
        monkeypatch.delenv(name, raising=False)


def make() -> Pipeline:
    return Pipeline(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), ranks=2)


@pytest.mark.parametrize("launcher", LAUNCHED)
def test_processes_that_do_not_know_of_each_other_are_told_what_to_set(
    launcher: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in LAUNCHED[launcher].items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=f"{launcher} started 4 processes") as caught:
        make()
    (said,) = re.findall(r"sh -c '(.*?) exec", str(caught.value))
    for variable, value in (("RANK", "3"), ("WORLD_SIZE", "4"), ("LOCAL_RANK", "1")):
        (name,) = re.findall(rf"(?:^| ){variable}=\$(\w+)", said)
        assert LAUNCHED[launcher][name] == value
    assert main(["train", "--steps", "1"]) == 2
    assert "which do not know of each other" in capsys.readouterr().err


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {**LAUNCHED["srun"], "WORLD_SIZE": "1"},
        {**LAUNCHED["srun"], "SLURM_STEP_NUM_TASKS": "1"},
        {"SLURM_JOB_ID": "41", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"},
    ],
    ids=["a plain process", "a sweep", "one task", "sbatch itself"],
)
def test_what_is_no_process_among_several_is_left_alone(
    variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    make().close()
