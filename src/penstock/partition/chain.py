"""Cut a model whose forward is a chain of modules: each one's output is the next one's input."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from torch import nn

from penstock.errors import PartitionError
from penstock.partition.base import Partition


class ChainStage(nn.Module):
    """Some modules of a model, called one after the other, under the names they have in the model.

    Args:
        model: the whole model.
        paths: the modules' paths in it, in the order of the calls. A tuple that one gives becomes the
            next one's positional arguments.
    """

    def __init__(self, model: nn.Module, paths: Sequence[str]) -> None:
        super().__init__()
        self._paths = tuple(paths)
        for path in self._paths:
            _graft(self, path, model.get_submodule(path))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the modules in order; the arguments go to the first."""
        first, *rest = self._paths
        value = self.get_submodule(first)(*args, **kwargs)
        for path in rest:
            module = self.get_submodule(path)
            value = module(*value) if isinstance(value, tuple) else module(value)
        return value


def _graft(root: nn.Module, path: str, module: nn.Module) -> None:
    """Put a module at a path, with empty modules on the way."""
    *way, name = path.split(".")
    holder = root
    for step in way:
        if step not in dict(holder.named_children()):
            holder.add_module(step, nn.Module())
        holder = holder.get_submodule(step)
    holder.add_module(name, module)


def cut_chain(model: nn.Module, stages: Sequence[Sequence[str]]) -> Partition:
    """Cut a model at module paths.

    Args:
        model: its forward calls the named modules one after the other and does nothing else.
        stages: for each stage the paths of its modules, in the order of the calls.

    Raises:
        PartitionError: an unknown path, a stage without modules, a parameter in no stage or in two.
    """
    known = dict(model.named_modules())
    unknown = [path for paths in stages for path in paths if path not in known]
    if unknown:
        raise PartitionError(
            f"no modules {unknown} in the model; its paths are like {_some(known)}"
        )
    empty = [index for index, paths in enumerate(stages) if not paths]
    if empty:
        raise PartitionError(f"stages {empty} have no modules; name at least one for each stage")
    partition = Partition(tuple(ChainStage(model, paths) for paths in stages))
    partition.check_covers(model)
    return partition


def _some(known: dict[str, nn.Module]) -> str:
    return ", ".join(list(known)[1:6])


def cut_sequential(model: nn.Sequential, stages: int) -> Partition:
    """Cut an ``nn.Sequential`` into runs of its children, as equal in number as can be.

    Raises:
        PartitionError: more stages than children.
    """
    names = [name for name, _ in model.named_children()]
    if not 1 <= stages <= len(names):
        raise PartitionError(
            f"{len(names)} modules cannot be cut into {stages} stages; use from 1 to {len(names)}"
        )
    size, rest = divmod(len(names), stages)
    starts = [index * size + min(index, rest) for index in range(stages + 1)]
    return cut_chain(model, [names[a:b] for a, b in pairwise(starts)])
