"""Checkpoints under kills, on a full disk, with damaged bytes, and with tables that somebody has crafted.

The nightly figures are those of ``--only kills --count 200``, ``--only flips --count 60`` and ``--only tables
--count 500``.
"""

from __future__ import annotations

import json
import logging
import os
import random
import re
import shutil
import signal
import subprocess
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist

from campaigns.run import Campaign, Rows
from campaigns.table import Row
from penstock import Checkpoints
from penstock.checkpoint import describe, export
from penstock.errors import CheckpointError, InputFileError, StateDictError, UsageError
from tests.checkpoint.runs import Run
from tests.fuzz.files import mutate

RANKS = 2
WINDOW = 0.4
"""Seconds after a trial's first saving within which it is killed."""
GRACE = 60.0
"""Seconds that what was not killed has to end by itself."""


def run_of_ranks() -> Run:
    """A small run: of these processes, or all of it in one."""
    return Run("1F1B", RANKS)


# ---- a run that is killed again and again, and goes on each time


def run_rank(rank: int, folder: Path, trial: int) -> None:
    """One rank: go on from the last checkpoint, and save after each step."""
    store = folder / f"store-{trial}"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    run = run_of_ranks()
    checkpoints = Checkpoints(folder / "checkpoints", keep=2, asynchronous=bool(trial % 2))
    run.step = checkpoints.load(resume="auto", **run.states) or 0
    note(folder, rank, "resumed", run.step)
    while True:
        note(folder, rank, "loss", run.step, *run.train(1))
        checkpoints.save(run.step, **run.states)
        # What is written beside the training is known to be whole a step later.
        note(folder, rank, "saved", run.step - trial % 2)


def note(folder: Path, rank: int, *what: Any) -> None:
    """A line that is there when the process is not any more."""
    if rank == 0:
        handle = os.open(folder / "notes", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(handle, (json.dumps(what) + "\n").encode())
        os.close(handle)


def notes(folder: Path) -> list[list[Any]]:
    """All of them that are whole: one that is being written may show its beginning."""
    path = folder / "notes"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def fork(function: Callable[[], object]) -> int:
    """A child that runs a function: torch is imported there already."""
    child = os.fork()
    if child:
        return child
    status = 1
    with suppress(BaseException):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        function()
        status = 0
    os._exit(status)


def launch(folder: Path, trial: int) -> None:
    """Start the ranks, which end with this process, and wait for them."""

    def as_rank(rank: int) -> None:
        os.environ["TORCHELASTIC_RUN_ID"] = "campaign"  # a rank ends when such a launcher does
        run_rank(rank, folder, trial)

    os.setsid()
    ranks = [fork(lambda rank=rank: as_rank(rank)) for rank in range(RANKS)]  # type: ignore[misc]
    (folder / f"ranks-{trial}.partial").write_text(json.dumps(ranks))
    os.replace(folder / f"ranks-{trial}.partial", folder / f"ranks-{trial}")
    for rank in ranks:
        os.waitpid(rank, 0)


def kill(folder: Path, trial: int, chance: random.Random) -> tuple[str, float]:
    """Start a trial and kill something of it while it saves; returns what, and when all had ended."""
    before = len(notes(folder))
    launcher = fork(lambda: launch(folder, trial))
    until = time.monotonic() + 60
    while not any(kind == "saved" for kind, *_ in notes(folder)[before:]):
        if time.monotonic() > until:
            os.killpg(launcher, signal.SIGKILL)
            os.waitpid(launcher, 0)
            raise RuntimeError(f"trial {trial} saved nothing in a minute")
        time.sleep(0.005)
    time.sleep(chance.uniform(0, WINDOW))
    ranks = json.loads((folder / f"ranks-{trial}").read_text())
    what = chance.choice(["one rank", "all ranks", "the launcher"])
    victims = {"one rank": [chance.choice(ranks)], "all ranks": ranks, "the launcher": [launcher]}
    for victim in victims[what]:
        with suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)
    return what, wait_for(launcher)


def wait_for(launcher: int) -> float:
    """Wait until all of a trial have ended, and return for how long; those that do not are ended."""
    started, reaped = time.monotonic(), False
    while time.monotonic() < started + GRACE:
        reaped = reaped or os.waitpid(launcher, os.WNOHANG)[0] == launcher
        try:
            os.killpg(launcher, 0)
        except ProcessLookupError:
            return time.monotonic() - started
        time.sleep(0.01)
    with suppress(ProcessLookupError):
        os.killpg(launcher, signal.SIGKILL)
    if not reaped:
        os.waitpid(launcher, 0)
    return time.monotonic() - started


