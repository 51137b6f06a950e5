"""A training run from its settings to its run folder."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from time import perf_counter, time
from typing import Any

import torch
from rich.console import Console
from rich.text import Text
from torch import Tensor, nn

from penstock import plan as planning
from penstock.checkpoint import Checkpoints
from penstock.errors import CheckpointError, ConfigError, InputFileError, NonFiniteError, UsageError
from penstock.parallel import over_replicas, replicated_mesh
from penstock.pipeline import Pipeline, peak_memory
from penstock.plan import Plan, Profile
from penstock.plan.report import report_of
from penstock.schedule import Schedule, Timeline
from penstock.train import corpus as texts
from penstock.train.config import TrainConfig
from penstock.train.corpus import Corpus
from penstock.train.display import StepMetrics, make_display, peak_flops, say
from penstock.train.model import (
    GPT,
    VOCABULARY,
    Sampling,
    generate,
    learning_rate,
    make_optimizer,
    next_byte_loss,
    readable,
    set_learning_rate,
)
from penstock.train.runfolder import (
    AUTO,
    CHECKPOINTS,
    RunFolder,
    Stop,
    command_to_go_on,
    create_folder,
    run_folder_of,
    source_of,
    why,
)
from penstock.train.settings import device_of, ranks_of, schedule_of, shape_of, stages_of, to_toml

# ---- plans for training runs: the costs of the model decide what the settings leave open


PLANNING = 5.0
"""How many seconds the best plans are improved."""


def profile_of(
    config: TrainConfig, device: planning.Device | str | None = None, *, repeats: int = 3
) -> Profile:
    """What the model of a run costs.

    Args:
        config: the settings.
        device: the device for which to predict; by default the costs are measured on that of the run.
        repeats: how often to measure.
    """
    tokens = torch.zeros(config.batch, config.sequence, dtype=torch.long)
    given: dict[str, Any] = {"target": tokens, "loss_fn": next_byte_loss, "tokens": config.sequence}
    if device is not None:
        with torch.device("meta"):
            model = GPT(shape_of(config))
        return planning.predict(model, tokens, device=device, **given)
    torch.set_num_threads(config.threads)
    model = GPT(shape_of(config), config.seed).to(device_of(config))
    return planning.measure(model, tokens, repeats=repeats, **given)


def chosen_plan(config: TrainConfig, usual: Pipeline | None, batch: Any) -> Plan | None:
    """The plan of a run, which is the same on every rank.

    Args:
        config: the settings.
        usual: if a plan is to be found, a pipeline made by the other settings: a step of it is recorded, and
            corrects what was measured of the model alone.
        batch: tokens and target of that step.

    Raises:
        ConfigError: there is no such file, or the plan is for another run.
        InputFileError: the file does not hold a plan.
    """
    if config.plan is None:
        return None
    if usual is None:
        return _fitting(config, _read(Path(config.plan)))
    tokens, target = batch
    # The first step only warms up.
    usual.step(tokens, target=target)
    step = planning.costs_from(usual.step(tokens, target=target, record=True))
    text = ""
    if usual.leads:
        profile = profile_of(config)
        units = [unit.path for unit in profile.at(config.batch // config.microbatches).units]
        cut = planning.cut_of(units, stages_of(config))
        profile = step.correct(profile, config.batch // config.microbatches, cut)
        text = planning.search(
            profile,
            ranks=ranks_of(config),
            pipeline=ranks_of(config),
            batch=config.batch,
            keep=1,
            seconds=PLANNING,
        )[0].to_json()
    told: list[str] = usual.agree(text)
    return Plan.from_json(told[0])


def plans_itself(config: TrainConfig) -> bool:
    """Whether a plan is to be found rather than read.

    Raises:
        ConfigError: there is a plan and there are replicas: a plan is for one pipeline.
    """
    if config.plan is not None and config.replicas > 1:
        raise ConfigError(
            f"plan={config.plan!r} with replicas={config.replicas}: a plan is for one pipeline; "
            "leave one of them out"
        )
    return config.plan == AUTO


def _read(path: Path) -> Plan:
    if not path.is_file():
        raise ConfigError(
            f"plan={str(path)!r}: there is no such file; give auto, or what penstock plan --json has written"
        )
    try:
        return Plan.from_json(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeError) as error:
        raise InputFileError(f"{path}: cannot be read: {error}") from error
    except InputFileError as error:
        raise InputFileError(f"{path}: {error}") from error


def _fitting(config: TrainConfig, plan: Plan) -> Plan:
    batch = plan.microbatches * plan.shape.samples
    for name, mine, planned in (
        ("ranks", ranks_of(config), plan.ranks),
        ("batch", config.batch, batch * plan.replicas),
        ("replicas", 1, plan.replicas),
    ):
        if mine != planned:
            raise ConfigError(
                f"plan={config.plan!r} is for {name}={planned}, but this run has {mine}; "
                "plan it with the settings of the run: penstock plan --config"
            )
    return plan


def report_of_run(
    config: TrainConfig, pipe: Pipeline, plan: Plan | None, timeline: Timeline, title: str
) -> str:
    """The report of a run: a measured step beside the same step simulated with the model's costs."""
    if plan is None:
        profile = profile_of(config, repeats=2)
        plan = planning.plan_for(
            profile, pipe.schedule, stages_of(config), batch=config.batch // config.replicas
        )
    return report_of([plan], title=title, measured=timeline)


