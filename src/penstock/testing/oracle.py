"""The oracle: a pipeline computes what the plain model computes in a loop over the same microbatches.

A :class:`Case` is a model as a user writes it, with a batch and a loss::

    def test_my_model():
        case = Case(MyModel().double(), (tokens,), target, token_loss)
        compare(case, schedule="ZB-V", ranks=2, microbatches=4).check(1e-12)

:func:`compare` makes the pipeline, and :func:`judge` takes one that you have made, in one process or in each
of several.
"""

from __future__ import annotations

import copy
import hashlib
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from os import PathLike
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock._engine.microbatches import Microbatches, RulesGiven, read_rules, split_batch
from penstock._engine.parallel import whole
from penstock._engine.runtime import (
    ActionEvent,
    Loss,
    LossFunction,
    StepLoss,
    StepResult,
    collect_losses,
)
from penstock._engine.values import flatten, map_tensors, named_leaves, tensors_in, unflatten
from penstock.errors import PeerFailed, UsageError
from penstock.partition import randomness
from penstock.pipeline import Pipeline
from penstock.pipeline.plan import Stages
from penstock.schedule import Schedule
from penstock.schedule.action import microbatch_of

SEED = 11
"""The seed of the random numbers, in the pipeline and in a plain loop over microbatches."""
LIMIT = 0.1
"""The norm to which gradients are clipped before an optimizer step."""
MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


class Refusal(NamedTuple):
    """The error by which a case is refused, and a regular expression that its message holds."""

    error: type[Exception]
    gist: str = ""


@dataclass(frozen=True)
class Case:
    """A model as a user writes it, a batch and a loss.

    Args:
        model: the model, which is copied and not changed.
        args: its positional arguments; or :class:`penstock.Microbatches`. They are copied.
        target: the target of the loss; for microbatches a list.
        loss_fn: ``(output, target) -> scalar``, or a :class:`penstock.Loss`.
        kwargs: the model's arguments by name.
        split: how arguments are split.
        counts: numbers that the model counts, such as calls of its hooks; several processes add up theirs.
        example_of: what it is an example of.
        evaluates: whether it can be evaluated too.
        refused: how a step of it is refused; None if it is computed right.
    """

    model: nn.Module
    args: Sequence[Any]
    target: Any
    loss_fn: LossFunction | Loss
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    split: RulesGiven | None = None
    counts: Callable[[Any], Mapping[str, float]] | None = None
    example_of: str = ""
    evaluates: bool = True
    refused: Refusal | None = None

    @property
    def loss(self) -> Loss:
        """The loss, which reports values that are not finite in place of stopping."""
        loss = self.loss_fn if isinstance(self.loss_fn, Loss) else Loss(self.loss_fn)
        return replace(loss, nonfinite="warn")

    def call(self) -> tuple[Sequence[Any], dict[str, Any], Any]:
        """A copy of the arguments and of the target, which a model may change in place."""
        args, kwargs, target = copy.deepcopy((self.args, dict(self.kwargs), self.target))
        return args, kwargs, target

    @property
    def is_split(self) -> bool:
        """Whether its batch is given as microbatches."""
        return bool(self.args) and isinstance(self.args[0], Microbatches)


