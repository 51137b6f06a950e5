"""``penstock checkpoint``: show what checkpoints hold, and write their weights as plain files."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock import checkpoint
from penstock.errors import UsageError

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
    processing_class = None if processor is None else _processor(processor)
    for path in checkpoint.export(folder, out, processing_class):
        typer.echo(str(path))


def _processor(name: str) -> Any:
    try:
        return import_module("transformers").AutoProcessor.from_pretrained(name)
    except ImportError:
        raise UsageError(
            "--processor needs transformers: pip install 'penstock-pipeline[transformers]'"
        ) from None
    except (OSError, ValueError) as error:
        raise UsageError(f"--processor {name}: transformers finds none there: {error}") from error
