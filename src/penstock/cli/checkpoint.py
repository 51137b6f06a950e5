"""``penstock checkpoint``: show what checkpoints hold, and write their weights as plain files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from penstock import checkpoint

app = typer.Typer(
    help="See what checkpoints hold, and export weights.",
    no_args_is_help=True,
    add_completion=False,
)

Folder = Annotated[
    Path, typer.Argument(help="A run folder, a folder of checkpoints, or one of them.")
]
Check = Annotated[bool, typer.Option("--check", help="Read everything and compare the checksums.")]
Out = Annotated[Path, typer.Argument(help="Where to write the weights.")]
Processor = Annotated[
    str | None,
    typer.Option(
        help="A tokenizer or processor to write too: a name or folder that transformers knows."
    ),
]


@app.command()
def show(folder: Folder, check: Check = False) -> None:
    """List the checkpoints of a folder, and what is in the latest."""
    typer.echo(checkpoint.describe(folder, check=check))


@app.command()
def export(folder: Folder, out: Out, processor: Processor = None) -> None:
    """Write the weights of the latest checkpoint as plain safetensors files, and a model's config.json."""
    processing_class = None
    if processor is not None:
        from transformers import AutoProcessor

        processing_class = AutoProcessor.from_pretrained(processor)  # type: ignore[no-untyped-call]
    for path in checkpoint.export(folder, out, processing_class):
        typer.echo(str(path))
