"""Schedules as rows of actions, a row per rank, under torch's names."""
