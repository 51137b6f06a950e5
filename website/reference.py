"""Pages made from the code: one for each public part, the commands, and an index of all names."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import typer

import penstock
from penstock.cli.main import app

PARTS = {
    "penstock": "Main names",
    "penstock.schedule": "Schedules",
    "penstock.partition": "Cutting a model",
    "penstock.plan": "Planning a run",
    "penstock.checkpoint": "Saving and resuming",
    "penstock.backward": "Split backward",
    "penstock.integrations": "Integrations",
    "penstock.testing": "Testing",
    "penstock.train": "Trainer",
    "penstock.doctor": "Doctor",
    "penstock.pipelining": "Names of torch.distributed.pipelining",
    "penstock.errors": "Errors",
}
"""The public parts and the titles of their pages."""
NEED_EXTRAS = {"penstock.integrations": ["transformers", "lightning", "accelerate"]}
"""Modules that import other libraries: they are read for a part's page, and not imported."""
EXAMPLES = Path(__file__).parents[1] / "examples"


def pages() -> dict[str, str]:
    """Every page of the reference by its path."""
    made = {_path(part): _part(part, title) for part, title in PARTS.items()}
    return {"reference/index.md": _index(), "reference/commands.md": _commands()} | made


def paths() -> list[str]:
    """Where its pages are."""
    return ["reference/index.md", "reference/commands.md", *map(_path, PARTS)]


def navigation() -> list[Any]:
    """The reference in the navigation."""
    return [
        "reference/index.md",
        {"Commands": "reference/commands.md"},
        *({part: _path(part)} for part in PARTS),
    ]


def _path(part: str) -> str:
    return f"reference/{part}.md"


def _module(part: str) -> ModuleType:
    found: Any = penstock
    for name in part.split(".")[1:]:
        found = getattr(found, name)
    return found  # type: ignore[no-any-return]


def names_of(part: str) -> list[str]:
    """The public names of a part, in the order of its page: classes and functions by alphabet."""
    module = _module(part)
    listed = getattr(module, "__all__", None) or [
        name
        for name, value in vars(module).items()
        if getattr(value, "__module__", None) == part and not name.startswith("_")
    ]
    return sorted(listed, key=lambda name: (not name[0].isupper(), name.lower()))


def _part(part: str, title: str) -> str:
    """A page: what the part is, and each of its names from its docstring."""
    about = f"::: {part}\n    options: {{members: false, show_root_heading: false}}\n"
    listed = [*names_of(part), *NEED_EXTRAS.get(part, ())]
    names = "\n".join(f"::: {part}.{name}\n" for name in listed)
    return f"# {title}: `{part}`\n\n{about}\n{names}"


def _index() -> str:
    rows = sorted(
        ((name, part) for part in PARTS for name in names_of(part)),
        key=lambda row: (row[0].lower(), row[1]),
    )
    parts = "\n".join(f"| [`{part}`]({part}.md) | {_summary(part)} |" for part in PARTS)
    names = "\n".join(
        f"| [`{name}`][{part}.{name}] | [`{part}`]({part}.md) | {_summary(f'{part}.{name}')} |"
        for name, part in rows
        if not name.startswith("_")
    )
    return (
        "# Reference\n\nEvery public name, from its docstring. The parts are imported when they are first "
        "used, so `import penstock` is enough for all of them. The [commands](commands.md) have a page of "
        'their own.\n\n<div class="names" markdown="1">\n\n| part | what it is |\n|---|---|\n'
        f"{parts}\n\n</div>\n\n## Index of names\n\n"
        '<div class="names" markdown="1">\n\n| name | part | what it is |\n|---|---|---|\n'
        f"{names}\n\n</div>\n"
    )


@cache
def _read() -> Any:
    """Penstock's sources, as mkdocstrings reads them."""
    import griffe  # of the extra docs: the rest of this module does without

    return griffe.load(
        "penstock", search_paths=[str(EXAMPLES.parent / "src")], resolve_aliases=True
    )


def _summary(path: str) -> str:
    """The first line of a name's docstring.

    Raises:
        LookupError: it has none.
    """
    inner = path.partition(".")[2]
    docstring = (_read()[inner] if inner else _read()).docstring
    if docstring is None:
        raise LookupError(f"{path} is public, and has no docstring")
    return _cell(docstring.value.strip().split("\n", 1)[0])


def _cell(text: str) -> str:
    """Text as it stands in a table."""
    return text.replace("|", "\\|").replace("``", "`").replace("<", "&lt;")


# ---- examples


def examples() -> dict[str, str]:
    """A page for each program in ``examples/``: what it says of itself, and its source."""
    return {f"examples/{file.stem}.md": _example(file) for file in sorted(EXAMPLES.glob("*.py"))}


def _example(file: Path) -> str:
    source = file.read_text(encoding="utf-8")
    about = ast.get_docstring(ast.parse(source)) or ""
    title, _, usage = about.partition("\n")
    shown = f"```console\n{usage.strip()}\n```\n\n" if usage.strip() else ""
    return f"# {file.stem}\n\n{title}\n\n{shown}```python\n{source}```\n"


# ---- commands


def _commands() -> str:
    commands: Any = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    sections = [
        section
        for name, command in commands.items()
        if not command.hidden
        for section in _command(f"penstock {name}", command)
    ]
    return "# Commands\n\nAs in `--help`.\n\n" + "\n".join(sections)


def _command(path: str, command: Any) -> Iterator[str]:
    below = getattr(command, "commands", {})
    yield f"{'##' if ' ' not in path[9:] else '###'} {path}\n\n{inspect.cleandoc(command.help or '')}\n"
    for name, inner in below.items():
        yield from _command(f"{path} {name}", inner)
    if not below:
        shown = [one for one in command.params if not one.hidden]
        arguments = " ".join(_argument(one) for one in shown if one.param_type_name == "argument")
        yield f"```text\n{path} [options] {arguments}".rstrip() + "\n```\n"
        yield "| option | what it is |\n|---|---|\n" + "\n".join(map(_parameter, shown)) + "\n"


def _argument(one: Any) -> str:
    return str(one.name.upper() if one.required else f"[{one.name.upper()}]")


def _parameter(one: Any) -> str:
    """A row of the table of a command's options."""
    spelt = " ".join(f"`{name}`" for name in (*one.opts, *one.secondary_opts))
    if one.param_type_name == "argument":
        spelt = f"`{one.name.upper()}`"
    said = one.help or ""
    if one.default not in (None, "", False, ()) and "Default" not in said:
        said = f"{said} Default: {one.default}."
    return f"| {spelt} | {_cell(said)} |"
