"""A case as the Python program that both sides run: a plain loop, and a Pipeline.

The plain loop is spelled out in the program, with what the case needs and no more. It takes from Penstock
only what a user's plain loop would: the random numbers, and the losses that a model adds.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from penstock.testing.fuzz.cases import EVENTS, OPS, PRELUDES, SEVERAL, WEIGHT_EVENTS, Case
from penstock.testing.fuzz.source import (
    Lines,
    batch,
    classes,
    expression,
    filled,
    laid_out,
    loss,
    loss_fn,
    loss_weight,
    make,
    metric,
)

_SEED = 17
_CAST = "with torch.autocast('cpu', torch.bfloat16):"
_NOTE = """seen = []


def note(name, *values):
    seen.append((name, [found.detach().sum() for found in tensors(values)]))"""
_OPTIMIZERS = {
    "SGD": "SGD({}, lr=0.1)",
    "momentum": "SGD({}, lr=0.1, momentum=0.9, weight_decay=0.1)",
    # A large eps: noise around a gradient of zero must not become a step.
    "AdamW": "AdamW({}, lr=0.05, eps=0.1, weight_decay=0.1)",
}


def program(case: Case) -> str:
    """The program of a case: its ``plain()`` and ``piped()`` give what is compared."""
    parts = [
        *classes(case),
        make(case),
        batch(case),
        loss(case),
        _change(case),
        _plain(case),
        _piped(case),
    ]
    body = "\n\n\n".join(filter(None, parts))
    notes = _NOTE if re.search(r"\bnote\(", body) else ""
    used = [text for name, text in PRELUDES.items() if re.search(rf"(?<![.\w]){name}\b", body)]
    imports = [text for text in used if "\n" not in text]
    above = [notes, *(text.strip("\n") for text in used if "\n" in text)]
    imports += (
        ["from dataclasses import dataclass"] if any("@dataclass" in text for text in above) else []
    )
    ours = [name for name in ("Told", "merged", "parts", "tensors") if f"{name}(" in body + notes]
    head = [
        *sorted(imports), "\nimport torch", "from torch import nn", "from torch.nn import functional as F",
        "\nimport penstock", f"from penstock.testing.fuzz import {', '.join(sorted(['check', *ours]))}",
        f"\ntorch.set_default_dtype(torch.{case.run.dtype})",
    ]  # fmt: skip
    end = f'if __name__ == "__main__":{_hint(case)}\n    check(plain(), piped(), {tolerance(case)!r})\n'
    return "\n\n\n".join(["\n".join(head).strip(), *filter(None, above), body, end])


def tolerance(case: Case) -> float:
    """By how much two sides may differ: sums are taken in another order."""
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
    """A value of each step, as an expression."""
    return repr(values[0]) if all(value == values[0] for value in values) else f"{values!r}[step]"


def _steps_sizes(case: Case) -> list[list[int]]:
    return [_sizes(b, m) for b, m in zip(case.run.batches, case.run.microbatches, strict=True)]


# ---- what both sides do


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
        *(
            [f"if step in {case.run.load}:", [f"{owner}.load_state_dict(make().state_dict())"]]
            if case.run.load
            else []
        ),
        *([f"if step in {anew}:", [_optimizer(case, owner)]] if anew else []),
        *([f"if step in {case.run.twin}:", twin] if case.run.twin else []),
    ]


def _after_step(case: Case, owner: str, evaluation: Lines) -> Lines:
    run = case.run
    norm = {
        "model": "torch.nn.utils.clip_grad_norm_(model.parameters(), ",
        "pipe": "pipe.clip_grad_norm_(",
    }[owner]
    scaled = run.scaler and owner == "pipe"
    ending: list[Any] = [
        run.clip and f"told.number(step, 'norm', {norm}{run.clip}))",
        *(["scaler.step(optimizer)", "scaler.update()"] if scaled else ["optimizer.step()"]),
        "optimizer.zero_grad()",
    ]
    if run.accumulate > 1:
        ending = [f"if step % {run.accumulate} == {run.accumulate - 1}:", ending]
    return [*([f"if step in {run.evaluate}:", list(evaluation)] if run.evaluate else []), *ending]


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
        call = [
            f"with penstock.randomness(model, seed={_SEED}, step=step, microbatch=index):",
            call,
        ]
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
    """Lines that give the output and the loss of a microbatch."""
    lines: Lines = ["output = model(*args, **kwargs)", f"loss = {loss_fn(case)}(output, target)"]
    if any("penstock.add_loss" in text for text in classes(case)):
        lines = [
            "with penstock.collect_losses() as losses:",
            lines[:1],
            f"{lines[1]} + losses.total()",
        ]
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
    """Lines that say by what the loss of each microbatch counts in that of the batch."""
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
    """By what else the loss is multiplied for the gradients."""
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
    given += [
        text for text in ("scaler=scaler", "outputs=True") if getattr(run, text.split("=")[0])
    ]
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
