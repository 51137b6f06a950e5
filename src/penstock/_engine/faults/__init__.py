"""A fault on one rank becomes a named error on all: heartbeats in the store, a monitor, and reports."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock._engine.lazily import lazily

if TYPE_CHECKING:
    from penstock._engine.faults.activity import Activity as Activity
    from penstock._engine.faults.activity import Collective as Collective
    from penstock._engine.faults.activity import Patience as Patience
    from penstock._engine.faults.activity import Timeout as Timeout
    from penstock._engine.faults.activity import Timeouts as Timeouts
    from penstock._engine.faults.activity import add_probe as add_probe
    from penstock._engine.faults.activity import has_probes as has_probes
    from penstock._engine.faults.activity import stand_in as stand_in
    from penstock._engine.faults.failure import Failure as Failure
    from penstock._engine.faults.failure import failing_module as failing_module
    from penstock._engine.faults.failure import versions as versions
    from penstock._engine.faults.failure import without_library_frames as without_library_frames
    from penstock._engine.faults.meeting import DAY as DAY
    from penstock._engine.faults.meeting import Meeting as Meeting
    from penstock._engine.faults.meeting import Members as Members
    from penstock._engine.faults.meeting import decline as decline
    from penstock._engine.faults.meeting import end_waits as end_waits
    from penstock._engine.faults.meeting import meet as meet
    from penstock._engine.faults.meeting import noticing_gone_machines as noticing_gone_machines
    from penstock._engine.faults.places import Place as Place
    from penstock._engine.faults.places import ranges as ranges
    from penstock._engine.faults.search import Search as Search
    from penstock._engine.faults.watch import Watch as Watch

__all__, __getattr__, __dir__ = lazily(__name__)
