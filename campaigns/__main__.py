"""``python -m campaigns NAME ...``: run a campaign; without a name, list them."""

from __future__ import annotations

import ast
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from campaigns.run import run

NAMES = ("faults", "fuzz", "kills", "loops", "mutants", "soak", "team", "zoo")


def about(name: str) -> str:
    """The first line of a campaign's docstring. Importing them all would take long."""
    spec = find_spec(f"campaigns.{name}")
    assert spec is not None
    assert spec.origin is not None
    text = ast.get_docstring(ast.parse(Path(spec.origin).read_text(encoding="utf-8"))) or ""
    return text.partition("\n")[0]


def main(arguments: list[str]) -> int:
    """Run the campaign that is named; returns 0 if it found nothing bad."""
    if arguments and arguments[0] in NAMES:
        name, *rest = arguments
        return run(name, import_module(f"campaigns.{name}"), rest)
    print("make campaign ARGS=NAME, or ARGS='NAME --help' for its options:")
    for name in NAMES:
        print(f"  {name:8} {about(name)}")
    return int(bool(arguments) and arguments[0] not in ("-h", "--help"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
