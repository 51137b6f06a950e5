"""``penstock doctor``: examine the ranks of a job, and the links between them, before it starts.

::

    torchrun --nproc-per-node 4 -m penstock doctor --out cluster.json

Nothing is sent but between the job's own ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock._engine.lazily import lazily

if TYPE_CHECKING:
    from penstock.doctor.checks import Check as Check
    from penstock.doctor.examination import Examination as Examination
    from penstock.doctor.examination import RankReport as RankReport
    from penstock.doctor.examination import examine as examine
    from penstock.doctor.links import LinkReport as LinkReport
    from penstock.doctor.rates import Facts as Facts

__all__, __getattr__, __dir__ = lazily(__name__)