# ---- A training run from its settings to its run folder


# ---- replicas: which one this process belongs to, and its share of each batch


class Side:
    """This process's place among the replicas of a run.

    Args:
        config: the settings.
    """

    def __init__(self, config: TrainConfig) -> None:
        self.count, self.index = config.replicas, 0
        self._shard = config.shard
        self._mesh: Any = None
        if self.count > 1:
            device = torch.device(config.device).type
            self._mesh = replicated_mesh(device, self.count, ranks_of(config))
            self.index = self._mesh.get_local_rank("dp")

    @property
    def options(self) -> dict[str, Any]:
        """What a Pipeline is told about the replicas."""
        if self._mesh is None:
            return {}
        return {"mesh": self._mesh, "replicas": self._mesh["dp"], "wrap": self._wrap}

    def _wrap(self, module: nn.Module, stage: int) -> nn.Module:
        return over_replicas(module, self._mesh, shard=self._shard)

    def part(self, batch: Tensor) -> Tensor:
        """The samples of this replica."""
        return batch.tensor_split(self.count)[self.index]


# ---- the run


CLOCKS = {
    "measured": "measured on the clocks of the ranks",
    "replayed": "replayed: measured durations on one clock per rank, as one process ran all ranks",
}


@dataclass(frozen=True)
class Outcome:
    """The results of a run, which are the same on every rank.

    Args:
        losses: the training loss of every step since the run was started or resumed, in nats per byte.
        held_out_loss: nats per byte on text the model did not train on; None if the run was stopped.
        sample: the generated bytes, without the prompt.
        folder: the run folder, with everything else.
    """

    losses: tuple[float, ...]
    held_out_loss: float | None
    sample: bytes
    folder: Path


def train(config: TrainConfig, console: Console | None = None) -> Outcome:
    """Train a :class:`GPT` through pipeline stages.

    In one process all ranks take turns; under ``torchrun`` this process is one rank. The numbers are the
    same either way.

    Args:
        config: the settings.
        console: where the leading process prints; standard output by default.

    Raises:
        UsageError: the settings cannot be used here.
        InputFileError: the text is too short.
    """
    torch.set_num_threads(config.threads)
    corpus = texts.load(config.data, config.sequence)
    side = Side(config)
    with make_pipeline(config, side, find_plan(config, side, corpus)) as pipe:
        out = (console or Console()) if pipe.leads else Console(quiet=True)
        folder, checkpoints = _claim(pipe, config)
        pipe.report_failures_to(folder.path)
        say(out, introduction(config, corpus, pipe.schedule))
        with checkpoints, Stop(config.time_limit, lambda text: say(out, text)) as stop:
            return Run(config, pipe, corpus, folder, checkpoints, out, side).complete(stop)


