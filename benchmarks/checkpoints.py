"""Checkpoints under kills, on a full disk and with damaged bytes; and what they cost beside torch's own."""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from penstock import Checkpoints, Pipeline
from penstock.checkpoint.folder import find
from penstock.checkpoint.loading import Table
from penstock.errors import CheckpointError, InputFileError
from penstock.faults.processes import die_with_parent
from penstock.testing import WorkerPool

KILLS = 210
RANKS = 2
WINDOW = 0.4
"""Seconds after a trial's first saving within which it is killed."""
GRACE = 4.0
"""Seconds that what was not killed has to end by itself."""
FLIPS = 300


# ---- a run that is killed again and again, and goes on each time


class Job:
    """A small run: dropout, AdamW and a schedule of learning rates."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        block = [nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Dropout(0.1)) for _ in range(4)]
        self.pipe = Pipeline(
            nn.Sequential(*block),
            schedule="1F1B",
            ranks=RANKS,
            microbatches=2,
            loss_fn=nn.functional.mse_loss,
            seed=1,
        )
        self.optimizer = torch.optim.AdamW(self.pipe.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 10, 0.99)
        self.states: dict[str, Any] = {
            "pipe": self.pipe,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
        }

    def train(self, step: int) -> float:
        """A step on data of its own."""
        generator = torch.Generator().manual_seed(step)
        x, y = (torch.randn(4, 32, generator=generator) for _ in range(2))
        loss = self.pipe.step(x, target=y).loss
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        return loss


def rank_of_trial(rank: int, folder: Path, trial: int) -> None:
    """One rank: go on from the last checkpoint, and save after each step."""
    store = folder / f"store-{trial}"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    job = Job()
    checkpoints = Checkpoints(folder / "checkpoints", keep=2, asynchronous=bool(trial % 2))
    step = checkpoints.load(**job.states) or 0
    note(folder, rank, "resumed", step)
    while True:
        loss = job.train(step)
        note(folder, rank, "loss", step, loss)
        step += 1
        checkpoints.save(step, **job.states)
        # What is written beside the training is known to be whole a step later.
        note(folder, rank, "saved", step - trial % 2)


def note(folder: Path, rank: int, *what: Any) -> None:
    """A line that is there when the process is not any more."""
    if rank == 0:
        handle = os.open(folder / "notes", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(handle, (json.dumps(what) + "\n").encode())
        os.close(handle)


def notes(folder: Path) -> list[list[Any]]:
    """All of them."""
    path = folder / "notes"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def fork(function: Callable[[], object]) -> int:
    """A child that runs a function: torch is imported there already."""
    child = os.fork()
    if child:
        return child
    status = 1
    with suppress(BaseException):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 2)
        function()
        status = 0
    os._exit(status)


def launcher(folder: Path, trial: int) -> None:
    """Starts the ranks, which end with it, and waits for them."""
    os.setsid()
    ranks = [fork(lambda rank=rank: _as_rank(rank, folder, trial)) for rank in range(RANKS)]  # type: ignore[misc]
    (folder / f"ranks-{trial}.partial").write_text(json.dumps(ranks))
    os.replace(folder / f"ranks-{trial}.partial", folder / f"ranks-{trial}")
    for rank in ranks:
        os.waitpid(rank, 0)


def _as_rank(rank: int, folder: Path, trial: int) -> None:
    die_with_parent()
    rank_of_trial(rank, folder, trial)


def killed(folder: Path, trial: int, chance: random.Random) -> str:
    """Start a trial and kill something of it while it saves."""
    before = len(notes(folder))
    started = fork(lambda: launcher(folder, trial))
    until = time.monotonic() + 60
    while not any(kind == "saved" for kind, *_ in notes(folder)[before:]):
        if time.monotonic() > until:
            os.killpg(started, signal.SIGKILL)
            os.waitpid(started, 0)
            raise RuntimeError(f"trial {trial} saved nothing in a minute")
        time.sleep(0.005)
    time.sleep(chance.uniform(0, WINDOW))
    ranks = json.loads((folder / f"ranks-{trial}").read_text())
    what = chance.choice(["one rank", "all ranks", "the launcher"])
    victims = {"one rank": [chance.choice(ranks)], "all ranks": ranks, "the launcher": [started]}
    for victim in victims[what]:
        with suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)
    _wait_for(started)
    return what


def _wait_for(started: int) -> None:
    """Wait until all of a trial have ended; those that do not are ended."""
    until = time.monotonic() + GRACE
    reaped = False
    while time.monotonic() < until:
        reaped = reaped or os.waitpid(started, os.WNOHANG)[0] == started
        try:
            os.killpg(started, 0)
        except ProcessLookupError:
            return
        time.sleep(0.01)
    with suppress(ProcessLookupError):
        os.killpg(started, signal.SIGKILL)
    if not reaped:
        os.waitpid(started, 0)


def campaign(kills: int, seed: int = 0) -> dict[str, Any]:
    """One run that is killed so many times; after each kill the last whole checkpoint is what goes on."""
    chance, started = random.Random(seed), time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="penstock-kills-"))
    # What the ranks import and prepare is then there in each.
    Job().train(0)
    what: dict[str, int] = {}
    torn, problems = 0, []
    try:
        for trial in range(kills):
            victim = killed(folder, trial, chance)
            what[victim] = what.get(victim, 0) + 1
            torn += any((folder / "checkpoints").glob(".writing-*"))
            problems += _looked_at(folder, trial)
        problems += _losses_differ(folder)
        resumed = [step for kind, step, *_ in notes(folder) if kind == "resumed"]
        steps = max(step for kind, step, *_ in notes(folder) if kind == "loss") + 1
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return {
        "kills": sum(what.values()),
        "of": what,
        "while_something_was_being_written": torn,
        "resumed": len(resumed),
        "steps": steps,
        "problems": problems,
        "seconds": time.monotonic() - started,
    }


def _looked_at(folder: Path, trial: int) -> list[str]:
    """What is wrong after a kill: the last checkpoint is damaged, or one that was whole is gone."""
    last = max(step for kind, step, *_ in notes(folder) if kind == "saved")
    found = find(folder / "checkpoints")[0]
    problems = [] if found.step >= last else [f"trial {trial}: {found.step} after {last}"]
    try:
        Table(found).verify_all()
    except InputFileError as error:
        problems.append(f"trial {trial}: {error}")
    return problems


def _losses_differ(folder: Path) -> list[str]:
    """Steps whose loss is not, bit by bit, that of a run without a stop."""
    made = [(step, loss) for kind, step, *rest in notes(folder) if kind == "loss" for loss in rest]
    job = Job()
    expected = [job.train(step) for step in range(max(step for step, _ in made) + 1)]
    return [f"step {step}: {loss}" for step, loss in made if loss != expected[step]]


# ---- a full disk, and damaged bytes


@contextmanager
def small_disk(size: str) -> Iterator[Path | None]:
    """A file system of so many bytes, where this process may mount one."""
    folder = Path(tempfile.mkdtemp(prefix="penstock-disk-"))
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    mounted = not subprocess.run(command, capture_output=True, check=False).returncode
    try:
        yield folder if mounted else None
    finally:
        if mounted:
            subprocess.run(["umount", str(folder)], check=False)
        shutil.rmtree(folder, ignore_errors=True)


def full_disk() -> dict[str, Any]:
    """Save until the disk is full: the error, and what is loadable then."""
    with small_disk("300k") as folder:
        if folder is None:
            return {"tried": False}
        job, told, step = Job(), "", 0
        checkpoints = Checkpoints(folder)
        while not told and step < 100:
            try:
                checkpoints.save(step := step + 1, **job.states)
            except CheckpointError as error:
                told = str(error).replace(str(folder), "DISK")
        whole = find(folder)
        for one in whole:
            Table(one).verify_all()
        loaded = Checkpoints(folder).load(**job.states)
        shutil.rmtree(whole[-1].path)
        checkpoints.save(step, **job.states)
        left = len(list(folder.glob(".writing-*")))
        checkpoints.close()
        return {"tried": True, "error": told, "at": step, "loaded": loaded, "left_over": left}


def damage(count: int, seed: int = 0) -> dict[str, Any]:
    """Flip and cut bytes anywhere in the latest checkpoint: is the file named, and the one before taken?"""
    chance, job = random.Random(seed), Job()
    named = before = 0
    with tempfile.TemporaryDirectory() as folder:
        checkpoints = Checkpoints(folder)
        checkpoints.save(1, **job.states)
        path = checkpoints.save(2, **job.states).path
        assert path is not None
        files = sorted(path.iterdir())
        for number in range(count):
            file = files[number % len(files)]
            content = file.read_bytes()
            file.write_bytes(_damaged(content, chance))
            try:
                Table(find(Path(folder))[0]).verify_all()
            except InputFileError as error:
                named += str(file) in str(error)
            except IndexError:
                pass
            else:
                # A damaged table makes a checkpoint the oldest of all.
                named += find(Path(folder))[-1].path == path
            before += checkpoints.load(**job.states) == 1
            file.write_bytes(content)
        checkpoints.close()
    return {"damaged": count, "named": named, "the_one_before_was_taken": before}


def _damaged(content: bytes, chance: random.Random) -> bytes:
    place = chance.randrange(len(content))
    if chance.random() < 0.2:
        return content[:place]
    return (
        content[:place] + bytes([content[place] ^ 1 << chance.randrange(8)]) + content[place + 1 :]
    )


# ---- costs


def cost(group: Any, rounds: int, layers: int, width: int, folder: str) -> dict[str, Any]:
    """A worker's task: seconds that a call held the training up, and until all was on the disk."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    pipe = Pipeline(model, schedule="1F1B", microbatches=2, loss_fn=_loss, group=group)
    optimizer = torch.optim.AdamW(pipe.parameters())
    x = torch.randn(4, width)
    pipe.step(x, target=x)
    optimizer.step()
    states: dict[str, Any] = {"pipe": pipe, "optimizer": optimizer}
    theirs = {"model": pipe, "optimizer": pipe.optimizer_state(optimizer)}
    ours, beside = (
        Checkpoints(f"{folder}/a", keep=1),
        Checkpoints(f"{folder}/b", keep=1, asynchronous=True),
    )
    # On a machine without an accelerator it can pin nothing.
    stager = DefaultStager(StagingOptions(False, False, False, False))
    number = 0

    def place() -> str:
        return f"{folder}/c{number}"

    def torch_save() -> Any:
        state_dict_saver.save(theirs, checkpoint_id=place(), process_group=group)

    def torch_async(**options: Any) -> Any:
        return state_dict_saver.async_save(
            theirs, checkpoint_id=place(), process_group=group, **options
        )

    ways: dict[str, Callable[[], Any]] = {
        "ours": lambda: ours.save(number, **states) and None,
        "torch": torch_save,
        "ours, beside": lambda: beside.save(number, **states) and beside,
        "torch, beside": torch_async,
        "torch, beside, memory kept": lambda: torch_async(async_stager=stager),
    }
    found: dict[str, Any] = {name: [] for name in ways}
    for _ in range(rounds + 1):
        for name, way in ways.items():
            number += 1
            pipe.agree(None)
            started = time.perf_counter()
            pending = way()
            stall = time.perf_counter() - started
            if pending is not None:
                pending.wait() if isinstance(pending, Checkpoints) else pending.result()
            pipe.agree(None)
            found[name].append([stall, time.perf_counter() - started])
            if pipe.leads and not name.startswith("ours"):
                found["bytes, torch"] = sum(p.stat().st_size for p in Path(place()).iterdir())
                shutil.rmtree(place())
    if pipe.leads:
        path = find(Path(folder, "a"))[0].path
        found["bytes, ours"] = sum(p.stat().st_size for p in path.iterdir())
    for checkpoints in (ours, beside):
        checkpoints.close()
    pipe.close()
    return found


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, target)


