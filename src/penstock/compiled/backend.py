"""The backend of `torch.compile` for stages: what compiles the graphs that Dynamo captures, each once.

Dynamo captures graphs, with guards that say when each holds; AOT autograd traces a graph together with its
backward and cuts these two apart. What breaks Dynamo's graphs, changes tensors in place, makes views, or
draws random numbers is theirs, and stays as it is there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from torch.fx import GraphModule

from penstock.compiled import names
from penstock.compiled.cut import Policy
from penstock.compiled.equality import key_of
from penstock.compiled.plain import function_of

log = logging.getLogger("penstock")

CUDA_GRAPHS = "triton.cudagraphs"

_known: dict[tuple[str, str], tuple[Callable[..., Any], GraphModule]] = {}


@dataclass
class Tally:
    """How many compiled graphs were entered so far, and how many were compiled."""

    graphs: int = 0
    compiled: int = 0


tally = Tally()


class Compiler:
    """Compiles what Dynamo captures.

    Args:
        inductor: The options of inductor; None runs the operations of the graphs as they are.
        checkpoints: Whether the weights' half computes checkpointed regions once more.
    """

    compiler_name = "penstock"

    def __init__(self, inductor: names.Options | None, *, checkpoints: bool = False) -> None:
        if inductor is not None and inductor.get(CUDA_GRAPHS):
            log.info(
                "compiled stages do without CUDA graphs, whose memory microbatches under way share"
            )
            inductor = {**inductor, CUDA_GRAPHS: False}
        self._inductor = inductor
        self._checkpoints = checkpoints

    def __eq__(self, other: object) -> bool:
        # Where backends are equal, Dynamo takes for one stage what it has compiled for another.
        return isinstance(other, Compiler) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))

    def __str__(self) -> str:
        return f"Compiler({self._inductor}, {self._checkpoints})"

    def __call__(self, graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Returns what computes a graph."""
        key = key_of(graph, inputs)
        known = key and _known.get((str(self), key))
        if known:
            return known[0]
        made = self._compiled(graph, inputs)
        if made is None:
            return graph.forward

        def run(*args: Any) -> Any:
            tally.graphs += 1
            return made(*args)

        if key:
            # With the graph, whose functions the key tells apart by where they are.
            _known[str(self), key] = run, graph
        return run

    def reset(self) -> None:
        """Forgets all; `torch.compiler.reset` calls it."""
        _known.clear()

    def _compiled(self, graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any] | None:
        """Compiles a graph, without inductor if that fails; None if nothing does."""
        for inductor in [self._inductor, None] if self._inductor is not None else [None]:
            started = perf_counter()
            names.note(Policy(fused=inductor is not None, checkpoints=self._checkpoints))
            try:
                if inductor is None:
                    made = names.compile_plainly(graph, inputs, function_of)
                else:
                    made = names.compile_with_inductor(graph, inputs, inductor)
            except Exception as error:
                if names.is_no_failure(error):
                    raise
                by = "as it is" if inductor is None else "by inductor"
                told = f"{type(error).__name__}: {error}"
                log.warning("a part of a stage could not be compiled %s: %s", by, told)
                continue
            tally.compiled += 1
            done, nodes = perf_counter() - started, len(graph.graph.nodes)
            log.info("compiled a forward pass of %d operations in %.1f s", nodes, done)
            return made
        return None
