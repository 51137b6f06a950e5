"""A case as a Python program with two sides: a plain loop, and a Pipeline.

The plain loop is spelled out in the program, with what the case needs and no more. It takes from Penstock
only what a user's plain loop would: random numbers, and the losses that a model adds.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import pairwise
from textwrap import indent
from typing import Any

from penstock.testing.fuzz.cases import (
    BLOCKS,
    CLASSES,
    EVENTS,
    HOOKS,
    OPS,
    PRELUDES,
    SEVERAL,
    WEIGHT_EVENTS,
    At,
    Body,
    Case,
    Line,
)

_SEED = 17
_CAST = "with torch.autocast('cpu', torch.bfloat16):"
_NOTE = """seen = []


def note(name, *values):
    seen.append((name, [found.detach().sum() for found in tensors(values)]))"""
_OPTIMIZERS = {
    "SGD": "SGD({}, lr=0.1)",
    "momentum": "SGD({}, lr=0.1, momentum=0.9, weight_decay=0.1)",
    # With a large eps, so that noise around a gradient of zero does not become a step.
    "AdamW": "AdamW({}, lr=0.05, eps=0.1, weight_decay=0.1)",
}


def program(case: Case) -> str:
    """The program of a case; its ``plain()`` and ``piped()`` return what is compared."""
    sides = _change(case), _plain(case), _piped(case)
    parts = [*classes(case), make(case), batch(case), loss(case), *sides]
    body = "\n\n\n".join(filter(None, parts))
    notes = _NOTE if re.search(r"\bnote\(", body) else ""
    used = [text for name, text in PRELUDES.items() if re.search(rf"(?<![.\w]){name}\b", body)]
    imports = [text for text in used if "\n" not in text]
    above = [notes, *(text.strip("\n") for text in used if "\n" in text)]
    if any("@dataclass" in text for text in above):
        imports.append("from dataclasses import dataclass")
    ours = [name for name in ("Told", "merged", "parts", "tensors") if f"{name}(" in body + notes]
    head = [
        *sorted(imports), "\nimport torch", "from torch import nn", "from torch.nn import functional as F",
        "\nimport penstock", f"from penstock.testing.fuzz import {', '.join(sorted(['check', *ours]))}",
        f"\ntorch.set_default_dtype(torch.{case.run.dtype})",
    ]  # fmt: skip
    end = f'if __name__ == "__main__":{_hint(case)}\n    check(plain(), piped(), {tolerance(case)!r})\n'
    return "\n\n\n".join(["\n".join(head).strip(), *filter(None, above), body, end])


def tolerance(case: Case) -> float:
    """By how much two sides may differ, since they add up in different orders."""
    halves = case.run.autocast or any(
        line.op in OPS and OPS[line.op].family == "autocast" for line in case.model.all_lines()
    )
    return 1e-10 if case.run.dtype == "float64" else 2e-2 if halves else 1e-4


def _hint(case: Case) -> str:
    return f"  # with torchrun --nproc-per-node {case.run.ranks}" if case.run.gloo else ""


def _sizes(batch: int, microbatches: int) -> list[int]:
    count = min(batch, microbatches)
    return [batch // count + (index < batch % count) for index in range(count)]


def _each(values: Sequence[object]) -> str:
    """An expression for a value that may differ from step to step."""
    return repr(values[0]) if all(value == values[0] for value in values) else f"{values!r}[step]"


def _steps_sizes(case: Case) -> list[list[int]]:
    return [_sizes(b, m) for b, m in zip(case.run.batches, case.run.microbatches, strict=True)]


# ---- the parts that both sides have


def _change(case: Case) -> str:
    lines: list[Lines | str] = []
    for event in case.events:
        words = {"p": expression(event.path), "r": expression(event.other), "D": str(case.width)}
        lines += [f"if step == {event.step}:", filled(EVENTS[event.what], words).split("\n")]
    return laid_out(["def change(model, step):", lines]) if lines else ""


def _optimizer(case: Case, owner: str) -> str:
    weights = f"{owner}.parameters()"
    if case.run.gloo and owner == "pipe":  # a rank may have none
        weights = "[*pipe.parameters()] or [torch.zeros(1, requires_grad=True)]"
    return f"optimizer = torch.optim.{_OPTIMIZERS[case.run.optimizer].format(weights)}"


def _before_step(case: Case, owner: str) -> Lines:
    anew = sorted({event.step for event in case.events if event.what in WEIGHT_EVENTS})
    twin = ["twin = copy.deepcopy(model).eval()", "args, kwargs, target = batch(step)",
            f"{loss_fn(case, 'twin')}(twin(*args, **kwargs), target).backward()",
            "told.gradients('twin', twin.named_parameters())"]  # fmt: skip
    return [
        case.events and "change(model, step)",
        *_in_steps(case.run.load, [f"{owner}.load_state_dict(make().state_dict())"]),
        *_in_steps(anew, [_optimizer(case, owner)]),
        *_in_steps(case.run.twin, twin),
    ]


def _after_step(case: Case, owner: str, evaluation: Lines) -> Lines:
    run = case.run
    clips = "torch.nn.utils.clip_grad_norm_(model.parameters(), "
    norm = clips if owner == "model" else "pipe.clip_grad_norm_("
    scaled = run.scaler and owner == "pipe"
    ending: list[Any] = [
        run.clip and f"told.number(step, 'norm', {norm}{run.clip}))",
        *(["scaler.step(optimizer)", "scaler.update()"] if scaled else ["optimizer.step()"]),
        "optimizer.zero_grad()",
    ]
    if run.accumulate > 1:
        ending = [f"if step % {run.accumulate} == {run.accumulate - 1}:", ending]
    return [*_in_steps(run.evaluate, list(evaluation)), *ending]


def _in_steps(steps: Sequence[int], lines: list[Any]) -> Lines:
    return [f"if step in {steps}:", lines] if steps else []


def _side(case: Case, owner: str, before: Lines, step: Lines, after: Lines) -> str:
    head = "plain()" if owner == "model" else "piped(group=None)" if case.run.gloo else "piped()"
    notes = "note(" in "".join(classes(case)) + make(case) + _change(case)
    return laid_out([f"def {head}:", [
        "model, told = make(), Told()", *before, _optimizer(case, owner),
        f"for step in range({case.run.steps}):", [*_before_step(case, owner), *step],
        f"told.state({owner}.state_dict())", notes and "told.hooks(seen)", *after, "return told",
    ]])  # fmt: skip


# ---- the plain loop


def _plain(case: Case) -> str:
    run = case.run
    call = _forward(case)
    call += [
        f"(loss * shares[index]{_factor(case)}).backward()",
        "total += loss.item() * shares[index]",
    ]
    if case.draws:
        seeded = f"penstock.randomness(model, seed={_SEED}, step=step, microbatch=index)"
        call = [f"with {seeded}:", call]
    over = "counts" if run.weight else "sizes"
    measured = f"metric += float(({metric(case)})(output, target)) * {over}[index] / sum({over})"
    step = [
        f"sizes, whole = {_each(_steps_sizes(case))}, batch(step)",
        "given = list(parts(whole, sizes))", *_shares(case),
        f"total{' = metric' if run.metrics else ''} = 0.0", run.outputs and "made = []",
        "for index, (args, kwargs, target) in enumerate(given):",
        [*call, run.outputs and "made.append(output)", run.metrics and measured],
        "told.number(step, 'loss', total)", run.metrics and "told.number(step, 'metric', metric)",
        run.outputs and f"told.output(step, {'made' if run.ready else 'merged(made)'})",
        run.given == "requires grad" and "told.inputs(step, whole)",
        "told.gradients(step, model.named_parameters())",
        *_after_step(case, "model", _plain_evaluation(case)),
    ]  # fmt: skip
    return _side(case, "model", [], step, [])


def _forward(case: Case) -> list[Any]:
    """The lines that compute the output and the loss of a microbatch."""
    lines: Lines = ["output = model(*args, **kwargs)", f"loss = {loss_fn(case)}(output, target)"]
    if any("penstock.add_loss" in text for text in classes(case)):
        made = f"{lines[1]} + losses.total()"
        lines = ["with penstock.collect_losses() as losses:", lines[:1], made]
    return [_CAST, list(lines)] if case.run.autocast else list(lines)


def _plain_evaluation(case: Case) -> Lines:
    each = [_sizes(size, case.run.microbatches[0]) for size in case.run.batches]
    return [
        "modes, total, made = [(module, module.training) for module in model.modules()], 0.0, []",
        "model.eval()", f"sizes = {_each(each)}", "given = list(parts(batch(step), sizes))",
        *_shares(case, training=False),
        "for index, (args, kwargs, target) in enumerate(given):",
        ["with torch.no_grad():", _forward(case), "total += loss.item() * shares[index]",
         "made.append(output)"],
        "told.number(step, 'evaluation', total)", "told.output(f'evaluation {step}', merged(made))",
        "for module, mode in modes:", ["module.training = mode"],
    ]  # fmt: skip


def _shares(case: Case, *, training: bool = True) -> Lines:
    """The lines that compute how much the loss of each microbatch counts in that of the batch."""
    run = case.run
    counts = {
        "numbers": "[1.0 + index for index in range(len(sizes))]" if training else None,
        "number": "[2.5 * size / sum(sizes) for size in sizes]",
        "target": f"[float(({loss_weight(case)})(target)) for _, _, target in given]",
    }.get(run.weight)
    if counts is None and run.reduction == "sum":
        return ["shares = [1.0] * len(sizes)"]
    over = "1.0" if run.reduction == "sum" else "count"
    return [f"counts = {counts or 'sizes'}", f"shares = [{over} / sum(counts) for count in counts]"]


def _factor(case: Case) -> str:
    """The further factor of the loss for the gradients."""
    run = case.run
    if run.total:
        whole = "" if run.reduction == "sum" and not run.weight else " * sum(counts)"
        return f"{whole} / {run.total}"
    return f" / {run.accumulate}" if run.accumulate > 1 and run.reduction == "mean" else ""


# ---- the Pipeline


def _piped(case: Case) -> str:
    run, given = case.run, ["*args", "target=target", "**kwargs"]
    start: Lines = ["args, kwargs, target = whole = batch(step)"]
    if run.ready:
        one = f"dict(zip({list(case.model.takes)}, args)) | kwargs" if run.by_name else "args"
        start = [f"whole = batch(step)\ngiven = list(parts(whole, {_each(_steps_sizes(case))}))",
                 f"calls = penstock.Microbatches([{one} for args, kwargs, _ in given])"]  # fmt: skip
        given = ["calls", "target=[target for _, _, target in given]"]
    if len(set(run.microbatches)) > 1:
        given.append(f"microbatches={_each(run.microbatches)}")
    if run.weight == "numbers":
        number = _each([len(sizes) for sizes in _steps_sizes(case)])
        given.append(f"loss_weight=[1.0 + index for index in range({number})]")
    given += [f"total_weight={run.total}"] if run.total else []
    given += ["scaler=scaler"] if run.scaler else []
    given += ["outputs=True"] if run.outputs else []
    call = [f"result = pipe.step({', '.join(given)})"]
    step = [
        *start, *([_CAST, call] if run.autocast else call), "told.number(step, 'loss', result.loss)",
        run.metrics and "told.number(step, 'metric', result.metrics['mean'])",
        run.outputs and "told.output(step, result.outputs)",
        run.given == "requires grad" and "told.inputs(step, whole)",
        run.scaler and "scaler.unscale_(optimizer)",
        "told.gradients(step, pipe.named_parameters())", *_after_step(case, "pipe", _piped_evaluation(case)),
    ]  # fmt: skip
    scaler = run.scaler and "scaler = penstock.LossScaler(init_scale=64.0)"
    return _side(
        case, "pipe", [*_own_schedule(case), _pipeline(case), scaler], step, ["pipe.close()"]
    )


def _piped_evaluation(case: Case) -> Lines:
    call = ["found = pipe.eval(*args, target=target, outputs=True, **kwargs)"]
    return ["args, kwargs, target = batch(step)", *([_CAST, call] if case.run.autocast else call),
            "told.number(step, 'evaluation', found.loss)",
            "told.output(f'evaluation {step}', found.outputs)"]  # fmt: skip


def _own_schedule(case: Case) -> Lines:
    if not case.run.rows:
        return []
    placement = (
        f"penstock.schedule.Placement({tuple(case.run.placement)}), {case.run.microbatches[0]},"
    )
    return [
        "schedule = penstock.schedule.Schedule(",
        [f"'own', {placement}", "tuple(tuple(map(penstock.schedule.parse_action, row.split())) for row in [",
         [f"{row!r}," for row in case.run.rows], "]),"],
        ")",
    ]  # fmt: skip


def _pipeline(case: Case) -> str:
    run = case.run
    stages, weight = _stages(case), loss_weight(case)
    words = [
        "model", "schedule=schedule" if run.rows else f"schedule={run.schedule!r}",
        not run.gloo and f"ranks={run.ranks}",
        f"microbatches={run.microbatches[0]}", f"loss_fn={loss_fn(case)}", stages and f"stages={stages}",
        run.reduction != "mean" and f"reduction={run.reduction!r}", weight and f"loss_weight={weight}",
        run.accumulate > 1 and f"accumulate={run.accumulate}",
        run.metrics and f"metrics=dict(mean={metric(case)})", case.draws and f"seed={_SEED}",
        run.gloo and "group=group, timeout=60.0",
    ]  # fmt: skip
    return f"pipe = penstock.Pipeline({', '.join(word for word in words if word)})"


def _stages(case: Case) -> str:
    run, names = case.run, [f"m{line.number}" for line in case.model.lines if line.is_module]
    starts = [f"m{number}" for number in run.points]
    if run.cut in ("calls", "traced"):
        words = f"how={run.cut!r}, example=next(iter(parts(batch(0), {_steps_sizes(case)[0]})))[:2]"
        words += f", balance={run.balance!r}" if run.balance else ""
        return f"penstock.partition.partition(model, {run.stages}, {words})"
    if run.cut == "points":
        return repr(starts)
    if run.cut == "lists":
        cuts = [0, *(names.index(name) for name in starts), len(names)]
        return repr([names[a:b] for a, b in pairwise(cuts)])
    return "" if run.stages == run.ranks and run.schedule not in SEVERAL else str(run.stages)


# ---- its model, its data and its loss


Lines = Sequence[Any]
"""Lines of a program: texts, lists of lines to indent, and empty values, which are left out."""
_WORD = re.compile(r"\{(\w+)\}")


def laid_out(lines: Lines) -> str:
    """The text of lines."""
    parts = (
        indent(laid_out(one), "    ") if isinstance(one, list) else one for one in lines if one
    )
    return "\n".join(part for part in parts if part)


def filled(text: str, words: dict[str, str]) -> str:
    """A template with its words filled in, which may be templates too."""
    while _WORD.search(text):
        text = _WORD.sub(lambda found: words[found[1]], text)
    return text.strip("\n")


def expression(path: str, of: str = "model") -> str:
    """``m3.0.m4`` as Python writes it: ``model.m3[0].m4``."""
    return re.sub(r"\.(\d+)", r"[\1]", f"{of}.{path}")


def classes(case: Case) -> list[str]:
    """The classes of a case: its blocks, inner ones first, and its model unless that is a Sequential."""
    found = [
        _class(case, f"Block{line.number}", line.body, line)
        for line in _blocks(case.model)
        if line.body
    ]
    return found if case.sequential else [*found, _class(case, "Model", case.model)]


def make(case: Case) -> str:
    """The function that makes the model, with its hooks."""
    model: Lines = ["model = Model()"]
    if case.sequential:
        rows = [
            f"m{line.number}={_init(case, case.model, line).split('=', 1)[1].strip()},"
            for line in case.model.lines
        ]
        model = ["model = nn.Sequential(collections.OrderedDict(", rows, "))"]
    hooks = [
        filled(HOOKS[hook.what], {"p": expression(hook.path), "q": f"{hook.what} {number}"})
        for number, hook in enumerate(case.hooks)
    ]
    return laid_out(["def make():", ["torch.manual_seed(1)", *model, *hooks, "return model"]])


def _blocks(body: Body) -> Iterable[Line]:
    for line in body.lines:
        if line.body is not None:
            yield from _blocks(line.body)
            yield line


def _class(case: Case, name: str, body: Body, block: Line | None = None) -> str:
    names = ", ".join(body.takes)
    call = list(BLOCKS)[block.choices["call"]] if block else ""
    reentrant = {"inside of itself": "False", "reentrant inside": "True"}.get(call)
    makes = [_init(case, body, line) for line in body.lines] + (
        [] if block else list(map(_tie, case.ties))
    )
    lines = [*(_line(case, body, line) for line in body.lines), f"return {_given(body)}"]
    again = f"return checkpoint(self.run, {names}, use_reentrant={reentrant})"
    parts = [
        ["def __init__(self):", ["super().__init__()", *makes]] if any(makes) else [],
        [f"def {'run' if reentrant else 'forward'}(self, {names}):", lines],
        [f"def forward(self, {names}):", [again]] if reentrant else [],
    ]  # fmt: skip
    return f"class {name}(nn.Module):\n" + indent(
        "\n\n".join(laid_out(part) for part in parts if part), "    "
    )


def _given(body: Body) -> str:
    if body.form == "one":
        return body.gives[0]
    by_name = ", ".join(f"{name}={value}" for name, value in zip("ab", body.gives, strict=True))
    listed = ", ".join(body.gives)
    return {"tuple": f"({listed})", "dict": f"dict({by_name})", "Pair": f"Pair({listed})"}[
        body.form
    ]


def _tie(tie: At) -> str:
    end = ".weight" if tie.what == "weight" else ""
    return f"{expression(tie.path, 'self')}{end} = {expression(tie.other, 'self')}{end}"


# ---- a line


def _first(body: Body, line: Line) -> Line:
    """The line whose module a line calls, most often itself."""
    return (
        line if line.again is None else next(one for one in body.lines if one.number == line.again)
    )


def _words(case: Case, body: Body, line: Line) -> dict[str, str]:
    first = _first(body, line)
    words = {
        "m": f"self.m{first.number}", "n": str(line.number), "out": f"h{line.number}",
        "other": _other(body, line),
        "D": str(case.width), "T": str(case.length), "half": str(case.width // 2), "classes": str(CLASSES),
        "args": ", ".join(line.takes), **{str(i): name for i, name in enumerate(line.takes)},
    }  # fmt: skip
    if first.body is not None:
        words["named"] = ", ".join(
            f"{a}={v}" for a, v in zip(first.body.takes, line.takes, strict=True)
        )
        return words
    return words | {
        n: str(values[first.choices.get(n, 0)]) for n, values in OPS[first.op].choices.items()
    }


def _other(body: Body, line: Line) -> str:
    """The nearest square weight of an earlier line, or else the line's own module."""
    found = f"self.m{line.number}"
    for one in body.lines[: body.lines.index(line)]:
        square = OPS[one.op].square if one.op in OPS else ""
        found = {"module": f"self.m{one.number}.weight", "weight": f"self.m{one.number}"}.get(
            square, found
        )
    return found


