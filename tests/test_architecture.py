"""The house rules: who imports whom, who may know what, and what no file does."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import penstock
from penstock import pipeline

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "penstock"
TABLE = tomllib.loads((ROOT / "imports.toml").read_text())
FILES = sorted(SOURCE.rglob("*.py"))
# The front door is above all parts and imports them lazily; it is checked on its own.
FRONT = {"__init__", "__main__", "_engine"}
# The folder of the parts that users do not import; the table names these without it.
ENGINE = "_engine."
# Parts that nobody imports but penstock itself.
INNER = {"cli", *(path.stem for path in (SOURCE / "_engine").iterdir())}


class Import(NamedTuple):
    """One imported name: by which module of penstock, from which module, and how."""

    by: str
    module: str
    name: str
    by_name: bool = False

    def __str__(self) -> str:
        return f"{self.by} imports {self.module}.{self.name}"

    def reaches(self, package: str) -> bool:
        found = f"{self.module}.{self.name}"
        return (found + ".").startswith(package + ".")


def module_of(path: Path) -> str:
    """``transport.process_group``; a package's ``__init__`` is the package."""
    parts = path.relative_to(SOURCE).with_suffix("").parts
    name = ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)
    return name.removeprefix(ENGINE)


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imports_of(path: Path) -> Iterator[Import]:
    by = module_of(path)
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(by, alias.name, "")
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield Import(by, node.module or "", alias.name)
        elif isinstance(node, ast.Call) and (name := imported_by(node)):
            yield Import(by, name.rstrip("."), "", by_name=True)


def imported_by(call: ast.Call) -> str:
    """What an ``import_module("...")`` imports; of an f-string its beginning."""
    name = getattr(call.func, "attr", getattr(call.func, "id", ""))
    if name not in ("import_module", "__import__") or not call.args:
        return ""
    argument = call.args[0]
    text = argument.values[0] if isinstance(argument, ast.JoinedStr) else argument
    return text.value if isinstance(text, ast.Constant) and isinstance(text.value, str) else ""


@cache
def imports() -> list[Import]:
    return [found for path in FILES for found in imports_of(path)]


def own() -> list[Import]:
    """Imports of the library's own modules, also those inside functions and by name."""
    return [found for found in imports() if found.reaches("penstock") and found.by not in FRONT]


def part_of(module: str, depth: int = 0) -> str:
    """The part that a module belongs to; inside a part with depth 1."""
    return module.split(".")[depth]


def target_of(found: Import) -> str:
    """The imported module without ``penstock.``; names of ``penstock`` itself are parts."""
    of_parts = found.module in ("penstock", "penstock._engine")
    full = f"{found.module}.{found.name}" if of_parts else found.module
    return full.removeprefix("penstock").removeprefix(".").removeprefix(ENGINE)


# ---- parts


def edges_between_parts() -> set[tuple[str, str]]:
    pairs = {(part_of(found.by), part_of(target_of(found))) for found in own()}
    return {(user, used) for user, used in pairs if user != used}


def edges_inside_schedule() -> set[tuple[str, str]]:
    inside = [f for f in own() if f.by.startswith("schedule.") and "schedule." in target_of(f)]
    pairs = {(part_of(found.by, 1), part_of(target_of(found), 1)) for found in inside}
    return {(user, used) for user, used in pairs if user != used}


def test_imports_are_those_of_the_table_which_has_no_cycle() -> None:
    edges = {"parts": edges_between_parts(), "schedule": edges_inside_schedule()}
    for table, used_by in edges.items():
        allowed = {(user, used) for user, row in TABLE[table].items() for used in row}
        assert used_by == allowed
        tuple(TopologicalSorter(TABLE[table]).static_order())


def test_every_part_and_every_module_of_the_schedule_stands_in_the_table() -> None:
    modules = list(map(module_of, FILES))
    assert set(map(part_of, modules)) - FRONT <= set(TABLE["parts"])
    inside = {part_of(module, 1) for module in modules if module.startswith("schedule.")}
    assert inside <= set(TABLE["schedule"])