def kills(count: int, seed: int = 0) -> dict[str, Any]:
    """One run that is killed so many times; after each kill the last whole checkpoint is what goes on.

    The ranks are forks of this process, which must not have run a backward: a CUDA build of torch refuses
    one in a fork then.
    """
    chance, started = random.Random(seed), time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="penstock-kills-"))
    # What the ranks import is then there in each.
    run_of_ranks()
    victims: dict[str, int] = {}
    torn, problems, longest = 0, list[str](), 0.0
    try:
        for trial in range(count):
            victim, ended = kill(folder, trial, chance)
            victims[victim] = victims.get(victim, 0) + 1
            longest = max(longest, ended)
            torn += any((folder / "checkpoints").glob(".writing-*"))
            last = max(step for kind, step, *_ in notes(folder) if kind == "saved")
            latest = Checkpoints(folder / "checkpoints").steps()[0]
            text = describe(folder / "checkpoints", check=True)
            if latest < last or "DAMAGED" in text:
                problems.append(f"trial {trial}: {latest} after {last}: {text}")
        losses = [(step, *of) for kind, step, *of in notes(folder) if kind == "loss"]
        expected = run_of_ranks().train(max(step for step, _ in losses) + 1)
        problems += [f"step {step}: {loss}" for step, loss in losses if loss != expected[step]]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return {
        "kills": sum(victims.values()),
        "of": victims,
        "while something was being written": torn,
        "steps": len(expected),
        "longest end in seconds": round(longest, 1),
        "problems": problems,
        "seconds": round(time.monotonic() - started),
    }


# ---- a full disk, and damaged bytes


def disk() -> dict[str, Any]:
    """Save until a disk of 300 kB is full, where this process may mount one."""
    with tempfile.TemporaryDirectory() as folder:
        mount = ["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", folder]
        if subprocess.run(mount, capture_output=True, check=False).returncode:
            return {"tried": False}
        try:
            return fill(Path(folder))
        finally:
            subprocess.run(["umount", folder], check=False)


def fill(folder: Path) -> dict[str, Any]:
    """Save until the disk is full: the error, and what is loadable then."""
    job, error, step = run_of_ranks(), "", 0
    with Checkpoints(folder) as checkpoints:
        while not error:
            try:
                checkpoints.save(step := step + 1, **job.states)
            except CheckpointError as raised:
                error = str(raised)
        damaged = "DAMAGED" in describe(folder, check=True)
        loaded = checkpoints.load(**job.states) == step - 1
        shutil.rmtree(min(folder.glob("step-*")))
        checkpoints.save(step, **job.states)
        left = len(list(folder.glob(".writing-*")))
    return {"error": error, "loaded": loaded, "left over": left, "damaged": damaged}


def flips(count: int, seed: int = 0) -> dict[str, Any]:
    """Flip or cut bytes anywhere in the latest checkpoint: is the file named, and the one before taken?"""
    chance, job = random.Random(seed), run_of_ranks()
    named = before = 0
    with tempfile.TemporaryDirectory() as folder, Checkpoints(folder) as checkpoints:
        checkpoints.save(1, **job.states)
        path = checkpoints.save(2, **job.states).path
        assert path is not None
        files = sorted(path.iterdir())
        for number in range(count):
            file = files[number % len(files)]
            content = bytearray(file.read_bytes())
            place = chance.randrange(len(content))
            changed = content[:]
            changed[place] ^= 1 << chance.randrange(8)
            file.write_bytes(content[:place] if chance.random() < 0.2 else changed)
            named += f"DAMAGED: {file}" in describe(folder, check=True)
            before += checkpoints.load(resume="auto", **job.states) == 1
            file.write_bytes(content)
    return {"damaged": count, "named": named, "the one before was taken": before}


# ---- tables that somebody has crafted, with right checksums


