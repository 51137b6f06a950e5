"""Safetensors files that together hold the unsplit model's weights: one writer, one reader, stages filled.

The safetensors package maps files into memory, where the mapped pages count in addition to the tensors made
of them, and a file that is cut short while it is mapped ends the process. So a tensor's bytes are read straight
into the tensor, and written block by block with their checksum. The files are the format's own.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from penstock.errors import CheckpointError, InputFileError, StateDictError, UsageError
from penstock.partition.base import Partition, Shared, named_tensors

INDEX = "model.safetensors.index.json"
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
NAMES = {dtype: name for name, dtype in DTYPES.items()}
LONGEST_HEADER = 100_000_000
"""The limit that the format sets, in bytes."""
LONGEST_JSON = 256_000_000
DEEPEST_JSON = 100
_BLOCK = 4 << 20


def quoted(names: Iterable[str], most: int = 20) -> str:
    """Names from a file or a model, for a message: in quotes, escaped, and neither too long nor too many."""
    listed = list(names)
    shown = ", ".join(json.dumps(n if len(n) <= 120 else f"{n[:117]}...") for n in listed[:most])
    return shown if len(listed) <= most else f"{shown} and {len(listed) - most} more"


# ---- bytes and JSON


@contextmanager
def open_regular(path: Path) -> Iterator[BinaryIO]:
    """Open a file to read; anything but a regular file is refused, since a pipe or device might never end.

    Raises:
        InputFileError: it is no regular file, or it cannot be read.
    """
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb", buffering=0) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise InputFileError(f"{path} cannot be read: it is not a regular file")
            yield file
    except (OSError, ValueError) as error:
        if isinstance(error, InputFileError):
            raise
        text = getattr(error, "strerror", None) or error
        raise InputFileError(f"{str(path)[:300]} cannot be read: {text}") from error


def read_bytes(path: Path, most: int = LONGEST_JSON) -> bytes:
    """A file's content.

    Raises:
        InputFileError: it has more than ``most`` bytes, or cannot be read.
    """
    with open_regular(path) as file:
        content = file.read(most + 1)
        # A read of a raw file may return less than there is.
        while content and len(content) <= most and (more := file.read(most + 1 - len(content))):
            content += more
    if len(content) > most:
        raise InputFileError(f"{path} has more than {most:,} bytes")
    return content


def parse_json(content: bytes, path: Path) -> Any:
    """The JSON value of a file's content.

    Raises:
        InputFileError: it is no JSON, or is nested deeper than ``DEEPEST_JSON``.
    """
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise InputFileError(f"{path} is not JSON ({error})") from error
    if _is_deeper(value, DEEPEST_JSON):
        raise InputFileError(f"{path} is nested deeper than {DEEPEST_JSON} levels")
    return value


def _is_deeper(value: Any, levels: int) -> bool:
    if not isinstance(value, dict | list):
        return False
    inner = value.values() if isinstance(value, dict) else value
    return not levels or any(_is_deeper(one, levels - 1) for one in inner)


def raw_bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    if not tensor.numel():
        return memoryview(b"")
    memory: memoryview = tensor.reshape(-1).view(torch.uint8).numpy().data
    return memory


def fill(path: Path, memory: memoryview, begin: int) -> None:
    """Read from an offset in a file into memory.

    Raises:
        InputFileError: the file is too short, or cannot be read.
    """
    done = 0
    with open_regular(path) as file:
        file.seek(begin)
        while done < len(memory) and (count := file.readinto(memory[done:])):  # type: ignore[attr-defined]
            done += count
    if done < len(memory):
        raise InputFileError(f"{path} is damaged: its end is missing")


# ---- write


@dataclass(frozen=True)
class Written:
    """What was written into a file.

    Args:
        size: the bytes of the file.
        header: the length and the checksum of what precedes the tensors.
        tensors: for each tensor by name the offset of its bytes in the file, and their checksum.
    """

    size: int
    header: tuple[int, int]
    tensors: dict[str, tuple[int, int]]


def write_file(path: Path, tensors: Mapping[str, Tensor]) -> Written:
    """Write tensors into a new safetensors file, one after the other, and flush it to disk.

    Raises:
        CheckpointError: it cannot be written, or the format has no name for a tensor's type.
    """
    # The widest types first, like the format's own writer, so that each is aligned to its size.
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    about: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in order:
        tensor, begin = tensors[name], end
        if tensor.dtype not in NAMES:
            raise CheckpointError(
                f"{name} has the type {tensor.dtype}, which safetensors files cannot hold"
            )
        end += tensor.nbytes
        shape = list(tensor.shape)
        about[name] = {"dtype": NAMES[tensor.dtype], "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(about).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    try:
        with path.open("xb", buffering=0) as file:
            _write(file, memoryview(head))
            sums = {name: _write_tensor(file, tensors[name]) for name in order}
            os.fsync(file.fileno())
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written: {error.strerror or error}") from error
    places = {n: (len(head) + about[n]["data_offsets"][0], sums[n]) for n in order}
    return Written(len(head) + end, (len(head), crc32(head)), places)


def _write_tensor(file: Any, tensor: Tensor) -> int:
    memory, summed = raw_bytes(tensor.detach().cpu().contiguous()), 0
    for begin in range(0, len(memory), _BLOCK):
        block = memory[begin : begin + _BLOCK]
        summed = crc32(block, summed)
        _write(file, block)
    return summed


def _write(file: Any, memory: memoryview) -> None:
    while len(memory):
        memory = memory[file.write(memory) :]


def stage_file(stage: int, stages: int) -> str:
    """The name of a stage's file."""
    return f"model-{stage + 1:05d}-of-{stages:05d}.safetensors"


