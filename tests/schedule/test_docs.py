"""What the pages show is drawn from the schedules as they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.schedule import names
from penstock.schedule.library import find
from website.pictures import PAGE, drawn, kept

REDRAW = "not current: run `python -m website.pictures`"


@pytest.mark.parametrize(
    ("file", "content"), [pytest.param(*f, id=f[0].name) for f in kept().items()]
)
def test_what_the_repository_shows_is_current(file: Path, content: str) -> None:
    assert file.read_text() == content, f"{file.name} is {REDRAW}"


@pytest.mark.parametrize("name", names())
def test_every_schedule_has_a_picture_and_its_page_shows_it(name: str) -> None:
    path = f"schedules/{name.lower()}.svg"
    assert path in drawn()
    assert not find(name)[1].trains or f"]({path})" in PAGE.read_text()
