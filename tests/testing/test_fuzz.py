"""The fuzzer: it finds planted faults, makes them small, and finds nothing else in its fixed cases."""

from __future__ import annotations

from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.pipeline import Pipeline
from penstock.schedule import Placement, Schedule, add_communication, parse_action, validate
from penstock.testing import WorkerError, WorkerPool
from penstock.testing.fuzz import __main__ as command
from penstock.testing.fuzz import differences, merged, parts
from penstock.testing.fuzz.cases import OPS, Case, Run
from penstock.testing.fuzz.growing import count, form, grow
from penstock.testing.fuzz.judging import (
    Verdict,
    alike,
    judge,
    loaded,
    signature,
    told_by,
    verdict_of_ranks,
)
from penstock.testing.fuzz.program import program, tolerance
from penstock.testing.fuzz.shrinking import shrink

UNMENDED: dict[str, str] = {}
"""Fixed cases that are known to fail, and how. One that no longer does must go from here."""


# ---- fixed cases


def check(cases: Sequence[Case], judged: Callable[[Case], Verdict]) -> None:
    """Check that no case fails but those that are known to."""
    verdicts = {case.name: judged(case) for case in cases}
    found = {name: told for name, told in verdicts.items() if told.outcome == "failed"}
    new = {
        name: f"{told.reason}\n{told.detail[-500:]}"
        for name, told in found.items()
        if not signature(told).startswith(UNMENDED.get(name, "nothing is known"))
    }
    assert new == {}
    assert sorted(set(verdicts) & set(UNMENDED) - set(found)) == [], "mended: no longer UNMENDED"
    assert any(told.outcome == "same" for told in verdicts.values())


def in_process(case: Case) -> Verdict:
    return judge(program(case), tolerance(case))


@pytest.mark.slow
@pytest.mark.parametrize(
    "chunk", [0, *(pytest.param(chunk, marks=pytest.mark.nightly) for chunk in (1, 2))]
)
def test_fixed_cases_in_one_process_are_those_of_a_plain_loop(chunk: int) -> None:
    cases = [grow(f"0:{number}") for number in range(chunk * 20, chunk * 20 + 20)]
    check([case for case in cases if not case.run.gloo], in_process)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_fixed_cases_of_a_process_for_each_rank_are_those_of_a_plain_loop(
    workers: WorkerPool,
) -> None:
    bench = command.Bench(together=workers)
    check([grow(f"0:{number}") for number in range(9, 40, 10)], bench.judge)


# ---- faults that are planted

Step = Callable[..., Any]


def scale_a_gradient(step: Step) -> Step:
    def wrong(pipe: Pipeline, *args: Any, **kwargs: Any) -> Any:
        result = step(pipe, *args, **kwargs)
        for weight in pipe.parameters():
            if weight.dim() == 1 and weight.grad is not None:
                weight.grad.mul_(1 + 1e-6)
        return result

    return wrong


def make_zeros_of_none(step: Step) -> Step:
    def wrong(pipe: Pipeline, *args: Any, **kwargs: Any) -> Any:
        result = step(pipe, *args, **kwargs)
        for weight in pipe.parameters():
            if weight.requires_grad and weight.grad is None:
                weight.grad = torch.zeros_like(weight)
        return result

    return wrong


PLANTED = {
    "gradient differs": scale_a_gradient,
    "gradient zeros instead of None": make_zeros_of_none,
}


@pytest.mark.slow
@pytest.mark.parametrize("found", PLANTED)
def test_a_planted_fault_is_found_and_made_small(
    monkeypatch: pytest.MonkeyPatch, found: str
) -> None:
    right = Pipeline.step

    def fails(case: Case) -> bool:
        monkeypatch.setattr(Pipeline, "step", PLANTED[found](right))
        verdict = in_process(case)
        monkeypatch.setattr(Pipeline, "step", right)
        return alike(verdict, found) and in_process(case).outcome == "same"

    case = next(case for case in map(grow, (f"planted:{n}" for n in range(300))) if fails(case))
    small = shrink(case, fails)
    assert len(list(small.model.all_lines())) <= 6
    assert small.run.steps <= 2
    assert len(program(small)) < len(program(case))


