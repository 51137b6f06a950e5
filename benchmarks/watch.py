"""What the watch costs the store: simulated processes of a job, with the real records and a real store.

A store is in a process of its own, and in others are 2 to 1,024 desks, as the processes of a job have them.
Measured are the bytes that a process sends and gets, the share of a core that the store takes, and the time
until all have read of a failure that one of them reports. Torch looks up the name of each client of its
store: where no server of names answers, that takes longer than the rest.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined] # public, but not marked so
from torch.distributed.distributed_c10d import PrefixStore

from penstock.faults.activity import Activity
from penstock.faults.desk import Desk
from penstock.faults.failure import at_place
from penstock.faults.meeting import Meeting, Members

SIZES = 2, 8, 16, 1024
"""The numbers of processes."""
CLIENTS = 4
"""Processes that the desks are in."""
SECONDS = 20.0
"""For how long the store is watched while nothing happens."""


def raise_limit() -> None:
    """Let this process have as many connections as the system allows."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def host(pipe: Any) -> None:
    """A process that hosts the store."""
    raise_limit()
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    pipe.recv()


def play(pipe: Any, port: int, size: int, first: int, last: int) -> None:
    """A process with some of the job's desks."""
    raise_limit()
    threading.stack_size(256 * 1024)
    tcp = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    room = PrefixStore("meeting-1", PrefixStore("penstock/0/0", tcp))
    members = tuple(range(size))
    desks, activities = [], []
    for process in range(first, last):
        job = Members(members, members, (process,))
        activity = Activity(process, members)
        activity.setup = None
        activity.begin(1234)
        activity.come("the word before step 1234")
        activities.append(activity)
        meeting = Meeting(job, None, room, created=False, hosts=False)
        desks.append(Desk(meeting, activity.place, lambda: None))
        # As in a job, they do not all begin in the same moment.
        time.sleep(1.0 / size)
    while min(desk.clock for desk in desks) < 2.0:
        time.sleep(0.1)
    pipe.send([one.lost for one in desks])
    if pipe.recv() == "report":
        failure = at_place(
            activities[0].place(), "raised", "boom" * 100, trace="x" * 5000, by=first
        )
        pipe.send(time.monotonic())
        desks[0].report(failure, 30.0)
    deadline = time.monotonic() + 60.0
    while any(desk.failure is None for desk in desks) and time.monotonic() < deadline:
        time.sleep(0.01)
    pipe.send([desk.since if desk.failure is not None else None for desk in desks])
    os._exit(0)


def cpu_seconds(pid: int) -> float:
    """The time that a process has computed."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def loopback_bytes() -> int:
    """All bytes that went over the loopback interface so far."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    return int(next(line for line in lines if line.strip().startswith("lo:")).split()[1])


def measure(size: int) -> dict[str, Any]:
    """Play a job of some processes; returns its figures."""
    # Torch warns for each client whose name it cannot look up.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    context = multiprocessing.get_context("spawn")
    pipe, end = context.Pipe()
    store = context.Process(target=host, args=(end,), daemon=True)
    store.start()
    port = pipe.recv()
    count = min(CLIENTS, size)
    bounds = [round(i * size / count) for i in range(count + 1)]
    clients, pipes = [], []
    for first, last in pairwise(bounds):
        mine, theirs = context.Pipe()
        clients.append(
            context.Process(target=play, args=(theirs, port, size, first, last), daemon=True)
        )
        clients[-1].start()
        pipes.append(mine)
    lost = [one for each in pipes for one in each.recv() if one]
    if lost:
        raise AssertionError(f"{len(lost)} of {size} processes lost the store: {lost[0]}")
    busy, travelled, began = cpu_seconds(store.pid or 0), loopback_bytes(), time.monotonic()
    time.sleep(SECONDS)
    seconds = time.monotonic() - began
    busy, travelled = cpu_seconds(store.pid or 0) - busy, loopback_bytes() - travelled
    for index, each in enumerate(pipes):
        each.send("report" if index == 0 else "wait")
    at = pipes[0].recv()
    heard = [one for each in pipes for one in each.recv()]
    if None in heard:
        raise AssertionError(
            f"{heard.count(None)} of {size} processes have not read of the failure"
        )
    for client in clients:
        client.join(5.0)
        client.kill()
    pipe.send("end")
    store.join(5.0)
    return {
        "bytes a second and process": travelled / seconds / size,
        "share of a core": busy / seconds,
        "seconds until all know": max(heard) - at,
    }


def compare(rounds: int) -> dict[str, Any]:
    """All sizes, printed, and as JSON data; each is measured once, whatever the rounds."""
    figures: dict[str, Any] = {}
    for size in SIZES:
        found = figures[f"{size} processes"] = measure(size)
        rate, share, last = found.values()
        print(
            f"watch of {size} processes: {rate:.0f} bytes/s each, both ways, with headers; the store takes "
            f"{share:.2%} of a core; a failure was read by all after {last:.2f} s"
        )
    return figures
