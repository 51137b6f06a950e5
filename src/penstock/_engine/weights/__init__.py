"""Weights: first values, files, names, norms, optimizer states, and weights that several stages share.

Modules are imported when a name is first used: the command line reads and writes files without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock._engine.lazily import lazily

if TYPE_CHECKING:
    from penstock._engine.weights.files import WeightFiles as WeightFiles
    from penstock._engine.weights.folders import load_partition as load_partition
    from penstock._engine.weights.folders import parameters_on_meta as parameters_on_meta
    from penstock._engine.weights.folders import read_weights as read_weights
    from penstock._engine.weights.initialise import Init as Init
    from penstock._engine.weights.initialise import init_weights as init_weights

__all__, __getattr__, __dir__ = lazily(__name__)