@dataclass(frozen=True)
class Verdict:
    """What the pipeline computed, and what it should have computed.

    The names are such as ``"loss"``, ``"losses: main"``, ``"metrics: accuracy"``, ``"gradient: 0.weight"``,
    ``"gradient of the argument 0"``, ``"buffer: 1.running_mean"``, ``"output 3['logits']"`` of microbatch 3,
    ``"count: calls"``, ``"random numbers"`` (whether torch's generator was left alone), and
    ``"evaluation: loss"``.

    Attributes:
        actual: what the pipeline computed in this process, by name.
        expected: what the plain model computes in a loop over the same microbatches.
        whole: what it computes for the batch at once, where that is the same: the loss is checked to be
            over samples, and the model draws no random numbers, changes no buffers and adds no losses.
        refused: how the case should be refused, if it should.
        refusal: the error that did.
    """

    actual: Mapping[str, Any]
    expected: Mapping[str, Any]
    whole: Mapping[str, Any] = field(default_factory=dict)
    refused: Refusal | None = None
    refusal: Exception | None = None

    @property
    def loss(self) -> float:
        """The pipeline's loss."""
        return float(self.actual["loss"])

    @property
    def gradients(self) -> dict[str, Tensor | None]:
        """The gradients of the parameters in this process, by their names."""
        return _gradients(self.actual)

    @property
    def expected_gradients(self) -> dict[str, Tensor | None]:
        """The gradients of the same parameters in the plain loop."""
        return _gradients(self.expected)

    def differences(self) -> dict[str, float]:
        """The largest difference of each value, relative to its largest number if that is above 1."""
        names = [*self.expected, *(name for name in self.actual if name not in self.expected)]
        return {
            **{n: _gap(self.actual.get(n, _ABSENT), self.expected.get(n, _ABSENT)) for n in names},
            **{f"{n}, whole batch": _gap(self.actual[n], v) for n, v in self.whole.items()},
        }

    def check(self, tolerance: float) -> None:
        """Check that nothing differs by more than the tolerance, or that the refusal is the expected one.

        Raises:
            AssertionError: the message lists all that differs.
        """
        if self.refused is not None:
            error, gist = self.refused
            if self.refusal is None:
                raise AssertionError(f"was not refused by {error.__name__}: {gist}")
            if not re.search(gist, str(self.refusal)):
                raise AssertionError(f"{gist!r} does not match: {self.refusal}")
        wrong = {name: gap for name, gap in self.differences().items() if not gap <= tolerance}
        if wrong:
            raise AssertionError(
                f"differs from the unsplit model by more than {tolerance}: {wrong}"
            )

    def digest(self) -> dict[str, str]:
        """A text for the loss and for each gradient; two texts are equal exactly if all bits are."""
        prints = {name: _fingerprint(grad) for name, grad in self.gradients.items()}
        return {"loss": self.loss.hex(), **prints}


# ---- running a case


def compare(  # noqa: PLR0913 - what a user of Pipeline chooses, by name
    case: Case,
    *,
    schedule: str | PathLike[str] | Schedule,
    microbatches: int | None = None,
    ranks: int | None = None,
    stages: Stages = None,
    recompute: bool | Sequence[str] = False,
    mesh: Any = None,
    steps: int = 1,
    optimizer: MakeOptimizer | None = None,
    evaluate: bool = True,
) -> Verdict:
    """Run a case through a pipeline and through a plain loop.

    Args:
        case: the case to run.
        schedule: as for :class:`penstock.Pipeline`, like the next four.
        microbatches: the number of microbatches.
        ranks: the number of ranks.
        stages: how the model is cut.
        recompute: what backward computes again.
        mesh: as for the Pipeline; each process calls this, and gets a verdict on its own stages.
        steps: how many steps to run, as for :func:`judge`.
        optimizer: makes the optimizer that trains between the steps.
        evaluate: whether to compare an evaluation too.
    """
    with _expecting(case.refused) as refusals:
        pipe = Pipeline(
            copy.deepcopy(case.model),
            schedule=schedule,
            ranks=ranks,
            microbatches=microbatches,
            stages=stages,
            recompute=recompute,
            loss_fn=case.loss,
            split=case.split,
            mesh=mesh,
            seed=SEED,
        )
        with pipe:
            return judge(case, pipe, steps=steps, optimizer=optimizer, evaluate=evaluate)
    return Verdict({}, {}, {}, case.refused, *refusals)


