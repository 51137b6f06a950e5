"""Docstrings are written for ``help()``; the site shows them as Markdown."""

from __future__ import annotations

import re
from typing import Any

import griffe

ROLE = re.compile(r":(?:func|class|mod|meth|attr|data|exc):`(~?)([\w.]+)`")
BLOCK = re.compile(r"(?m)^(.*\S)?::$(?=\n\s*\n? +\S)")


class Roles(griffe.Extension):
    """Turns roles into links and ``::`` before an indented block into a code block."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for each object that has been read."""
        if obj.docstring is not None:
            text = ROLE.sub(_link, obj.docstring.value)
            obj.docstring.value = BLOCK.sub(lambda found: f"{found[1]}:" if found[1] else "", text)


def _link(found: re.Match[str]) -> str:
    short, name = found.groups()
    shown = f"`{name.rpartition('.')[2] if short else name}`"
    return f"[{shown}][{name}]" if name.startswith("penstock.") else shown
