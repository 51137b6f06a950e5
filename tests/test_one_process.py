"""What Penstock does in one process needs nothing that only POSIX systems have: it runs on Windows."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

from tests.processes import run_program

WITHOUT_POSIX = """
    import os, signal, socket, sys
    import torch, numpy, torch.distributed.checkpoint, torch.distributed.fsdp, typer, rich, pydantic

    class Blocked:
        def find_spec(self, name, path=None, target=None):
            if name in ("fcntl", "resource", "termios", "pwd", "grp", "syslog"):
                raise ModuleNotFoundError(name)

    sys.meta_path.insert(0, Blocked())
    for name in ("fcntl", "resource", "termios", "pwd", "grp", "syslog"):
        sys.modules.pop(name, None)
    for home, names in (
        (os, "register_at_fork fork O_NONBLOCK O_NOFOLLOW O_DIRECTORY O_CLOEXEC geteuid getuid killpg "
             "setsid fchmod sched_getaffinity"),
        (socket, "AF_UNIX"),
        (signal, "SIGKILL SIGSTOP SIGCONT SIGHUP SIGUSR1 SIGUSR2"),
    ):
        for name in names.split():
            if hasattr(home, name):
                delattr(home, name)
"""
USE = """
    import importlib, pkgutil
    import penstock

    for module in pkgutil.walk_packages(penstock.__path__, "penstock."):
        if "integrations." not in module.name and "__main__" not in module.name:
            importlib.import_module(module.name)

    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(4)])
    x, y = torch.randn(2, 8, 4)
    plain = torch.nn.functional.mse_loss(model(x), y).item()
    loss_fn = torch.nn.functional.mse_loss
    pipe = penstock.Pipeline(model, schedule="ZB-V", ranks=2, microbatches=4, loss_fn=loss_fn)
    optimizer = torch.optim.AdamW(pipe.parameters())
    checkpoints = penstock.Checkpoints("run", keep=2)
    for step in range(2):
        result = pipe.step(x, target=y)
        if step == 0:
            assert abs(result.loss - plain) < 1e-6, (result.loss, plain)
        optimizer.step()
        optimizer.zero_grad()
        checkpoints.save(step + 1, pipe=pipe, optimizer=optimizer)
    after = pipe.evaluate(x, target=y).loss
    pipe.weights.save("weights")
    model = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(4)])
    other = penstock.Pipeline(model, ranks=4, microbatches=4, loss_fn=loss_fn)
    other.weights.load("weights")
    assert abs(other.evaluate(x, target=y).loss - after) < 1e-6
    print("trained")
"""


def test_one_process_needs_no_posix(tmp_path: Path) -> None:
    program = textwrap.dedent(WITHOUT_POSIX) + textwrap.dedent(USE)
    ended = run_program(sys.executable, "-c", program, folder=tmp_path)
    assert ended.status == 0, ended
    assert ended.out.endswith("trained\n")