def judge(
    case: Case | Sequence[Case],
    pipe: Pipeline,
    *,
    steps: int = 1,
    optimizer: MakeOptimizer | None = None,
    evaluate: bool = True,
) -> Verdict:
    """Run a case through a pipeline that you have made, and through a plain loop.

    The loop draws the random numbers of the pipeline.

    Args:
        case: the case to run; for replicas a list with one for each, which differ in their batches.
        pipe: the pipeline, without gradients, that cuts a copy of the case's model and has its loss.
            Each of its processes calls this, and gets a verdict on its own stages.
        steps: how many steps to run; the verdict is on the last one.
        optimizer: makes the optimizer that trains between the steps, with clipped gradients. Without it,
            gradients add up.
        evaluate: whether to compare an evaluation after the steps too, unless the model draws random numbers
            in it.

    Raises:
        UsageError: the case's model has other parameters than the pipeline.
    """
    cases, mine = [case] if isinstance(case, Case) else [*case], pipe.replicas.index
    case, seed, first = cases[mine], pipe.randomness.seed, pipe.randomness.step
    with _expecting(case.refused) as refusals:
        actual = _trained(pipe, case, steps, optimizer)
    if case.refused is not None:
        return Verdict({}, {}, {}, case.refused, *refusals)
    evaluate = evaluate and case.evaluates
    evaluation = _piped(pipe, case, pipe.evaluate) if evaluate else {}
    # The pipeline knows its units when it is cut, as its first step does.
    draws: Any = _no_draws if seed == "off" else _RandomNumbers(seed, first, pipe.units)
    plain = _Plain(cases, mine, pipe.schedule.microbatches, draws, optimizer)
    expected = plain.train(steps)
    unknown = sorted(_gradients(actual).keys() - _gradients(expected).keys())
    if unknown:
        raise UsageError(
            f"the case's model has no parameter {', '.join(unknown)}; let the pipeline cut a copy of it"
        )
    if evaluate and (evaluated := plain.evaluate()) is not None:
        actual |= {f"evaluation: {name}": value for name, value in evaluation.items()}
        expected |= {f"evaluation: {name}": value for name, value in evaluated.items()}
    at_once = _Plain(cases, mine, None, _no_draws, optimizer).train_whole(steps)
    if seed == "off":
        del actual["random numbers"], expected["random numbers"]
    return Verdict(
        actual,
        {name: v for name, v in expected.items() if name in actual or not _is_local(name)},
        {name: value for name, value in at_once.items() if name in actual},
    )


@contextmanager
def _expecting(refused: Refusal | None) -> Iterator[list[Exception]]:
    """Catches the error by which a case should be refused, here or on another rank."""
    caught: list[Exception] = []
    kinds: tuple[type[Exception], ...] = (refused.error, PeerFailed) if refused else ()
    try:
        yield caught
    except kinds as error:
        caught.append(error)


def _trained(
    pipe: Pipeline, case: Case, steps: int, optimizer: MakeOptimizer | None
) -> dict[str, Any]:
    """Return what the last of some steps gives, and what they leave in this process."""
    trainer = optimizer(pipe.parameters()) if optimizer else None
    state = torch.get_rng_state()
    for step in range(steps):
        if step and trainer:
            pipe.clip_grad_norm_(LIMIT)
            _train(trainer)
        values = _piped(pipe, case, pipe.step)
    values["random numbers"] = bool(torch.equal(torch.get_rng_state(), state))
    values |= {f"gradient: {name}": p.grad for name, p in pipe.weights.here.named_parameters()}
    if pipe.model is not None:
        buffers = {name: b for name, b in pipe.model.named_buffers() if not b.is_meta}
        values |= {f"buffer: {name}": buffer for name, buffer in buffers.items()}
    if case.counts is not None:
        mine = dict(case.counts(pipe.model))
        for counts in pipe.job.meet(lambda: mine, among=pipe.job.pipeline):
            for name, count in counts.items():
                values[f"count: {name}"] = values.get(f"count: {name}", 0) + count
    return {name: _kept(value) for name, value in values.items()}


def _is_local(name: str) -> bool:
    """Tell whether only the process that has a stage has the value."""
    return name.removeprefix("evaluation: ").startswith(("gradient", "buffer", "output"))


def _piped(pipe: Pipeline, case: Case, run: Callable[..., StepResult]) -> dict[str, Any]:
    """Return what a call of the pipeline gives, with the outputs of the last stage if it is here."""
    args, kwargs, target = case.call()
    outputs: dict[int, Any] = {}

    def note(event: ActionEvent) -> None:
        if event.action.stage == pipe.schedule.stages - 1:
            output = event.outputs if pipe.model is None else event.outputs[0]
            outputs[microbatch_of(event.action) or 0] = map_tensors(output, _kept)

    with pipe.on("*F*", after=note):
        result = run(*args, target=target, **kwargs)
    return {
        "loss": result.loss,
        **{f"losses: {name}": value for name, value in result.losses.items()},
        **{f"metrics: {name}": value for name, value in result.metrics.items()},
        **_named_outputs(outputs),
        **(_of_arguments(args, kwargs) if run == pipe.step else {}),
    }


