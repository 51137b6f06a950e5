"""A traced call, cut into programs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from penstock.partition.traced.aliasing import Aliases
from penstock.partition.traced.export import ROOT, Exported
from penstock.partition.traced.layout import Layout, Wanted, stages_of
from penstock.partition.traced.program import Program
from penstock.partition.traced.wiring import wire
from penstock.values import Family, ValueSpec

Sure = frozenset[tuple[str, int]]
"""Tensors for which a gradient surely comes back: the value's name, and which of its tensors."""
Travelling = tuple[ValueSpec, Sure]
"""The spec of what travels and of the output, by name, with those tensors."""


class Trace:
    """One call's graph, cut at the marks.

    Args:
        exported: the graph.
        wanted: which of its marks are cut at.
        layout: how the regions between them make up stages.
        arguments_travel: whether the first stage hands on the arguments that later ones use.

    Attributes:
        families: what travels in calls that differ in sizes alone, as far as it was found.
    """

    def __init__(
        self, exported: Exported, wanted: Wanted, layout: Layout, *, arguments_travel: bool = False
    ) -> None:
        self.exported = exported
        self._stage_of = stages_of(exported.graph, wanted, layout)
        aliases = Aliases(exported.graph, exported.root)
        self.wiring = wire(
            exported.graph,
            self._stage_of,
            layout.stages,
            aliases,
            arguments_travel=arguments_travel,
        )
        self._programs: dict[int, Program] = {}
        self.families: dict[Any, Family[Travelling]] = {}

    def users(self, name: str) -> dict[int, list[fx.Node]]:
        """The stages that use a parameter or buffer, with the nodes that do."""
        last = len(self.wiring.slices) - 1
        found: dict[int, list[fx.Node]] = {}
        for node in self.exported.graph.nodes:
            if node.op == "get_attr" and node.target == ROOT + name:
                for user in node.users:
                    found.setdefault(self._stage_of.get(user, last), []).append(user)
        return found

    def program(self, stage: int, held: Mapping[str, str], device: torch.device) -> Program:
        """What a stage runs.

        Args:
            stage: its index.
            held: for each name of a parameter or buffer of the model, its name in the stage.
            device: the one traced on.
        """
        if stage not in self._programs:
            part = self.wiring.slices[stage]
            outputs = self.wiring.outputs if part is self.wiring.slices[-1] else None
            names = {ROOT + name: own for name, own in held.items()}
            self._programs[stage] = Program(part, outputs, self.exported.root, names, device)
        return self._programs[stage]
