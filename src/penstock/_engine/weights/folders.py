"""Folders of safetensors files that hold the unsplit model's weights, and stages filled from them."""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from penstock._engine.parallel import is_sharded, whole
from penstock._engine.transport import Job
from penstock._engine.weights.files import SAVE, WeightFiles, entries, write_file
from penstock._engine.weights.initialise import give_data
from penstock._engine.weights.lease import Lease
from penstock._engine.weights.states import (
    LoadResult,
    Names,
    StageWeights,
    check_fits,
    check_saveable,
    compare,
)
from penstock._engine.weights.storage import (
    check_arrived,
    file_name,
    is_there,
    parse_json,
    patiently,
    read_bytes,
    replace_file,
    write_bytes,
)
from penstock.errors import InputFileError, UsageError, listed
from penstock.partition.base import Partition, find_shared, named_tensors

INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_HIDDEN = f".{INDEX}."
"""The name of an index that is being written begins so."""
_FILES = r".+\.safetensors"
"""The names of files in an index."""
_OURS = re.compile(r"model-\d{5}-of-\d{5}-[0-9a-f]{12}\.safetensors")


class WeightFolder:
    """A folder whose weights are replaced as a whole.

    The new files have new names, which carry the identifier of the save. When all are on the disk, the index
    gets its name; what it no longer names is removed after that. So a reader finds the old weights or the new
    ones, whenever the writer is killed.

    Args:
        folder: the folder; it is made if necessary.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lease = Lease(folder)
        self.save = os.urandom(6).hex()

    def publish(
        self,
        stages: Mapping[int, Sequence[Any]],
        tied: Mapping[str, str],
        beside: Mapping[str, bytes],
    ) -> list[Path]:
        """Write the index of which file holds each tensor, in the form that transformers reads.

        Args:
            stages: for each stage, what :func:`save_stage` returned.
            tied: each further name of a tensor, with its name in a file.
            beside: the content of other files, by name; each replaces another one before the weights do.

        Returns:
            The paths of the files.

        Raises:
            CheckpointError: a file is not here as its process has written it.
            UsageError: another run has taken the folder.
        """
        rows = [row for _, row in sorted(stages.items())]
        about: dict[str, Any] = {
            "total_size": sum(sum(tensors.values()) for *_, tensors in rows),
            SAVE: self.save,
        }
        if tied:
            about["tied"] = dict(tied)
        index = {"metadata": about, "weight_map": {key: name for name, _, of in rows for key in of}}
        written = {self._folder / name: size for name, size, _ in rows}
        hidden = self._folder / f"{_HIDDEN}{self.save}"
        self._lease.check()
        for name, content in beside.items():
            path = self._folder / name
            if not is_there(path) or read_bytes(path) != content:
                patiently(
                    "made", path.parent, partial(path.parent.mkdir, parents=True, exist_ok=True)
                )
                replace_file(path, content)
        earlier = {_SINGLE, *_named_by(self._folder)}
        write_bytes(hidden, (json.dumps(index, indent=2) + "\n").encode(), reads_back=True)
        self._lease.publish(hidden, self._folder / INDEX, written)
        self._remove(earlier)
        return sorted(path for path, (*_, of) in zip(written, rows, strict=True) if of)

    def _remove(self, earlier: set[str]) -> None:
        """Remove what the index does not name: files of earlier saves, and of those that were killed."""
        kept = _named_by(self._folder)
        with suppress(OSError):
            for path in list(self._folder.iterdir()):
                name = path.name
                is_old = name in earlier or _OURS.fullmatch(name) or name.startswith(_HIDDEN)
                if is_old and name not in kept:
                    path.unlink(missing_ok=True)

    def close(self) -> None:
        """Let another process write into the folder; remove what was not published."""
        with suppress(Exception):
            if self._lease.is_ours():
                self._remove(set())
        self._lease.release()

    def __enter__(self) -> WeightFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class PipelineSave:
    """One save of a pipeline's weights; all processes that save together run it.

    Args:
        folder: the folder.
        weights: the weights of this process's stages.
        stages: the number of stages.
        writes: whether this process writes what it has, or another one that has the same.
        beside: called in the first process; returns the files beside the weights, see :func:`files_beside`.
    """

    def __init__(
        self,
        folder: Path,
        weights: StageWeights,
        stages: int,
        *,
        writes: bool,
        beside: Callable[[], Mapping[str, bytes]],
    ) -> None:
        self._folder, self._weights, self._stages = folder, weights, stages
        self._writes, self._make_beside = writes, beside
        self._files: dict[int, dict[str, Any]] = {}
        self._beside: Mapping[str, bytes] = {}
        self._target: WeightFolder | None = None

    def run(self, job: Job) -> None:
        """Write the files of all processes; the first one publishes them.

        Raises:
            UsageError: another process writes into the folder, or a weight cannot be saved.
            CheckpointError: some process could not write; the folder holds what it held before.
        """
        try:
            save = job.meet(self._look, self._begin, "save")
            job.meet(partial(self._write, save), self._publish, "save")
        finally:
            if self._target is not None:
                self._target.close()

    def _look(self) -> None:
        self._files = self._weights.files()
        check_saveable({name: one for of in self._files.values() for name, one in of.items()})

    def _begin(self, _: list[Any]) -> str:
        self._beside = self._make_beside()
        self._target = WeightFolder(self._folder)
        return self._target.save

    def _write(self, save: str) -> list[Any]:
        check_arrived(self._folder)
        written = []
        for index, weights in self._files.items():
            state: dict[str, Tensor] = {}
            for name, tensor in weights.items():
                # All gather one after the other; only who writes keeps them, and not on its device.
                gathered = whole(tensor)
                if self._writes:
                    state[name] = gathered.cpu() if is_sharded(tensor) else gathered
            if self._writes:
                written.append([index, save_stage(state, self._folder, index, self._stages, save)])
        return written

    def _publish(self, of_processes: list[Any]) -> None:
        assert self._target is not None
        written = dict(row for rows in of_processes for row in rows)
        self._target.publish(written, self._weights.names.tied, self._beside)


def files_beside(model: Any, processing_class: Any = None) -> dict[str, bytes]:
    """Return what ``from_pretrained`` needs beside the weights, by the names of files.

    Args:
        model: a model; that of transformers has a configuration, which its ``save_pretrained`` writes too.
        processing_class: a tokenizer, a processor, or whatever else has ``save_pretrained(folder)``.
    """
    files: dict[str, bytes] = {}
    # Looked for on the class: wrappers, such as PEFT's, pass on the attributes of the model inside.
    if hasattr(type(model), "config_class"):
        # Not by save_pretrained, which refuses settings for generation that from_pretrained loads.
        config = deepcopy(model.config)
        # It names a file of the folder that the model was loaded from.
        vars(config).pop("transformers_weights", None)
        config.architectures = [type(model).__name__]
        config.dtype = str(model.dtype).removeprefix("torch.")
        files["config.json"] = config.to_json_string().encode()
        if model.can_generate():
            text = model.generation_config.to_json_string(keys_to_pop=["compile_config"])
            files["generation_config.json"] = text.encode()
    if processing_class is None:
        return files
    if not callable(getattr(processing_class, "save_pretrained", None)):
        raise UsageError(
            f"processing_class= was given a {type(processing_class).__name__}, which has no "
            "save_pretrained(); give a tokenizer or a processor of transformers"
        )
    with TemporaryDirectory() as name:
        processing_class.save_pretrained(name)
        # Whoever writes weights too, as a Trainer does, has none here.
        paths = [path for path in sorted(Path(name).rglob("*")) if path.suffix != ".safetensors"]
        return files | {
            path.relative_to(name).as_posix(): path.read_bytes() for path in paths if path.is_file()
        }


def save_stage(
    state: Mapping[str, Tensor], folder: Path, stage: int, stages: int, save: str
) -> list[Any]:
    """Write one stage's file, under a name of its own for each save.

    Returns:
        The file's name and its size, and the size of each tensor by name, all in bytes.
    """
    name = f"model-{stage + 1:05d}-of-{stages:05d}-{save}.safetensors"
    size, _ = write_file(folder / name, state, save)
    return [name, size, {key: tensor.nbytes for key, tensor in state.items()}]


def _named_by(folder: Path) -> set[str]:
    """The files that a folder's index names; none if there is no index that can be read."""
    with suppress(InputFileError):
        if is_there(folder / INDEX):
            return {path.name for path in _read_index(folder)[0].values()}
    return set()


