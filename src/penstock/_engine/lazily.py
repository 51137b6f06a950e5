"""Names of a package that are imported when they are first used, so that importing the package is quick.

The package lists them once, as imports that only a type checker runs::

    if TYPE_CHECKING:
        from penstock.train.model import GPT as GPT

    __all__, __getattr__, __dir__ = lazily(__name__)
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any


def lazily(package: str) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """The ``__all__``, ``__getattr__`` and ``__dir__`` of a package.

    Args:
        package: its ``__name__``.
    """
    module = sys.modules[package]
    statements = ast.walk(ast.parse(inspect.getsource(module)))
    homes = {
        alias.asname: statement.module
        for statement in statements
        if isinstance(statement, ast.ImportFrom) and statement.module
        for alias in statement.names
        if alias.asname
    }
    names = sorted(homes)
    # A star import of a package must not import its parts.
    exported = [name for name in names if homes[name] != package]

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home = homes[name]
        part = home == package
        value = import_module(f"{home}.{name}") if part else getattr(import_module(home), name)
        # Kept, so that this is not asked again.
        setattr(module, name, value)
        return value

    return exported, get, lambda: names
