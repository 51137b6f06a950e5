"""Random programs: a hypothesis strategy that writes the Python source of a model and of a run of it.

A program defines ``make()``, ``batch(step)``, ``loss_fn``, ``change(model, step)``, ``RUN`` and
``pipeline(model, group)``. judging.py trains its model in a plain loop and through its Pipeline.
What is printed is what ran.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise, product
from pprint import pformat
from textwrap import indent
from typing import Any

from hypothesis import assume
from hypothesis import strategies as st

from campaigns.fuzz.lines import ABOVE, EVENTS, HOOKS
from campaigns.fuzz.models import ORDERED, Author, Body, class_text
from penstock.errors import ScheduleError
from penstock.schedule import Op, build, names


@dataclass(frozen=True)
class Program:
    """A program and what is to be known of it before it runs.

    Attributes:
        source: its text.
        processes: how many processes it needs; 1 stands for all ranks in this one.
        features: under what it is counted.
    """

    source: str
    processes: int
    features: tuple[str, ...]

    def __repr__(self) -> str:
        return self.source


SEQUENCE = "torch.randn(size, length, 4)"
TENSORS = {
    "V": "torch.randn(size, 4)",
    "S": SEQUENCE,
    "K": "torch.randint(0, 4, (size, length))",
    "Q": "torch.arange(length) <= torch.randint(0, length, (size, 1))",
    "i": "step % 2 + 1",
    "o": "None",
    "t": f"({SEQUENCE}, {SEQUENCE})",
    "d": f"dict(a={SEQUENCE}, b={SEQUENCE})",
}
SOURCE = """
{imports}
import torch
from torch import nn
from torch.nn import functional as F

import penstock
from campaigns.fuzz.judging import main, tensors

torch.set_default_dtype(torch.{dtype})
{above}
{classes}


def make():
    torch.manual_seed(1)
    model = {model}{hooks}
    return model


def batch(step, replica=0):
    torch.manual_seed(100 + step + 1000 * replica)
    size, length = {sizes}[step], {lengths}[step]
    return ({args}), dict({kwargs}), {target}


def loss_fn(output, target):
    return {loss}


def change(model, step):
    {change}


def pipeline(model, group=None):
    {pipeline}
{another}

RUN = {run}

if __name__ == "__main__":
    main(globals())
