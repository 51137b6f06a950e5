"""Compiled stages whose backward passes are in two halves.

Names are found when they are first used: most of them need parts of torch that take seconds to import.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.compiled.halves import places_in
    from penstock.compiled.names import graphs_kept, has_compiler
    from penstock.compiled.stages import CompiledModule, RefusedError, settings_of

__all__ = [
    "CompiledModule",
    "RefusedError",
    "graphs_kept",
    "has_compiler",
    "places_in",
    "settings_of",
]

_HOMES = {"places_in": "halves", "graphs_kept": "names", "has_compiler": "names"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES.get(name, 'stages')}"), name)
