"""What all campaigns share: their options, the loop over cases, and processes that are ended in time."""

from __future__ import annotations

import argparse
import math
import multiprocessing
import re
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from campaigns.table import Row, Table

Rows = Callable[[], Iterable[Row]]
BROKEN = ("lost", "broke")
"""Verdicts of cases that did not come to their end."""


@dataclass(frozen=True)
class Campaign:
    """A campaign.

    Attributes:
        cases: from the options, the name of each case and what runs it; may have no end.
        columns: of its table.
        bad: the verdicts by which it fails, besides those of cases that hang or break.
        limit: seconds for a case, which then runs in a forked process of its own; by default in this one.
        seconds: after these, no more cases begin.
        options: adds options of its own.
    """

    cases: Callable[[Namespace], Generator[tuple[str, Rows]]]
    columns: Sequence[str]
    bad: Collection[str]
    limit: float | None = None
    seconds: float = math.inf
    options: Callable[[ArgumentParser], None] = lambda parser: None


def run(name: str, module: ModuleType, arguments: Sequence[str]) -> int:
    """Run a campaign's cases and print its table.

    Args:
        name: of the campaign.
        module: whose ``CAMPAIGN`` it is.
        arguments: of the command line.

    Returns:
        1 if the verdict on any case is bad, else 0.
    """
    campaign: Campaign = module.CAMPAIGN
    parser = argparse.ArgumentParser(
        prog=f"python -m campaigns {name}",
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", default="", help="cases whose name matches this")
    parser.add_argument("--seed", type=int, default=0, help="what is drawn at random comes of it")
    parser.add_argument(
        "--seconds", type=float, default=campaign.seconds, help="begin no case after these"
    )
    parser.add_argument(
        "--to", type=Path, help="append the rows to this file, and leave out cases that it has"
    )
    campaign.options(parser)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    table = Table(campaign.columns, {*campaign.bad, *BROKEN}, options.to)
    until = time.monotonic() + options.seconds
    with closing(campaign.cases(options)) as cases:
        for case, rows in cases:
            if time.monotonic() > until:
                break
            if not re.search(options.only, case) or case in table:
                continue
            for row in _ended(case, rows, campaign.limit):
                table.add(row)
    return table.close()


def _ended(case: str, rows: Rows, limit: float | None) -> Iterator[Row]:
    """The rows of a case; if it does not come to its end, the last one says so."""
    try:
        yield from rows() if limit is None else in_child(rows, limit)
    except Lost as error:
        yield Row(case, "lost", (error,))
    except Broke as error:
        yield Row(case, "broke", (error,))
    except Exception as error:
        yield Row(case, "broke", (_sentence(error),))


class Lost(Exception):
    """A process hung or died."""


class Broke(Exception):
    """A case raised an error in its process; says which."""


def _sentence(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def in_child(rows: Rows, limit: float) -> Iterator[Row]:
    """The rows of a case that runs in a forked process, as they come; ended after so many seconds."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    child = context.Process(target=_send_rows, args=(rows, there))
    until = time.monotonic() + limit
    child.start()
    there.close()
    try:
        while here.poll(max(0.0, until - time.monotonic())):
            row = here.recv()
            if row is None:
                return
            if isinstance(row, str):
                raise Broke(row)
            yield row
        raise Lost(f"took longer than {limit:.0f} s")
    except EOFError:
        child.join()
        raise Lost(f"its process died with status {child.exitcode}") from None
    finally:
        child.kill()
        child.join()
        here.close()


def _send_rows(rows: Rows, pipe: Any) -> None:
    try:
        for row in rows():
            pipe.send(row)
        pipe.send(None)
    except Exception as error:
        # As text, since not every error survives pickling.
        pipe.send(_sentence(error))