"""


LAYOUTS = ("one process", "gloo", "2 x 2")
"""Where the ranks are: all in one process, each in its own, or that of two replicas of two stages."""


@st.composite
def programs(draw: Callable[[Any], Any], layout: str = LAYOUTS[0]) -> Program:
    """Programs of a layout."""
    author = Author(draw)
    gloo = layout != LAYOUTS[0]
    is_chain = author.chance(6)
    model, body, takes, ends = chain_of(author) if is_chain else model_of(author)
    # The plain loop has all replicas in one process, where what is global is shared by them.
    assume(layout != LAYOUTS[2] or "global numbers" not in author.used)
    pipeline, ranks, microbatches, cut = pipeline_of(author, body, is_chain, layout)
    run, options = run_of(author, microbatches, cut, layout)
    another = ""
    # Masks would depend on the other cut; and processes do not have the whole model any longer.
    alone = not gloo and not run["as_module"]
    if run["steps"] > 1 and alone and run["seed"] is None and author.chance(3):
        author.used.add("schedule swapped")
        run["swap"] = author.pick(("model", "state"))
        text = pipeline_of(author, body, is_chain, layout, microbatches)[0].format(options=options)
        another = f"\n\ndef another_pipeline(model):\n    {text}\n"
    # A batch norm needs two samples in each microbatch.
    least = microbatches * (2 if "batch norm" in author.used else 1)
    longer = not author.fixed_length and author.chance(4)
    tensors = [TENSORS[body.kinds[name]] for name in takes]
    named = len(takes) - (0 if is_chain else author.pick(range(len(takes) + 1)))
    target, loss = loss_of(author, body.kinds[body.floats()[-1]], ends, run["reduction"])
    words = {
        "dtype": run["dtype"],
        "classes": "\n\n\n".join(author.classes),
        "model": model,
        "hooks": hooks_of(author, body, averaged=run["as_module"] and run["replicas"] > 1),
        "sizes": [least + author.pick((0, 1, 3)) for _ in range(run["steps"])],
        "lengths": [3] * (run["steps"] - longer) + [4] * longer,
        "args": "".join(f"{text}, " for text in tensors[:named]).rstrip(),
        "kwargs": ", ".join(map("{}={}".format, takes[named:], tensors[named:])),
        "target": target,
        "loss": loss,
        "change": change_of(author, body, run["steps"]),
        "pipeline": pipeline.format(options=options),
        "another": another,
        "run": pformat(run, width=100, compact=True, sort_dicts=False),
    }
    written = SOURCE.format(imports="", above="", **words)
    above = [text for word, text in ABOVE.items() if re.search(rf"(?<![.\w]){word}", written)]
    imports = [text for text in above if "\n" not in text]
    above = [f"\n{text}" for text in above if "\n" in text]
    source = SOURCE.format(imports="\n".join(imports), above="".join(above), **words)
    asked = ("as_module", "autocast", "evaluate", "load", "loss_weight", "outputs")
    features = {*author.used, layout, *(name for name in asked if run[name])}
    return Program(source.lstrip(), ranks * run["replicas"] if gloo else 1, tuple(sorted(features)))


def model_of(author: Author) -> tuple[str, Body, list[str], list[str]]:
    """A model of lines: how it is made, its body, its arguments, and where its outputs are."""
    body, takes, outputs = author.model()
    returned, ends = outputs[0], [""]
    if len(outputs) == 2:
        as_dict = "dict(a={}, b={})".format(*outputs)
        pair = (", ".join(outputs), ["[0]", "[1]"])
        returned, ends = author.pick((pair, (as_dict, ["['a']", "['b']"])))
    if len(body.square) > 1 and author.chance(6):
        author.shares = True
        body.init.append(f"self.{body.square[0]}.weight = self.{body.square[-1]}.weight")
    elif body.square and body.tables and author.chance(3):
        author.shares = True
        body.init.append(f"self.{body.square[-1]}.weight = self.{body.tables[0]}.weight")
    author.classes.append(class_text("Model", body, ", ".join(takes), returned))
    return "Model()", body, takes, ends


def chain_of(author: Author) -> tuple[str, Body, list[str], list[str]]:
    """The same of an ``nn.Sequential``."""
    body = author.chain()
    rows = [text.removeprefix("self.").replace(" = ", "=", 1) for text in body.init]
    lines = "".join(f"        {row},\n" for row in rows)
    return f"nn.Sequential(collections.OrderedDict(\n{lines}    ))", body, ["x0"], [""]


def loss_of(author: Author, kind: str, ends: list[str], fold: str) -> tuple[str, str]:
    """A target and an expression for the loss."""
    first, *others = (f"output{end}" for end in ends)
    classes = TENSORS["K"] if kind == "S" else "torch.randint(0, 4, (size,))"
    flat = f"{first}.flatten(0, -2), target.flatten()"
    target, term = author.pick((
        (TENSORS[kind], f"F.mse_loss({first}, target, reduction={fold!r})"),
        (classes, f"F.cross_entropy({flat}, reduction={fold!r})"),
        ("None", f"{first}.square().{fold}()"),
        (f"{TENSORS[kind]}.requires_grad_() + 0", f"F.mse_loss({first}, target, reduction={fold!r})"),
    ))  # fmt: skip
    terms = [term, *(f"{other}.square().{fold}()" for other in others)]
    return target, " + ".join(terms + [f"0.1 * {first}.abs().{fold}()"] * author.chance(4))


def run_of(author: Author, microbatches: int, cut: Any, layout: str) -> tuple[dict[str, Any], str]:
    """What is done with the model, and what the Pipeline must know of it."""
    draws = "draws" in author.used
    # As a module it gives a loss alone, and draws in other steps.
    as_module = not draws and author.chance(8)
    run: dict[str, Any] = {
        "steps": author.pick((1, 2, 3)),
        "microbatches": microbatches,
        "reduction": author.pick(("mean", "sum")),
        "dtype": author.pick(("float64",) * 9 + ("float32",)),
        "optimizer": author.pick(("SGD", "AdamW")),
        "clip": author.pick((None, 0.1)),
        "outputs": not as_module and author.chance(4),
        "evaluate": not draws and not as_module and author.chance(5),
        "inference": author.chance(2),
        "load": author.chance(12),
        "accumulate": 1 if as_module else author.pick((1, 1, 1, 1, 2)),
        "seed": 17 if draws else None,
        "cut": cut if draws else None,
        "swap": None,
        "as_module": as_module,
        "replicas": 2 if layout == LAYOUTS[2] else 1,
    }
    run["loss_weight"] = run["accumulate"] == 1 and not as_module and author.chance(8)
    run["autocast"] = run["dtype"] == "float32" and author.chance(2)
    run["half"] = run["autocast"] or "autocast" in author.used
    said = "" if run["reduction"] == "mean" else ", reduction='sum'"
    if run["loss_weight"]:
        # These weights are none of the loss's own.
        said += ", weight=weight_of, check=False"
    options = f", loss_fn=penstock.Loss(loss_fn{said})" if said else ", loss_fn=loss_fn"
    return run, options + (f", seed={run['seed']!r}" if run["seed"] is not None else "")


def pipeline_of(
    author: Author, body: Body, is_chain: bool, layout: str, microbatches: int | None = None
) -> tuple[str, int, int, Any]:
    """The lines that make the Pipeline, its ranks, its microbatches, and where it is cut."""
    units, microbatches = len(body.units), microbatches or author.pick((2, 1, 3, 4, 6))
    name, ranks, stages = schedule_for(author, units, microbatches)
    gloo = layout != LAYOUTS[0]
    if gloo and ranks not in ((2, 3) if layout == LAYOUTS[1] else (2,)):
        name, ranks, stages = "1F1B", 2, 2
    before, schedule = "", repr(name)
    if not author.used & set(ORDERED) and author.chance(4):
        seed = author.draw(st.integers(0, 99))
        stages, before = drawn_order(seed, units, ranks, microbatches)
        schedule, name = "schedule", "of its own"
    author.used.add(f"schedule {name}")
    starts = sorted(author.draw(st.permutations(range(1, units)))[: stages - 1])
    bounds = [body.modules.index(body.units[start]) for start in starts]
    slices = list(pairwise([0, *bounds, len(body.modules)]))
    options = f"schedule={schedule}, microbatches={microbatches}{{options}}"
    # Masks of stages that are made by hand depend on the cut.
    if is_chain and not gloo and "draws" not in author.used and author.chance(3):
        author.used.add("from_stages")
        parts = ", ".join(f"model[{a}:{b}]" for a, b in slices)
        listed = f"penstock.PipelineStage(part, i, {stages}) for i, part in enumerate(parts)"
        before += f"parts = [{parts}]\n    stages = [{listed}]\n    "
        text = f"{before}return penstock.Pipeline.from_stages(stages, {options})"
        return text, ranks, microbatches, None
    # What a unit was given must not change before the unit runs again.
    if "in place" not in author.used and author.chance(6):
        author.used.add("recomputation")
        options += ", recompute=True"
    lists = [body.modules[a:b] for a, b in slices]
    cut = author.pick((stages, [body.units[start] for start in starts] or stages, lists))
    where = {
        LAYOUTS[0]: f"ranks={ranks}",
        LAYOUTS[1]: "mesh=group, timeout=60.0",
        LAYOUTS[2]: "mesh=group, replicas='dp', timeout=60.0",
    }[layout]
    text = f"{before}return penstock.Pipeline(model, stages={cut}, {where}, {options})"
    return text, ranks, microbatches, cut


def schedule_for(author: Author, units: int, microbatches: int) -> tuple[str, int, int]:
    """The name of a schedule that fits, its ranks and its stages."""
    most, name, each = author.pick((2, 1, 3, 4)), author.pick(names()), author.pick((None, 1, 2, 3))
    for ranks, count in product(range(min(most, units), 0, -1), (each, None)):
        try:
            schedule = build(name, ranks=ranks, microbatches=microbatches, stages_per_rank=count)
        except ScheduleError:
            continue
        trains = any(getattr(a, "op", None) is not Op.F for row in schedule.programs for a in row)
        if trains and schedule.stages <= units:
            return name, ranks, schedule.stages
    return "GPipe", min(most, units), min(most, units)


def drawn_order(seed: int, units: int, ranks: int, microbatches: int) -> tuple[int, str]:
    """A schedule in any order that one rank alone could run, which is valid wherever the stages are."""
    chance = random.Random(seed)
    stages = chance.randint(ranks, max(ranks, min(units, 5)))
    placement = [*range(ranks), *(chance.randrange(ranks) for _ in range(stages - ranks))]
    chance.shuffle(placement)
    rows: list[list[str]] = [[] for _ in range(ranks)]
    split = chance.random()
    forward = [(stage, "F") for stage in range(stages)]
    back = [
        (s, op)
        for s in reversed(range(stages))
        for op in ("IW" if chance.random() < split else "B")
    ]
    left = dict.fromkeys(range(microbatches), forward + back)
    while left:
        m = chance.choice(list(left))
        # The next action, or one that a weights' half lets overtake it.
        late = [i for i, (_, op) in enumerate(left[m]) if op == "W"]
        first = next((i for i, (_, op) in enumerate(left[m]) if op != "W"), 0)
        ready = [first, *(i for i in late if i < first)]
        stage, op = left[m][at := chance.choice(ready)]
        rows[placement[stage]].append(f"{stage}{op}{m}")
        left[m] = left[m][:at] + left[m][at + 1 :]
        left = {key: actions for key, actions in left.items() if actions}
    lines = "".join(f"        {' '.join(row)!r},\n" for row in rows)
    parsed = "tuple(tuple(map(penstock.schedule.parse_action, row.split())) for row in rows)"
    return stages, (
        f"rows = [\n{lines}    ]\n"
        f"    placement = penstock.schedule.Placement({tuple(placement)})\n"
        f"    schedule = penstock.schedule.Schedule('own', placement, {microbatches}, {parsed})\n    "
    )


def hooks_of(author: Author, body: Body, *, averaged: bool) -> str:
    """The line that registers a hook, if there is one; none on a weight whose gradient it sees averaged."""
    if not body.square or not author.chance(4):
        return ""
    author.used.add("hooks")
    # A shared weight's gradient is complete only when the step is over.
    hooks = [hook for hook in HOOKS if not ((author.shares or averaged) and ".weight" in hook)]
    return f"\n    {author.pick(hooks).format(p='model.' + author.pick(body.square))}"


def change_of(author: Author, body: Body, steps: int) -> str:
    """What happens to the model between two steps, if anything does."""
    if steps == 1 or not body.square or not author.chance(4):
        return "pass"
    author.used.add("changes between steps")
    text = author.pick(EVENTS).format(p="model." + author.pick(body.square))
    when = author.pick(("==", ">="))
    return f"if step {when} {author.pick(range(1, steps))}:\n{indent(text, ' ' * 8)}"