# ---- cases


def test_a_name_is_one_case() -> None:
    assert program(grow("3:14")) == program(grow("3:14"))
    assert program(grow("3:14")) != program(grow("3:15"))


def test_every_row_of_the_table_comes_up() -> None:
    seen = Counter(line.op for n in range(900) for line in grow(f"1:{n}").model.all_lines())
    assert set(OPS) - set(seen) == set()


def test_schedules_of_its_own_are_valid() -> None:
    runs = [run for n in range(300) if (run := grow(f"2:{n}").run).rows]
    assert len(runs) > 10
    for run in runs:
        programs = tuple(tuple(map(parse_action, row.split())) for row in run.rows)
        made = Schedule("own", Placement(tuple(run.placement)), run.microbatches[0], programs)
        assert validate(add_communication(made)).ok, made


@pytest.mark.slow
def test_every_form_of_the_table_is_one_that_torch_takes() -> None:
    wrong = {}
    for number in range(count()):
        with loaded(program(form(number))) as module:
            told = told_by(module.plain, 30.0)
        if isinstance(told, Verdict):
            wrong[number] = told.reason
    assert wrong == {}


# ---- shrinking, judging, telling


def test_shrinking_leaves_what_fails_and_nothing_else() -> None:
    def fails(case: Case) -> bool:
        return case.run.schedule == "ZB-H1" and any(
            line.op == "lstm" for line in case.model.all_lines()
        )

    case = next(case for case in map(grow, (f"4:{n}" for n in range(2000))) if fails(case))
    small = shrink(case, fails)
    assert [line.op for line in small.model.lines] == ["lstm"]
    assert small.run == Run(schedule="ZB-H1", ranks=1, batches=[1], microbatches=[1])
    assert not small.hooks + small.ties + small.events


def test_parts_and_merged() -> None:
    batch = ({"x": torch.arange(5)}, [torch.arange(10).view(5, 2), 3])
    first, second = parts(batch, [3, 2])
    assert first[0]["x"].tolist() == [0, 1, 2]
    assert second[1][0].tolist() == [[6, 7], [8, 9]]
    assert merged([first, second])[0]["x"].tolist() == [0, 1, 2, 3, 4]


ONE = torch.ones(2)


@pytest.mark.parametrize(
    ("expected", "found", "said"),
    [
        (ONE, ONE + 1e-12, []),
        (ONE, ONE + 1e-3, ["a: differs by 0.001"]),
        (None, ONE * 0, ["a: zeros instead of None"]),
        (ONE, None, ["a: None instead of numbers"]),
        (ONE, ONE.float().half(), ["a: torch.float16 [2] instead of torch.float32 [2]"]),
        (ONE, ONE * float("nan"), ["a: differs by nan"]),
        ([[1.0], [2.0]], [[2.0], [1.0]], []),
        ([[1.0]], [[1.0], [1.0]], ["a: called 2 times instead of 1"]),
        ([[1.0]], [[float("inf")]], ["a: called without data"]),
    ],
)
def test_differences(expected: Any, found: Any, said: list[str]) -> None:
    assert differences({"a": expected}, {"a": found}, 1e-10) == said


def test_what_is_missing_is_a_difference() -> None:
    assert differences({"a": ONE}, {"b": ONE}, 1.0) == ["a: not there", "b: should not be there"]


SIDES = """
import torch
from penstock.errors import InternalError, SpecError, StageError
from penstock.testing.fuzz import Told
def plain():
    {plain}
    return Told(a=1.0)
def piped():
    {piped}
    return Told(a=1.0)
"""