def test_no_cycle_between_modules() -> None:
    modules = set(map(module_of, FILES))
    graph: dict[str, set[str]] = {}
    for found in own():
        target = target_of(found)
        deeper = f"{target}.{found.name}"
        graph.setdefault(found.by, set()).add(deeper if deeper in modules else target)
    packages = {m for m in modules if (SOURCE / m.replace(".", "/") / "__init__.py").exists()}
    # A package's __init__ imports its own modules; these import each other, not the package.
    for package in packages:
        graph[package] = {m for m in graph.get(package, set()) if not m.startswith(package + ".")}
    tuple(TopologicalSorter(graph).static_order())


def test_nothing_is_imported_by_name() -> None:
    late = [found for found in imports() if found.by_name and found.reaches("penstock")]
    assert [str(found) for found in late] == []


def test_the_architecture_page_lists_the_parts_from_the_bottom_up() -> None:
    listed = (ROOT / "docs" / "architecture.md").read_text().split("## Packages")[1].split("##")[0]
    cells = [line.split("|")[1] for line in listed.splitlines() if line.startswith("| `")]
    parts = [part for cell in cells for part in re.findall(r"`(?:_engine/)?(\w+)(?:/|\.py)`", cell)]
    assert sorted(parts) == sorted(TABLE["parts"])
    edges = [(user, used) for user, row in TABLE["parts"].items() for used in row]
    upwards = [f"{a} imports {b}" for a, b in edges if parts.index(a) < parts.index(b)]
    assert upwards == []


# ---- torch and others


@pytest.mark.parametrize("package", sorted(TABLE["only"]))
def test_third_parties_are_known_to_few(package: str) -> None:
    allowed = TABLE["only"][package]
    users = {found.by for found in imports() if found.reaches(package)}
    assert {user for user in users if not within(user, allowed)} == set()


def within(module: str, parts: list[str]) -> bool:
    return any((module + ".").startswith(part + ".") for part in parts)


@pytest.mark.parametrize("part", TABLE["no_torch"]["parts"])
def test_parts_without_torch(part: str) -> None:
    users = [str(f) for f in imports() if part_of(f.by) == part and f.reaches("torch")]
    assert users == []


def python(code: str) -> None:
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=110, check=False
    )
    assert found.returncode == 0, found.stderr


def test_schedules_run_with_torch_blocked() -> None:
    python(
        "import sys; sys.modules['torch'] = None\n"
        "from penstock.schedule import add_communication, build, names, validate\n"
        "made = [build('1F1B', ranks=2, microbatches=4) for _ in names()]\n"
        "assert all(validate(add_communication(one)).ok for one in made)"
    )


def test_importing_penstock_imports_nothing_else() -> None:
    python(
        "import sys, penstock\n"
        "assert 'Pipeline' in dir(penstock)\n"
        "assert 'penstock.schedule' not in sys.modules\n"
        "assert '1F1B' in penstock.schedule.names()\n"
        "assert not {'torch', 'numpy', 'penstock.pipeline.pipeline'} & set(sys.modules)"
    )


def test_the_front_door_gives_every_name() -> None:
    assert penstock.Pipeline is pipeline.Pipeline
    assert all(getattr(penstock, name) for name in penstock.__all__)
    assert set(penstock.__all__) <= set(dir(penstock))


def test_the_front_door_leads_to_every_part() -> None:
    """Also to those that nothing has imported yet, so it is asked as if none were there."""
    for part in sorted(TABLE["parts"].keys() - INNER):
        assert part in dir(penstock)
        assert penstock.__getattr__(part).__name__ == f"penstock.{part}"


@pytest.mark.parametrize("name", ["Pipelin", "schedul", "_lazily"])
def test_the_front_door_refuses_unknown_names(name: str) -> None:
    with pytest.raises(AttributeError, match=f"no attribute '{name}'"):
        getattr(penstock, name)


@pytest.mark.parametrize(
    "package", ["checkpoint", "compiled", "faults", "parallel", "plan", "schedule", "train"]
)
def test_names_that_are_imported_lazily_are_found(package: str) -> None:
    inner = f"penstock.{ENGINE}{package}" if package in INNER else f"penstock.{package}"
    found = import_module(inner)
    assert [name for name in found.__all__ if not hasattr(found, name)] == []
    assert dir(found) == found.__all__
    assert not hasattr(found, "no_such_name")


