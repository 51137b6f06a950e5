"""Mistakes planted in the library, one at a time: each must make tests fail.

``campaigns/mutants.toml`` lists them: a file, the text there, what it becomes, and the tests that must
notice. They are planted in a copy of the tree. What survives asks for a test, and so does one whose tests
take longer than the limit twice, the second time with three times as long: nobody knows whether they would
notice. A case's name begins with the file, so that ``--only ^partition/`` plants those of a package. If a
text does not stand once in its file, nothing is planted: the code has changed, and the list must follow.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
from argparse import ArgumentParser, Namespace
from collections.abc import Generator, Iterator
from functools import partial
from pathlib import Path

from campaigns.run import Campaign, Rows
from campaigns.table import Row

ROOT = Path(__file__).parents[1]
COPIED = ("src", "tests", "campaigns", "pyproject.toml", "imports.toml")
SUMMARY = "FAILED ", "ERROR "
"""How pytest's lines begin that name what failed."""


def listed() -> list[dict[str, str]]:
    mutants: list[dict[str, str]] = tomllib.loads(
        (ROOT / "campaigns/mutants.toml").read_text(encoding="utf-8")
    )["mutant"]
    return mutants


def outdated(mutants: list[dict[str, str]]) -> list[str]:
    """What in the list does not fit the tree: texts that do not stand once, and tests that are gone."""
    problems = []
    for mutant in mutants:
        file = ROOT / mutant["file"]
        count = file.read_text(encoding="utf-8").count(mutant["old"]) if file.is_file() else 0
        if count != 1:
            problems.append(f"{mutant['what']}: the text stands {count} times in {mutant['file']}")
        problems += [
            f"{mutant['what']}: there is no {test}"
            for test in mutant["tests"].split()
            if not _stands(*test.partition("::"))
        ]
    return problems


def _stands(file: str, _: str, test: str) -> bool:
    """Whether there is a file of tests, and in it the one that is named, if one is."""
    path, function = ROOT / file, test.partition("[")[0]
    return path.is_file() and f"def {function}" in path.read_text(encoding="utf-8")


def copy_tree(tree: Path) -> None:
    for name in COPIED:
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, tree / name, ignore=ignored)
        else:
            shutil.copy(ROOT / name, tree)


TIMED_OUT = -1
VERDICTS = {0: "survived", 1: "caught", 2: "caught", TIMED_OUT: "timed out"}
"""What the status of pytest says of a mutant."""


def run_tests(tree: Path, tests: list[str], limit: float) -> tuple[int, str]:
    """The status of pytest, or that it took too long, and the first line that names what failed."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    environment = os.environ | {"PYTHONPATH": f"{tree / 'src'}", "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, cwd=tree, env=environment, start_new_session=True, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    ) as process:  # fmt: skip
        try:
            output, _ = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            return TIMED_OUT, f"took longer than {limit:.0f} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    failed = (line for line in output.splitlines() if line.startswith(SUMMARY))
    return process.returncode, next(failed, output.strip().rpartition("\n")[2])


def unchanged(name: str, tree: Path, tests: list[str], limit: float) -> Iterator[Row]:
    status, said = run_tests(tree, tests, limit * len(tests))
    yield Row(name, "void" if status else "passes", ("", said))


def planted(name: str, mutant: dict[str, str], tree: Path, limit: float) -> Iterator[Row]:
    file = tree / mutant["file"]
    source = file.read_text(encoding="utf-8")
    change = f"{mutant['old']} → {mutant['new']}"
    try:
        file.write_text(source.replace(mutant["old"], mutant["new"]), encoding="utf-8")
        status, said = run_tests(tree, mutant["tests"].split(), limit)
        if status == TIMED_OUT:
            status, said = run_tests(tree, mutant["tests"].split(), 3 * limit)
    finally:
        file.write_text(source, encoding="utf-8")
    yield Row(name, VERDICTS.get(status, "void"), (change, said))


def add_options(parser: ArgumentParser) -> None:
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for a mutant's tests")


def cases(options: Namespace) -> Generator[tuple[str, Rows]]:
    mutants = listed()
    if problems := outdated(mutants):
        raise ValueError("campaigns/mutants.toml is outdated:\n" + "\n".join(problems))
    with tempfile.TemporaryDirectory(prefix="penstock-mutants-") as folder:
        tree = Path(folder)
        copy_tree(tree)
        tests = sorted({test for mutant in mutants for test in mutant["tests"].split()})
        name = "the tree as it is"
        yield name, partial(unchanged, name, tree, tests, options.limit)
        for mutant in mutants:
            name = f"{mutant['file'].removeprefix('src/penstock/')}: {mutant['what']}"
            yield name, partial(planted, name, mutant, tree, options.limit)


CAMPAIGN = Campaign(
    cases,
    columns=("change", "pytest says"),
    bad=("survived", "timed out", "void"),
    options=add_options,
)
