"""Signals: who listens to them when others have listened before."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest

from penstock.faults.processes import Interrupts


def test_a_listener_that_has_gone_without_a_word_holds_nobody_up() -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    before = signal.set_wakeup_fd(writing)
    os.close(reading)
    os.close(writing)
    try:
        found = Interrupts()
        found.open()
        assert not found.came()
        found.close()
        assert signal.set_wakeup_fd(-1) == -1
    finally:
        signal.set_wakeup_fd(before)


def test_a_listener_that_is_closed_by_another_thread_leaves_no_end_to_others() -> None:
    before = signal.set_wakeup_fd(-1)
    try:
        first, second = Interrupts(), Interrupts()
        first.open()
        thread = threading.Thread(target=first.close)
        thread.start()
        thread.join()
        # What is opened now would get the numbers of ends that were closed.
        file = os.pipe()
        second.open()
        assert not second.came()
        second.close()
        assert signal.set_wakeup_fd(-1) == -1
        os.close(file[0])
        os.close(file[1])
    finally:
        signal.set_wakeup_fd(before)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_signal_to_a_process_that_was_forked_is_not_this_one_s() -> None:
    # Where the tests run in the background, a shell has it ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    found = Interrupts()
    found.open()
    try:
        child = os.fork()
        if child == 0:
            try:
                os.kill(os.getpid(), signal.SIGINT)
            except KeyboardInterrupt:
                os._exit(7)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert not found.came()
    finally:
        found.close()
        signal.signal(signal.SIGINT, before)


CODE = """
import signal, sys, time
from penstock.faults.processes import interrupt, terminate
signal.signal(signal.SIGTERM, terminate)
signal.signal(signal.SIGINT, interrupt)
try:
    print("ready", flush=True)
    time.sleep(60)
finally:
    print("cleaning up", flush=True)
    if sys.argv[1] == "slowly":
        time.sleep(60)
"""


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_second_signal_ends_at_once_what_cleans_up_slowly(number: int, status: int) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", CODE, "slowly"], stdout=subprocess.PIPE, text=True
    ) as process:
        for said in ("ready", "cleaning up"):
            assert process.stdout is not None
            assert process.stdout.readline().strip() == said
            process.send_signal(number)
        assert process.wait(10.0) == status


def test_one_signal_leaves_through_the_contexts_that_are_open() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", CODE, "fast"], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline().strip() == "ready"
        process.send_signal(signal.SIGTERM)
        assert process.communicate(timeout=10.0)[0].strip() == "cleaning up"
        assert process.returncode == 143
