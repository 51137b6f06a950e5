"""docs/launching.md: each command starts the page's program, where its launcher is installed."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from tests.launchers import slurm
from tests.processes import Ended, free_port, run_program
from tests.test_pages import CODE_OF, ROOT, Block

PAGE = CODE_OF[ROOT / "docs/launching.md"]
LIMIT = 150.0

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.on_cpu("launchers start and end processes, whatever these compute on"),
]


def block_with(text: str) -> Block:
    (block,) = (block for block in PAGE if text in block.text)
    return block


def losses_of_one_process() -> str:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(4)])
    return f"{mse_loss(model(torch.ones(8, 16)), torch.zeros(8, 16)).item():.6f}\n"


def run(folder: Path, *command: str, environment: dict[str, str] | None = None) -> Ended:
    """Run a command beside the page's ``train.py``."""
    (folder / "train.py").write_text(block_with("ranks=2) as pipe").text)
    return run_program(*command, limit=LIMIT, folder=folder, environment=environment)


def check(ran: Ended) -> None:
    assert ran.status == 0, ran.err
    assert losses_of_one_process() in ran.out


WAYS = {
    "file": 'init_method=f"file://{place}"',
    "tcp": 'init_method="tcp://127.0.0.1:{port}"',
    "FileStore": "store=dist.FileStore(place, ranks)",
}


@pytest.mark.nightly
@pytest.mark.parametrize("way", WAYS)
def test_mp_spawn(way: str, tmp_path: Path) -> None:
    text = block_with("mp.spawn").text
    assert WAYS["file"] in text
    text = text.replace(WAYS["file"], WAYS[way].replace("{port}", str(free_port())))
    (tmp_path / "spawned.py").write_text(text)
    check(run(tmp_path, sys.executable, "spawned.py"))


@pytest.mark.nightly
def test_accelerate_launch(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    (command,) = re.findall(r"^\$ (accelerate .*)$", block_with("accelerate launch").text, re.M)
    check(run(tmp_path, *command.replace("launch", "launch --main_process_port 0").split()))


@pytest.mark.nightly
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="needs Open MPI")
def test_mpirun(tmp_path: Path) -> None:
    flags = ["--allow-run-as-root", "--oversubscribe"]
    (command,) = re.findall(r"'(RANK=.*)'", block_with("mpirun -n 16").text)
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    check(run(tmp_path, "mpirun", *flags, "-n", "2", "sh", "-c", command, environment=place))


@pytest.mark.nightly
@pytest.mark.skipif(find_spec("ray") is None, reason="needs Ray")
def test_ray_train_starts_again_where_it_was(tmp_path: Path) -> None:
    """The second attempt resumes, since rank 1 dies in the first one."""
    text = block_with("TorchTrainer(").text
    dies = "if pipe.rank == 1 and step == 3 and not done: __import__('os')._exit(1)"
    assert "for step in range(done, steps):\n" in text
    text = text.replace(
        "for step in range(done, steps):\n",
        f"for step in range(done, steps):\n            {dies}\n",
    )
    (tmp_path / "ray_train.py").write_text(text)
    every_line = {"RAY_DEDUP_LOGS": "0"}
    ran = run(tmp_path, sys.executable, "ray_train.py", environment=every_line)
    assert ran.status == 0, ran.err
    assert re.findall(r"step (\d)  loss", ran.out)[-3:] == ["4", "5", "6"]


# ---- SLURM


@pytest.fixture(scope="module")
def slurm_commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    if not slurm.is_here():
        pytest.skip("needs slurmctld, slurmd, slurm-client and munge, and root")
    folder = tmp_path_factory.mktemp("slurm")
    for above in (folder, folder.parent, folder.parent.parent):
        above.chmod(0o755)
    with slurm.started(folder / "run") as environment:
        yield environment


@pytest.mark.nightly
def test_srun_alone_is_told_what_to_set(slurm_commands: dict[str, str], tmp_path: Path) -> None:
    ran = run(tmp_path, "srun", "-n", "2", "python", "train.py", environment=slurm_commands)
    assert ran.status != 0
    assert "srun started 2 processes" in ran.err


@pytest.mark.nightly
@pytest.mark.parametrize("text", ["srun torchrun", "srun sh"])
def test_sbatch(text: str, slurm_commands: dict[str, str], tmp_path: Path) -> None:
    """The page's scripts, on one machine without GPUs."""
    script = block_with(text).text
    for of_page, here in (
        ("--nodes=2", "--nodes=1"), (" --gpus-per-node=8", ""),
        ("--ntasks-per-node=8", "--ntasks-per-node=2"), ("--nproc-per-node 8", "--nproc-per-node 2"),
        ("29500", str(free_port())),
    ):  # fmt: skip
        script = script.replace(of_page, here)
    (tmp_path / "job.sh").write_text(script)
    ran = run(
        tmp_path, "sbatch", "--wait", "--output=job.out", "job.sh", environment=slurm_commands
    )
    output = (tmp_path / "job.out").read_text()
    assert ran.status == 0, output
    assert losses_of_one_process() in output