def _init(case: Case, body: Body, line: Line) -> str:
    """The statement that makes the module or weight of a line."""
    if line.body is not None:
        made = f"Block{line.number}()"
        made = f"nn.ModuleList([{made} for _ in range({line.copies})])" if line.copies > 1 else made
    elif line.again is not None or not OPS[line.op].make:
        return ""
    else:
        made = filled("{make}", _words(case, body, line))
    return made if made.startswith("self.") else f"self.m{line.number} = {made}"


def _line(case: Case, body: Body, line: Line) -> str:
    words, block, out = _words(case, body, line), _first(body, line), f"h{line.number}"
    if block.body is not None:
        return _call(block, line, words)
    code = filled("{code}", words)
    return code if re.search(rf"\b{out}b? =|^{out}\b", code, re.MULTILINE) else f"{out} = {code}"


def _call(block: Line, line: Line, words: dict[str, str]) -> str:
    """The call of a block, or the loop over its copies or calls."""
    code, out = list(BLOCKS.values())[block.choices["call"]], f"h{line.number}"
    if block.copies == block.times == 1:
        return filled(code, words)
    words["args"] = ", ".join([out, *line.takes[1:]])
    words["named"] = words["named"].replace(f"={line.takes[0]}", f"={out}", 1)
    loop = f"for _ in range({block.times}):"
    if block.copies > 1:
        loop, words["m"] = f"for layer in {words['m']}:", "layer"
    return laid_out([f"{out} = {line.takes[0]}", loop, [filled(code, words)]])


