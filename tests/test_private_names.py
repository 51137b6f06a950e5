"""The private names of torch that Penstock uses: each is there in the torch that is installed.

So a newer torch names what it lacks in a second, before any other test fails of it.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import penstock

PACKAGE = Path(penstock.__file__).parent


def is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def dotted(node: ast.AST) -> str:
    """The name that an expression such as ``torch._C._functorch`` reads; empty for any other."""
    if isinstance(node, ast.Name):
        return node.id
    inner = dotted(node.value) if isinstance(node, ast.Attribute) else ""
    return f"{inner}.{node.attr}" if inner and isinstance(node, ast.Attribute) else ""


def private_names(path: Path) -> Iterator[str]:
    """The private names of torch that a file imports or reads."""
    for node in ast.walk(ast.parse(path.read_text())):
        names = [dotted(node)]
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        yield from (name for name in names if name.startswith("torch.") and is_private(name))


USED = {
    name: str(path.relative_to(PACKAGE))
    for path in sorted(PACKAGE.rglob("*.py"))
    for name in private_names(path)
}


def there(name: str) -> bool:
    """Whether a module of torch has a name."""
    found = torch
    module, *parts = name.split(".")
    for part in parts:
        module += f".{part}"
        if not hasattr(found, part):
            try:
                importlib.import_module(module)
            except ImportError:
                return False
        found = getattr(found, part)
    return True


@pytest.mark.parametrize("name", USED)
def test_torch_has_the_name(name: str) -> None:
    assert there(name), f"{USED[name]} uses {name}, which torch {torch.__version__} lacks"


def test_a_name_that_is_gone_is_found() -> None:
    assert not there("torch._subclasses.no_such_name")
    assert not there("torch._no_such_module.name")
