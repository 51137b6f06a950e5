"""Load a checkpoint: all compare it with what they have, before each reads what it needs."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from penstock._engine.transport import Job
from penstock._engine.weights.states import LoadResult, Offer
from penstock._engine.weights.telling import distinct
from penstock._engine.weights.trees import decode
from penstock.checkpoint.contents import (
    OPTIMIZER,
    RANDOMNESS,
    STATE,
    WEIGHTS,
    Fit,
    Labelled,
    OptimizerState,
    Targets,
)
from penstock.checkpoint.folder import find
from penstock.checkpoint.table import CheckpointTable
from penstock.errors import (
    CheckpointError,
    InputFileError,
    PenstockError,
    StateDictError,
    UsageError,
    listed,
    shortened,
)

log = logging.getLogger("penstock")

# ---- choose a checkpoint


class Choosing:
    """Chooses a checkpoint that is whole; the processes share the work of looking.

    Args:
        folder: the folder of checkpoints.
        step: the step to load; None for the checkpoint that was written last.
        older: whether to take an older one if the newest is damaged.

    Attributes:
        skipped: why newer checkpoints were not taken.
    """

    def __init__(self, folder: Path, step: int | None, *, older: bool) -> None:
        self._folder, self._step, self._older = folder, step, older
        self.skipped: list[str] = []

    def choose(self, job: Job) -> CheckpointTable | None:
        """The table of the checkpoint, or None if there is none; all processes call this."""
        group = job.together
        listed_ones = job.meet(lambda: None, lambda _: self._candidates(), "load")
        for place, (name, step) in enumerate(listed_ones):
            tables: list[CheckpointTable] = []
            look = partial(self._look, name, slice(group.rank, None, group.size), tables)
            if not (damage := job.meet(look, self._judge, "load")):
                if self.skipped and not group.rank:
                    log.warning(
                        "%s: resumes from step %d, not from the newest, step %d: %s",
                        self._folder, step, listed_ones[0][1], "; ".join(self.skipped),
                    )  # fmt: skip
                return tables[0]
            self._pass_over(damage, [one for _, one in listed_ones[place + 1 :]])
        return None

    def _candidates(self) -> list[Any]:
        """The names and steps of checkpoints, in the order in which they are tried."""
        there = find(self._folder)
        chosen = [one for one in there if self._step in (None, one.step)]
        if self._step is not None and not chosen:
            steps = ", ".join(str(one.step) for one in there)
            raise UsageError(
                f"step={self._step}: {self._folder} has no checkpoint of it; it has those of steps "
                f"{steps or 'none'}"
            )
        return [[one.path.name, one.step] for one in chosen]

    def _look(self, name: str, share: slice, tables: list[CheckpointTable]) -> list[str]:
        """Read a table, and compare a share of its files with it; return its save, and the damage."""
        try:
            tables.append(CheckpointTable(self._folder / name))
            tables[0].check_files(share)
        except InputFileError as error:
            text = str(error)
            return ["", text if name in text else f"{self._folder / name}: {text}"]
        return [tables[0].save, ""]

    def _judge(self, seen: list[Any]) -> str:
        damage = "; ".join(dict.fromkeys(text for _, text in seen if text))
        if not damage and len({save for save, _ in seen}) > 1:
            raise CheckpointError(
                f"the hosts see different checkpoints in {self._folder.absolute()}; it must lie where all "
                "processes see the same files"
            )
        return damage

    def _pass_over(self, damage: str, others: Sequence[int]) -> None:
        self.skipped.append(damage)
        if self._older and others:
            return
        if self._older:
            raise InputFileError(
                f"no checkpoint in {self._folder} is whole: {'; '.join(self.skipped)}"
            )
        if self._step is not None:
            raise InputFileError(damage)
        hint = ", and there is no other checkpoint"
        if others:
            hint = (
                f". The one before it is of step {others[0]}: load(step={others[0]}) takes that, and "
                'resume="auto" the newest one that is whole'
            )
        raise InputFileError(f"{damage}; nothing was loaded{hint}")


# ---- compare it, read it, and fill the targets


class Loading:
    """A checkpoint, and the objects to load it into.

    Args:
        table: the checkpoint's table.
        targets: the objects that the user passed.

    Attributes:
        step: the checkpoint's step.
        extra: the user's JSON data.
    """

    def __init__(self, table: CheckpointTable, targets: Targets) -> None:
        self._table, self._targets = table, targets
        self._matched: list[Labelled] = []
        self.step = table.step
        self.extra = decode(table.contents.extra)

    def match(self) -> Offer:
        """Compare the checkpoint with what this process has."""
        fit, saved = Fit(), self._table.contents
        with self._reading():
            for one in self._targets.all:
                kind = saved.kinds.get(one.label)
                if kind == one.kind or (one.kind == OPTIMIZER and one.label in saved.groups):
                    self._matched.append(one)
                    one.match(self._table, fit)
                elif kind is not None or one.label != RANDOMNESS:
                    there = ", ".join(f"{label}=" for label in saved.kinds)
                    what = (
                        f"is {one.kind}, {shortened(kind)} was saved" if kind else "was not saved"
                    )
                    fit.loose.append(f"{one.label}= {what}; there are {there}")
        named = {one.label for one in self._matched if one.kind != STATE}
        asked = sorted(name for name in self._table.names if name.partition("/")[0] in named)
        labels = [[one.label, one.kind] for one in self._targets.all]
        problems = {"hard": fit.hard, "missing": fit.missing, "loose": fit.loose}
        return Offer(sorted(fit.used), asked, problems, labels)

    def check(
        self, strict: bool, result: LoadResult, problems: Mapping[str, list[str]], parts: Any
    ) -> None:
        """In the leader: check how the checkpoint fits all processes; one error lists every mismatch."""
        path, (missing, unexpected) = self._table.path, result
        lines, loose = list(problems["hard"]), list(problems["loose"])
        loose += [f"missing in it: {listed(missing)}"] if missing else []
        loose += [f"in it, but not here: {listed(unexpected)}"] if unexpected else []
        if strict:
            lines += loose
        elif loose:
            log.warning("%s fits in part:\n\t%s", path, "\n\t".join(loose))
        if lines:
            asked = set[str]().union(*distinct(parts, "loaded"))
            fits = "is of another model" if asked == {*unexpected} != set() else "does not fit"
            hint = "; strict=False loads what fits of it" if strict else ""
            raise StateDictError(
                f"{path} {fits}, and nothing was loaded{hint}:\n\t" + "\n\t".join(lines)
            )
        given = dict(row for rows in distinct(parts, "about") for row in rows)
        left = [label for label in self._table.contents.kinds if label not in {*given, RANDOMNESS}]
        # Who loads weights alone does not go on with the run.
        goes_on = any(kind != WEIGHTS for label, kind in given.items() if label != RANDOMNESS)
        if left and goes_on:
            log.warning("%s also holds %s, which load() was not given", path, ", ".join(left))

    @torch.no_grad()
    def read(self) -> None:
        """Read all but the weights into new memory, and look for these; nothing is changed."""
        with self._reading():
            for one in self._matched:
                one.read(self._table)

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """A context in which the checkpoint is read, and nothing is changed."""
        try:
            yield
        except InputFileError as error:
            raise InputFileError(
                f"{self._table.path} is damaged, and nothing was loaded: {error}"
            ) from error

    @torch.no_grad()
    def fill(self) -> None:
        """Fill all targets, the weights last."""
        order = STATE, OPTIMIZER, WEIGHTS
        for one in sorted(self._matched, key=lambda one: order.index(one.kind)):
            try:
                one.fill(self._table)
            except PenstockError:
                raise
            except Exception as error:
                if one.kind == WEIGHTS:
                    raise
                text = f"{type(error).__name__}: {error}".split("\n")[0][:300]
                raise StateDictError(
                    f"{self._table.path}: what was saved is not taken, and no weights were loaded ({text})"
                ) from error
        pipe = self._targets.pipe
        if pipe is None:
            return
        for one in self._targets.all:
            if isinstance(one, OptimizerState):
                pipe.weights.was_loaded(one.optimizer)
        if RANDOMNESS not in self._table.contents.kinds:
            # A plain loop, for example, saves none.
            text = "%s holds no seed and step of random numbers: the next step is taken to be number %d"
            log.warning(text, self._table.path, self.step)
            pipe.randomness.load_state_dict({"seed": pipe.randomness.seed, "step": self.step})
