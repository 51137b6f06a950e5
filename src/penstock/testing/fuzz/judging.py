"""Run a program, and judge it: the same, refused, failed, or void if the plain loop itself fails."""

from __future__ import annotations

import linecache
import re
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from types import FrameType, ModuleType
from typing import Any

import torch
from torch import Tensor

from penstock import errors
from penstock.errors import InternalError, NonFiniteError, PenstockError, StageError
from penstock.testing.fuzz import Told, differences

LIMIT = 30.0
"""After how many seconds a side of a case counts as hanging."""
_NAME = "penstock_fuzzed"
_FAULTS = (InternalError, NonFiniteError, StageError)
"""Errors of Penstock that are not refusals. A StageError wraps errors of the user's code, which has none."""


@dataclass(frozen=True)
class Verdict:
    """How a case went.

    Attributes:
        outcome: ``"same"``, ``"refused"``, ``"failed"``, or ``"void"`` if the plain loop fails.
        reason: the reason in a few words, which are the same for similar cases.
        detail: everything that is known.
    """

    outcome: str
    reason: str = ""
    detail: str = ""


class Hang(BaseException):
    """A side took too long; a BaseException, so that nothing on the way catches it."""


def judge(program: str, tolerance: float = 1e-10, limit: float = LIMIT) -> Verdict:
    """Run both sides of a program in this process and compare."""
    with loaded(program) as module:
        expected = told_by(module.plain, limit)
        if isinstance(expected, Verdict):
            return replace(expected, outcome="void")
        if not _finite(expected):
            return Verdict("void", "not finite")
        found = told_by(module.piped, limit)
    return found if isinstance(found, Verdict) else compare(expected, found, tolerance)


def compare(expected: Mapping[str, Any], found: Mapping[str, Any], tolerance: float) -> Verdict:
    """The verdict on two runs that both came to their end."""
    wrong = differences(expected, found, tolerance)
    if not wrong:
        return Verdict("same")
    kinds = sorted({_kind(line) for line in wrong})
    return Verdict("failed", f"difference: {', '.join(kinds)}", "\n".join(wrong[:20]))


def _kind(difference: str) -> str:
    """``gradient: zeros instead of None``, without names and sizes."""
    what, _, said = difference.partition(": ")
    said = re.sub(r"\d+ times", "n times", said.split(" by ")[0])
    said = re.sub(r"called n times instead of \d+", "called too often or too seldom", said)
    return f"{re.split(r' of |,| [0-9]', what)[0].split(' ')[0]} {re.sub(r'[0-9]+', 'n', said)}"


def _finite(told: Told) -> bool:
    values = (
        torch.as_tensor(found) for found in told.values() if not isinstance(found, list | None)
    )
    return all(bool(value.isfinite().all()) for value in values if value.is_floating_point())


# ---- one side


@contextmanager
def loaded(program: str) -> Iterator[ModuleType]:
    """The program as a module whose source can be found as if it were in a file."""
    name, file = _NAME, f"<{_NAME}>"
    module = ModuleType(name)
    module.__file__ = file
    linecache.cache[file] = (len(program), None, program.splitlines(keepends=True), file)
    sys.modules[name] = module
    dtype = torch.get_default_dtype()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exec(compile(program, file, "exec"), vars(module))
            yield module
    finally:
        torch.set_default_dtype(dtype)
        sys.modules.pop(name, None)


def told_by(side: Callable[..., Told], limit: float, **arguments: Any) -> Told | Verdict:
    """What a side tells, or the verdict if it fails."""
    try:
        with _limited(limit):
            found = side(**arguments)
    except Hang:
        return Verdict("failed", "hang", traceback.format_exc())
    except Exception as error:
        return _of_error(error)
    finally:
        left = _left_behind()
    return Verdict("failed", f"left behind: {left}") if left else found


def _left_behind() -> str:
    """Modes that a side has left changed, in words; they are reset."""
    found = []
    if not torch.is_grad_enabled():
        torch.set_grad_enabled(True)
        found.append("gradients disabled")
    if torch.is_autocast_enabled("cpu"):
        torch.set_autocast_enabled("cpu", False)
        found.append("autocast")
    return ", ".join(found)


def _of_error(error: Exception) -> Verdict:
    detail = "".join(traceback.format_exception(error))
    root: BaseException = error
    while isinstance(root, StageError) and root.__cause__ is not None:
        root = root.__cause__
    kind, message = type(root), str(root)
    said = re.search(r": (\w+Error): (.*)", message, re.DOTALL)
    if isinstance(root, StageError) and said and hasattr(errors, said[1]):
        kind, message = getattr(errors, said[1]), said[2]
    told = f"{kind.__name__}: {_plainly(message)}"
    if issubclass(kind, PenstockError) and not issubclass(kind, _FAULTS):
        return Verdict("refused", told, detail)
    return Verdict("failed", f"error: {told}{_where(root)}", detail)


