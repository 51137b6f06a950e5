"""What is written for torch's package and runs in one process: the same programs with either import."""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter, signature
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from penstock.errors import UsageError
from tests.pipelining.alike import BODIES, perform
from tests.pipelining.differences import DIFFERENCES, answer
from tests.pipelining.either import MODULES, Names

pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated.*:FutureWarning")
"""torch's own tracing."""


@pytest.mark.parametrize("name", sorted(BODIES))
def test_either_import_does_the_same(name: str, tmp_path: Path) -> None:
    theirs, their_form = pytree.tree_flatten(perform(name, "torch", tmp_path))
    ours, form = pytree.tree_flatten(perform(name, "penstock", tmp_path))
    assert form == their_form
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.equal(mine, other) if isinstance(mine, Tensor) else mine == other


@pytest.mark.parametrize(
    ("row", "theirs", "ours"), DIFFERENCES, ids=lambda of: getattr(of, "__name__", "")
)
def test_what_differs_is_as_the_page_says(
    row: Callable[[Names], Any], theirs: Any, ours: Any
) -> None:
    assert (answer(row, "torch"), answer(row, "penstock")) == (theirs, ours)


OTHERS = {
    "_CustomFunctionProtocol",
    "_PipelineSchedule",
    "_PipelineScheduleRuntime",
    "_PipelineStageBase",
    "PipeliningMetadataError",
    "Pipe",
}
"""Classes that users do not call, and those of which torch says nothing."""


@pytest.mark.parametrize("module", MODULES)
def test_parameters_have_torchs_names_and_places(module: str) -> None:
    ours, theirs = (vars(getattr(Names(package), module)) for package in ("penstock", "torch"))
    for name in ours.keys() & theirs.keys() - OTHERS:
        home = getattr(theirs[name], "__module__", "")
        if callable(theirs[name]) and home.startswith("torch.distributed.pipelining"):
            wanted = list(signature(theirs[name]).parameters.values())
            parameters = list(signature(ours[name]).parameters.values())
            first, more = parameters[: len(wanted)], parameters[len(wanted) :]
            assert [(p.name, p.kind) for p in first] == [(p.name, p.kind) for p in wanted], name
            assert all(p.default is not Parameter.empty for p in more), name


def test_steps_of_a_stage_that_is_gathered_again() -> None:
    p = Names("penstock")
    rows = ["0UNSHARD,0F0,0RESHARD,0UNSHARD,0B0", "1F0,1B0"]
    steps = [p.row(row) for row in ("0UNSHARD,0F0,0RESHARD,0UNSHARD,-,0B0", "-,-,1F0,1B0,-,-")]
    assert p.add_schedule_op_spacing(list(map(p.row, rows))) == steps


def test_drawings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    visualizer = Names("penstock")
    rows = visualizer.get_schedule_ops("DualPipeV", 2, 4, add_spacing=True)
    visualizer.visualize_schedule(rows)
    assert capsys.readouterr().out.startswith("rank 0 stage 0 |")
    file = tmp_path / "schedule.svg"
    visualizer.visualize_schedule(rows, str(file))
    assert "0F0" in file.read_text()
    with pytest.raises(AssertionError, match="is not the class of a named schedule"):
        visualizer.get_schedule_ops("PipelineScheduleMulti", 2, 4)
    with pytest.raises(UsageError, match=r"name it schedule\.svg"):
        visualizer.visualize_schedule(rows, "schedule.png")
