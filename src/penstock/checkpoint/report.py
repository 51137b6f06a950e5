"""Describe a folder of checkpoints, and export the weights of one as plain files."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from penstock._engine.values import bytes_as_text
from penstock._engine.weights.folders import INDEX, WeightFolder, files_beside, save_stage
from penstock._engine.weights.storage import is_there
from penstock.checkpoint.contents import MODEL, STATE, WEIGHTS
from penstock.checkpoint.folder import find
from penstock.checkpoint.table import TABLE, CheckpointTable
from penstock.errors import InputFileError, UsageError, printable

LARGEST = 2 << 30
"""The size limit of an exported file, in bytes; a whole file is in memory at once."""


def _checkpoints(folder: str | os.PathLike[str]) -> list[Path]:
    """Find the checkpoints of a folder or a run folder, or a single one."""
    path = Path(folder)
    if (path / TABLE).exists():
        return [path]
    paths = [one.path for one in find(path) or find(path / "checkpoints")]
    if not paths:
        raise UsageError(
            f"{str(path)!r} holds no checkpoint; give a run folder, a folder of checkpoints, or one of them"
        )
    return paths


def describe(folder: str | os.PathLike[str], *, check: bool = False) -> str:
    """Describe the checkpoints in a folder, and the contents of the latest, as text.

    Args:
        folder: a run folder, a folder of checkpoints, or one of these.
        check: whether to read all files and verify their checksums.

    Raises:
        UsageError: there is no checkpoint.
    """
    lines, latest = [], None
    for path in _checkpoints(folder):
        try:
            table = CheckpointTable(path)
            if check:
                table.check_files()
        except InputFileError as error:
            lines.append(f"{path.name}  DAMAGED: {error}")
            continue
        latest = latest or table
        size = sum(file.bytes for file in table.contents.files)
        checked = "  all bytes are those that were written" if check else ""
        lines.append(f"{path.name}  {table.contents.written}  {bytes_as_text(size)}{checked}")
    return printable("\n".join([*lines, *(["", *_contents(latest)] if latest else [])]), "\n")


def _contents(table: CheckpointTable) -> Iterator[str]:
    contents = table.contents
    yield f"step {table.step}, in {table.path.name}:"
    layout = contents.layout
    cut = f"{layout.schedule}, {layout.stages} stages on {layout.ranks} ranks"
    yield (
        f"  written by {layout.processes} processes in {layout.replicas} replicas, "
        f"{'unsplit' if layout.schedule is None else cut}, torch {contents.torch}"
    )
    for label, kind in contents.kinds.items():
        keys = table.tensors_of(label)
        if kind == WEIGHTS:
            count = sum(math.prod(table.shape(key)) for key in keys)
            types = sorted({str(table.dtype(key)).removeprefix("torch.") for key in keys})
            names = sum(key.startswith(f"{label}/") for key in contents.tied)
            tied = f", {names} further names of tied ones" if names else ""
            yield f"  {label}: {count:,} numbers in {len(keys)} tensors of {', '.join(types)}{tied}"
        elif kind == STATE:
            yield f"  {label}: a state with {len(keys)} tensors"
        else:
            groups = contents.groups.get(label, [])
            count = sum(len(group.parameters) for group in groups)
            yield f"  {label}: {kind}, states of {count} parameters"
            for number, group in enumerate(groups):
                settings = (f"{key}={_setting(value)}" for key, value in group.settings.items())
                yield f"    group {number}: {len(group.parameters)} parameters, {', '.join(settings)}"
    if contents.extra is not None:
        yield f"  extra: {json.dumps(contents.extra)}"


def _setting(value: Any) -> Any:
    return value["of"] if isinstance(value, Mapping) and "of" in value else value


def export(
    folder: str | os.PathLike[str], out: str | os.PathLike[str], processing_class: Any = None
) -> list[Path]:
    """Write the weights of a checkpoint (of several, the latest) as plain safetensors files and an index.

    :func:`penstock.read_weights` and ``pipe.weights.load`` read them. A model of transformers gets its
    ``config.json`` and ``generation_config.json`` too, so that ``from_pretrained(out)`` loads it.

    Args:
        folder: a run folder, a folder of checkpoints, or one of these.
        out: the folder to write to, which must not hold such files.
        processing_class: a tokenizer or processor, whose files are written too.

    Returns:
        The paths of the files.

    Raises:
        UsageError: there is no checkpoint with a model's weights, or there are such files already.
        InputFileError: the checkpoint is damaged.
    """
    table, path = CheckpointTable(_checkpoints(folder)[0]), Path(out)
    if table.contents.kinds.get(MODEL) != WEIGHTS:
        raise UsageError(f"{table.path} holds no weights of a pipeline or of model=")
    if any(is_there(path / name) for name in (INDEX, "model.safetensors")):
        raise UsageError(f"{str(path)!r} holds weights already; choose another folder")
    table.check_files()
    beside = files_beside(None, processing_class)
    beside |= {name: text.encode() for name, text in table.contents.beside.items()}
    files, size = [list[str]()], 0
    for key in table.tensors_of(MODEL):
        nbytes = math.prod(table.shape(key)) * table.dtype(key).itemsize
        if files[-1] and size + nbytes > LARGEST:
            files.append([])
            size = 0
        files[-1].append(key)
        size += nbytes
    tied = {_name(k): _name(v) for k, v in table.contents.tied.items() if k.startswith(f"{MODEL}/")}
    with WeightFolder(path) as target:
        written = {}
        for number, keys in enumerate(files):
            state = {_name(key): table.read(key) for key in keys}
            written[number] = save_stage(state, path, number, len(files), target.save)
        return target.publish(written, tied, beside)


def _name(key: str) -> str:
    return key.partition("/")[2]
