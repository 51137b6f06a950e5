"""A model cut into stages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor, nn

from penstock.errors import PartitionError
from penstock.schedule import Edge
from penstock.specs import ValueSpec


class Description(NamedTuple):
    """What travels between the stages for one call.

    Attributes:
        edges: the values, who makes and who uses them.
        specs: of each edge's value, and under ``"output"`` of the model's output.
    """

    edges: tuple[Edge, ...]
    specs: Mapping[str, ValueSpec]


Describe = Callable[[ValueSpec, bool], Description]
"""From the spec of a microbatch's ``(args, kwargs)``, and whether gradients are wanted."""


class Shared(NamedTuple):
    """A parameter or buffer that several stages use.

    Attributes:
        names: all its names in the model; it is counted and saved under the first.
        holders: the stages, ascending, each with a name of it in that stage's module.
    """

    names: tuple[str, ...]
    holders: tuple[tuple[int, str], ...]


@dataclass(frozen=True)
class Partition:
    """The stages of a model, in order, each holding its own parameters under the model's names.

    A stage's module is called as a module is, or, where it has the attribute ``wired = True``, as
    ``module(values, args, kwargs)``: the values that it uses by name, and the arguments of the model, in
    which tensors that this process was not given are on the meta device. It then gives a dict of all values
    that it makes, and in the last stage the model's output.

    Args:
        modules: one for each stage.
        edges: which values travel; empty for the chain, where each stage feeds the next.
        shared: the weights that several stages use.
        describe: tells the edges and specs of a call, where they depend on it.
    """

    modules: tuple[nn.Module, ...]
    edges: tuple[Edge, ...] = ()
    shared: tuple[Shared, ...] = ()
    describe: Describe | None = None

    def check_covers(self, model: nn.Module) -> None:
        """Check that every parameter and buffer of ``model`` is in exactly one stage.

        Raises:
            PartitionError: the message names what is missing or shared, and the stages that share it.
        """
        holders = self._holders()
        missing = [name for name, tensor in _named_tensors(model) if id(tensor) not in holders]
        if missing:
            raise PartitionError(
                f"in no stage: {_listed(missing)}; name the modules that hold them in stages="
            )
        shared = {
            name: sorted(holders[id(tensor)])
            for name, tensor in _named_tensors(model)
            if len(holders[id(tensor)]) > 1
        }
        if shared:
            raise PartitionError(
                f"used by several stages: {shared}; put the modules that share it into one stage"
            )

    def _holders(self) -> dict[int, set[int]]:
        holders: dict[int, set[int]] = {}
        for index, module in enumerate(self.modules):
            for _, tensor in _named_tensors(module):
                holders.setdefault(id(tensor), set()).add(index)
        return holders


def _named_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(), *module.named_buffers()]


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"