def find_plan(config: TrainConfig, side: Side, corpus: Corpus) -> Plan | None:
    """The plan that the settings ask for, if any: from a file, or found with a pipeline made without it."""
    if not plans_itself(config):
        return chosen_plan(config, None, None)
    batch = corpus.training_batch(1, seed=config.seed, batch=config.batch, sequence=config.sequence)
    with make_pipeline(config, side) as usual:
        return chosen_plan(config, usual, batch)


def make_pipeline(
    config: TrainConfig, side: Side | None = None, plan: Plan | None = None
) -> Pipeline:
    """The pipeline of the run, or one of its replicas."""
    decided: dict[str, Any] = {"plan": plan}
    if plan is None:
        decided = {
            "schedule": schedule_of(config),
            "microbatches": config.microbatches,
            "stages": stages_of(config),
        }
    return Pipeline(
        GPT(shape_of(config), config.seed),
        **decided,
        loss_fn=next_byte_loss,
        device=device_of(config),
        seed=config.seed,
        **(side.options if side else {}),
    )


def introduction(config: TrainConfig, corpus: Corpus, schedule: Schedule) -> str:
    """What is trained, how and on which text, in three lines."""
    shape = shape_of(config)
    return (
        f"model: {shape.parameters:,} parameters, {config.layers} layers in {schedule.stages} stages on "
        f"{schedule.ranks} ranks{_replicas(config)}\n"
        f"schedule: {schedule.name}, {schedule.microbatches} microbatches; {config.device}, "
        f"threads per process: {config.threads}\n"
        f"text: {corpus.name}, {corpus.files:,} files, {len(corpus.training) / 1e6:.2f} MB to train on, "
        f"{len(corpus.held_out) / 1e6:.2f} MB held out"
    )


def _replicas(config: TrainConfig) -> str:
    if config.replicas == 1:
        return ""
    return f", {config.replicas} replicas{', weights sharded over them' if config.shard else ''}"


def _claim(pipe: Pipeline, config: TrainConfig) -> tuple[RunFolder, Checkpoints]:
    """Let the leading process make the run folder, and all processes fail if it cannot."""
    made = {"path": "", "problem": ""}
    if pipe.leads:
        try:
            going_on = run_folder_of(config.resume) if config.resume else None
            out = config.out or (None if going_on is None else str(going_on))
            same = config.resume == AUTO or (going_on is not None and out == str(going_on))
            made["path"] = str(create_folder(out, resumes=same))
            Checkpoints(Path(made["path"], CHECKPOINTS)).claim()
        except (UsageError, CheckpointError) as error:
            made["problem"] = str(error)
    agreed = pipe.agree(made)[0]
    if pipe.replicas.exchange is not None:
        agreed = pipe.replicas.exchange(agreed)[0]
    if agreed["problem"]:
        raise UsageError(agreed["problem"])
    path = Path(agreed["path"])
    kept = Checkpoints(path / CHECKPOINTS, config.keep, asynchronous=True)
    return RunFolder(path, writes=pipe.leads), kept


