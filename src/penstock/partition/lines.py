"""Where in the author's code something happens, for messages: the module and the line."""

from __future__ import annotations

import inspect
import linecache
import os
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

_LIBRARIES = tuple(
    f"{folder}{os.sep}" for folder in (Path(torch.__file__).parent, Path(__file__).parents[1])
)
"""By their folders: the author's own may be called so too."""
_METHODS = tuple(f"{os.sep}torch{os.sep}{file}" for file in ("_tensor.py", "overrides.py"))
"""Where PyTorch defines the methods of tensors in Python."""


def where(paths: Mapping[int, str], unit: str = "") -> str:
    """The module and the line of the author's code that runs now; or a unit, and the line that calls it."""
    return place_of(paths, *running(paths), unit)


def place_of(paths: Mapping[int, str], module: nn.Module | None, line: str, unit: str = "") -> str:
    """Words for a module, whose code calls a unit if one is given, and a line."""
    if module is not None:
        path = unit or paths[id(module)] or f"the {type(module).__name__}"
        return f"in {path} ({line})" if line else f"in {path}"
    if unit:
        return f"in {unit}"
    return f"in the model ({line})" if line else "in the model"


def running(paths: Mapping[int, str]) -> tuple[nn.Module | None, str]:
    """The module whose code runs now, and the line of the author's code."""
    frame = sys._getframe(1)
    line = ""
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(_LIBRARIES):
            # Code that was typed in or generated is the author's if its lines can be shown.
            if not name.startswith("<") or linecache.getline(name, frame.f_lineno):
                line = line or f"{os.path.basename(name)}:{frame.f_lineno}"
            module = frame.f_locals.get("self")
            if id(module) in paths and isinstance(module, nn.Module):
                return module, line
        if frame.f_back is None:
            break
        frame = frame.f_back
    return None, line


def is_called_by_library() -> bool:
    """Tell whether code of PyTorch calls the method of a tensor that runs now, and not the author's."""
    frame = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.endswith(_METHODS):
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None and frame.f_code.co_filename.startswith(_LIBRARIES)


def line_of(module: nn.Module) -> str:
    """The file and line of a module's forward, in brackets; nothing for a module of PyTorch."""
    if type(module).__module__.startswith("torch."):
        return ""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    if code is None:
        return ""
    return f" (its forward: {os.path.basename(code.co_filename)}:{code.co_firstlineno})"
