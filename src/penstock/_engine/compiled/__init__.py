"""Compiled stages whose backward passes are in two halves.

Modules are imported when a name is first used: most of them need parts of torch that take seconds to import.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock._engine.lazily import lazily

if TYPE_CHECKING:
    from penstock._engine.compiled.halves import leave_weights as leave_weights
    from penstock._engine.compiled.halves import places_in as places_in
    from penstock._engine.compiled.names import graphs_kept as graphs_kept
    from penstock._engine.compiled.names import has_compiler as has_compiler
    from penstock._engine.compiled.names import settings_of as settings_of
    from penstock._engine.compiled.stages import CompiledModule as CompiledModule
    from penstock._engine.compiled.stages import RefusedError as RefusedError

__all__, __getattr__, __dir__ = lazily(__name__)
