"""Signals: who listens to them when others have listened before."""

from __future__ import annotations

import os
import signal

from penstock.faults.signals import Interrupts


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
