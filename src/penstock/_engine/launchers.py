"""Launchers that know nothing of torch: what they tell their processes, in torch's variables."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping, MutableMapping
from typing import NamedTuple
from zlib import crc32

from penstock.errors import UsageError

logger = logging.getLogger("penstock")


class Launcher(NamedTuple):
    """A launcher's variables.

    Attributes:
        name: its command.
        size: the number of processes.
        rank: this process's number.
        local: its number on its machine.
        here: the number of processes on this machine, or the number of machines, by :attr:`machines`.
        job: what tells this start of a job from others, on all machines alike.
        machines: whether ``here`` is the number of machines.
        hosts: the names of the machines, if it is told; the first one has process 0.
    """

    name: str
    size: str
    rank: str
    local: str
    here: str
    job: tuple[str, ...] = ()
    machines: bool = False
    hosts: str = ""


LAUNCHERS = (
    Launcher(
        "mpirun",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
    ),
    Launcher("mpiexec", "PMI_SIZE", "PMI_RANK", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    Launcher(
        "srun",
        "SLURM_STEP_NUM_TASKS",
        "SLURM_PROCID",
        "SLURM_LOCALID",
        "SLURM_STEP_NUM_NODES",
        ("SLURM_JOB_ID", "SLURM_STEP_ID"),
        machines=True,
        hosts="SLURM_STEP_NODELIST",
    ),
)
"""Open MPI, MPICH and Intel MPI, SLURM: one may start the next, whose variables then lie under its own."""
PORTS = range(20000, 32000)
"""Below those that systems give to connections."""
DEFAULT_PORT = 29500


def read_launcher(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set torch's variables from those of ``srun``, ``mpirun`` or ``mpiexec``.

    :class:`penstock.Pipeline` and the command line do so themselves. A program in which a library must know
    the processes before there is a pipeline, as ``transformers.TrainingArguments`` does, calls this first.
    Nothing is changed where ``RANK`` or ``WORLD_SIZE`` is set, or where the launcher has started one process.
    ``MASTER_ADDR`` and ``MASTER_PORT`` are kept where they are set; otherwise they are this machine if all
    processes are here, or the first host that SLURM tells, and a port that is made from the job's number.

    Raises:
        UsageError: the processes are on several machines, and the launcher does not say where the first is.
    """
    if {"RANK", "WORLD_SIZE"} & environment.keys():
        return
    for launcher in LAUNCHERS:
        names = {launcher.rank, launcher.local} | ({launcher.here} - {""})
        if environment.get(launcher.size, "1") != "1" and names <= environment.keys():
            environment.update(_variables(launcher, environment))
            if environment["RANK"] == "0":
                logger.warning(
                    "penstock: %s has started %s processes, which are the ranks of one job; if each is a run "
                    "of its own, set WORLD_SIZE=1",
                    launcher.name,
                    environment["WORLD_SIZE"],
                )
            return


def _variables(launcher: Launcher, environment: Mapping[str, str]) -> dict[str, str]:
    """Torch's variables for a launcher's process."""
    size, here = environment[launcher.size], environment[launcher.here]
    together = here == ("1" if launcher.machines else size)
    address = "127.0.0.1" if together else _first_host(environment.get(launcher.hosts, ""))
    if not environment.get("MASTER_ADDR") and not address:
        raise UsageError(
            f"{launcher.name} started {size} processes on several machines ({launcher.size}={size}, "
            f"{launcher.here}={here}) without RANK and WORLD_SIZE, and does not say where process 0 is: set "
            "MASTER_ADDR to an address of its machine that all reach, and MASTER_PORT; or have "
            f"{launcher.name} start torchrun once per machine. If each process is a run of its own, set "
            "WORLD_SIZE=1"
        )
    job = ".".join(environment[name] for name in launcher.job if name in environment)
    port = PORTS[crc32(job.encode()) % len(PORTS)] if job else DEFAULT_PORT
    return {
        "RANK": environment[launcher.rank],
        "WORLD_SIZE": size,
        "LOCAL_RANK": environment[launcher.local],
        **({"LOCAL_WORLD_SIZE": size} if together else {}),
        "MASTER_ADDR": environment.get("MASTER_ADDR") or address,
        "MASTER_PORT": environment.get("MASTER_PORT") or str(port),
    }


def _first_host(hosts: str) -> str:
    """The first of SLURM's hosts: ``node07`` of ``node[07-09,12],login1``."""
    match = re.match(r"([^\[,]*)(?:\[(\d+)[^\]]*\]([^,]*))?", hosts)
    return "" if match is None else "".join(part or "" for part in match.groups())
