"""The examples run as their first lines say, and give the same either way."""

from __future__ import annotations

import ast
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from penstock.schedule import Picture
from tests.processes import run_script

pytestmark = pytest.mark.on_cpu("examples choose their device themselves")
EXAMPLES = Path(__file__).parents[2] / "examples"
PROCESSES = {"llama": 2, "lora": 2, "unet": 2, "hand_placed": 3, "mesh": 4}
NEEDS = {"llama": "transformers", "lora": "peft"}


def steps(*command: str, processes: int = 1) -> list[str]:
    """The lines of the steps that a script prints."""
    ran = run_script(*command, processes=processes)
    assert [rank.status for rank in ran] == [0] * processes, ran
    printed = "".join(rank.out for rank in ran)
    return [line for line in printed.splitlines() if line.startswith("step")]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        # What the others are examples of is trained by day in integrations, the catalogue and parallel.
        pytest.param(name, marks=() if name in ("llama", "hand_placed") else pytest.mark.nightly)
        for name in sorted(PROCESSES)
    ],
)
def test_examples_run_in_one_process_and_in_several(name: str) -> None:
    if name in NEEDS and find_spec(NEEDS[name]) is None:
        pytest.skip(f"{NEEDS[name]} is not installed")
    script = str(EXAMPLES / f"{name}.py")
    alone = steps(script)
    assert len(alone) == 10
    assert float(alone[-1].split()[3]) < float(alone[0].split()[3])
    assert steps(script, processes=PROCESSES[name]) == alone


def test_the_first_example_is_short() -> None:
    assert len((EXAMPLES / "llama.py").read_text().splitlines()) < 40


@pytest.mark.slow
def test_torchs_names_run_with_either_package() -> None:
    script = str(EXAMPLES / "torch_names.py")
    ours = steps(script, "--package", "penstock", processes=2)
    assert len(ours) == 5
    assert steps(script, "--package", "torch", processes=2) == ours
    assert steps(script, "--package", "penstock") == ours


def shown(cell: str, names: dict[str, Any]) -> Any:
    """Run a cell as a notebook does; the value of its last line, if that is an expression."""
    *body, last = ast.parse(cell).body
    value = isinstance(last, ast.Expr)
    exec(compile(ast.Module(body if value else [*body, last], []), "cell", "exec"), names)
    return eval(ast.unparse(last), names) if value else None


def test_the_notebook_draws_trains_and_plans(capsys: pytest.CaptureFixture[str]) -> None:
    notebook = json.loads((EXAMPLES / "tour.ipynb").read_text())
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] for cell in cells)
    names: dict[str, Any] = {}
    values = [shown("".join(cell["source"]), names) for cell in cells]
    pictures = [value for value in values if isinstance(value, Picture)]
    titles = ["ZB-H1", "1F1B", "a recorded step", "the fastest plan"]
    assert [title in one._repr_svg_() for title, one in zip(titles, pictures, strict=True)] == [
        True
    ] * 4
    losses = names["losses"]
    assert losses == sorted(losses, reverse=True)
    assert f"{names['result'].loss:.5f}" == f"{names['plain']:.5f}"
    assert str(names["plans"]) in capsys.readouterr().out
