"""Runs a step: the agreement before it, the interpreter of its program, and its result."""

from penstock._engine.runtime.calls import (
    Call,
    StepState,
    check_plans,
    describe_stages,
    refusal_of,
)
from penstock._engine.runtime.hooks import ActionEvent, ActionHook, HookHandle, Hooks, Which
from penstock._engine.runtime.kinds import contents_of
from penstock._engine.runtime.loss import (
    MAIN,
    Loss,
    LossFunction,
    LossOver,
    LossWeight,
    Metric,
    Reduction,
    StepLoss,
    TotalWeight,
    add_loss,
    check_function,
    collect_losses,
)
from penstock._engine.runtime.loss_check import advice, differ
from penstock._engine.runtime.result import StepCost, StepResult, TimelineKind
from penstock._engine.runtime.runner import Runner, without_data
from penstock._engine.runtime.scaler import LossScaler
from penstock._engine.runtime.stopping import GracefulStop
from penstock._engine.runtime.turns import overlap_collectives
from penstock._engine.runtime.whole import forwards_first

__all__ = [
    "MAIN",
    "ActionEvent",
    "ActionHook",
    "Call",
    "GracefulStop",
    "HookHandle",
    "Hooks",
    "Loss",
    "LossFunction",
    "LossOver",
    "LossScaler",
    "LossWeight",
    "Metric",
    "Reduction",
    "Runner",
    "StepCost",
    "StepLoss",
    "StepResult",
    "StepState",
    "TimelineKind",
    "TotalWeight",
    "Which",
    "add_loss",
    "advice",
    "check_function",
    "check_plans",
    "collect_losses",
    "contents_of",
    "describe_stages",
    "differ",
    "forwards_first",
    "overlap_collectives",
    "refusal_of",
    "without_data",
]