# ---- the data and the loss


def _tensor(kind: str, case: Case, size: str) -> str:
    length, given = "length" if case.run.lengths else str(case.length), case.run.given
    one = f"torch.randn({size}, {length}, {case.width})"
    mapping = "collections.UserDict" if given == "mapping" else "dict"
    text = {
        "V": f"torch.randn({size}, {case.width})",
        "S": one,
        "I": f"torch.randn({size}, 2, {length}, {case.width})",
        "K": f"torch.randint(0, {CLASSES}, ({size}, {length}))",
        "N": f"torch.randint(0, {CLASSES}, ({size},))",
        "Q": f"torch.arange({length}) <= torch.randint(0, {length}, ({size}, 1))",
        "i": "2",
        "o": "None",
        "t": f"({one}, {one})",
        "d": f"{mapping}(a={one}, b={one})",
        "c": f"Pair({one}, {one})",
    }[kind]
    if kind in "VSI" and given == "requires grad":
        return f"{text}.requires_grad_()"
    return f"torch.cat([{text}, {text}])[:{size}]" if kind in "VSI" and given == "views" else text


def batch(case: Case) -> str:
    """The function that makes the batch of a step."""
    run, takes = case.run, case.model.takes
    size = str(run.batches[0]) if len(set(run.batches)) == 1 else "size"
    made = {name: _tensor(kind, case, size) for name, kind in takes.items()}
    target = f"target = {_target(case, size)}"
    before: Lines = [target]
    if run.given == "alias":
        before = [f"x0 = {made['x0']}", target]
        made |= {name: "x0" for name, kind in takes.items() if kind == takes["x0"]}
    cut = len(made) - run.by_name
    args = "".join(f"{text}, " for text in list(made.values())[:cut]).strip()
    kwargs = ", ".join(f"{name}={text}" for name, text in list(made.items())[cut:])
    return laid_out(["def batch(step):", [
        "torch.manual_seed(100 + step)", size == "size" and f"size = {run.batches}[step]",
        run.lengths and f"length = {run.lengths}[step]", *before, f"return ({args}), dict({kwargs}), target",
    ]])  # fmt: skip


