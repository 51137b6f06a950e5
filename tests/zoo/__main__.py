"""Models as their libraries have them, cut by default, beside the plain loop.

``python -m tests.zoo [--library transformers] [--only NAME] [--schedules 1F1B ZB-V] [--to FILE] [--skip FILE]``

Each model runs in a process of its own, which is ended when it takes too long.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import time
import warnings
from collections import Counter
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from tests.zoo.judging import Row, judge

LIBRARIES = ("transformers", "diffusers", "timm", "torchvision", "hand")
KINDS = ("right", "with example", "refused", "unclear", "silent", "lost", "void")


def models_of(library: str) -> dict[str, Any]:
    """What makes each model of a library, by name."""
    name = "tests.catalogue.models" if library == "hand" else f"tests.zoo.{library}_models"
    models: dict[str, Any] = import_module(name).MODELS
    return models


def _in_child(library: str, name: str, schedules: list[str], pipe: Any) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    torch.manual_seed(0)
    judge(name, models_of(library)[name], schedules, pipe.send)
    pipe.send(None)


def run(library: str, name: str, schedules: list[str], seconds: float) -> list[Row]:
    """The rows of one model; the last one says so if its process hung or died."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    child = context.Process(target=_in_child, args=(library, name, schedules, there), daemon=True)
    began = time.monotonic()
    rows: list[Row] = []
    child.start()
    there.close()
    said = f"took longer than {seconds:.0f} s"
    try:
        while here.poll(max(0.0, began + seconds - time.monotonic())):
            row = here.recv()
            if row is None:
                return rows
            rows.append(row)
    except EOFError:
        child.join()
        said = f"its process died with status {child.exitcode}"
    finally:
        child.kill()
        child.join()
    return [*rows, Row(name, text=said, seconds=time.monotonic() - began)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--library", default="hand", choices=LIBRARIES)
    parser.add_argument("--only", default="", help="run models whose name has this text")
    parser.add_argument("--schedules", nargs="*", default=["1F1B"])
    parser.add_argument("--seconds", type=float, default=120.0, help="for each model")
    parser.add_argument("--skip", default="", help="a table; models that it has are left out")
    parser.add_argument("--to", default="", help="append rows to this file")
    options = parser.parse_args()
    path = Path(options.skip)
    done = path.read_text() if options.skip and path.exists() else ""
    counts: Counter[str] = Counter()
    for name in models_of(options.library):
        if options.only not in name or f"| {name} |" in done:
            continue
        for row in run(options.library, name, options.schedules, options.seconds):
            counts[row.kind] += 1
            print(row.shown(), flush=True)
            if options.to:
                with Path(options.to).open("a") as file:
                    file.write(row.shown() + "\n")
    print(", ".join(f"{counts[kind]} {kind}" for kind in KINDS if counts[kind]))


if __name__ == "__main__":
    main()