def read_weights(folder: str | os.PathLike[str]) -> WeightFiles:
    """The weights in a folder of safetensors files, under all their names.

    ``model.load_state_dict(penstock.read_weights(folder))`` fills the unsplit model.

    Args:
        folder: one that ``pipe.weights.save`` or transformers wrote, or a single file.

    Raises:
        InputFileError: the folder holds no such files, or they cannot be read.
    """
    path = Path(folder)
    for file in (path, path / INDEX, path / _SINGLE):
        if is_there(file):
            break
    else:
        raise InputFileError(
            f"{path}: it holds neither {INDEX} nor model.safetensors; pass a folder that pipe.weights.save "
            "or transformers has written"
        )
    if file == path / INDEX:
        return WeightFiles(*_read_index(path))
    return WeightFiles(dict.fromkeys(entries(file), file), {})


def _read_index(folder: Path) -> tuple[dict[str, Path], dict[str, str], str | None]:
    """The file of each tensor; each further name of a tensor, with its name in the file; the save."""
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
        file_name(file, _FILES, path)
    lacking = sorted(file for file in set(files.values()) if not is_there(folder / file))
    if lacking:
        raise InputFileError(
            f"{folder}: the index names {listed(lacking)}, which are missing on the host "
            f"{socket.gethostname()}; copy the whole folder, to where all processes see it"
        )
    save = about.get(SAVE) if isinstance(about, dict) else None
    return {name: folder / file for name, file in files.items()}, tied, save


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


