"""Give every rank the outputs of the last stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.errors import SpecError
from penstock.runtime.describing import OUTPUT
from penstock.runtime.driver import Task, Wait
from penstock.runtime.exchange import Specs
from penstock.transport import Transport
from penstock.values import ValueSpec, flatten


def check_outputs(specs: Sequence[Specs]) -> None:
    """Check that the outputs of a call can be given to every rank, before it begins.

    Raises:
        SpecError: they hold something that cannot travel.
    """
    for agreed in specs:
        if OUTPUT not in agreed:
            raise SpecError(
                "the model's output cannot travel to other ranks: it holds something that cannot be "
                "described, such as a set; let the model leave it out (transformers' caches go with "
                "use_cache=False), or use step and eval without outputs"
            )
        agreed[OUTPUT].check_travels("the model's output")


def share_outputs(
    transport: Transport,
    source: int,
    outputs: Mapping[int, Any],
    specs: Sequence[Specs],
    device: torch.device,
) -> Task[list[Any]]:
    """The outputs of all microbatches.

    Args:
        transport: the rank's end.
        source: the rank that has them.
        outputs: on that rank, by microbatch.
        specs: for each microbatch, what was agreed about its values.
        device: where they shall live.

    Raises:
        SpecError: they are not what was agreed.
    """
    found = []
    for microbatch, agreed in enumerate(specs):
        found.append(
            (yield from _share(transport, source, outputs.get(microbatch), agreed, device))
        )
    return found


def _share(
    transport: Transport, source: int, output: Any, specs: Specs, device: torch.device
) -> Task[Any]:
    spec = specs[OUTPUT]
    own = _checked(output, spec) if transport.rank == source else None
    shared = []
    for index, tensor_spec in enumerate(spec.tensors):
        tensor = own[index] if own is not None else tensor_spec.empty(device)
        ticket = transport.broadcast(tensor, source)
        yield Wait(ticket, transport.rank, "waits for the outputs of the last stage")
        shared.append(ticket.take())
    return spec.fill(shared)


def _checked(output: Any, spec: ValueSpec) -> list[Tensor]:
    """The tensors of the last stage's output, if it is what was agreed on: the rest is not sent again."""
    tensors, structure = flatten(output)
    if not spec.fits(tensors, structure, gradients=False):
        gap = spec.difference(ValueSpec.of(output), gradients=False)
        raise SpecError(
            f"the model's output is not what was agreed: {gap}; what is not in a tensor may depend on "
            "shapes alone, so give numbers that are computed as tensors"
        )
    return [tensor.detach() for tensor in tensors]
