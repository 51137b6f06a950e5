"""Run a schedule: bind every rank's program once, agree on calls, and run the steps."""

from penstock.runtime.agreement import (
    Call,
    Refusal,
    Report,
    agree_plan,
    describe_stages,
    reports_of,
)
from penstock.runtime.bind import BoundProgram, Wanted
from penstock.runtime.driver import Task, Wait, drive
from penstock.runtime.explain import explain, table
from penstock.runtime.instrumentation import ActionEvent, ActionHook, HookHandle, Hooks, Which
from penstock.runtime.program import RankProgram, channels
from penstock.runtime.rank import Rank, check_stages
from penstock.runtime.work import StepData

__all__ = [
    "ActionEvent",
    "ActionHook",
    "BoundProgram",
    "Call",
    "HookHandle",
    "Hooks",
    "Rank",
    "RankProgram",
    "Refusal",
    "Report",
    "StepData",
    "Task",
    "Wait",
    "Wanted",
    "Which",
    "agree_plan",
    "channels",
    "check_stages",
    "describe_stages",
    "drive",
    "explain",
    "reports_of",
    "table",
]