def costs(rounds: int, layers: int = 16, width: int = 1024) -> dict[str, Any]:
    """Medians over rounds, of the slower rank."""
    with WorkerPool(RANKS) as workers, tempfile.TemporaryDirectory() as folder:
        answers = workers.run(
            "benchmarks.checkpoints:cost",
            RANKS,
            timeout=1800,
            rounds=rounds,
            layers=layers,
            width=width,
            folder=folder,
        )
    found: dict[str, Any] = {name: of for name, of in answers[0].items() if "bytes" in name}
    for name in answers[0].keys() - found.keys():
        # The first of each makes what later ones have: connections, memory.
        pairs = list(zip(*(answer[name][1:] for answer in answers), strict=True))
        stalls = [max(one[0] for one in pair) for pair in pairs]
        wholes = [max(one[1] for one in pair) for pair in pairs]
        found[name] = {"stall": statistics.median(stalls), "whole": statistics.median(wholes)}
    return found


def compare(rounds: int, kills: int = KILLS) -> dict[str, Any]:
    """All of it, printed, and as JSON data."""
    found: dict[str, Any] = {"kills": campaign(kills)}
    about = found["kills"]
    victims = ", ".join(f"{count} of {what}" for what, count in sorted(about["of"].items()))
    print(
        f"checkpoints: {about['kills']} kills ({victims}), "
        f"{about['while_something_was_being_written']} while one was being written; {about['resumed']} "
        f"resumed, {about['steps']} steps, {len(about['problems'])} problems; {about['seconds']:.0f} s"
    )
    for problem in about["problems"][:10]:
        print(f"  {problem}")
    found["full disk"] = full_disk()
    print(f"checkpoints, full disk: {found['full disk']}")
    found["damage"] = damage(FLIPS)
    print(f"checkpoints, damaged bytes: {found['damage']}")
    found["costs"] = costs(min(rounds, 12))
    for name, figures in found["costs"].items():
        told = (
            f"{figures / 1e6:.1f} MB"
            if isinstance(figures, int)
            else f"stall {figures['stall'] * 1e3:.1f} ms, whole after {figures['whole'] * 1e3:.1f} ms"
        )
        print(f"checkpoints, {name}: {told}")
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=["kills", "disk", "damage", "costs"])
    parser.add_argument("--count", type=int, default=20)
    given = parser.parse_args()
    torch.set_num_threads(1)
    parts: dict[str, Callable[[], Any]] = {
        "kills": lambda: campaign(given.count),
        "disk": full_disk,
        "damage": lambda: damage(given.count),
        "costs": lambda: costs(given.count),
    }
    print(json.dumps(parts[given.part](), indent=2))
