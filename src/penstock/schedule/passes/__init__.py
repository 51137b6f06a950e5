"""Passes: a Schedule in, a Schedule out, the argument untouched."""

from penstock.schedule.passes.add_communication import add_communication
from penstock.schedule.passes.compose import Pass, compose
from penstock.schedule.passes.compute_only import compute_only
from penstock.schedule.passes.delay_receives import delay_receives
from penstock.schedule.passes.merge_backward import merge_backward
from penstock.schedule.passes.prefetch import prefetch
from penstock.schedule.passes.reduce_gradients import reduce_gradients
from penstock.schedule.passes.release_sends import release_sends
from penstock.schedule.passes.wait_sends import add_wait_sends, remove_wait_sends

__all__ = [
    "Pass",
    "add_communication",
    "add_wait_sends",
    "compose",
    "compute_only",
    "delay_receives",
    "merge_backward",
    "prefetch",
    "reduce_gradients",
    "release_sends",
    "remove_wait_sends",
]
