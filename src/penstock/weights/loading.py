"""Give memory to stages that were cut without any, and fill it from files: each process just its own."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from penstock.errors import StateDictError, UsageError
from penstock.partition.base import Partition, Shared, named_tensors
from penstock.weights.reading import Entry, entries, weight_files

Folder = str | os.PathLike[str]


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Build models whose parameters have no memory, while their buffers have what their code computes.

    ``torch.device("meta")`` leaves buffers without values too, and those that are in no file, such as the
    frequencies of rotary embeddings, are lost then.
    """

    def emptied(
        module: nn.Module, name: str, parameter: nn.Parameter | None
    ) -> nn.Parameter | None:
        del module, name
        if parameter is None or parameter.is_meta:
            return parameter  # one that is tied stays the same
        return nn.Parameter(parameter.to("meta"), parameter.requires_grad)

    hook: Any = emptied  # torch's annotation leaves out that it may give another parameter
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
    """Fill a stage from safetensors files, reading nothing else.

    Args:
        module: the stage; what of it is on the meta device gets memory.
        folder: one that :meth:`penstock.Pipeline.save` or transformers wrote, or a single file.
        shared: the partition's table: a tied weight may be in the files under any of its names.
        device: where what has no memory yet is to live.

    Raises:
        InputFileError: there are no such files, or broken ones.
        StateDictError: they lack something, or have it in another size; nothing is changed then.
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
        stages: which of them.
        folder: as for :func:`load_stage`.
        device: where what has no memory yet is to live.
        seen: told what is being done, at every tensor.

    Raises:
        InputFileError: as :func:`load_stage`.
        StateDictError: the files are not those of the model: something is missing, of another size, or of no
            stage; nothing is changed then.
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
    """As :func:`load_stage`, for several; what they share is read once and stays one."""
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
    """For each name of a shared weight all of them."""
    return {name: one.names for one in shared for name in one.names}


# ---- what is wanted, and whether it is there

_Wanted = dict[str, tuple[Tensor, Entry | None]]


def _wanted(
    module: nn.Module, files: Mapping[str, Entry], names: Mapping[str, tuple[str, ...]]
) -> _Wanted:
    """For each tensor that a stage saves, itself and where it is in the files."""
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
    """Refuse buffers that are in no file and have no values: only the model's code can compute them."""
    lost = [
        name
        for module, wanted in zip(modules, every, strict=True)
        for name, tensor in named_tensors(module)
        if tensor.is_meta and name not in wanted
    ]
    if lost:
        raise UsageError(
            f"{', '.join(lost[:5])} are saved in no file, and on the meta device they have no values; build "
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
    """Replace a parameter or buffer, under the same name."""
    path, _, last = name.rpartition(".")
    holder: Any = module.get_submodule(path)
    if isinstance(tensor, nn.Parameter):
        holder.register_parameter(last, tensor)
    else:
        setattr(holder, last, tensor)
