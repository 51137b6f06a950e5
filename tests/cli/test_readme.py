"""What the README shows is so."""

from __future__ import annotations

import re
from pathlib import Path

from penstock.train import TrainConfig

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def test_it_begins_with_two_commands_of_the_makefile() -> None:
    targets = re.findall(r"^\$ make (\w+)", blocks("console")[0], re.MULTILINE)
    assert targets == ["run", "test"]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert all(f"\n{target}:" in makefile for target in targets)


def test_its_run_is_the_default_one() -> None:
    config, shown = TrainConfig(), blocks("text")[0]
    assert f"step {config.steps}/{config.steps}" in shown
    assert f"{config.schedule}, {config.microbatches} microbatches" in shown