# ---- what no file does

FORBIDDEN = {
    "the peer": r"torch\.distributed\.pipelining",
    "pickle": r"\bpickle\b|\btorch\.(load|save)\(|weights_only",
    # Arguments of transformers' Trainer, which is refused, and of Accelerate have such names.
    "object collectives": r"(?<!use_)(all_gather|broadcast|gather|scatter|send|recv)_object",
}


@pytest.mark.parametrize("what", sorted(FORBIDDEN))
def test_no_file_has(what: str) -> None:
    pattern = re.compile(FORBIDDEN[what])
    told = [path for path in FILES if pattern.search(path.read_text())]
    found = {path.name: pattern.findall(code_of(path)) for path in told}
    assert {name: lines for name, lines in found.items() if lines} == {}


@cache
def code_of(path: Path) -> str:
    """A file without its docstrings and comments, which may tell of what it does not do."""
    return ast.unparse(_Undocumented().visit(ast.parse(path.read_text())))


class _Undocumented(ast.NodeTransformer):
    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        constant = isinstance(node.value, ast.Constant)
        return ast.Pass() if constant else node


# Tools of the field call these two so; the modules of backward/ share them.
FIELD_NAMES = {"_get_grad_fn_or_grad_acc", "_null_coalesce_accumulate"}


def test_no_underscore_name_of_another_module() -> None:
    private = [f for f in own() if f.name.startswith("_") and f.name not in FIELD_NAMES]
    assert [str(found) for found in private] == []


def test_private_modules_are_used_in_their_own_package() -> None:
    private = [f for f in own() if "._" in f.module.replace("penstock._engine", "penstock")]
    strangers = [f for f in private if not within(f.by, [target_of(f).rpartition("._")[0]])]
    assert [str(found) for found in strangers] == []


# ---- names


MAY_BE_PRIVATE = re.compile(
    r"(?<!\bself)(?<!\bcls)(?<!\bos)(?<!\btorch)\._[A-Za-z]"
    r"|^ *_[A-Za-z]\w*,$|\bimport .*\b_[A-Za-z]|etattr\(.*\"_",
    re.MULTILINE,
)
"""Most files have nothing like it, and need not be parsed."""


def private_names(path: Path) -> Iterator[str]:
    """The underscore names of the library that a test imports, reads or replaces."""
    source = path.read_text()
    for node in ast.walk(ast.parse(source if MAY_BE_PRIVATE.search(source) else "")):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("penstock"):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.Attribute) and node.attr.startswith("_"):
            base = ast.unparse(node.value)
            names = [] if re.match(r"(self|cls|os|torch|super\(\))\b", base) else [node.attr]
        elif isinstance(node, ast.Call) and getattr(
            node.func, "attr", getattr(node.func, "id", "")
        ).endswith(("getattr", "setattr")):
            names = [str(a.value) for a in node.args if isinstance(a, ast.Constant)]
        for name in names:
            if re.fullmatch(r"_[A-Za-z]\w*", name):
                yield f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}: {name}"


def own_private_names(offered: bool) -> set[str]:
    """The underscore names of penstock.pipelining, which offers them as torch does, or of all else."""
    names: set[str] = set()
    for path in FILES:
        if (part_of(module_of(path)) == "pipelining") is not offered:
            continue
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
                names.add(node.id if isinstance(node, ast.Name) else node.attr)
            elif offered and isinstance(node, ast.alias):
                names.add(node.asname or node.name)
    return {name for name in names if name.startswith("_")}


def test_tests_speak_the_public_language() -> None:
    of_torch = {*dir(torch.nn.Module()), *dir(torch.Tensor), *dir(DeviceMesh)}
    public = own_private_names(offered=True) | of_torch
    # A notebook asks for the last of them.
    private = own_private_names(offered=False) - public - {"_repr_svg_"}
    tests = [*(ROOT / "tests").rglob("*.py"), *(ROOT / "campaigns").rglob("*.py")]
    lines = [line for path in tests for line in private_names(path)]
    assert [line for line in lines if line.rpartition(" ")[2] in private] == []