class Run:
    """The steps of a run, and what comes after them.

    Args:
        config: the settings.
        pipe: the pipeline.
        corpus: the text.
        folder: the run folder, for the results.
        checkpoints: the states from which to go on.
        console: where to print.
        side: which of the replicas this is.
    """

    def __init__(  # noqa: PLR0913 - what a run has, by name
        self,
        config: TrainConfig,
        pipe: Pipeline,
        corpus: Corpus,
        folder: RunFolder,
        checkpoints: Checkpoints,
        console: Console,
        side: Side,
    ) -> None:
        self._side = side
        self._config = config
        self._pipe = pipe
        self._corpus = corpus
        self._folder = folder
        self._checkpoints = checkpoints
        self._console = console
        self._device = device_of(config)
        self._plan = pipe.plan
        self._optimizer = make_optimizer(pipe.named_parameters(), config)
        self._timeline: tuple[int, Timeline, str] | None = None

    def complete(self, stop: Stop) -> Outcome:
        """Train, then measure, save and sample.

        Args:
            stop: tells when to stop early.
        """
        first = self._resume()
        self._folder.write_config(to_toml(self._config))
        losses, stopped = self._train(first, stop)
        if stopped:
            self._leave(first + len(losses), stopped)
            stop.deliver(stopped)
            return Outcome(tuple(losses), None, b"", self._folder.path)
        held_out_loss = self._held_out_loss()
        sample = self._sample()
        self._pipe.save(self._folder.weights)
        self._keep_timeline()
        say(self._console, f"run folder: {self._folder.path}")
        return Outcome(tuple(losses), held_out_loss, sample, self._folder.path)

    def _train(self, first: int, stop: Stop) -> tuple[list[float], int]:
        """The losses of the steps, and why these ended early, if they did."""
        display = make_display(self._console, self._config.steps)
        losses, stopped = [], 0
        with display.running():
            for step in range(first + 1, self._config.steps + 1):
                metrics = self._step(step)
                losses.append(metrics.loss)
                self._folder.log(metrics.as_json())
                display.step(metrics)
                stopped = stop.agreed(self._pipe)
                if stopped or self._saves(step):
                    self._save(step)
                if stopped:
                    break
        return losses, stopped

    # ---- stop and go on

    def _resume(self) -> int:
        """Go on from a checkpoint, if the settings ask for it; returns its step."""
        if self._config.resume is None:
            return 0
        source = source_of(self._config.resume, self._folder.path)
        reader = self._checkpoints if source == self._checkpoints.folder else Checkpoints(source)
        step = reader.load(pipe=self._pipe, optimizer=self._optimizer)
        if step is None and self._config.resume != AUTO:
            raise UsageError(f"resume={self._config.resume!r}: there is no checkpoint in {source}")
        self._folder.rewind(step or 0)
        if step is not None:
            say(self._console, f"goes on after step {step} of {source}")
            self._warn(reader.extra)
        return step or 0

    def _data(self) -> dict[str, Any]:
        """What determines the text on which a step trains."""
        config = self._config
        about = {"seed": config.seed, "batch": config.batch, "sequence": config.sequence}
        return {**about, "text": len(self._corpus.training)}

    def _warn(self, before: dict[str, Any]) -> None:
        for name, value in self._data().items():
            if before.get(name) != value:
                changed = f"{name} was {before.get(name)} and is {value}"
                say(self._console, f"{changed}: the text is not that of a run without a stop")

    def _saves(self, step: int) -> bool:
        every = self._config.save_every
        return every is not None and (step % every == 0 or step == self._config.steps)

    def _save(self, step: int) -> None:
        saved = self._checkpoints.save(
            step, pipe=self._pipe, optimizer=self._optimizer, extra=self._data()
        )
        self._folder.log({"step": step, "checkpoint": True, "stall": saved.stall})

    def _leave(self, step: int, stopped: int) -> None:
        self._checkpoints.wait()
        say(self._console, f"{why(stopped)}: {self._checkpoints.last}")
        say(self._console, f"go on with: {command_to_go_on(self._folder.path)}")
        # All ranks leave together, so that none takes the end of another for a failure.
        self._pipe.close()

    # ---- a step

    def _step(self, step: int) -> StepMetrics:
        started = perf_counter()
        config = self._config
        tokens, target = self._corpus.training_batch(
            step, seed=config.seed, batch=config.batch, sequence=config.sequence
        )
        try:
            mine = self._side.part
            result = self._pipe.step(mine(tokens), target=mine(target), record=self._records(step))
        except NonFiniteError as error:
            given = f"learning_rate={self._config.learning_rate:g}"
            raise NonFiniteError(f"{given}: {error}; use a lower learning rate") from None
        norm = self._pipe.clip_grad_norm_(config.clip)
        rate = self._update(step)
        seconds = perf_counter() - started
        if result.timeline is not None:
            self._timeline = (step, result.timeline, str(result.timeline_kind))
        return StepMetrics(
            step=step,
            time=time(),
            rank=self._rank,
            loss=result.loss,
            gradient_norm=norm,
            learning_rate=rate,
            seconds=seconds,
            tokens_per_second=tokens.numel() / seconds,
            memory=self._peak_memory(),
            mfu=self._mfu(tokens.numel() / seconds),
            bubble=result.bubble,
            clocks=result.timeline_kind,
            shown=self._shows(step),
        )

    def _records(self, step: int) -> bool:
        """Whether to record when each action runs: always where that costs nothing."""
        return self._device.type == "cpu" or self._shows(step)

    def _shows(self, step: int) -> bool:
        """Whether to show the step: now and then, and at the end."""
        return step % self._config.log_every == 0 or step == self._config.steps

    def _update(self, step: int) -> float:
        rate = learning_rate(step, self._config)
        set_learning_rate(self._optimizer, rate)
        self._optimizer.step()
        self._pipe.zero_grad()
        return rate

    @property
    def _rank(self) -> int:
        """The first rank of this process."""
        return self._pipe.schedule.placement.rank_of[self._pipe.stages[0].index]

    def _mfu(self, tokens_per_second: float) -> float | None:
        """The share of the devices' peak that the model's own operations use, if the peak is known."""
        peak = peak_flops(self._device)
        if peak is None:
            return None
        schedule = self._pipe.schedule
        alone = len(self._pipe.stages) == schedule.stages
        devices = self._config.replicas * (1 if alone else schedule.ranks)
        return shape_of(self._config).flops * tokens_per_second / (peak * devices)

    def _peak_memory(self) -> int:
        """The peak memory of the process that holds most."""
        peaks: list[int] = self._pipe.agree(peak_memory(self._device))
        return max(peaks)

    def _held_out_loss(self) -> float:
        config = self._config
        batches = self._corpus.held_out_batches(
            config.held_out_batches, batch=config.batch, sequence=config.sequence
        )
        mine = self._side.part
        losses = [self._pipe.eval(mine(x), target=mine(y)).loss for x, y in batches]
        loss, measured = fmean(losses), len(losses) * config.batch * config.sequence
        self._folder.log({"held_out_loss": loss, "held_out_bytes": measured})
        say(
            self._console,
            f"held-out loss {loss:.4f} nats/byte on {measured:,} bytes "
            f"(a uniform guess: {math.log(VOCABULARY):.4f})",
        )
        return loss

    def _sample(self) -> bytes:
        config = self._config
        prompt = config.prompt.encode()
        sampling = Sampling(config.sample_length, config.temperature, config.sequence, config.seed)
        text = generate(self._pipe.predict, prompt, sampling)
        if text:
            self._console.rule("sample", align="left")
            self._console.print(
                Text(readable(prompt), style="dim").append(readable(text), style="not dim"),
                soft_wrap=True,
            )
            self._console.rule()
        return text

    def _keep_timeline(self) -> None:
        """Keep the timeline of the last step that was recorded."""
        if self._timeline is None:
            return
        step, timeline, clocks = self._timeline
        kind = CLOCKS[clocks]
        schedule = self._pipe.schedule
        title = f"{schedule.name}: step {step}, {schedule.ranks} ranks, {schedule.microbatches} microbatches"
        self._folder.write_timeline(timeline, title=title, note=kind)
        if self._pipe.leads:
            report = report_of_run(self._config, self._pipe, self._plan, timeline, title)
            self._folder.write_report(report)
        say(self._console, f"timeline of step {step}: bubble {timeline.bubble:.1%}, {kind}")