def _named_outputs(outputs: Mapping[int, Any]) -> dict[str, Any]:
    leaves = [named_leaves(outputs[index], f"output {index}") for index in sorted(outputs)]
    return {name: leaf for named in leaves for name, leaf in named}


def _of_arguments(args: Any, kwargs: Any) -> dict[str, Any]:
    """The gradients of the arguments that ask for one."""
    is_split = bool(args) and isinstance(args[0], Microbatches)
    values = (args[0].calls, {}) if is_split else (args, kwargs)
    return {
        f"gradient of the argument {place}": _kept(leaf.grad)
        for place, leaf in enumerate(tensors_in(values))
        if leaf.requires_grad and leaf.is_leaf
    }


# ---- the plain loop


def plain_loop(
    case: Case, steps: int = 1, optimizer: MakeOptimizer | None = None
) -> tuple[float, dict[str, Tensor | None]]:
    """The loss and gradients of the unsplit model, with the losses that it adds.

    The loop runs all samples at once, or microbatches one by one where the case has them.

    Args:
        case: the case to run.
        steps: the number of steps.
        optimizer: makes the optimizer that trains between the steps.
    """
    # A batch of all samples draws numbers that no microbatch would.
    draws: Any = _RandomNumbers(SEED, 0, None) if case.is_split else _no_draws
    values = _Plain([case], 0, None, draws, optimizer).train(steps)
    return values["loss"], _gradients(values)


_Draws = Callable[[nn.Module, int, int], AbstractContextManager[Any]]
"""Draws in the context what a pipeline does for a model, a step and a microbatch."""


class _RandomNumbers(NamedTuple):
    """The random numbers of a pipeline: its seed, the number of its first step, and its units."""

    seed: int
    first: int
    units: Sequence[str] | None

    def __call__(
        self, model: nn.Module, step: int, microbatch: int
    ) -> AbstractContextManager[None]:
        step += self.first
        return randomness(model, seed=self.seed, step=step, microbatch=microbatch, units=self.units)


def _no_draws(model: nn.Module, step: int, microbatch: int) -> AbstractContextManager[None]:
    return nullcontext()


class _PlainCall(NamedTuple):
    """One call of the plain loop: the number of the microbatch, its arguments, target and samples."""

    number: int
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    target: Any
    samples: int