def _plainly(message: str) -> str:
    """The first words of a message, without the parts that differ from case to case."""
    text = message.strip().split("\n")[0]
    text = re.sub(r"\b(self\.|model\.)?[mhxa]\d+(b|\.\w+|\[\d+\])*\b", "m", text)
    text = re.sub(r"0x[0-9a-f]+|\d+(\.\d+)?", "n", text)
    return re.sub(r"(n, )+n", "n", re.sub(r"(m, )+m", "m", text))[:150]


def _where(error: BaseException) -> str:
    """The function of Penstock in which an error was raised."""
    frames = [
        f
        for f in traceback.extract_tb(error.__traceback__)
        if "/penstock/" in f.filename and "/fuzz/" not in f.filename
    ]
    return (
        f" [{frames[-1].filename.rpartition('/penstock/')[2]}: {frames[-1].name}]" if frames else ""
    )


@contextmanager
def _limited(seconds: float) -> Iterator[None]:
    def stop(_: int, frame: FrameType | None) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


_TELLING = ("None", "hook", "there", "input", "output", "evaluation", "loss", "gradient", "norm")
"""Words in differences, those first that say most about the cause."""


def signature(verdict: Verdict) -> str:
    """What must stay the same while a case is shrunk; of several differences, the most telling one."""
    head, _, kinds = verdict.reason.partition(": ")
    if head != "difference":
        return verdict.outcome + " " + verdict.reason
    return min(kinds.split(", "), key=_rank)


def _rank(kind: str) -> int:
    return next((i for i, word in enumerate(_TELLING) if word in kind), len(_TELLING))


def alike(verdict: Verdict, first: str) -> bool:
    """Whether a verdict has a signature, possibly among others."""
    return first in (signature(verdict), *verdict.reason.partition(": ")[2].split(", "))


# ---- in workers, see penstock.testing.WorkerPool


def work_alone(group: Any, program: str, tolerance: float, limit: float) -> dict[str, str]:
    """A worker's task: both sides in its process."""
    return asdict(judge(program, tolerance, limit))


def work_plain(group: Any, program: str, limit: float) -> None:
    """A worker's task: the plain loop alone, which may crash the worker."""
    with loaded(program) as module:
        told_by(module.plain, limit)


def work_together(group: Any, program: str, limit: float) -> dict[str, Any]:
    """A worker's task: the plain loop, and the share of this rank."""
    with loaded(program) as module:
        found = told_by(module.plain, limit)
        if isinstance(found, Verdict):
            return {"void": asdict(found)}
        expected = _packed(found)
        found = told_by(module.piped, limit, group=group)
        return (
            {"verdict": asdict(found)}
            if isinstance(found, Verdict)
            else {"expected": expected, "found": _packed(found)}
        )


def _packed(told: Told) -> dict[str, Any]:
    return {name: [str(v.dtype)[6:], list(v.shape), v.flatten().tolist()] if isinstance(v, Tensor) else v
            for name, v in told.items() if not name.startswith("hook")} | {
            name: {"hook": v} for name, v in told.items() if name.startswith("hook")}  # fmt: skip


def _unpacked(packed: Mapping[str, Any]) -> Told:
    told = Told()
    for name, value in packed.items():
        if isinstance(value, dict):
            told[name] = value["hook"]
        elif isinstance(value, list):
            told[name] = torch.tensor(value[2], dtype=getattr(torch, value[0])).view(value[1])
        else:
            told[name] = value
    return told


_OF_INPUT = "gradient of input "


def verdict_of_ranks(answers: Sequence[Mapping[str, Any]], tolerance: float) -> Verdict:
    """The verdict on a case whose ranks each ran their share."""
    if "void" in answers[0]:
        return replace(Verdict(**answers[0]["void"]), outcome="void")
    wrong = [Verdict(**answer["verdict"]) for answer in answers if "verdict" in answer]
    if wrong:
        # The rank with the cause, rather than those that stopped because of it.
        return min(
            wrong, key=lambda found: ("PeerFailed" in found.reason, found.outcome != "failed")
        )
    expected = _unpacked(answers[0]["expected"])
    if not _finite(expected):
        return Verdict("void", "not finite")
    together = Told()
    for answer in answers:
        found = _unpacked(answer["found"])
        hooks = {
            name: together.get(name, []) + found.pop(name)
            for name in [*found]
            if name.startswith("hook")
        }
        # Each rank has its own arguments, whose gradients are the shares of the stages that it holds.
        shares = {name: found.pop(name) for name in [*found] if name.startswith(_OF_INPUT)}
        alone = compare({n: expected.get(n) for n in found if n in expected}, found, tolerance)
        if alone.outcome != "same":
            return alone
        for name, share in shares.items():
            before = together.get(name)
            together[name] = (
                share if before is None else before if share is None else before + share
            )
        together |= found | hooks
    return compare(expected, together, tolerance)
