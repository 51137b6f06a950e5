"""Docstrings are written for ``help()``; the site shows them as Markdown."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import griffe

PAGES = Path(__file__).parents[1] / "docs"
ROLE = re.compile(r":(?:func|class|mod|meth|attr|data|exc):`(~?)([\w.]+)`")
BLOCK = re.compile(r"(?m)^(.*\S)?( ?)::$(?=\n\s*\n? +\S)")
PAGE = re.compile(r"\bdocs/([\w-]+)\.md\b")


class Roles(griffe.Extension):
    """Turns roles and names of pages into links, and ``::`` before an indented block into a code block."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for each object that has been read."""
        if obj.docstring is not None:
            text = ROLE.sub(_link, obj.docstring.value)
            text = PAGE.sub(lambda found: f"[{_title(found[1])}](../{found[1]}.html)", text)
            obj.docstring.value = BLOCK.sub(_colon, text)


def _colon(found: re.Match[str]) -> str:
    """What reStructuredText shows for ``::``: nothing after a space, else a colon."""
    text, space = found[1] or "", found[2]
    return text if space or not text else f"{text}:"


@functools.cache
def _title(page: str) -> str:
    first = (PAGES / f"{page}.md").read_text().partition("\n")[0]
    return first.removeprefix("# ")


def _link(found: re.Match[str]) -> str:
    short, name = found.groups()
    shown = f"`{name.rpartition('.')[2] if short else name}`"
    return f"[{shown}][{name}]" if name.startswith("penstock.") else shown
