"""Tests that never ran are listed, also where a whole file was skipped and in processes of xdist."""

from __future__ import annotations

import pytest

pytest_plugins = "pytester"

WHOLE = """
import pytest
pytest.importorskip("no_such_package")

def test_one(): pass

class TestTwo:
    def test_two(self): pass
"""
SOME = """
import pytest

@pytest.mark.skipif(True, reason="needs two of them")
@pytest.mark.parametrize("number", [1, 2, 3])
def test_three(number): pass

def test_four(): pass
"""


@pytest.mark.parametrize("processes", [[], ["-n", "1"]])
def test_what_never_ran_is_listed(pytester: pytest.Pytester, processes: list[str]) -> None:
    pytester.makepyfile(test_whole=WHOLE, test_some=SOME)
    result = pytester.runpytest_inprocess("-p", "tests.holes", *processes)
    result.stdout.fnmatch_lines(
        [
            "*5 never ran*",
            "test_some.py: needs two of them: test_three (3 cases)",
            "test_whole.py: could not import 'no_such_package'*: test_one, test_two",
        ]
    )
    assert "test_four" not in result.stdout.str()
