"""What the pages say: their programs run, their names are found, and so is what no other test shows."""

from __future__ import annotations

import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from functools import partial, reduce
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from penstock import Pipeline
from penstock.backward import SplitBackward
from penstock.cli.main import main
from penstock.plan import search
from penstock.schedule import library
from tests.processes import run_script
from website import reference

pytestmark = pytest.mark.on_cpu("pages show what a CPU prints")
ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SOURCES = sorted((ROOT / "src").rglob("*.py"))


# ---- names and links


@pytest.mark.parametrize("file", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(file: Path) -> None:
    made = {*reference.paths()}
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", file.read_text()):
        is_outside = target.startswith("https://")
        assert is_outside or (file.parent / target).exists() or target in made, target


def test_names_are_found() -> None:
    """In the pages, and in what docstrings and messages tell."""
    told = {
        name: file
        for file in [*PAGES, *SOURCES]
        for name in re.findall(r"(?<![\w./])penstock(?:\.[A-Za-z_]\w*)+", file.read_text())
    }
    assert [f"{name} in {told[name].name}" for name in sorted(told) if not exists(name)] == []


def exists(name: str) -> bool:
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found: Any = import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        return (
            reduce(lambda held, part: getattr(held, part, None), parts[count:], found) is not None
        )
    return False


# ---- programs

CODE = re.compile(
    r"(?:^<!-- (?P<mark>skip|file): (?P<said>.*?) -->\n)?"
    r"^```(?P<language>python|console|bash)\n(?P<text>.*?)^```",
    re.MULTILINE | re.DOTALL,
)


class Block(NamedTuple):
    """Code on a page.

    Attributes:
        page: the file.
        line: of its first line.
        language: what stands behind the opening fence.
        text: the code.
        mark: on the line before, ``skip`` and why, or ``file`` and its name; otherwise empty.
        said: the reason, or the name.
    """

    page: Path
    line: int
    language: str
    text: str
    mark: str
    said: str


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text()
    for code in CODE.finditer(text):
        line = text.count("\n", 0, code.start("text")) + 1
        mark, said = code["mark"] or "", code["said"] or ""
        yield Block(page, line, code["language"], code["text"], mark, said)


CODE_OF = {page: list(blocks(page)) for page in PAGES}
LONG = {"lightning", "transformers", "transformers-trainer", "trl-and-peft"}
"""Pages whose programs take long, and do what tests of integrations and examples do by day."""


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=pytest.mark.nightly if page.stem in LONG else ())
        for page in PAGES
        if CODE_OF[page]
    ],
    ids=lambda page: page.stem,
)
def test_programs_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of a page one after the other, as somebody runs them who reads it from top to bottom."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    # No page is about how long a plan is improved.
    monkeypatch.setattr("penstock.plan.search", partial(search, seconds=0))
    # What a page registers or imports is forgotten after it.
    monkeypatch.setattr(library, "RECIPES", dict(library.RECIPES))
    before = set(sys.modules)
    module = sys.modules["page"] = ModuleType("page")
    try:
        for block in CODE_OF[page]:
            run_block(block, vars(module))
    finally:
        for name in {
            "page",
            *(name for name in set(sys.modules) - before if is_of(name, tmp_path)),
        }:
            sys.modules.pop(name, None)


def is_of(name: str, folder: Path) -> bool:
    return str(getattr(sys.modules[name], "__file__", None) or "").startswith(str(folder))


def run_block(block: Block, names: dict[str, Any]) -> None:
    if block.mark == "skip":
        return
    if block.mark == "file":
        Path(block.said).write_text(block.text)
        commands = (other for other in CODE_OF[block.page] if other.language != "python")
        if not any(block.said in command.text for command in commands):
            runpy.run_path(block.said, run_name="__main__")
    elif block.language == "python":
        # There is no GPU here; and Penstock reads a model's source, so that there has to be a file.
        file = Path(f"{block.page.stem}-{block.line}.py").absolute()
        file.write_text("\n" * (block.line - 1) + block.text.replace('"cuda"', '"cpu"'))
        exec(compile(file.read_text(), file, "exec"), names)
    else:
        for command in re.findall(r"^\$ (.*)", block.text.replace("\\\n", " "), re.MULTILINE):
            run_command(block, shlex.split(command, comments=True))


