"""The connections of one pipeline between its ranks, beside those of the group that it was given.

They are a pipeline's own: what fails in it breaks no connection of the user's, and none of another pipeline
on the same group, such as the next one.
"""

from __future__ import annotations

import random
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from penstock.errors import MessageError

NOBODY = 0x4F
"""The tag of a message that nobody sends, see :func:`break_off`."""
_CONNECT = timedelta(seconds=120)
"""How long ranks that are all there may take to connect."""


def connect_all(parent: dist.ProcessGroup, device: torch.device, timeout: timedelta) -> Any:
    """Connect the ranks of a group with each other over gloo; all of them call this together.

    Not by ``new_group``, which gives a part of the world the name of its last group again when that was
    ended: its members then find the addresses of that one.

    Args:
        parent: the group, by which they meet.
        device: of messages over it.
        timeout: of the operations on what is made.

    Returns:
        A ``ProcessGroupGloo``; the stubs of torch do not tell its methods.

    Raises:
        MessageError: a rank ended, or did not come in the time that the group allows.
    """
    try:
        name = _agree_on_name(parent, device)
        store = PrefixStore(f"penstock/{name}", parent.get_group_store())
        made = dist.ProcessGroupGloo(store, parent.rank(), parent.size(), _CONNECT)
    except RuntimeError as error:
        raise MessageError(
            f"rank {parent.rank()} waits for all {parent.size()} ranks to make their pipeline: {error}\n"
            "another rank may say why it stopped"
        ) from error
    made.set_timeout(timeout)
    return made


def _agree_on_name(parent: dist.ProcessGroup, device: torch.device) -> int:
    """A number that only this meeting has, the first rank's; there once all ranks have come."""
    mine = torch.tensor([random.SystemRandom().getrandbits(62)], device=device)
    rows = [torch.empty_like(mine) for _ in range(parent.size())]
    dist.all_gather(rows, mine, group=parent)
    return int(rows[0])


def break_off(group: Any) -> None:
    """Close the connections of a gloo group: a receive that is not served in time does that to all.

    From whom does not matter, unless that one is gone: then the receive is refused, and closes nothing.
    """
    for peer in range(group.size()):
        if peer != group.rank():
            with suppress(RuntimeError):
                group.recv([torch.zeros(1)], peer, NOBODY).wait(timedelta(milliseconds=1))
