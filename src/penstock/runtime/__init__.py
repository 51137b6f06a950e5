"""Run a schedule: every rank's program as a machine that one can step."""

from penstock.runtime.agreement import agree_plan, describe_stages
from penstock.runtime.driver import Task, Wait, drive
from penstock.runtime.hooks import ActionEvent, ActionHook, HookHandle, Hooks, Which
from penstock.runtime.machine import Machine, Work
from penstock.runtime.orders import Order, Refusal, Report, reports_of
from penstock.runtime.program import RankProgram, channels, engine_for
from penstock.runtime.rank import Rank, check_stages

__all__ = [
    "ActionEvent",
    "ActionHook",
    "HookHandle",
    "Hooks",
    "Machine",
    "Order",
    "Rank",
    "RankProgram",
    "Refusal",
    "Report",
    "Task",
    "Wait",
    "Which",
    "Work",
    "agree_plan",
    "channels",
    "check_stages",
    "describe_stages",
    "drive",
    "engine_for",
    "reports_of",
]
