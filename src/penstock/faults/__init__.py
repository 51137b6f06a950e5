"""A fault on one rank becomes a named error on all: heartbeats, a place to report failures, and a watch.

Names are imported on first use, so that the command line can handle signals without importing torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.lazily import lazily

if TYPE_CHECKING:
    from penstock.faults.failure import Failure as Failure
    from penstock.faults.failure import failing_module as failing_module
    from penstock.faults.failure import status_of as status_of
    from penstock.faults.failure import versions as versions
    from penstock.faults.failure import without_own_frames as without_own_frames
    from penstock.faults.processes import this_host as this_host
    from penstock.faults.progress import FIRST_STEP as FIRST_STEP
    from penstock.faults.progress import PATIENCE as PATIENCE
    from penstock.faults.progress import Activity as Activity
    from penstock.faults.progress import Patience as Patience
    from penstock.faults.progress import Timeout as Timeout
    from penstock.faults.progress import add_probe as add_probe
    from penstock.faults.progress import has_probes as has_probes
    from penstock.faults.rendezvous import SLACK as SLACK
    from penstock.faults.rendezvous import Rendezvous as Rendezvous
    from penstock.faults.watch import Watch as Watch

__all__, __getattr__, __dir__ = lazily(__name__)
