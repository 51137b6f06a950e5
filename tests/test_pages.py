"""What the pages say: their programs run, their names are found, and so is what no other test shows."""

from __future__ import annotations

import re
from functools import reduce
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint

from penstock import Pipeline
from penstock.backward import DeferredBackward
from penstock.errors import UsageError
from penstock.partition import partition
from penstock.schedule import add_communication, build, compute_only, merge_backward

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SOURCES = sorted((ROOT / "src").rglob("*.py"))


def blocks(page: str) -> list[str]:
    """The programs of a page."""
    return re.findall(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL)


# ---- names, links and programs


@pytest.mark.parametrize("file", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(file: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", file.read_text()):
        assert (file.parent / target).exists(), target


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


EVERYWHERE = """
import torch, penstock, penstock.partition, penstock.weights
from torch import nn
from torch.nn import functional
from penstock.partition import cut_into

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, hidden):
        return hidden + self.linear(hidden)

class Model(nn.Module):
    def __init__(self, config=None):
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.blocks = self.layers = nn.ModuleList([Block() for _ in range(10)])
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 10)

    def forward(self, x, mask=None):
        hidden = self.embed(x)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden if mask is None else hidden * mask[..., None]))

def loss_fn(output, target):
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())

config, model = None, Model()
x = y = tokens = target = torch.arange(80).view(16, 5) % 10
mask, loader, batch, args = torch.ones(16, 5), [(x, y)], {"x": x}, (x,)
opt = torch.optim.SGD(model.parameters(), 0.1)
pipe = other = penstock.Pipeline(model, ranks=2, microbatches=8, loss_fn=loss_fn, seed=17)
"""
"""What the programs of the pages take for granted."""

BEFORE = {
    "backward.md": "module, x, dy = nn.Linear(3, 2), torch.ones(5, 3, requires_grad=True), torch.ones(5, 2)\n"
    "scale = nn.Parameter(torch.ones(3))",
    "coming-from-others.md": "",
    "coming-from-torch.md": "from penstock.pipelining.schedules import *\n"
    "from penstock.pipelining.schedules import _Action, B, F, _batch_p2p, _wait_batch_p2p",
    "first-weights.md": "GPT = Model",
    "compile.md": "",
    "fuzzing.md": "",
    "hooks.md": "",
    "meshes.md": """
import torch.distributed
from torch.distributed.device_mesh import init_device_mesh as made
from torch.distributed.fsdp import fully_shard

def init_device_mesh(device, shape, mesh_dim_names):
    # As many processes as there are here.
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    return made("cpu", (1, 1), mesh_dim_names=mesh_dim_names)

model, my_part_of_the_batch, my_part_of_the_target = Model(), x, y""",
    "partition.md": "",
    "planning.md": """
import penstock.plan
from penstock.train.model import GPT, Shape, next_byte_loss
model = GPT(Shape(layers=6, width=64, heads=4, sequence=32))
tokens = torch.randint(0, 256, (16, 33))
batch, target = tokens[:, :-1], tokens[:, 1:]
profile = penstock.plan.predict(model, batch, target=target, loss_fn=next_byte_loss, device="h100")
plans = penstock.plan.search(profile, ranks=2, batch=16, schedules="1F1B", keep=1, seconds=0)""",
    "randomness.md": "",
    "saving-and-resuming.md": "import warnings; warnings.simplefilter('ignore')",
    "tracing.md": "pipe.save('folder')\nmodel.eval()",
    "training.md": "by_image = lambda value, sizes: value.split(sizes)\n"
    "tokens_a, tokens_b = target_a, target_b = tokens.split([7, 9])",
    "values.md": "class Cache: pass",
    "weights.md": """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(10, 8), nn.Linear(8, 10, bias=False)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head.weight = self.embed.weight

    def forward(self, x):
        return self.head(self.blocks[1](self.blocks[0](self.embed(x))))

model = Model()""",
    "when-a-run-stops.md": "everything, path, train = {}, 'everything', lambda: None",
}
"""And what those of one page do beside it."""


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")
@pytest.mark.parametrize("page", BEFORE)
def test_programs_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "page"}
    exec(EVERYWHERE + BEFORE[page], names)
    for program in blocks(page):
        found = dict(names)
        exec(program.replace('"cuda"', '"cpu"'), found)
        if dist.is_initialized():
            found["pipe"].close()
            dist.destroy_process_group()


def test_every_page_with_programs_is_run() -> None:
    """That of the schedules is run by tests/schedule/test_docs.py."""
    assert {page.name for page in PAGES[1:] if "```python" in page.read_text()} == {
        *BEFORE,
        "schedules.md",
    }


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
    """docs/backward.md; ``nn.LSTM`` in float32 is one piece where torch has oneDNN."""
    model = Wrapped(module, copies)
    x = torch.randn(3, 2, 4, dtype=next(module.parameters()).dtype, requires_grad=True)
    output = model(x)
    DeferredBackward(model).input_half(output, torch.ones_like(output), [x])
    late = {name for name, parameter in module.named_parameters() if parameter.grad is None}
    assert late == waits


def test_the_way_of_a_batch_goes_by_these_names() -> None:
    page = (ROOT / "docs/the-way-of-a-batch.md").read_text()
    steps = re.findall(r"^\| \d \| `(\S+?)\.py`, `([\w.]+)`", page, re.MULTILINE)
    assert len(steps) == 7
    for file, name in steps:
        assert exists(f"penstock.{file.replace('/', '.')}.{name}"), name
    for file in re.findall(r"`([\w/]+\.py)`", page):
        assert (ROOT / "src/penstock" / file).exists(), file


def test_the_table_of_the_way_of_a_batch_is_a_real_one() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    pipe = Pipeline(model, schedule="ZB-H1", ranks=2, microbatches=2, loss_fn=mse_loss)
    pipe.step(torch.ones(4, 4), target=torch.ones(4, 4))
    rows = [row.split() for row in str(pipe.explain()).splitlines()]
    page = (ROOT / "docs/the-way-of-a-batch.md").read_text()
    shown = [row.split() for row in page.split("```")[1].strip().splitlines()]
    begin = rows.index(shown[0])
    assert rows[begin : begin + len(shown)] == shown


class Rerun(nn.Module):
    """A batch norm inside a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Any:
        return checkpoint(lambda value: self.norm(self.linear(value)), x, use_reentrant=False)


@pytest.mark.parametrize(("by", "counted"), [("microbatch", 4), ("batch", 1)])
def test_a_norm_inside_a_checkpoint_counts_twice_by_default(by: Any, counted: int) -> None:
    model = nn.Sequential(nn.Linear(4, 4), Rerun())
    pipe = Pipeline(model, ranks=2, microbatches=2, loss_fn=mse_loss, batch_statistics=by)
    pipe.step(torch.randn(4, 4), target=torch.randn(4, 4))
    assert model.get_buffer("1.norm.num_batches_tracked") == counted


def test_of_changes_a_traced_stage_knows_freezing_and_numbers_alone() -> None:
    """docs/weights.md."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    x = torch.randn(4, 4)
    made = partition(model, 2, how="traced", example=((x[:2],), {}))
    pipe = Pipeline(model, stages=made, ranks=2, microbatches=2, loss_fn=mse_loss)
    before = pipe.step(x, target=x).loss
    model[0].forward = lambda value: value * 100
    assert pipe.step(x, target=x).loss == before
    model[0].requires_grad_(False)
    pipe.zero_grad()
    pipe.step(x, target=x)
    assert model[0].weight.grad is None
    model[0].weight.data.zero_()
    assert pipe.step(x, target=x).loss != before
    model[0].weight = nn.Parameter(torch.ones(4, 4))
    with pytest.raises(UsageError, match=r"'0\.weight' was replaced"):
        pipe.step(x, target=x)


class Writes(nn.Linear):
    """Needs numbers, and counts its calls in a parameter."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.calls = nn.Parameter(torch.zeros(()), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.calls.add_(1)
        assert self.calls.item() > 0
        return super().forward(x)


def test_a_forward_that_writes_into_parameters_does_so_once_more(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """docs/values.md."""
    model = nn.Sequential(Writes(), nn.Linear(4, 4))
    pipe = Pipeline(model, ranks=2, microbatches=2, loss_fn=mse_loss)
    pipe.step(torch.ones(4, 4), target=torch.ones(4, 4))
    assert model[0].calls == 2 + 1
    assert "a forward that changes parameters in place has run once on zeros" in caplog.text


def test_what_undoes_passes_leaves_whole_backwards_whole() -> None:
    """docs/schedules.md."""
    plain = build("ZB-H1", ranks=3, microbatches=4)
    merged = merge_backward(plain)
    assert compute_only(add_communication(merged)) == merged != plain


def test_the_batch_of_a_tokenizer_travels() -> None:
    """docs/values.md."""
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


def test_hooks_on_modules_are_in_the_graph_and_do_not_run_afterwards() -> None:
    """docs/tracing.md."""
    calls: list[None] = []

    def doubles(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        calls.append(None)
        return output * 2

    x = torch.ones(2, 4)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    expected = model[1](2 * model[0](x))
    model[0].register_forward_hook(doubles)
    made = partition(model, 2, how="traced", example=((x,), {}))
    pipe = Pipeline(model, stages=made, ranks=2, microbatches=1)
    torch.testing.assert_close(pipe.predict(x), expected.detach())  # traces evaluation too
    traced = len(calls)
    torch.testing.assert_close(pipe.predict(x), expected.detach())
    assert len(calls) == traced > 0
