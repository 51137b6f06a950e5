"""A run saved whole, and resumed in any layout; see docs/saving-and-resuming.md.

Modules are imported when a name is first used, so that ``penstock --help`` does not wait for torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock._engine.lazily import lazily

if TYPE_CHECKING:
    from penstock.checkpoint.checkpoints import Checkpoints as Checkpoints
    from penstock.checkpoint.report import describe as describe
    from penstock.checkpoint.report import export as export
    from penstock.checkpoint.saving import Saved as Saved

__all__, __getattr__, __dir__ = lazily(__name__)
