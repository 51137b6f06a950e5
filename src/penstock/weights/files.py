"""Safetensors files that together hold the unsplit model's weights: write them, read them, fill stages."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from penstock.errors import InputFileError, StateDictError, UsageError
from penstock.partition.base import Partition, Shared, named_tensors

# ---- write one file per stage, and an index


INDEX = "model.safetensors.index.json"


def stage_file(stage: int, stages: int) -> str:
    """The name of a stage's file."""
    return f"model-{stage + 1:05d}-of-{stages:05d}.safetensors"


def save_stage(
    state: Mapping[str, Tensor], folder: Path, stage: int, stages: int
) -> dict[str, int]:
    """Write a stage's file.

    Args:
        state: the tensors by their names in the unsplit model.
        folder: the folder, which is created if it does not exist.
        stage: the index of the stage.
        stages: the number of stages.

    Returns:
        The size of each tensor in bytes, by its name in the unsplit model.
    """
    tensors = _apart(state)
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / stage_file(stage, stages)
    partial = target.with_suffix(".partial")
    save_file(tensors, partial, metadata={"format": "pt"})
    os.replace(partial, target)
    return {name: tensor.nbytes for name, tensor in tensors.items()}


def _apart(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors that share no memory, as the format requires."""
    seen: set[int] = set()
    found: dict[str, Tensor] = {}
    for name, tensor in state.items():
        data = tensor.detach().cpu().contiguous()
        place = data.untyped_storage().data_ptr()
        found[name] = data.clone() if place in seen else data
        seen.add(place)
    return found


def save_index(
    folder: Path, sizes: Mapping[int, Mapping[str, int]], tied: Mapping[str, str] | None = None
) -> None:
    """Write which tensor is in which file, in the form that transformers reads.

    Args:
        folder: where the files are.
        sizes: for each stage, what :func:`save_stage` returned.
        tied: further names of tensors, each with the name that the tensor is written under.
    """
    stages = len(sizes)
    about: dict[str, Any] = {"total_size": sum(sum(of.values()) for of in sizes.values())}
    if tied:
        about["tied"] = dict(tied)
    index: dict[str, Any] = {
        "metadata": about,
        "weight_map": {
            name: stage_file(stage, stages) for stage in sorted(sizes) for name in sizes[stage]
        },
    }
    partial = folder / f"{INDEX}.partial"
    partial.write_text(json.dumps(index, indent=2) + "\n")
    os.replace(partial, folder / INDEX)


# ---- read tensors from safetensors files straight into their memory
# The safetensors package maps files into memory, and the mapped pages then count in addition to the tensors
# that are made from them. Here a tensor's bytes are read once, into the tensor itself.


DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "U16": torch.uint16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
"""The format's names of types."""
_LONGEST_HEADER = 100_000_000
"""The limit that the format sets."""


@dataclass(frozen=True)
class Entry:
    """A tensor in a file.

    Args:
        path: the file.
        dtype: of the tensor.
        shape: of the tensor.
        begin: the offset of its bytes in the file.
    """

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int

    def read(self) -> Tensor:
        """Read the tensor into new memory."""
        made = torch.empty(self.shape, dtype=self.dtype)
        fill(self.path, raw_bytes(made), self.begin)
        return made


def raw_bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    found: memoryview = (
        tensor.reshape(-1).view(torch.uint8).numpy().data if tensor.numel() else memoryview(b"")
    )
    return found


def fill(path: Path, memory: memoryview, begin: int) -> None:
    """Read from an offset in a file into memory.

    Raises:
        InputFileError: the file is too short, or cannot be read.
    """
    count, done = 1, 0
    try:
        with path.open("rb", buffering=0) as file:
            file.seek(begin)
            while count and done < len(memory):
                count = file.readinto(memory[done:])
                done += count
    except OSError as error:
        raise InputFileError(f"{path} cannot be read: {error.strerror or error}") from error
    if done < len(memory):
        raise InputFileError(f"{path} is damaged: its end is missing")


def entries(path: Path) -> dict[str, Entry]:
    """The tensors of a file, by name.

    Raises:
        InputFileError: it is not a safetensors file, or is damaged.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(_LONGEST_HEADER, size - 8):
                raise InputFileError(f"{path}: not a safetensors file (a header of {length} bytes)")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        return {name: _entry(path, about, 8 + length, size) for name, about in header.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, InputFileError):
            raise
        raise InputFileError(f"{path}: not a safetensors file ({error})") from error


def _entry(path: Path, about: Any, start: int, size: int) -> Entry:
    dtype, shape = DTYPES[about["dtype"]], tuple(map(int, about["shape"]))
    begin, end = map(int, about["data_offsets"])
    bytes_of_one = torch.empty(0, dtype=dtype).element_size()
    if min((0, *shape)) < 0 or not 0 <= begin <= end <= size - start:
        raise InputFileError(
            f"{path}: a tensor lies beyond the end of the file; copy the file again"
        )
    if end - begin != math.prod(shape) * bytes_of_one:
        raise InputFileError(f"{path}: a tensor of {list(shape)} has {end - begin} bytes")
    return Entry(path, dtype, shape, start + begin)


# ---- read weights from safetensors files, one tensor at a time


class WeightFiles(Mapping[str, Tensor]):
    """The tensors of a folder by name, each of which is read when it is asked for.

    Args:
        files: for each tensor by name, the file that holds it.
        tied: further names, each with the name that the tensor has in its file.
    """

    def __init__(self, files: Mapping[str, Path], tied: Mapping[str, str]) -> None:
        self._files = dict(files)
        self._tied = {name: first for name, first in tied.items() if first in files}
        self._open: dict[Path, Any] = {}

    def __getitem__(self, name: str) -> Tensor:
        first = name if name in self._files else self._tied[name]
        path = self._files[first]
        if path not in self._open:
            self._open[path] = _opened(path)
        found: Tensor = self._open[path].get_tensor(first)
        return found

    def __contains__(self, name: object) -> bool:
        # Without this, Mapping would read the tensor to find out.
        return name in self._files or name in self._tied

    def __iter__(self) -> Iterator[str]:
        yield from self._files
        yield from (name for name in self._tied if name not in self._files)

    def __len__(self) -> int:
        return len(self._files.keys() | self._tied.keys())


def read_weights(folder: str | os.PathLike[str]) -> Mapping[str, Tensor]:
    """The weights in a folder of safetensors files, under all their names.

    ``model.load_state_dict(penstock.read_weights(folder))`` fills the unsplit model.

    Args:
        folder: one that :meth:`penstock.Pipeline.save` or transformers wrote, or a single file.

    Raises:
        InputFileError: it holds no such files, or they cannot be read.
    """
    path = Path(folder)
    found = _meant(path)
    if found == path / INDEX:
        return WeightFiles(*_read_index(path))
    return WeightFiles(dict.fromkeys(_opened(found).keys(), found), {})


def weight_files(path: Path) -> dict[Path, set[str] | None]:
    """The files of a folder, or a single file, each with the names to read from it; ``None`` stands for all.

    Raises:
        InputFileError: there are no files, or the index names files elsewhere.
    """
    meant = _meant(path)
    if meant != path / INDEX:
        return {meant: None}
    found: dict[Path, set[str] | None] = {}
    for name, file in _read_index(path)[0].items():
        found[file] = {*(found.get(file) or ()), name}
    return found


def _meant(path: Path) -> Path:
    """The file itself; for a folder, its index or its only file."""
    for found in (path, path / INDEX, path / "model.safetensors"):
        if found.is_file():
            return found
    raise InputFileError(
        f"{path}: it holds neither {INDEX} nor model.safetensors; pass a folder that Pipeline.save or "
        "transformers has written"
    )


def _read_index(folder: Path) -> tuple[dict[str, Path], dict[str, str]]:
    """The file of each tensor; and further names, each with the name in the file."""
    try:
        index = json.loads((folder / INDEX).read_text())
        files = {
            str(name): folder / _inside(folder, file) for name, file in index["weight_map"].items()
        }
        tied = dict(index.get("metadata", {}).get("tied", {}))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, InputFileError):
            raise
        raise InputFileError(
            f"{folder / INDEX}: not an index of weights ({type(error).__name__}: {error}); write it again"
        ) from error
    lacking = sorted({path.name for path in files.values() if not path.is_file()})
    if lacking:
        raise InputFileError(
            f"{folder}: the index names {', '.join(lacking)}, which are missing; copy the whole folder"
        )
    return files, tied


def _inside(folder: Path, file: str) -> Path:
    """A path that an index names, after a check that it stays inside the folder."""
    path = Path(file)
    if path.is_absolute() or ".." in path.parts:
        raise InputFileError(
            f"{folder / INDEX}: it names {file!r}, which is outside of its folder; do not trust this index"
        )
    return path


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise InputFileError(f"{path}: not a safetensors file ({error})") from error


# ---- fill stages from files: each process reads only its own, and stages without memory get some


Folder = str | os.PathLike[str]


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """A context in which models are built without memory for parameters, but with computed buffers.

    ``torch.device("meta")`` would leave buffers without values too, and those that are not in files, such
    as the frequencies of rotary embeddings, would be lost.
    """

    def emptied(
        module: nn.Module, name: str, parameter: nn.Parameter | None
    ) -> nn.Parameter | None:
        del module, name
        if parameter is None or parameter.is_meta:
            return parameter  # a tied parameter stays the same object
        return nn.Parameter(parameter.to("meta"), parameter.requires_grad)

    hook: Any = emptied  # torch's annotation does not say that a hook may return another parameter
    handle = register_module_parameter_registration_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def load_stage(
    module: nn.Module,
    folder: Folder,
    *,
    shared: Sequence[Shared] = (),
    device: torch.device | str = "cpu",
) -> None:
    """Fill a stage from safetensors files, reading only its own tensors.

    Args:
        module: the stage; tensors on the meta device get memory.
        folder: one that :meth:`penstock.Pipeline.save` or transformers wrote, or a single file.
        shared: the partition's table, since a tied weight may be in the files under any of its names.
        device: where tensors without memory go.

    Raises:
        InputFileError: there are no such files, or they are damaged.
        StateDictError: something is missing in them, or has another size; nothing is changed then.
    """
    load_stages([module], folder, shared=shared, device=device)


def load_partition(
    partition: Partition,
    stages: Iterable[int],
    folder: Folder,
    *,
    device: torch.device | str = "cpu",
    seen: Callable[[str], object] = str,
) -> None:
    """Fill those stages of a partition that live in this process.

    Args:
        partition: of the model.
        stages: their indices.
        folder: as for :func:`load_stage`.
        device: where tensors without memory go.
        seen: called with a text at every tensor, to report progress.

    Raises:
        InputFileError: as for :func:`load_stage`.
        StateDictError: the files are not those of the model: something is missing, has another size, or
            belongs to no stage; nothing is changed then.
    """
    seen("looks for its weights")
    files = _found(folder)
    names = _names(partition.shared)
    every = [_wanted(module, files, names) for module in partition.modules]
    known = {name for wanted in every for name in wanted} | names.keys()
    _check([*map(_problems, every)], [name for name in files if name not in known])
    held = sorted(stages)
    modules, wanted = [partition.modules[s] for s in held], [every[s] for s in held]
    _fill(modules, wanted, torch.device(device), seen)


def load_stages(
    modules: Sequence[nn.Module],
    folder: Folder,
    *,
    shared: Sequence[Shared] = (),
    device: torch.device | str = "cpu",
) -> None:
    """Like :func:`load_stage`, for several stages; what they share is read once and stays one tensor."""
    files, names = _found(folder), _names(shared)
    every = [_wanted(module, files, names) for module in modules]
    _check([*map(_problems, every)], [])
    _fill(modules, every, torch.device(device))


def _found(folder: Folder) -> dict[str, Entry]:
    return {
        name: entry
        for path, wanted in weight_files(Path(folder)).items()
        for name, entry in entries(path).items()
        if wanted is None or name in wanted
    }


def _names(shared: Sequence[Shared]) -> dict[str, tuple[str, ...]]:
    """For each name of a shared weight, all of its names."""
    return {name: one.names for one in shared for name in one.names}


# ---- which tensors are wanted, and whether the files have them

_Wanted = dict[str, tuple[Tensor, Entry | None]]


def _wanted(
    module: nn.Module, files: Mapping[str, Entry], names: Mapping[str, tuple[str, ...]]
) -> _Wanted:
    """For each tensor that a stage saves: the tensor, and its entry in the files."""
    own = dict(named_tensors(module))
    tied: dict[int, list[str]] = {}
    for name, tensor in own.items():
        tied.setdefault(id(tensor), []).extend(names.get(name, (name,)))
    saved = [name for name in module.state_dict(keep_vars=True) if name in own]
    return {name: (own[name], _first(files, tied[id(own[name])])) for name in saved}


def _first(files: Mapping[str, Entry], names: Iterable[str]) -> Entry | None:
    return next((files[name] for name in names if name in files), None)


def _problems(wanted: _Wanted) -> list[str]:
    missing = [f'"{name}"' for name, (_, entry) in wanted.items() if entry is None]
    sizes = [
        f"{name}: {list(entry.shape)} in {entry.path.name}, {list(tensor.shape)} in the model"
        for name, (tensor, entry) in wanted.items()
        if entry is not None and entry.shape != tuple(tensor.shape)
    ]
    return ([f"not in the files: {', '.join(missing)}"] if missing else []) + sizes


def _check(problems: Sequence[Sequence[str]], extra: Sequence[str]) -> None:
    found = list(dict.fromkeys(text for texts in problems for text in texts))
    if extra:
        found.append("in the files but in no stage: " + ", ".join(f'"{name}"' for name in extra))
    if found:
        raise StateDictError(
            "the weights do not fit, and none were loaded:\n\t" + "\n\t".join(found)
        )


# ---- filling


def _fill(
    modules: Sequence[nn.Module],
    every: Sequence[_Wanted],
    device: torch.device,
    seen: Callable[[str], object] = str,
) -> None:
    _check_computed(modules, every)
    made: dict[int, Tensor] = {}
    for module, wanted in zip(modules, every, strict=True):
        for name, (tensor, entry) in wanted.items():
            if entry is None:
                continue
            seen(f"loads {name}")
            if not tensor.is_meta:
                _copy(tensor, entry)
                continue
            if id(tensor) not in made:
                made[id(tensor)] = _made(tensor, entry, device)
            _put(module, name, made[id(tensor)])


def _check_computed(modules: Sequence[nn.Module], every: Sequence[_Wanted]) -> None:
    """Refuse buffers that are in no file and on the meta device: only the model's code can compute them."""
    lost = [
        name
        for module, wanted in zip(modules, every, strict=True)
        for name, tensor in named_tensors(module)
        if tensor.is_meta and name not in wanted
    ]
    if lost:
        raise UsageError(
            f"{', '.join(lost[:5])} are in no file, and have no values on the meta device; build "
            "the model under penstock.weights.parameters_on_meta(), which leaves buffers as computed"
        )


@torch.no_grad()
def _copy(tensor: Tensor, entry: Entry) -> None:
    tensor.copy_(entry.read())


def _made(tensor: Tensor, entry: Entry, device: torch.device) -> Tensor:
    data = entry.read().to(device=device, dtype=tensor.dtype)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(data, tensor.requires_grad)
    return data


def _put(module: nn.Module, name: str, tensor: Tensor) -> None:
    """Replace a parameter or buffer."""
    path, _, last = name.rpartition(".")
    holder: Any = module.get_submodule(path)
    if isinstance(tensor, nn.Parameter):
        holder.register_parameter(last, tensor)
    else:
        setattr(holder, last, tensor)