def save_stage(
    state: Mapping[str, Tensor], folder: Path, stage: int, stages: int
) -> dict[str, int]:
    """Write a stage's file; a file of that name is replaced once the new one is complete.

    Args:
        state: the tensors by their names in the unsplit model.
        folder: the folder, which is created if it does not exist.
        stage: the index of the stage.
        stages: the number of stages.

    Returns:
        The size of each tensor in bytes, by its name in the unsplit model.
    """
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / stage_file(stage, stages)
    partial = target.with_suffix(".partial")
    partial.unlink(missing_ok=True)
    write_file(partial, state)
    os.replace(partial, target)
    return {name: tensor.nbytes for name, tensor in state.items()}


def save_index(
    folder: Path, sizes: Mapping[int, Mapping[str, int]], tied: Mapping[str, str] | None = None
) -> None:
    """Write which tensor is in which file, in the form that transformers reads.

    Args:
        folder: where the files are.
        sizes: for each stage, what :func:`save_stage` returned.
        tied: further names of tensors, each with the name that the tensor is written under.
    """
    about: dict[str, Any] = {"total_size": sum(sum(of.values()) for of in sizes.values())}
    if tied:
        about["tied"] = dict(tied)
    files = {name: stage_file(i, len(sizes)) for i in sorted(sizes) for name in sizes[i]}
    partial = folder / f"{INDEX}.partial"
    partial.write_text(json.dumps({"metadata": about, "weight_map": files}, indent=2) + "\n")
    os.replace(partial, folder / INDEX)


