"""A model cut into stages."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor, nn

from penstock.errors import PartitionError
from penstock.schedule import Edge
from penstock.values import ValueSpec


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
    """A parameter or buffer that several stages use, or that has several names.

    Attributes:
        names: all its names in the model; it is counted and saved under the first.
        holders: the stages, ascending, each with a name of it in that stage's module.
    """

    names: tuple[str, ...]
    holders: tuple[tuple[int, str], ...]

    @property
    def stages(self) -> tuple[int, ...]:
        """The stages that use it."""
        return tuple(stage for stage, _ in self.holders)


@runtime_checkable
class Releases(Protocol):
    """A stage that can let go of its data."""

    def release(self, kept: Collection[Tensor]) -> None:
        """Let go of all data but of the tensors that are kept."""


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
        how: the way it was made, as :func:`penstock.partition.partition` says it.
        reason: why that way.
    """

    modules: tuple[nn.Module, ...]
    edges: tuple[Edge, ...] = ()
    shared: tuple[Shared, ...] = ()
    describe: Describe | None = None
    how: str = ""
    reason: str = ""

    def check_covers(self, model: nn.Module) -> None:
        """Check that every parameter and buffer of ``model`` is in one stage, or in ``shared``.

        Raises:
            PartitionError: the message names what is missing or shared, and the stages that share it.
        """
        holders = self._holders()
        missing = [name for name, tensor in named_tensors(model) if id(tensor) not in holders]
        if missing:
            raise PartitionError(
                f"in no stage: {_listed(missing)}; name the modules that hold them in stages="
            )
        self._check_table()
        listed = {
            name: {stage for stage, _ in one.holders} for one in self.shared for name in one.names
        }
        used = {name: holders[id(tensor)] for name, tensor in named_tensors(model)}
        wrong = {
            name: sorted(stages)
            for name, stages in used.items()
            if len(stages) > 1 and stages != listed.get(name)
        }
        if wrong:
            raise PartitionError(
                f"used by several stages: {wrong}, which the partition does not list as shared; make its "
                "shared= with find_shared(model, modules), or put the modules that share it into one stage"
            )

    def keep(self, stages: Collection[int]) -> None:
        """Let go of the data of all other stages, where these share a model that would hold on to it.

        The model then has tensors on the meta device in their place.
        """
        kept = [tensor for index in stages for _, tensor in named_tensors(self.modules[index])]
        for index, module in enumerate(self.modules):
            if index not in stages and isinstance(module, Releases):
                module.release(kept)

    def _check_table(self) -> None:
        """Check that the stages hold what ``shared`` says."""
        held = [dict(named_tensors(module)) for module in self.modules]
        wrong = [
            (stage, name)
            for one in self.shared
            for stage, name in one.holders
            if not 0 <= stage < len(held) or name not in held[stage]
        ]
        if wrong:
            raise PartitionError(
                f"shared= says that stages hold {wrong}, which they do not; "
                "make it with find_shared(model, modules)"
            )

    def _holders(self) -> dict[int, set[int]]:
        holders: dict[int, set[int]] = {}
        for index, module in enumerate(self.modules):
            for _, tensor in named_tensors(module):
                holders.setdefault(id(tensor), set()).add(index)
        return holders


def named_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Parameters and buffers under every name that they have."""
    parameters = module.named_parameters(remove_duplicate=False)
    return [*parameters, *module.named_buffers(remove_duplicate=False)]


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"
