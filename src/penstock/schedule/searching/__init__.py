"""Search: schedules for stages of unequal cost under a memory limit, and what none can beat."""

from penstock.schedule.searching.search import lower_bound, search

__all__ = ["lower_bound", "search"]
