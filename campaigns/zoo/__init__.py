"""Models of libraries, made small from their configurations: a pipeline of each beside its plain loop.

All models of transformers, diffusers, timm and torchvision that are installed, and those that the tests wrote
by hand, each cut by default.
"""

from __future__ import annotations

import logging
import os
import warnings
from argparse import ArgumentParser, Namespace
from collections.abc import Generator, Iterator
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from campaigns.run import Campaign, Rows
from campaigns.table import Row
from campaigns.zoo.judging import judge

LIBRARIES = ("transformers", "diffusers", "timm", "torchvision", "hand")


def models_of(library: str) -> dict[str, Any]:
    """What makes each model of a library, by name."""
    places = [f"campaigns.zoo.{library}_models"]
    if library == "hand":
        places += ["tests.catalogue.models"]
    return {name: make for place in places for name, make in import_module(place).MODELS.items()}


def add_options(parser: ArgumentParser) -> None:
    there = [name for name in LIBRARIES if name == "hand" or find_spec(name) is not None]
    parser.add_argument(
        "--libraries", nargs="*", default=there, choices=LIBRARIES, help="by default all installed"
    )
    parser.add_argument("--schedules", nargs="*", default=["1F1B"])


def cases(options: Namespace) -> Generator[tuple[str, Rows]]:
    for library in options.libraries:
        models = models_of(library)
        for name, make in models.items():
            case = f"{library}: {name}"
            yield case, partial(rows_of, case, make, options.schedules, options.seed)


def rows_of(case: str, make: Any, schedules: list[str], seed: int) -> Iterator[Row]:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    torch.manual_seed(seed)
    for row in judge(case, make, schedules):
        gap = f"{row.gap:.0e}" if row.kind in ("right", "with example", "silent") else ""
        share = f"{row.share:.2f}" if row.share else ""
        yield Row(case, row.kind, (row.schedule, gap, share, row.text))


CAMPAIGN = Campaign(
    cases,
    columns=("schedule", "largest difference", "share of the busiest rank", "what it says"),
    bad=("silent", "unclear"),
    limit=120.0,
    options=add_options,
)
