"""Runs a step: the interpreter of a program, what the ranks agree on before it, and its result."""

from penstock.runtime.calls import Call, Offer, check_plans, describe_stages, differences, mark_of
from penstock.runtime.hooks import ActionEvent, ActionHook, HookHandle, Hooks, Which
from penstock.runtime.interpreter import Interpreter, Program, StepData
from penstock.runtime.loss import (
    Loss,
    LossFunction,
    LossOptions,
    LossWeight,
    Metric,
    NonFinite,
    Reduction,
    Replicas,
    add_loss,
    collect_losses,
)
from penstock.runtime.result import StepCost, StepResult, TimelineKind
from penstock.runtime.runner import CallReport, Runner
from penstock.runtime.scaler import LossScaler

__all__ = [
    "ActionEvent",
    "ActionHook",
    "Call",
    "CallReport",
    "HookHandle",
    "Hooks",
    "Interpreter",
    "Loss",
    "LossFunction",
    "LossOptions",
    "LossScaler",
    "LossWeight",
    "Metric",
    "NonFinite",
    "Offer",
    "Program",
    "Reduction",
    "Replicas",
    "Runner",
    "StepCost",
    "StepData",
    "StepResult",
    "TimelineKind",
    "Which",
    "add_loss",
    "check_plans",
    "collect_losses",
    "describe_stages",
    "differences",
    "mark_of",
]
