"""DTensors that cross; see ``crossing.py``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from penstock.errors import SpecError
from penstock.values import register_type

_Names = tuple[str, ...]
_MESHES: dict[_Names, DeviceMesh] = {}
_CALLBACKS: list[Callable[..., Any]] = []
_MODULES: WeakSet[nn.Module] = WeakSet()


def prepare(modules: Iterable[nn.Module], get_mesh: Callable[..., Any] | None) -> None:
    """Register DTensors as values that come apart, and remember whose parameters may have meshes."""
    _register()
    if get_mesh is not None and get_mesh not in _CALLBACKS:
        _CALLBACKS.append(get_mesh)
    new = [module for module in modules if module not in _MODULES]
    _MODULES.update(new)
    # A process may have several meshes of the same names one after the other.
    _note_meshes_of(new)


@cache
def _register() -> None:
    register_type(DTensor, _take_apart, _put_together)


def _note(mesh: DeviceMesh) -> _Names:
    names = tuple(mesh.mesh_dim_names or ())
    if not names:
        raise SpecError(
            "a DTensor on a mesh without names of dimensions cannot travel: the receiver could not tell "
            "its own mesh; give init_device_mesh mesh_dim_names"
        )
    _MESHES[names] = mesh
    return names


def _take_apart(tensor: DTensor) -> dict[str, Any]:
    return {
        "share": tensor.to_local(),
        "mesh": list(_note(tensor.device_mesh)),
        "placements": [_told(placement) for placement in tensor.placements],
        "shape": list(tensor.shape),
        "stride": list(tensor.stride()),
    }


def _put_together(parts: dict[str, Any]) -> DTensor:
    found: DTensor = DTensor.from_local(
        parts["share"],
        _mesh(tuple(parts["mesh"])),
        [_read(text) for text in parts["placements"]],
        run_check=False,
        shape=torch.Size(parts["shape"]),
        stride=tuple(parts["stride"]),
    )
    return found


def _mesh(names: _Names) -> DeviceMesh:
    if names not in _MESHES:
        _look_for_meshes(names)
    if names not in _MESHES:
        raise SpecError(
            f"a DTensor on a mesh of the dimensions {names} arrives, but this process knows only "
            f"{sorted(_MESHES)}; give PipelineStage get_mesh="
        )
    return _MESHES[names]


def _look_for_meshes(names: _Names) -> None:
    """In the parameters of this process's stages, then at what the users' functions give."""
    _note_meshes_of(list(_MODULES))
    for callback in _CALLBACKS:
        if names not in _MESHES and (found := callback(names, None)) is not None:
            _MESHES[names] = found


def _note_meshes_of(modules: Iterable[nn.Module]) -> None:
    for parameter in (p for module in modules for p in module.parameters()):
        if isinstance(parameter, DTensor) and parameter.device_mesh.mesh_dim_names:
            _note(parameter.device_mesh)


def _told(placement: Placement) -> list[Any]:
    """A placement as JSON data."""
    if isinstance(placement, Shard) and type(placement) is Shard:
        return ["shard", placement.dim]
    if isinstance(placement, Replicate):
        return ["replicate"]
    if isinstance(placement, Partial) and type(placement) is Partial:
        return ["partial", placement.reduce_op]
    raise SpecError(
        f"a DTensor placed as {placement} cannot travel; redistribute it to Shard, Replicate or Partial"
    )


def _read(told: list[Any]) -> Placement:
    kind, *rest = told
    if kind == "shard":
        return Shard(int(rest[0]))
    return Partial(str(rest[0])) if kind == "partial" else Replicate()
