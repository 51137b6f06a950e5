"""A model cut into stages."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from penstock.errors import PartitionError


@dataclass(frozen=True)
class Partition:
    """The stages of a model, in order, each holding its own parameters under the model's names.

    Args:
        modules: one for each stage.
    """

    modules: tuple[nn.Module, ...]

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
