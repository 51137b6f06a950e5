"""A plugin that says at the end which tests never ran, and why: also those of files that are skipped whole.

pytest counts such a file as one skip, and processes of xdist tell nothing of it.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest

TEST = re.compile(r"^(?:    )?def (test_\w+)", re.MULTILINE)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Holes(config))


class Holes:
    """What was skipped in this process and, of whole files, in those of xdist."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._files: dict[str, str] = {}

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:
            self._files[report.nodeid] = reason_of(report)

    def pytest_sessionfinish(self) -> None:
        if hasattr(self._config, "workeroutput"):
            self._config.workeroutput["files that were skipped"] = self._files

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self._files |= getattr(node, "workeroutput", {}).get("files that were skipped", {})

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        names: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
        for file, reason in self._files.items():
            text = Path(self._config.rootpath, file).read_text(encoding="utf-8")
            names[file, reason].update(TEST.findall(text))
        for report in terminalreporter.stats.get("skipped", []):
            if isinstance(report, pytest.TestReport):
                file, _, name = report.nodeid.partition("::")
                names[file, reason_of(report)][name.partition("[")[0]] += 1
        if names:
            terminalreporter.section(f"{sum(each.total() for each in names.values())} never ran")
        for (file, reason), each in sorted(names.items()):
            tests = (name if n == 1 else f"{name} ({n} cases)" for name, n in sorted(each.items()))
            terminalreporter.write_line(f"{file}: {reason}: {', '.join(tests)}")


def reason_of(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Why something was skipped."""
    said = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return said.removeprefix("Skipped: ")
