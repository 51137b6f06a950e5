"""Compiled stages whose backward passes are in two halves.

Modules are imported when a name is first used: most of them need parts of torch that take seconds to import.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.lazily import lazily

if TYPE_CHECKING:
    from penstock.compiled.halves import leave_weights, places_in
    from penstock.compiled.names import graphs_kept, has_compiler, settings_of
    from penstock.compiled.stages import CompiledModule, RefusedError

__all__ = [
    "CompiledModule",
    "RefusedError",
    "graphs_kept",
    "has_compiler",
    "leave_weights",
    "places_in",
    "settings_of",
]

__getattr__ = lazily(
    __name__,
    {
        "halves": "leave_weights places_in",
        "names": "graphs_kept has_compiler settings_of",
        "stages": "CompiledModule RefusedError",
    },
)
