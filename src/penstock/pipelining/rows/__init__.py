"""Schedules as rows of actions, a row a rank, under torch's names."""