# ---- read


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

    @property
    def nbytes(self) -> int:
        """The length of its bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def read(self, offsets: Sequence[int] = (), sizes: Sequence[int] = ()) -> Tensor:
        """The tensor, or a box of it, in new memory; only the rows that contain the box are read."""
        sizes = tuple(sizes) if self.shape and sizes else self.shape
        offsets = tuple(offsets) if self.shape and offsets else (0,) * len(sizes)
        row = math.prod(self.shape[1:]) * self.dtype.itemsize
        rows = torch.empty((*sizes[:1], *self.shape[1:]), dtype=self.dtype)
        fill(self.path, raw_bytes(rows), self.begin + (offsets[0] * row if offsets else 0))
        for dim in range(1, len(sizes)):
            rows = rows.narrow(dim, offsets[dim], sizes[dim])
        return rows

    def checksum(self) -> int:
        """The checksum of its bytes, which are read block by block."""
        return checksum(self.path, self.begin, self.nbytes)


def checksum(path: Path, begin: int, size: int) -> int:
    """The CRC-32 of some bytes of a file.

    Raises:
        InputFileError: the file is too short, or cannot be read.
    """
    buffer, summed = memoryview(bytearray(min(size, _BLOCK))), 0
    with open_regular(path) as file:
        file.seek(begin)
        while size:
            count = file.readinto(buffer[: min(size, _BLOCK)])  # type: ignore[attr-defined]
            if not count:
                raise InputFileError(f"{path} is damaged: its end is missing")
            summed, size = crc32(buffer[:count], summed), size - count
    return summed


def entries(path: Path) -> dict[str, Entry]:
    """The tensors of a file, by name.

    Raises:
        InputFileError: it is not a safetensors file, or is damaged.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
    if not 2 <= length <= min(LONGEST_HEADER, size - 8):
        raise InputFileError(f"{path}: not a safetensors file (a header of {length} bytes)")
    content = bytearray(length)
    fill(path, memoryview(content), 8)
    header = parse_json(bytes(content), path)
    try:
        header.pop("__metadata__", None)
        return {name: _entry(path, about, 8 + length, size) for name, about in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        if isinstance(error, InputFileError):
            raise
        text = str(error)[:200]
        raise InputFileError(f"{path}: not a safetensors file ({text})") from error


def _entry(path: Path, about: Any, start: int, size: int) -> Entry:
    begin, end = map(int, about["data_offsets"])
    shape = tuple(map(int, about["shape"]))
    entry = Entry(path, DTYPES[about["dtype"]], shape, start + begin)
    if min((0, *shape)) < 0 or not 0 <= begin <= end <= size - start:
        raise InputFileError(
            f"{path}: a tensor lies beyond the end of the file; copy the file again"
        )
    if end - begin != entry.nbytes:
        raise InputFileError(f"{path}: a tensor of {list(shape)} has {end - begin} bytes")
    return entry


class WeightFiles(Mapping[str, Tensor]):
    """The tensors of a folder by name, each of which is read when it is asked for.

    Args:
        files: for each tensor by name, the file that holds it.
        tied: further names, each with the name that the tensor has in its file.
    """

    def __init__(self, files: Mapping[str, Path], tied: Mapping[str, str]) -> None:
        self._files = dict(files)
        self._tied = {name: first for name, first in tied.items() if first in files}
        self._entries: dict[Path, dict[str, Entry]] = {}

    def entry(self, name: str) -> Entry:
        """Where a tensor is.

        Raises:
            InputFileError: the file that the index names does not hold it.
        """
        first = name if name in self._files else self._tied[name]
        path = self._files[first]
        if path not in self._entries:
            self._entries[path] = entries(path)
        if first not in self._entries[path]:
            raise InputFileError(
                f"{path} does not hold {quoted([first])}, as its index says; copy the whole folder again"
            )
        return self._entries[path][first]

    def __getitem__(self, name: str) -> Tensor:
        return self.entry(name).read()

    def __contains__(self, name: object) -> bool:
        # Without this, Mapping would read the tensor to find out.
        return name in self._files or name in self._tied

    def __iter__(self) -> Iterator[str]:
        yield from self._files
        yield from (name for name in self._tied if name not in self._files)

    def __len__(self) -> int:
        return len(self._files.keys() | self._tied.keys())


def read_weights(folder: str | os.PathLike[str]) -> WeightFiles:
    """The weights in a folder of safetensors files, under all their names.

    ``model.load_state_dict(penstock.read_weights(folder))`` fills the unsplit model.

    Args:
        folder: one that :meth:`penstock.Pipeline.save` or transformers wrote, or a single file.

    Raises:
        InputFileError: it holds no such files, or they cannot be read.
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
    """The file of each tensor; and further names, each with the name in the file."""
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
            f"{folder}: the index names {quoted(lacking)}, which are missing; copy the whole folder"
        )
    return {name: folder / file for name, file in files.items()}, tied


def _is_there(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # such as a name that is too long
        return False


# ---- fill stages from files: each process reads only its own, and stages without memory get some


Folder = str | os.PathLike[str]
_Wanted = dict[str, tuple[Tensor, Entry | None]]
"""For each tensor that a stage saves: the tensor, and its entry in the files."""


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """A context in which models are built without memory for parameters, but with computed buffers.

    ``torch.device("meta")`` would leave buffers without values too, and those that are not in files, such
    as the frequencies of rotary embeddings, would be lost.
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


def load_stages(
    modules: Sequence[nn.Module],
    folder: Folder,
    *,
    shared: Sequence[Shared] = (),
    device: torch.device | str = "cpu",
) -> None:
    """Like :func:`load_stage`, for several stages; what they share is read once and stays one tensor."""
    wanted = _wanted(modules, read_weights(folder), shared)
    _check(wanted, [])
    _fill(modules, wanted, torch.device(device), str)


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
    files = read_weights(folder)
    wanted = _wanted(partition.modules, files, partition.shared)
    known = {name for of in wanted for name in of} | {n for s in partition.shared for n in s.names}
    _check(wanted, [name for name in files if name not in known])
    indices = sorted(stages)
    modules = [partition.modules[index] for index in indices]
    _fill(modules, [wanted[index] for index in indices], torch.device(device), seen)


def _wanted(
    modules: Sequence[nn.Module], files: WeightFiles, shared: Sequence[Shared]
) -> list[_Wanted]:
    aliases = {name: one.names for one in shared for name in one.names}
    wanted = []
    for module in modules:
        tensors = dict(named_tensors(module))
        tied: dict[int, list[str]] = {}
        for name, tensor in tensors.items():
            tied.setdefault(id(tensor), []).extend(aliases.get(name, (name,)))
        of_module: _Wanted = {}
        for name in module.state_dict(keep_vars=True):
            if name in tensors:
                names = [one for one in tied[id(tensors[name])] if one in files]
                of_module[name] = tensors[name], files.entry(names[0]) if names else None
        wanted.append(of_module)
    return wanted


def _check(wanted: Sequence[_Wanted], extra: Sequence[str]) -> None:
    pairs = {name: pair for of in wanted for name, pair in of.items()}
    missing = [name for name, (_, entry) in pairs.items() if entry is None]
    problems = [f"not in the files: {quoted(missing)}"] if missing else []
    problems += [
        f"{name}: {list(entry.shape)} in {entry.path.name}, {list(tensor.shape)} in the model"
        for name, (tensor, entry) in pairs.items()
        if entry is not None and entry.shape != tuple(tensor.shape)
    ]
    if extra:
        problems.append(f"in the files but in no stage: {quoted(extra)}")
    if problems:
        raise StateDictError(
            "the weights do not fit, and none were loaded:\n\t" + "\n\t".join(problems)
        )


@torch.no_grad()
def _fill(
    modules: Sequence[nn.Module],
    wanted: Sequence[_Wanted],
    device: torch.device,
    seen: Callable[[str], object],
) -> None:
    _check_computed(modules, wanted)
    filled: dict[int, Tensor] = {}
    for module, of_module in zip(modules, wanted, strict=True):
        for name, (tensor, entry) in of_module.items():
            assert entry is not None  # _check has found all
            seen(f"loads {name}")
            if not tensor.is_meta:
                tensor.copy_(entry.read())
                continue
            if id(tensor) not in filled:
                data = entry.read().to(device=device, dtype=tensor.dtype)
                is_parameter = isinstance(tensor, nn.Parameter)
                filled[id(tensor)] = (
                    nn.Parameter(data, tensor.requires_grad) if is_parameter else data
                )
            put_tensor(module, name, filled[id(tensor)])


def _check_computed(modules: Sequence[nn.Module], wanted: Sequence[_Wanted]) -> None:
    """Refuse buffers that are in no file and on the meta device: only the model's code can compute them."""
    lost = [
        name
        for module, of_module in zip(modules, wanted, strict=True)
        for name, tensor in named_tensors(module)
        if tensor.is_meta and name not in of_module
    ]
    if lost:
        raise UsageError(
            f"{', '.join(lost[:5])} are in no file, and have no values on the meta device; build "
            "the model under penstock.weights.parameters_on_meta(), which leaves buffers as computed"
        )


def put_tensor(module: nn.Module, name: str, tensor: Tensor) -> None:
    """Put another parameter or buffer in the place of the one of this name."""
    path, _, last = name.rpartition(".")
    holder: Any = module.get_submodule(path)
    if isinstance(tensor, nn.Parameter):
        holder.register_parameter(last, tensor)
    else:
        setattr(holder, last, tensor)