def check_folder(model: nn.Module, folder: str | os.PathLike[str]) -> None:
    """Check that a folder holds the weights of a model, as :func:`load_partition` will.

    Raises:
        InputFileError: there are no such files, or they are damaged.
        StateDictError: the files do not match the model.
    """
    _check_files(
        model.state_dict(keep_vars=True), read_weights(folder), Names(find_shared(model, [model]))
    )


def _check_files(saved: Mapping[str, Any], files: Mapping[str, Any], names: Names) -> None:
    missing, problems = compare(saved, names, files)
    unexpected = [name for name in files if name not in saved and not names.is_shared(name)]
    check_fits(LoadResult(missing, unexpected), problems)


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
        folder: one that ``pipe.weights.save`` or transformers wrote, or a single file.
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
    _check_files({name: tensor for of in saved for name, tensor in of.items()}, files, names)
    for index in sorted(stages):
        # Only the model's code can compute what no file holds.
        lost = [
            name for name, of in tensors[index].items() if of.is_meta and name not in saved[index]
        ]
        if lost:
            raise UsageError(
                f"{', '.join(lost[:5])} are in no file, and have no values on the meta device; build "
                "the model under penstock.parameters_on_meta(), which leaves buffers as computed"
            )
    with torch.no_grad():
        for name, tensor in (pair for index in sorted(stages) for pair in saved[index].items()):
            seen(f"loads {name}")
            value = files[next(one for one in names.all(name) if one in files)]
            if tensor.is_meta:
                give_data(tensor, value.to(device=device, dtype=tensor.dtype))
            else:
                tensor.copy_(value)
