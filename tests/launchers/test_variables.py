"""What launchers that know nothing of torch tell their processes."""

from __future__ import annotations

import pytest

from penstock import read_launcher
from penstock.errors import UsageError

SRUN = {
    "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "gpu[07-08]", "SLURM_JOB_ID": "41", "SLURM_STEP_ID": "0",
}  # fmt: skip
MPIRUN = {
    f"OMPI_COMM_WORLD_{name}": value
    for name, value in (("SIZE", "2"), ("RANK", "1"), ("LOCAL_RANK", "1"), ("LOCAL_SIZE", "2"))
}
MPIEXEC = {"PMI_SIZE": "2", "PMI_RANK": "1", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}


def read(variables: dict[str, str]) -> dict[str, str]:
    """The variables that are new."""
    environment = dict(variables)
    read_launcher(environment)
    return {name: value for name, value in environment.items() if variables.get(name) != value}


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("gpu[07-08]", "gpu07"),
        ("gpu[7,9-12],b1", "gpu7"),
        ("a-1,a-2", "a-1"),
        ("n[1-2]-ib,x", "n1-ib"),
    ],
)
def test_srun_tells_where_the_first_machine_is(hosts: str, first: str) -> None:
    exported = read({**SRUN, "SLURM_STEP_NODELIST": hosts})
    port = int(exported.pop("MASTER_PORT"))
    assert exported == {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": first}
    assert 20000 <= port < 32000
    # Another job on the same machine, or another step of it, meets elsewhere.
    assert read({**SRUN, "SLURM_STEP_ID": "1"})["MASTER_PORT"] != str(port)


@pytest.mark.parametrize(
    "variables",
    [{**SRUN, "SLURM_STEP_NUM_NODES": "1"}, MPIRUN, MPIEXEC],
    ids=["srun", "mpirun", "mpiexec"],
)
def test_on_one_machine_nothing_has_to_be_set(variables: dict[str, str]) -> None:
    exported = read(variables)
    assert exported["MASTER_ADDR"] == "127.0.0.1"
    assert exported["LOCAL_WORLD_SIZE"] == exported["WORLD_SIZE"]
    already_set = {"MASTER_ADDR": "here", "MASTER_PORT": "7"}
    exported = read({**variables, **already_set})
    assert not exported.keys() & already_set.keys()


@pytest.mark.parametrize("variables", [MPIRUN, MPIEXEC], ids=["mpirun", "mpiexec"])
def test_several_machines_of_mpi_need_an_address(variables: dict[str, str]) -> None:
    apart = variables | {
        name: "1" for name in variables if name.endswith(("LOCAL_SIZE", "LOCALNRANKS"))
    }
    with pytest.raises(
        UsageError, match=r"mpi\w+ started 2 processes on several.*MASTER_ADDR.*WORLD_SIZE=1"
    ):
        read(apart)
    assert read({**apart, "MASTER_ADDR": "node-a"})["RANK"] == "1"


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {**SRUN, "WORLD_SIZE": "1"},
        {**SRUN, "RANK": "0", "WORLD_SIZE": "4"},
        {**SRUN, "SLURM_STEP_NUM_TASKS": "1"},
        {"SLURM_JOB_ID": "41", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"},
    ],
    ids=["a plain process", "a sweep", "torch's are set", "one task", "sbatch itself"],
)
def test_what_is_no_process_among_several_is_left_alone(variables: dict[str, str]) -> None:
    assert read(variables) == {}


def test_mpirun_inside_a_step_of_srun_tells_the_rank() -> None:
    exported = read({**SRUN, "SLURM_STEP_NUM_NODES": "1", **MPIRUN})
    assert (exported["RANK"], exported["WORLD_SIZE"]) == ("1", "2")
