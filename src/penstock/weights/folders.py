"""Folders of safetensors files that hold the unsplit model's weights, and stages filled from them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from penstock.errors import InputFileError, UsageError, listed, quoted
from penstock.partition.base import Partition, named_tensors
from penstock.weights.files import WeightFiles, entries, parse_json, read_bytes, write_file
from penstock.weights.initialise import give_data
from penstock.weights.states import LoadResult, Names, check_fits, compare

INDEX = "model.safetensors.index.json"


def _file_of(stage: int, stages: int) -> str:
    return f"model-{stage + 1:05d}-of-{stages:05d}.safetensors"


def save_stage(
    state: Mapping[str, Tensor], folder: Path, stage: int, stages: int
) -> dict[str, int]:
    """Write one stage's file; an older one is replaced once the new one is complete.

    Returns:
        The size of each tensor in bytes, for :func:`save_index`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / _file_of(stage, stages)
    partial = target.with_suffix(".partial")
    partial.unlink(missing_ok=True)
    write_file(partial, state)
    os.replace(partial, target)
    return {name: tensor.nbytes for name, tensor in state.items()}


def save_index(
    folder: Path, sizes: Mapping[int, Mapping[str, int]], tied: Mapping[str, str]
) -> None:
    """Write the index of which file holds each tensor, in the form that transformers reads.

    Args:
        folder: where the files are.
        sizes: for each stage, what :func:`save_stage` returned.
        tied: each further name of a tensor, with its name in a file.
    """
    about: dict[str, Any] = {"total_size": sum(sum(of.values()) for of in sizes.values())}
    if tied:
        about["tied"] = dict(tied)
    files = {name: _file_of(i, len(sizes)) for i in sorted(sizes) for name in sizes[i]}
    partial = folder / f"{INDEX}.partial"
    partial.write_text(json.dumps({"metadata": about, "weight_map": files}, indent=2) + "\n")
    os.replace(partial, folder / INDEX)


def read_weights(folder: str | os.PathLike[str]) -> WeightFiles:
    """The weights in a folder of safetensors files, under all their names.

    ``model.load_state_dict(penstock.read_weights(folder))`` fills the unsplit model.

    Args:
        folder: one that :meth:`penstock.Pipeline.save` or transformers wrote, or a single file.

    Raises:
        InputFileError: the folder holds no such files, or they cannot be read.
    """
    path = Path(folder)
    for file in (path, path / INDEX, path / "model.safetensors"):
        if file.exists() and not file.is_dir():
            break
    else:
        raise InputFileError(
            f"{path}: it holds neither {INDEX} nor model.safetensors; pass a folder that Pipeline.save or "
            "transformers has written"
        )
    if file == path / INDEX:
        return WeightFiles(*_read_index(path))
    return WeightFiles(dict.fromkeys(entries(file), file), {})


def _read_index(folder: Path) -> tuple[dict[str, Path], dict[str, str]]:
    """The file of each tensor; and each further name of a tensor, with its name in the file."""
    path = folder / INDEX
    index = parse_json(read_bytes(path), path)
    about = index.get("metadata", {}) if isinstance(index, dict) else None
    files: Any = index.get("weight_map") if isinstance(index, dict) else None
    tied: Any = about.get("tied", {}) if isinstance(about, dict) else None
    for table in (files, tied):
        if not isinstance(table, dict) or not all(isinstance(one, str) for one in table.values()):
            raise InputFileError(
                f"{path}: not an index of weights (its weight_map must give each name a file); write it again"
            )
    for file in set(files.values()):
        if not file or Path(file).is_absolute() or ".." in Path(file).parts:
            raise InputFileError(
                f"{path}: it names {quoted([file])}, which is outside of its folder; do not trust this index"
            )
    lacking = sorted(file for file in set(files.values()) if not _is_there(folder / file))
    if lacking:
        raise InputFileError(
            f"{folder}: the index names {listed(lacking)}, which are missing; copy the whole folder"
        )
    return {name: folder / file for name, file in files.items()}, tied


def _is_there(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # such as a name that is too long
        return False


# ---- fill stages from files: each process reads only its own tensors, and gives stages memory


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """A context that builds models without memory for parameters, but with computed buffers.

    ``torch.device("meta")`` would leave buffers without values too. Those that no file holds, such as the
    frequencies of rotary embeddings, would be lost.
    """

    def on_meta(
        module: nn.Module, name: str, parameter: nn.Parameter | None
    ) -> nn.Parameter | None:
        del module, name
        if parameter is None or parameter.is_meta:
            return parameter  # a tied parameter stays the same object
        return nn.Parameter(parameter.to("meta"), parameter.requires_grad)

    hook: Any = on_meta  # torch's annotation does not say that a hook may return another parameter
    handle = register_module_parameter_registration_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def load_partition(
    partition: Partition,
    stages: Iterable[int],
    folder: str | os.PathLike[str],
    *,
    device: torch.device | str = "cpu",
    seen: Callable[[str], object] = str,
) -> None:
    """Fill this process's stages of a partition, reading only their own tensors.

    Args:
        partition: the model's stages; a tied weight may be in the files under any of its names.
        stages: the indices of the stages to fill.
        folder: one that :meth:`penstock.Pipeline.save` or transformers wrote, or a single file.
        device: the device on which meta tensors get memory.
        seen: called with a line of text for every tensor, to report progress.

    Raises:
        InputFileError: there are no such files, or they are damaged.
        StateDictError: the files do not match the model: a tensor is missing, has another size, or belongs
            to no stage. Nothing has changed then.
        UsageError: a buffer has no values, and is in no file.
    """
    seen("looks for its weights")
    files, names = read_weights(folder), Names(partition.shared)
    tensors = [dict(named_tensors(module)) for module in partition.modules]
    saved = [
        {name: of[name] for name in module.state_dict(keep_vars=True) if name in of}
        for module, of in zip(partition.modules, tensors, strict=True)
    ]
    here = {name: tensor for of in saved for name, tensor in of.items()}
    missing, problems = compare(here, names, files)
    unexpected = [name for name in files if name not in here and not names.is_shared(name)]
    check_fits(LoadResult(missing, unexpected), problems)
    for index in sorted(stages):
        # Only the model's code can compute what no file holds.
        lost = [
            name for name, of in tensors[index].items() if of.is_meta and name not in saved[index]
        ]
        if lost:
            raise UsageError(
                f"{', '.join(lost[:5])} are in no file, and have no values on the meta device; build "
                "the model under penstock.weights.parameters_on_meta(), which leaves buffers as computed"
            )
    with torch.no_grad():
        for name, tensor in (pair for index in sorted(stages) for pair in saved[index].items()):
            seen(f"loads {name}")
            value = files[next(one for one in names.all(name) if one in files)]
            if tensor.is_meta:
                give_data(tensor, value.to(device=device, dtype=tensor.dtype))
            else:
                tensor.copy_(value)
