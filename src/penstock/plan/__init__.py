"""Plan a run before it starts: from the costs of a model's units to the fastest ways to run it that fit.

::

    profile = penstock.plan.measure(model, batch, target=target, loss_fn=loss_fn)
    plans = penstock.plan.search(profile, ranks=4, batch=64, memory=16e9)
    pipe = penstock.Pipeline(model, schedule=plans[0], loss_fn=loss_fn)

Modules are imported when a name is first used, so that the command line does not wait for torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock._engine.lazily import lazily

if TYPE_CHECKING:
    from penstock.plan.choice import Order as Order
    from penstock.plan.choice import Plan as Plan
    from penstock.plan.choice import PlanShape as PlanShape
    from penstock.plan.choice import with_messages as with_messages
    from penstock.plan.cluster import Cluster as Cluster
    from penstock.plan.cluster import Link as Link
    from penstock.plan.cluster import bytes_of as bytes_of
    from penstock.plan.costs import Profile as Profile
    from penstock.plan.costs import StageCosts as StageCosts
    from penstock.plan.costs import UnitCost as UnitCost
    from penstock.plan.costs import UnitCosts as UnitCosts
    from penstock.plan.costs import ValueCost as ValueCost
    from penstock.plan.costs import cut_of as cut_of
    from penstock.plan.devices import DEVICES as DEVICES
    from penstock.plan.devices import Device as Device
    from penstock.plan.devices import device_called as device_called
    from penstock.plan.devices import device_named as device_named
    from penstock.plan.measured import correct as correct
    from penstock.plan.measuring import measure as measure
    from penstock.plan.measuring import predict as predict
    from penstock.plan.measuring import predict_hf as predict_hf
    from penstock.plan.report import report_of as report_of
    from penstock.plan.searching import Plans as Plans
    from penstock.plan.searching import plan_for as plan_for
    from penstock.plan.searching import search as search

__all__, __getattr__, __dir__ = lazily(__name__)