class _Plain:
    """The unsplit model in a loop over the microbatches of all replicas.

    Args:
        cases: one for each replica.
        mine: the index of the replica whose outputs are of interest.
        microbatches: into how many each batch is split; None leaves it whole.
        draws: draws the random numbers of a microbatch.
        optimizer: makes the optimizer that trains between the steps.
    """

    def __init__(
        self,
        cases: Sequence[Case],
        mine: int,
        microbatches: int | None,
        draws: _Draws,
        optimizer: MakeOptimizer | None,
    ) -> None:
        self.cases, self.loss = cases, cases[0].loss
        self.mine, self.microbatches, self.draws = mine, microbatches, draws
        self.model = copy.deepcopy(cases[0].model)
        self._optimizer = optimizer(self.model.parameters()) if optimizer else None

    def train(self, steps: int) -> dict[str, Any]:
        for step in range(steps):
            if step and self._optimizer is not None:
                nn.utils.clip_grad_norm_(self.model.parameters(), LIMIT)
                _train(self._optimizer)
            values = self._run(step)
        values |= {f"gradient: {name}": p.grad for name, p in self.model.named_parameters()}
        values |= {f"buffer: {name}": b for name, b in self.model.named_buffers()}
        if self.cases[0].counts is not None:
            counts = self.cases[0].counts(self.model)
            values |= {f"count: {name}": count for name, count in counts.items()}
        values["random numbers"] = True
        return {name: _kept(value) for name, value in values.items()}

    def train_whole(self, steps: int) -> dict[str, Any]:
        """The loss and the gradients of whole batches; nothing where microbatches may give others."""
        whole = self.loss.check and self.loss.over != "batch"
        if not whole or self.cases[0].is_split or len(self.cases) > 1:
            return {}
        with torch.random.fork_rng():
            before = _states(self.model)
            values = self.train(steps)
            if any(
                not torch.equal(*pair) for pair in zip(before, _states(self.model), strict=True)
            ):
                return {}
        adds = {name for name in values if name.startswith("losses") and name != "losses: main"}
        return {} if adds else {n: v for n, v in values.items() if n.startswith(("loss", "grad"))}

    def evaluate(self) -> dict[str, Any] | None:
        """Return what an evaluation gives; None if it draws random numbers or changes buffers."""
        self.model.eval()
        with torch.no_grad(), torch.random.fork_rng():
            before = _states(self.model)
            values = self._run(None)
            drawn = zip(before, _states(self.model), strict=True)
            return values if all(torch.equal(*pair) for pair in drawn) else None

    def _run(self, step: int | None) -> dict[str, Any]:
        """Run each microbatch; also backward, if it is a step."""
        calls = [case.call() for case in self.cases]
        batches = [self._parts(*pair) for pair in zip(self.cases, calls, strict=True)]
        tally = _Tally(self.loss, [part for batch in batches for part in batch])
        for place, part in enumerate(tally.parts):
            draws = nullcontext() if step is None else self.draws(self.model, step, part.number)
            with draws, collect_losses() as added:
                output = self.model(*part.args, **part.kwargs)
                loss = tally.add(place, output, added.terms)
                if loss.requires_grad:
                    loss.backward(retain_graph=self.loss.over == "batch")
        if self.loss.over == "batch" and (loss := tally.add_batch()).requires_grad:
            loss.backward()
        start = sum(map(len, batches[: self.mine]))
        outputs = tally.outputs[start : start + len(batches[self.mine])]
        arguments = {} if step is None else _of_arguments(*calls[self.mine][:2])
        return tally.values() | _named_outputs(dict(enumerate(outputs))) | arguments

    def _parts(self, case: Case, call: tuple[Any, Any, Any]) -> list[_PlainCall]:
        args, kwargs, target = call
        if self.microbatches is None and not case.is_split:
            return [_PlainCall(0, args, kwargs, target, 1)]
        count = self.microbatches or 1
        batch = split_batch(args, kwargs, target, read_rules(case.split), count, fewer=True)
        targets = batch.targets or [None] * len(batch.parts or ())
        samples = batch.weights or batch.samples or [1] * len(targets)
        return [
            _PlainCall(index, part.args, part.kwargs | part.local, target, count)
            for index, (part, target, count) in enumerate(
                zip(batch.parts or (), targets, samples, strict=True)
            )
        ]


class _Tally:
    """Adds up what the parts of a batch give, each by its share."""

    def __init__(self, loss: Loss, parts: Sequence[_PlainCall]) -> None:
        self.parts, self.outputs = parts, list[Any]()
        self._loss = StepLoss.for_steps(loss)
        self._sums: defaultdict[str, float] = defaultdict(float, {"loss": 0.0, "losses: main": 0.0})
        self._metrics: dict[str, list[tuple[float, float]]] = {name: [] for name in loss.metrics}
        self._apart: list[tuple[Any, Any]] = []

    def add(self, place: int, output: Any, added: Sequence[tuple[str, Tensor, float]]) -> Tensor:
        """Note what a part gives; its share of the loss of the batch."""
        target, share = self.parts[place].target, self._share("main", place)
        self.outputs.append(map_tensors(output, _kept))
        terms = [self._term(n, value, self._share(n, place), by) for n, value, by in added]
        if self._loss.over == "batch":
            self._apart.append((output, target))
        # A part of weight 0 may have no loss: a mean over nothing is NaN.
        elif share:
            terms.append(self._term("main", self._loss.function(output, target), share))
        with torch.no_grad():
            for name, metric in self._loss.metrics.items():
                value, count = metric(output, target), self._counts("main")[place]
                pair = value if isinstance(value, tuple) else (float(value) * count, count)
                self._metrics[name].append((float(pair[0]), float(pair[1])))
        return self._sum(terms)

    def add_batch(self) -> Tensor:
        """The loss of all outputs together."""
        output, target = map(_joined, zip(*self._apart, strict=True))
        return self._sum([self._term("main", self._loss.function(output, target), 1.0)])

    def values(self) -> dict[str, float]:
        """The loss, losses and metrics by name."""
        sums = {name: [*map(sum, zip(*of, strict=True))] for name, of in self._metrics.items()}
        ratios = {f"metrics: {n}": a / b if b else float("nan") for n, (a, b) in sums.items()}
        return {**self._sums, **ratios}

    def _term(self, name: str, value: Tensor, share: float, weight: float = 1.0) -> Tensor:
        self._sums[f"losses: {name}"] += float(value.detach()) * share
        return value.reshape(()) * (weight * share)

    def _sum(self, terms: Sequence[Tensor]) -> Tensor:
        total = sum(terms[1:], terms[0]) if terms else torch.zeros((), device="cpu")
        self._sums["loss"] += float(total.detach())
        return total

    def _counts(self, name: str) -> list[float]:
        """Return how much each part counts, as the loss says."""
        samples = [part.samples or 1 for part in self.parts]
        return self._loss.counts(samples, [part.target for part in self.parts], self._main_or(name))

    def _main_or(self, name: str) -> str:
        """The loss by whose weights one counts: itself, or the main one."""
        return name if name in self._loss.weights else "main"

    def _share(self, name: str, place: int) -> float:
        """The factor of a part's loss in the loss of the batch."""
        adds_up, counts = self._loss.reduction == "sum", self._counts(name)
        if adds_up and self._loss.weights[self._main_or(name)] is None:
            return 1.0
        return (1.0 if adds_up else counts[place]) / sum(counts) if sum(counts) else 0.0


