"""Launchers that know nothing of torch: their processes need its variables."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

from penstock.errors import UsageError


class Launcher(NamedTuple):
    """A launcher's variables.

    Attributes:
        name: its command.
        size: the number of processes.
        rank: this process's number.
        local: its number on its machine.
    """

    name: str
    size: str
    rank: str
    local: str


_OPEN_MPI = (f"OMPI_COMM_WORLD_{name}" for name in ("SIZE", "RANK", "LOCAL_RANK"))
LAUNCHERS = (
    Launcher("mpirun", *_OPEN_MPI),
    Launcher("mpiexec", "PMI_SIZE", "PMI_RANK", "MPI_LOCALRANKID"),
    Launcher("srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID"),
)
"""Open MPI, MPICH and Intel MPI, SLURM: one may start the next, whose variables then lie under its own."""


def check_launcher(environment: Mapping[str, str] = os.environ) -> None:
    """Refuse to train in each of several processes of ``srun``, ``mpirun`` or ``mpiexec`` by itself.

    Raises:
        UsageError: one of them has started several processes, and neither RANK nor WORLD_SIZE is set.
    """
    if {"RANK", "WORLD_SIZE"} & environment.keys():
        return
    for name, size, rank, local in LAUNCHERS:
        if environment.get(size, "1") != "1" and {rank, local} <= environment.keys():
            raise UsageError(
                f"{name} started {environment[size]} processes, which do not know of each other. Set "
                f"RANK=${rank}, WORLD_SIZE=${size} and LOCAL_RANK=${local} in each, and MASTER_ADDR and "
                f"MASTER_PORT to an address of the machine of rank 0: {name} ... sh -c 'RANK=${rank} "
                f"WORLD_SIZE=${size} LOCAL_RANK=${local} exec python train.py'. If each process is a run of "
                "its own, set WORLD_SIZE=1"
            )
