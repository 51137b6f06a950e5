"""Find the weights that several stages use: by identity, before anything is copied or moved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from penstock.partition.base import Shared, named_tensors

_Uses = dict[int, list[tuple[int, str]]]
"""By the identity of a tensor: the stages that hold it, each with a name of it there."""


def find_shared(model: nn.Module, modules: Sequence[nn.Module]) -> tuple[Shared, ...]:
    """The parameters and buffers that several stages use, or that have several names.

    Args:
        model: the whole model. Weights are tied there where one tensor is reached by several names, or
            where one module is called in several stages.
        modules: its stages, which hold the model's own tensors.
    """
    uses = _uses(dict(enumerate(modules)))
    names: dict[int, list[str]] = {}
    for name, tensor in named_tensors(model):
        names.setdefault(id(tensor), []).append(name)
    found = (Shared(tuple(names[key]), tuple(uses.get(key, ()))) for key in names)
    return tuple(one for one in found if len(one.names) > 1 or len(one.holders) > 1)


def find_shared_between(modules: Mapping[int, nn.Module]) -> tuple[Shared, ...]:
    """As :func:`find_shared`, for stages whose model is not there: the names are those of the stages.

    Args:
        modules: by the index of the stage.
    """
    known: dict[int, dict[str, None]] = {}
    for module in modules.values():
        for name, tensor in named_tensors(module):
            known.setdefault(id(tensor), {})[name] = None
    uses = _uses(modules)
    found = (Shared(tuple(names), tuple(uses[key])) for key, names in known.items())
    return tuple(one for one in found if len(one.names) > 1 or len(one.holders) > 1)


def _uses(modules: Mapping[int, nn.Module]) -> _Uses:
    uses: _Uses = {}
    for stage, module in sorted(modules.items()):
        for name, tensor in named_tensors(module):
            held = uses.setdefault(id(tensor), [])
            if not held or held[-1][0] != stage:
                held.append((stage, name))
    return uses
