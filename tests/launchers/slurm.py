"""A SLURM of one machine, from Debian's slurmctld, slurmd, slurm-client and munge; root alone starts it."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.processes import free_port

COMMANDS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol", "sinfo")
SETTINGS = """
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmdPort={daemon}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SchedulerType=sched/builtin
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
NodeName={host} NodeAddr=127.0.0.1 CPUs=16 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def is_here() -> bool:
    """Whether all that it needs is installed, and this is root."""
    return os.getuid() == 0 and all(map(shutil.which, COMMANDS))


@contextmanager
def started(folder: Path) -> Iterator[dict[str, str]]:
    """SLURM in a folder below one that all may enter; gives the environment for its commands."""
    ports = [free_port(), free_port()]
    host = platform.node().partition(".")[0]
    for name in ("state", "spool"):
        (folder / name).mkdir(parents=True)
    folder.chmod(0o755)
    key, settings = folder / "munge.key", folder / "slurm.conf"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    settings.write_text(
        SETTINGS.format(host=host, folder=folder, controller=ports[0], daemon=ports[1])
    )
    environment = os.environ | {"SLURM_CONF": str(settings)}
    files = [f"--{name}-file={folder}/munge.{name}" for name in ("key", "pid", "log", "seed")]
    daemons = [
        ["munged", "--foreground", "--force", f"--socket={folder}/munge.socket", *files],
        ["slurmctld", "-D", "-f", str(settings)],
        ["slurmd", "-D", "-f", str(settings)],
    ]
    running: list[subprocess.Popen[bytes]] = []
    try:
        for command in daemons:
            quiet = subprocess.DEVNULL
            running.append(subprocess.Popen(command, env=environment, stdout=quiet, stderr=quiet))
            time.sleep(0.5)  # each needs the one before
        wait_until_idle(environment)
        yield environment
    finally:
        subprocess.run(["scancel", "--user=root"], env=environment, capture_output=True)
        for process in reversed(running):
            process.terminate()
            process.wait(20)


def wait_until_idle(environment: dict[str, str]) -> None:
    deadline = time.monotonic() + 60
    state = ""
    while state != "idle":
        assert time.monotonic() < deadline, f"SLURM's machine is {state!r}"
        time.sleep(0.2)
        reply = subprocess.run(
            ["sinfo", "-h", "-o", "%T"], env=environment, capture_output=True, text=True
        )
        state = reply.stdout.strip()