def run_command(block: Block, command: list[str]) -> None:
    """Commands about schedules run here, and scripts in processes of their own, one per rank."""
    program, *arguments = command
    if command[:2] == ["penstock", "schedule"] or command == ["penstock", "--version"]:
        assert main(arguments) == 0, f"{block.page.name}:{block.line}"
        return
    if command[:3] == ["torchrun", "--standalone", "--nproc-per-node"]:
        ran = run_script(*command[4:], processes=int(command[3]))
    else:
        started = {"penstock": ["-m", "penstock"], "python": []}
        assert program in started, (
            f"{block.page.name}:{block.line}: say how {program} is run, or skip it"
        )
        ran = run_script(*started[program], *arguments)
    assert all(found.status == 0 for found in ran), ran


def test_few_programs_are_skipped() -> None:
    """Only what needs something that is not here, or would change what is."""
    listed = [block for page in PAGES for block in CODE_OF[page]]
    assert sum(block.mark == "skip" for block in listed) < len(listed) / 5


# ---- claims that no other test shows


class Wrapped(nn.Module):
    """A module's first output."""

    def __init__(self, module: nn.Module, copies: int) -> None:
        super().__init__()
        self.inner, self.copies = module, copies

    def forward(self, x: Tensor) -> Any:
        return self.inner(*[x] * self.copies)[0]


@pytest.mark.parametrize(
    ("module", "copies", "waits"),
    [
        (nn.MultiheadAttention(4, 2), 3, {"in_proj_weight", "out_proj.weight"}),
        (nn.GRU(4, 4), 1, {"weight_ih_l0", "weight_hh_l0"}),
        (nn.LSTM(4, 4).double(), 1, {"weight_ih_l0", "weight_hh_l0"}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_layers_of_torch_wait_where_they_come_down_to_products(
    module: nn.Module, copies: int, waits: set[str]
) -> None:
    """docs/split-backward.md; ``nn.LSTM`` in float32 is one piece where torch has oneDNN."""
    model = Wrapped(module, copies)
    x = torch.randn(3, 2, 4, dtype=next(module.parameters()).dtype, requires_grad=True)
    output = model(x)
    SplitBackward(model).input_half(output, torch.ones_like(output), [x])
    late = {name for name, parameter in module.named_parameters() if parameter.grad is None}
    assert late == waits


def test_the_way_of_a_batch_goes_by_these_names() -> None:
    page = (ROOT / "docs/architecture.md").read_text()
    steps = re.findall(r"^\| \d \| `(\S+?)\.py`, `([\w.]+)`", page, re.MULTILINE)
    assert len(steps) == 7
    for file, name in steps:
        assert exists(f"penstock.{file.replace('/', '.')}.{name}"), name
    for file in re.findall(r"`([\w/]+\.py)`", page):
        assert (ROOT / "src/penstock" / file).exists(), file


def test_the_batch_of_a_tokenizer_travels() -> None:
    """docs/how-cutting-works.md."""
    encoding = pytest.importorskip("transformers").BatchEncoding

    class Packs(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            return encoding({"hidden": super().forward(x)})

    class Unpacks(nn.Linear):
        def forward(self, batch: Any) -> Any:
            assert type(batch) is encoding
            return super().forward(batch["hidden"])

    model = nn.Sequential(Packs(4, 4), Unpacks(4, 4))
    pipe = Pipeline(model, ranks=2, microbatches=2, loss_fn=mse_loss)
    assert pipe.step(torch.ones(4, 4), target=torch.ones(4, 4)).loss > 0
