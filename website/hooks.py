"""What mkdocs calls as it builds the site: adds pages made from the code, the README and the changelog."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from website import reference

ROOT = Path(__file__).parents[1]


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Fill the section of the navigation that is made from the code."""
    nav: list[Any] = config.nav or []
    made = {"Reference": reference.navigation(), "Examples": list(reference.examples())}
    config.nav = [
        {title: made.get(title, pages) for title, pages in section.items()} for section in nav
    ]
    return config


def on_page_markdown(markdown: str, **_: Any) -> str:
    """In the repository pages link to the examples as files, here to their pages."""
    return re.sub(r"\]\(\.\./examples/(\w+)\.py\)", r"](examples/\1.md)", markdown)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what is made from the code, the front page and the changelog."""
    fixed = {
        "index.md": _front(),
        "changelog.md": (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"),
    }
    for path, text in (reference.pages() | reference.examples() | fixed).items():
        files.append(File.generated(config, path, content=text))
    return files


def _front() -> str:
    """The README as the front page: its links lead to pages; those to files outside of the site are text."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    text = re.sub(r"\]\(examples/(\w+)\.py\)", r"](examples/\1.md)", text)
    text = text.replace("](docs/", "](").replace("](CHANGELOG.md)", "](changelog.md)")
    return re.sub(r"\[([^\]]+)\]\((?:[A-Z]+\.md|LICENSE|examples/\w+\.ipynb)\)", r"\1", text)