def rewrite_table(checkpoint: Path, change: Callable[[Any], Any]) -> None:
    """Change what a table says, and make its checksum right."""
    path = checkpoint / "checkpoint.json"
    head, body = path.read_bytes().split(b"\n", 1)
    text = json.dumps(change(json.loads(body))).encode()
    summed = head[head.index(b'"format": ') + len('"format": ') :] + b"\n" + text
    path.write_bytes(b'{"crc32": %d, "format": ' % crc32(summed) + summed)


def export_crafted(folder: Path) -> str:
    """Export, and return what was written that no export writes."""
    with tempfile.TemporaryDirectory() as name:
        with suppress(InputFileError, UsageError):
            export(folder, Path(name, "a", "b"))
        files = (one for one in Path(name).rglob("*") if one.is_file())
        paths = (one.relative_to(name).as_posix() for one in files)
        stray = [path for path in paths if not EXPORTED.fullmatch(path)]
        return f"written: {stray}" if stray else ""


EXPORTED = re.compile(
    r"a/b/(model-[0-9a-f-]+of-[0-9a-f-]+\.safetensors|[a-z.]+index\.json|config\.json)"
)
"""What an export writes."""


def load_crafted(checkpoints: Checkpoints) -> tuple[str, str]:
    """Export, and load into a fresh run: what comes of it, and what is wrong with that."""
    if stray := export_crafted(checkpoints.folder):
        return "exported", stray
    job = run_of_ranks()
    before = {name: one.clone() for name, one in job.model.state_dict().items()}
    try:
        checkpoints.load(**job.states)
    except (InputFileError, StateDictError) as error:
        kind = type(error).__name__
        lines = str(error).split("\n\t") if kind == "StateDictError" else [str(error)]
        if any("\n" in line or "\x1b" in line or len(line) > 2000 for line in lines):
            return kind, f"the message is {str(error)[:300]!r}"
        same = all(torch.equal(before[n], one) for n, one in job.model.state_dict().items())
        return kind, "" if same else "the model was changed"
    except Exception as error:
        return type(error).__name__, f"{type(error).__name__}: {str(error)[:300]}"
    return "loaded", ""


def tables(count: int, seed: int = 0) -> dict[str, Any]:
    """Load crafted tables: each is an error of ours, and nothing is changed, or it is loaded."""
    chance, job = random.Random(seed), run_of_ranks()
    job.train(1)
    kinds: dict[str, int] = {}
    problems = []
    with tempfile.TemporaryDirectory() as name, Checkpoints(name) as checkpoints:
        path = checkpoints.save(1, **job.states, extra={"seen": [1, 2.5]}).path
        assert path is not None
        rewrite_table(path, lambda table: {**table, "beside": {"config.json": "{}"}})
        original = (path / "checkpoint.json").read_bytes()
        for number in range(count):
            rewrite_table(path, lambda table: mutate(table, chance))
            kind, problem = load_crafted(checkpoints)
            kinds[kind] = kinds.get(kind, 0) + 1
            problems += [f"{number}: {problem}"] if problem else []
            (path / "checkpoint.json").write_bytes(original)
    return {"tables": count, "outcomes": kinds, "problems": problems}


# ---- the table

PARTS: dict[str, Callable[[int, int], dict[str, Any]]] = {
    "kills": kills,
    "disk": lambda count, seed: disk(),
    "flips": flips,
    "tables": tables,
}


def is_good(found: dict[str, Any]) -> bool:
    """Whether what a part found is as it should be."""
    if "named" in found:
        return {found["named"], found["the one before was taken"]} == {found["damaged"]}
    if "error" in found:
        return bool(found["loaded"]) and not found["left over"] and not found["damaged"]
    return not found.get("problems") and found.get("longest end in seconds", 0.0) < GRACE


def rows_of(name: str, count: int, seed: int) -> Iterator[Row]:
    logging.disable()
    found = PARTS[name](count, seed)
    verdict = "not tried" if found.get("tried") is False else "good" if is_good(found) else "wrong"
    yield Row(name, verdict, ("; ".join(f"{what}: {of}" for what, of in found.items()),))


def add_options(parser: ArgumentParser) -> None:
    parser.add_argument("--count", type=int, default=20, help="of kills, damages and tables")


def cases(options: Namespace) -> Generator[tuple[str, Rows]]:
    for name in PARTS:
        yield name, partial(rows_of, name, options.count, options.seed)


CAMPAIGN = Campaign(
    cases, columns=("what happened",), bad=("wrong",), limit=3600.0, options=add_options
)
