"""What is in a folder of checkpoints, in words, and the weights of one as plain files."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from penstock.checkpoint.contents import MODEL
from penstock.checkpoint.folder import TABLE, Found, find
from penstock.checkpoint.loading import Table
from penstock.errors import InputFileError, UsageError
from penstock.weights.files import save_index, save_stage

LARGEST = 2 << 30
"""Bytes of an exported file: as much is in memory at once."""


def _found(folder: str | os.PathLike[str]) -> list[Found]:
    """The checkpoints that are meant: those of a folder, of a run folder, or a single one.

    Raises:
        UsageError: there is none.
    """
    path = Path(folder)
    if (path / TABLE).is_file():
        return [one for one in find(path.parent) if one.path.name == path.name]
    found = find(path) or find(path / "checkpoints")
    if not found:
        raise UsageError(
            f"{str(path)!r} holds no checkpoint; give a run folder, a folder of checkpoints, or one of them"
        )
    return found


def describe(folder: str | os.PathLike[str], *, check: bool = False) -> str:
    """What checkpoints a folder holds, and what is in the latest of them.

    Args:
        folder: a run folder, a folder of checkpoints, or one of them.
        check: whether to read everything and compare it with the checksums.

    Raises:
        UsageError: there is no checkpoint.
    """
    lines, latest = [], None
    for one in _found(folder):
        try:
            table = Table(one)
            if check:
                table.verify_all()
        except InputFileError as error:
            lines.append(f"{one.path.name}  DAMAGED: {error}")
            continue
        latest = latest or table
        size = sum(about["bytes"] for about in table.files.values())
        checked = "  all bytes are those that were written" if check else ""
        lines.append(f"{one.path.name}  {table.about['written']}  {_bytes(size)}{checked}")
    return "\n".join([*lines, *(["", *_contents(latest)] if latest else [])])


def _contents(table: Table) -> Iterator[str]:
    yield f"step {table.found.step}, in {table.found.path.name}:"
    layout = table.layout
    cut = f", {layout['schedule']}, {layout['stages']} stages on {layout['ranks']} ranks"
    yield (
        f"  written by {layout['processes']} processes in {layout['replicas']} replicas"
        f"{cut if 'schedule' in layout else ', unsplit'}, torch {table.about['torch']}"
    )
    for label, about in table.weights.items():
        keys = [key for key in table.tensors if key.startswith(f"{label}/")]
        count = sum(math.prod(table.shape(key)) for key in keys)
        types = sorted({str(table.dtype(key)).removeprefix("torch.") for key in keys})
        tied = f", {len(about['tied'])} further names of tied ones" if about["tied"] else ""
        yield f"  {label}: {count:,} numbers in {len(keys)} tensors of {', '.join(types)}{tied}"
    for label, about in table.optimizers.items():
        yield f"  {label}: {about['kind']}, states of {len(about['states'])} parameters"
        for number, group in enumerate(about["groups"]):
            settings = ", ".join(f"{key}={_setting(of)}" for key, of in group["settings"].items())
            yield f"    group {number}: {len(group['parameters'])} parameters, {settings}"
    for label, about in table.states.items():
        kinds = len(about["variants"])
        yield f"  {label}: {'the same on all processes' if kinds == 1 else f'{kinds} different ones'}"
    if table.extra is not None:
        yield f"  extra: {json.dumps(table.extra, default=str)}"


def _setting(value: Any) -> Any:
    return value["of"] if isinstance(value, Mapping) and "of" in value else value


def _bytes(size: float) -> str:
    if size < 1000:
        return f"{size:,.0f} bytes"
    for unit in ("kB", "MB"):
        size /= 1000
        if size < 1000:
            return f"{size:,.1f} {unit}"
    return f"{size / 1000:,.1f} GB"


def export(folder: str | os.PathLike[str], out: str | os.PathLike[str]) -> list[Path]:
    """Write the weights of a checkpoint, the latest of several, as plain safetensors files and an index.

    :func:`penstock.read_weights`, ``Pipeline(weights=)`` and transformers read them.

    Args:
        folder: a run folder, a folder of checkpoints, or one of them.
        out: where to; it must not hold such files yet.

    Returns:
        The files.

    Raises:
        UsageError: there is no checkpoint with a model's weights, or there are files already.
        InputFileError: it is damaged.
    """
    table, path = Table(_found(folder)[0]), Path(out)
    if MODEL not in table.weights:
        raise UsageError(f"{table.found.path} holds no weights of a pipeline or of model=")
    if path.exists() and any(path.glob("*.safetensors*")):
        raise UsageError(f"{str(path)!r} holds weights already; choose another folder")
    keys = [key for key in table.tensors if key.startswith(f"{MODEL}/")]
    table.verify([(key, table.everything(key)) for key in keys])
    shards = list(_shards(table, keys))
    sizes = {}
    for number, shard in enumerate(shards):
        state: dict[str, Tensor] = {key.partition("/")[2]: table.read(key) for key in shard}
        sizes[number] = save_stage(state, path, number, len(shards))
    save_index(path, sizes, table.weights[MODEL]["tied"])
    return sorted(path.glob("*.safetensors"))


def _shards(table: Table, keys: list[str]) -> Iterator[list[str]]:
    """The weights in parts of bounded size."""
    held, size = list[str](), 0
    for key in keys:
        bytes_of_one = math.prod(table.shape(key)) * table.dtype(key).itemsize
        if held and size + bytes_of_one > LARGEST:
            yield held
            held, size = [], 0
        held.append(key)
        size += bytes_of_one
    yield held
