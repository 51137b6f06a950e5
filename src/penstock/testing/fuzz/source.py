"""A case as the Python program that both sides run; here its model, its data and its loss."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from textwrap import indent
from typing import Any

from penstock.testing.fuzz.cases import BLOCKS, CLASSES, HOOKS, OPS, At, Body, Case, Line

Lines = Sequence[Any]
"""Lines of a program: texts, lists of lines that are indented, and what is empty and left out."""
_WORD = re.compile(r"\{(\w+)\}")


def laid_out(lines: Lines) -> str:
    """The text of lines."""
    parts = (
        indent(laid_out(one), "    ") if isinstance(one, list) else one for one in lines if one
    )
    return "\n".join(part for part in parts if part)


def filled(text: str, words: dict[str, str]) -> str:
    """A template with its words put in, which may be templates too."""
    while _WORD.search(text):
        text = _WORD.sub(lambda found: words[found[1]], text)
    return text.strip("\n")


def expression(path: str, of: str = "model") -> str:
    """``m3.0.m4`` as Python writes it: ``model.m3[0].m4``."""
    return re.sub(r"\.(\d+)", r"[\1]", f"{of}.{path}")


def classes(case: Case) -> list[str]:
    """The classes of a case: its blocks, the inner ones first, and its model if it has one of its own."""
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
    return {
        "tuple": f"({', '.join(body.gives)})",
        "dict": f"dict({by_name})",
        "Pair": f"Pair({', '.join(body.gives)})",
    }[body.form]


def _tie(tie: At) -> str:
    end = ".weight" if tie.what == "weight" else ""
    return f"{expression(tie.path, 'self')}{end} = {expression(tie.other, 'self')}{end}"


# ---- a line


def _first(body: Body, line: Line) -> Line:
    """The line whose module a line calls: mostly its own."""
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
    """The nearest weight of an earlier line, else its own."""
    found = f"self.m{line.number}"
    for one in body.lines[: body.lines.index(line)]:
        square = OPS[one.op].square if one.op in OPS else ""
        found = {"module": f"self.m{one.number}.weight", "weight": f"self.m{one.number}"}.get(
            square, found
        )
    return found


def _init(case: Case, body: Body, line: Line) -> str:
    """What makes the module or weight of a line."""
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
    """The tensors that the model gives."""
    ends = {
        "one": [""],
        "tuple": ["[0]", "[1]"],
        "dict": ["['a']", "['b']"],
        "Pair": [".first", ".second"],
    }
    return [f"output{end}" for end in ends[case.model.form]]


def loss(case: Case) -> str:
    """The loss function, or what makes it where it uses weights of the model."""
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
    """What is measured beside the loss."""
    return f"lambda output, target: {outputs(case)[0]}.mean()"
