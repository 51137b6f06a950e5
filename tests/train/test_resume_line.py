"""The line that resumes a run, on one machine and on several."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.train.runfolder import command_to_resume

TORCHRUN = {"LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "node0", "MASTER_PORT": "29400"}


@pytest.mark.parametrize(
    ("variables", "line"),
    [
        ({}, "penstock train --resume {out}"),
        (
            {"WORLD_SIZE": "4", "GROUP_WORLD_SIZE": "1"},
            "torchrun --standalone --nproc-per-node 4 -m penstock train --resume {out}",
        ),
        (
            {"WORLD_SIZE": "8", "GROUP_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "job7"},
            "torchrun --nnodes 2 --rdzv-backend c10d --rdzv-endpoint node0:29400 --rdzv-id job7 "
            "--nproc-per-node 4 -m penstock train --resume {out}    (on each of the 2 machines)",
        ),
    ],
)
def test_the_line_names_all_that_a_machine_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], line: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("WORLD_SIZE", "GROUP_WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in (TORCHRUN | variables).items() if variables else ():
        monkeypatch.setenv(name, value)
    assert command_to_resume(Path("run")) == line.format(out=tmp_path / "run")
