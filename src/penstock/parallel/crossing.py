"""Let DTensors cross from stage to stage: each process sends its own share to its counterpart.

A mesh does not travel. The receiver puts a share on its own mesh with the same names of dimensions: that of a
parameter of its stages, one that it has seen on a value, or what its ``get_mesh`` gives.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any

from torch import nn

GetMesh = Callable[..., Any]
_TORCH_PART = "torch.distributed.tensor"


def let_cross(modules: Iterable[nn.Module], get_mesh: GetMesh | None = None) -> None:
    """Prepare this process for DTensors between its stages and others.

    Args:
        modules: of its stages, whose parameters may tell their meshes.
        get_mesh: ``(dimension names, layout) -> DeviceMesh`` for others.
    """
    # torch takes half a second for its part of DTensors; where nobody has imported it, there are none.
    if _TORCH_PART in sys.modules or get_mesh is not None:
        import_module("penstock.parallel.crossings").prepare(modules, get_mesh)
