"""Passes: a Schedule in, a Schedule out, the argument untouched."""

from penstock.schedule.passes.add_communication import add_communication

__all__ = ["add_communication"]
