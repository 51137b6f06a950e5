"""The documentation is drawn from the schedules as they are, and its example runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from penstock.schedule import names
from penstock.schedule.library import registry
from tests.schedule.pictures import PAGE, files, path

REDRAW = "not current: run `python -m tests.schedule.pictures`"


@pytest.mark.parametrize(("file", "content"), [pytest.param(*f, id=f[0].name) for f in files()])
def test_pictures_and_table_are_current(file: Path, content: str) -> None:
    assert file.read_text() == content, f"{file.name} is {REDRAW}"


def test_every_schedule_shows_its_picture() -> None:
    library = Path(__file__).parents[2] / "src/penstock/schedule/library"
    shown = {
        (library / found).resolve()
        for file in library.glob("*.py")
        for found in re.findall(r"\.\. image:: (\S+)", file.read_text())
    }
    assert shown == {path(name) for name in names()}


def test_the_examples_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    # What the page registers is forgotten after it.
    monkeypatch.setattr(registry, "RECIPES", dict(registry.RECIPES))
    monkeypatch.setattr(registry, "_BY_NAME", dict(registry._BY_NAME))
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert blocks
    names_so_far: dict[str, object] = {}
    for block in blocks:
        exec(block, names_so_far)
