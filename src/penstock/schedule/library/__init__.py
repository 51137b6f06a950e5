"""The schedules, one a file, and the registry of their names."""

from penstock.schedule.library.registry import RECIPES, Recipe, build, find, names, register

__all__ = ["RECIPES", "Recipe", "build", "find", "names", "register"]