@pytest.mark.parametrize(
    ("plain", "piped", "outcome", "reason"),
    [
        ("pass", "pass", "same", ""),
        ("1 / 0", "pass", "void", "error: ZeroDivisionError: division by zero"),
        ("return Told(a=float('nan'))", "pass", "void", "not finite"),
        ("pass", "1 / 0", "failed", "error: ZeroDivisionError: division by zero"),
        ("pass", "raise SpecError('m12 has 3 of 4')", "refused", "SpecError: m has n of n"),
        ("pass", "raise StageError('rank 0: SpecError: no')", "refused", "SpecError: no"),
        ("pass", "raise StageError('rank 0') from SpecError('no')", "refused", "SpecError: no"),
        ("pass", "raise StageError('rank 0') from KeyError('x')", "failed", "error: KeyError: 'x'"),
        ("pass", "raise InternalError('oh')", "failed", "error: InternalError: oh"),
        ("pass", "while True: pass", "failed", "hang"),
        ("pass", "torch.set_grad_enabled(False)", "failed", "left behind: gradients disabled"),
    ],
)
def test_judging(plain: str, piped: str, outcome: str, reason: str) -> None:
    verdict = judge(SIDES.format(plain=plain, piped=piped), limit=0.3)
    assert (verdict.outcome, verdict.reason) == (outcome, reason)
    assert torch.is_grad_enabled()


# ---- the campaign


class Pool(WorkerPool):
    """One whose first worker dies."""

    def run(self, function: str, ranks: int, timeout: float = 60.0, **arguments: Any) -> list[Any]:
        raise WorkerError("worker 0 died:\nSegmentation fault")


def test_a_worker_that_dies_is_a_failure_of_its_case() -> None:
    with closing(command.Bench(together=Pool(3))) as bench:
        verdict = bench.judge(grow("0:9"))
    assert (verdict.outcome, verdict.reason) == (
        "failed",
        "crash: worker 0 died: Segmentation fault",
    )


def test_a_plain_loop_that_dies_too_makes_its_case_void() -> None:
    with closing(command.Bench()) as bench:
        bench._alone = Pool(1)
        assert bench.judge(grow("0:1")).outcome == "void"


def test_ranks_share_the_gradients_of_arguments() -> None:
    name, whole, none = "gradient of input 0, step 0", ["float64", [2], [3.0, 4.0]], None
    first, second = ["float64", [2], [1.0, 4.0]], ["float64", [2], [2.0, 0.0]]
    for shares, outcome in (
        ((whole, none), "same"),
        ((none, whole), "same"),
        ((first, second), "same"),
        ((first, none), "failed"),
        ((none, none), "failed"),
    ):
        answers = [{"expected": {name: whole}, "found": {name: share}} for share in shares]
        assert verdict_of_ranks(answers, 1e-10).outcome == outcome


class Here(command.Bench):
    """Judges in this process."""

    def judge(self, case: Case) -> Verdict:
        return in_process(case)


class Bench(command.Bench):
    """Says of cases with an LSTM that they fail."""

    def judge(self, case: Case) -> Verdict:
        wrong = any(line.op == "lstm" for line in case.model.all_lines())
        return Verdict("failed", "difference: loss differs") if wrong else Verdict("same")


def test_failures_of_one_cause_are_one_fault() -> None:
    campaign, bench = command.Campaign(), Bench()
    for number in range(60):
        case = grow(f"5:{number}")
        verdict = bench.judge(case)
        campaign.note(case, verdict)
        if verdict.outcome == "failed":
            command.look_into(bench, campaign, case, verdict, 10.0)
    (fault,) = campaign.faults
    assert len(fault.cases) == campaign.outcomes["failed"] > 1
    assert fault.families == ["recurrent"]
    assert "nn.LSTM(" in fault.program
    assert campaign.families["recurrent"]["failed"] == len(fault.cases)
    assert "60 cases: " in campaign.report()


def test_a_campaign(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    bench, file = Here(), tmp_path / "figures.json"
    options = Namespace(seed="forms", first=count() - 2, cases=9, seconds=60.0, json=file)
    assert (
        str(command.run(bench, options)) == "2 cases: 2 same, 0 refused, 0 failed; 0 faults; 0 void"
    )
    assert '"same": 2' in file.read_text()
    assert command.one(bench, "forms:0", 1.0) == 0
    assert "def plain():" in capsys.readouterr().out
