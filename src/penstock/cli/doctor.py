"""``penstock doctor``: examine the ranks of a job, and the links between them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from penstock import doctor as examining
from penstock.cli.output import check_folder, write_text
from penstock.errors import OK

ODD = 1
"""The exit status if there are anomalies."""
Out = Annotated[
    Path | None, typer.Option("--out", help="Write what was found as JSON, for penstock plan.")
]
OnDevice = Annotated[
    str,
    typer.Option("--device", help="Where ranks compute: cpu, cuda, or another kind."),
]
Folder = Annotated[
    Path, typer.Option("--folder", help="The folder of the run, which all ranks are to see.")
]
Dtypes = Annotated[
    list[str] | None,
    typer.Option("--dtype", help="A type of matrix products to measure; may be repeated."),
]
Window = Annotated[
    float,
    typer.Option("--window", min=0.0, help="Seconds of the windows in which rates are measured."),
]


def doctor(
    out: Out = None,
    device: OnDevice = "cpu",
    folder: Folder = Path(),
    dtype: Dtypes = None,
    window: Window = 0.15,
) -> int:
    """Examine all ranks of a job, and the links between them, in under two minutes.

    Start it as the run will be started: torchrun ... -m penstock doctor. In one process it checks this
    machine. The exit status is 0 if it finds no anomalies, else 1.
    """
    check_folder(out)
    first = os.environ.get("RANK", "0") == "0"

    def say(text: str) -> None:
        if first:
            typer.echo(f"{text} ...", err=True)

    report = examining.examine(device, folder=folder, dtypes=dtype or (), window=window, say=say)
    if not first:
        # If one process ends with an error, torchrun ends the others, and the first one is to report.
        return OK
    typer.echo(str(report))
    write_text(out, lambda: report.to_json() + "\n")
    return ODD if report.odd() else OK
