"""What the README and the tutorial show is so."""

from __future__ import annotations

import re
from pathlib import Path

from penstock.train import TrainConfig

ROOT = Path(__file__).parents[2]


def blocks(page: str, language: str) -> list[str]:
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def test_the_readme_begins_with_two_commands_of_the_makefile() -> None:
    targets = re.findall(r"^\$ make (\w+)", blocks("README.md", "console")[0], re.MULTILINE)
    assert targets == ["run", "test"]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert all(f"\n{target}:" in makefile for target in targets)


def test_the_tutorial_shows_the_default_run() -> None:
    config, shown = TrainConfig(), blocks("docs/tutorial.md", "text")[0]
    assert f"step {config.steps}/{config.steps}" in shown
    assert f"{config.schedule}, {config.microbatches} microbatches" in shown
