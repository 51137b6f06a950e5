"""DTensors that cross; see ``crossing.py``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from penstock.errors import SpecError
from penstock.specs import register_type

_Names = tuple[str, ...]
_MESHES: dict[_Names, DeviceMesh] = {}
_CALLBACKS: list[Callable[..., Any]] = []


def prepare(modules: Iterable[nn.Module], get_mesh: Callable[..., Any] | None) -> None:
    """Register DTensors as values that come apart, and note the meshes of parameters."""
    register_type(DTensor, _take_apart, _put_together)
    if get_mesh is not None and get_mesh not in _CALLBACKS:
        _CALLBACKS.append(get_mesh)
    for module in modules:
        for parameter in module.parameters():
            if isinstance(parameter, DTensor):
                _note(parameter.device_mesh)


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
    if names in _MESHES:
        return _MESHES[names]
    for callback in _CALLBACKS:
        found = callback(names, None)
        if found is not None:
            _MESHES[names] = found
            return _MESHES[names]
    raise SpecError(
        f"a DTensor on a mesh of the dimensions {names} arrives, but this process knows only "
        f"{sorted(_MESHES)}; give PipelineStage get_mesh="
    )


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
