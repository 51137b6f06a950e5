"""What mkdocs calls while it builds the site: puts in the pages and pictures that are made from the code."""

from __future__ import annotations

import re
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from website import pictures, reference


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
    """Add what is made from the code; a picture that the repository holds is drawn again."""
    for path, text in (pictures.drawn() | reference.pages() | reference.examples()).items():
        if (there := files.get_file_from_path(path)) is not None:
            files.remove(there)
        files.append(File.generated(config, path, content=text))
    return files