def _train(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    optimizer.zero_grad()


def _joined(values: Sequence[Any]) -> Any:
    """The outputs or targets of all parts as one."""
    leaves, (structure, *_) = zip(*map(flatten, values), strict=True)
    joined = [
        torch.cat(same) if isinstance(same[0], Tensor) and same[0].dim() else same[0]
        for same in zip(*leaves, strict=True)
    ]
    return unflatten(joined, structure)


def _states(model: nn.Module) -> list[Tensor]:
    """Return what says whether a model has drawn random numbers or changed its buffers."""
    kinds = {p.device.type for p in model.parameters()} - {"cpu", "meta"}
    modules: list[Any] = [torch.get_device_module(kind) for kind in sorted(kinds)]
    drawn = [torch.get_rng_state(), *(module.get_rng_state() for module in modules)]
    return [*drawn, *(buffer.detach().clone() for buffer in model.buffers())]


# ---- comparing


_ABSENT: Any = object()
"""Stands for a value that one side lacks."""


def _kept(value: Any) -> Any:
    """A value as it is now, of which later changes show nothing; of a tensor that is sharded the whole."""
    return whole(value).clone() if isinstance(value, Tensor) else value


def _gradients(values: Mapping[str, Any]) -> dict[str, Tensor | None]:
    return {
        name.removeprefix("gradient: "): value
        for name, value in values.items()
        if name.startswith("gradient: ")
    }


def _gap(actual: Any, expected: Any) -> float:
    if not isinstance(expected, Tensor | float | int) or not isinstance(
        actual, Tensor | float | int
    ):
        if hasattr(expected, "__dict__") and not isinstance(expected, Tensor):
            # An object such as a cache, which cannot be compared; it is None where no stage has all of it.
            return 0.0 if actual is None or type(actual) is type(expected) else float("inf")
        return 0.0 if actual is expected or bool(actual == expected) else float("inf")
    a, b = map(_number, (actual, expected))
    if a.shape != b.shape:
        return float("inf")
    if not a.numel():
        return 0.0
    same = (a == b) | (a.isnan() & b.isnan())
    largest = float(b.abs().nan_to_num(0.0, 0.0).max())
    return float(torch.where(same, 0.0, (a - b).abs()).max()) / max(1.0, largest)


def _number(value: Tensor | float) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach().to_dense().to("cpu", torch.complex128)
    return torch.tensor(value, dtype=torch.complex128, device="cpu")


def _fingerprint(gradient: Tensor | None) -> str:
    if gradient is None:
        return "none"
    raw = gradient.detach().to_dense().cpu().contiguous().flatten().view(torch.uint8)
    return hashlib.sha256(raw.numpy().tobytes()).hexdigest()
