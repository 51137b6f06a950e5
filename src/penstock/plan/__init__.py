"""Plan a run before it runs: from what the units of a model cost to the fastest ways to run it that fit.

::

    profile = penstock.plan.measure(model, batch, target=target, loss_fn=loss_fn)
    plans = penstock.plan.search(profile, ranks=4, batch=64, memory=16e9)
    pipe = penstock.Pipeline(model, plan=plans[0], loss_fn=loss_fn)

Modules are imported when a name is first used, so that the command line does not wait for torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.lazily import lazily

if TYPE_CHECKING:
    from penstock.plan.answer import Plan, Plans, Shape
    from penstock.plan.costs import (
        MeasuredStages,
        Profile,
        StageCosts,
        UnitCost,
        UnitCosts,
        ValueCost,
        costs_from,
        cut_of,
    )
    from penstock.plan.devices import DEVICES, Device, device_named
    from penstock.plan.measuring import measure
    from penstock.plan.predicting import predict, predict_hf
    from penstock.plan.searching import plan_for, search

__all__ = [
    "DEVICES",
    "Device",
    "MeasuredStages",
    "Plan",
    "Plans",
    "Profile",
    "Shape",
    "StageCosts",
    "UnitCost",
    "UnitCosts",
    "ValueCost",
    "costs_from",
    "cut_of",
    "device_named",
    "measure",
    "plan_for",
    "predict",
    "predict_hf",
    "search",
]

__getattr__ = lazily(
    __name__,
    {
        "answer": "Plan Plans Shape",
        "costs": "MeasuredStages Profile StageCosts UnitCost UnitCosts ValueCost costs_from cut_of",
        "devices": "DEVICES Device device_named",
        "measuring": "measure",
        "predicting": "predict predict_hf",
        "searching": "plan_for search",
    },
)