def _target(case: Case, size: str) -> str:
    kind = case.model.kinds()[case.model.gives[0]]
    length = "length" if case.run.lengths else str(case.length)
    rows = {"V": size, "S": f"{size}, {length}", "I": f"{size}, 2, {length}"}[kind]
    if case.run.loss == "no target":
        return "None"
    if case.run.loss != "cross entropy":
        return f"torch.randn({rows}, {case.width})"
    found = f"torch.randint(0, {CLASSES}, ({rows},))"
    return found if kind == "V" else f"{found}.index_fill(-1, torch.tensor([1]), -100)"


def outputs(case: Case) -> list[str]:
    """Expressions for the tensors of the model's output."""
    several = {"tuple": ["[0]", "[1]"], "dict": ["['a']", "['b']"], "Pair": [".first", ".second"]}
    ends = {"one": [""], **several}
    return [f"output{end}" for end in ends[case.model.form]]


def loss(case: Case) -> str:
    """The loss function, or a function that makes it if it uses weights of the model."""
    run, (first, *others) = case.run, outputs(case)
    fold = f"reduction={run.reduction!r}"
    terms = [{
        "mse": f"F.mse_loss({first}, target, {fold})",
        "smooth l1": f"F.smooth_l1_loss({first}, target, beta=0.5, {fold})",
        "cross entropy": f"F.cross_entropy({first}.flatten(0, -2), target.flatten(), {fold})",
        "no target": f"{first}.square().{run.reduction}()",
    }[run.loss], *(f"{other}.square().{run.reduction}()" for other in others)]  # fmt: skip
    how, _, path = run.uses.partition(" ")
    weight = expression(path) + ".weight"
    terms += {
        "norm": [f"0.1 * {weight}.norm()"],
        "linear": [f"F.linear({first}, {weight}).{run.reduction}()"],
    }.get(how, [])
    lines = ["def loss_fn(output, target):", [f"return {' + '.join(terms)}"]]
    return laid_out(["def loss_of(model):", [*lines, "return loss_fn"]] if run.uses else lines)


def loss_fn(case: Case, model: str = "model") -> str:
    """The expression of the loss function."""
    return f"loss_of({model})" if case.run.uses else "loss_fn"


def loss_weight(case: Case) -> str:
    """The Pipeline's ``loss_weight``."""
    of_target = {"cross entropy": "(target != -100).sum()", "no target": "2.0"}
    return {
        "target": f"lambda target: {of_target.get(case.run.loss, 'target.abs().sum()')}",
        "number": "2.5",
    }.get(case.run.weight, "")


def metric(case: Case) -> str:
    """The expression of the metric."""
    return f"lambda output, target: {outputs(case)[0]}.mean()"
