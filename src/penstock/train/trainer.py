"""A training run from its settings to its run folder."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from time import perf_counter, time
from typing import Any, Literal

import torch
from rich.console import Console
from rich.text import Text
from torch import Tensor

from penstock import plan as planning
from penstock._engine.devices import placed_on
from penstock._engine.parallel import replicated_mesh, shard
from penstock._engine.runtime import GracefulStop
from penstock._engine.values import bytes_as_text
from penstock.checkpoint import Checkpoints
from penstock.errors import (
    CheckpointError,
    ConfigError,
    InputFileError,
    NonFiniteError,
    UsageError,
    shortened,
)
from penstock.pipeline import Pipeline, SlowWarning
from penstock.plan import Plan, Profile
from penstock.schedule import Timeline, draw_svg
from penstock.schedule.reading import read_text
from penstock.train.config import TrainConfig, ranks_of, schedule_of, to_toml, world_size
from penstock.train.corpus import Batch, Corpus, load
from penstock.train.display import say, summary
from penstock.train.model import (
    GPT,
    VOCABULARY,
    even_stages,
    learning_rate,
    make_optimizer,
    next_byte_loss,
)
from penstock.train.runfolder import (
    AUTO,
    CHECKPOINTS,
    RunFolder,
    command_to_resume,
    create_folder,
    source_of,
)

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
        folder: the run folder, with everything else.
    """

    losses: tuple[float, ...]
    held_out_loss: float | None
    folder: Path


def train(config: TrainConfig, console: Console | None = None) -> Outcome:
    """Train a :class:`GPT` through pipeline stages.

    One process does the work of all ranks; under ``torchrun`` this process is one rank. The numbers are the
    same either way.

    Args:
        config: the settings.
        console: where the main process prints; standard output by default.

    Raises:
        UsageError: the settings cannot be used here.
        InputFileError: the text is too short, or the file of a plan is wrong.
    """
    device = device_of(config)
    corpus = load(config.data, config.sequence)
    mesh = mesh_of(config)
    torch.set_num_threads(config.threads)
    with (
        GracefulStop(config.time_limit) as stop,
        make_pipeline(config, corpus, device, mesh) as pipe,
    ):
        out = (console or Console()) if pipe.is_main_process else Console(quiet=True)
        folder, checkpoints = _claim_folder(pipe, config)
        pipe.job.report_failures_to(folder.path)
        with checkpoints:
            outcome = Run(config, pipe, corpus, folder, checkpoints, out).complete(stop)
    return outcome


# ---- from the settings to a pipeline


def device_of(config: TrainConfig) -> torch.device:
    """The device of a run; refuses one that this machine does not have."""
    try:
        return placed_on(config.device)
    except UsageError as error:
        raise ConfigError(str(error)) from None


def mesh_of(config: TrainConfig) -> Any:
    """The mesh of replicas (``dp``) and ranks (``pp``); None without replicas."""
    if config.replicas == 1:
        return None
    needed, world = config.replicas * ranks_of(config), world_size() or 1
    if world != needed:
        raise ConfigError(
            f"replicas={config.replicas} of {ranks_of(config)} ranks need {needed} processes, not {world}: "
            f"torchrun --standalone --nproc-per-node {needed} -m penstock train"
        )
    return replicated_mesh(device_of(config), config.replicas, ranks_of(config))


def make_model(config: TrainConfig, device: torch.device | str = "cpu") -> GPT:
    """The model of a run."""
    with torch.device("meta" if device == "meta" else "cpu"):
        model = GPT(config.layers, config.width, config.heads, config.sequence, config.seed)
    return model.to(device)


def make_pipeline(
    config: TrainConfig, corpus: Corpus, device: torch.device, mesh: Any = None
) -> Pipeline:
    """The pipeline of a run or, with replicas, this process's replica."""
    model = make_model(config, device if config.plan == AUTO else "cpu")
    options: dict[str, Any] = {"loss_fn": next_byte_loss, "device": device, "seed": config.seed}
    if mesh is not None:
        options |= {"mesh": mesh, "replicas": "dp"}
    if config.shard:
        options["wrap"] = lambda module, stage: shard(module, mesh["dp"])
    if config.recompute is not None:
        options["recompute"] = config.recompute == "all" or config.recompute.split(",")
    if config.plan == AUTO:
        options |= {"schedule": "auto", "ranks": ranks_of(config)}
        options["microbatches"] = config.microbatches
    elif config.plan is not None:
        options["schedule"] = _read_plan(config, Path(config.plan))
    else:
        schedule = schedule_of(config)
        options |= {"schedule": schedule.name, "microbatches": config.microbatches}
        options["stages"] = even_stages(config.layers, schedule.stages)
    pipe = Pipeline(model, **options)
    if config.plan == AUTO:
        tokens, target = (part.to(device) for part in _training_batch(config, corpus, step=1))
        pipe.cut(tokens, target=target)
    if config.watch_every is not None:
        pipe.on_step(SlowWarning(config.watch_every))
    return pipe


def _training_batch(config: TrainConfig, corpus: Corpus, step: int) -> Batch:
    return corpus.training_batch(
        step, seed=config.seed, batch=config.batch, sequence=config.sequence
    )


def _read_plan(config: TrainConfig, path: Path) -> Plan:
    """Read a plan, and check that it suits this run."""
    if not path.is_file():
        raise ConfigError(
            f"plan={str(path)!r}: there is no such file; give auto, or what penstock plan --json has written"
        )
    try:
        plan = Plan.from_json(read_text(path))
    except InputFileError as error:
        raise InputFileError(f"{path}: {error}") from error
    batch = plan.microbatches * plan.shape.samples * plan.replicas
    is_set = config.ranks is not None or world_size() is not None
    for name, ours, planned in (
        ("ranks", ranks_of(config) if is_set else plan.ranks, plan.ranks),
        ("batch", config.batch, batch),
        ("replicas", 1, plan.replicas),
    ):
        if ours != planned:
            raise ConfigError(
                f"plan={config.plan!r} is for {name}={planned}, but this run has {ours}; "
                "plan it with the settings of the run: penstock plan --config"
            )
    return plan


def profile_of(
    config: TrainConfig, device: planning.Device | str | None = None, *, repeats: int = 3
) -> Profile:
    """Return what the model of a run costs.

    Args:
        config: the settings.
        device: the device to predict for; by default costs are measured on the device of the run.
        repeats: how often to measure.
    """
    tokens = torch.zeros(config.batch, config.sequence, dtype=torch.long, device="cpu")
    about: dict[str, Any] = {"target": tokens, "loss_fn": next_byte_loss, "tokens": config.sequence}
    if device is not None:
        return planning.predict(make_model(config, "meta"), tokens, device=device, **about)
    torch.set_num_threads(config.threads)
    model = make_model(config, device_of(config))
    return planning.measure(model, tokens, repeats=repeats, **about)


def _claim_folder(pipe: Pipeline, config: TrainConfig) -> tuple[RunFolder, Checkpoints]:
    """Make the run folder on the leading process; if that fails, all processes fail."""
    claimed: list[Checkpoints] = []

    def checkpoints_in(path: Path) -> Checkpoints:
        return Checkpoints(path / CHECKPOINTS, config.keep, asynchronous=True)

    def claim(_: object) -> str:
        earlier = None if config.resume == AUTO else config.resume
        if earlier is not None:
            source_of(earlier, Path())
        out = config.out or earlier
        path = create_folder(out, resumes=config.resume == AUTO or out == earlier)
        claimed.append(checkpoints_in(path))
        try:
            claimed[0].claim()
        except CheckpointError as error:
            raise UsageError(str(error)) from None
        return str(path)

    path = Path(pipe.job.meet(lambda: None, claim, "begin the run"))
    checkpoints = claimed[0] if claimed else checkpoints_in(path)
    checkpoints.check_shared(pipe)
    return RunFolder(path, writes=pipe.is_main_process), checkpoints


# ---- the run


@dataclass
class Run:
    """The steps of a run, and the work after them."""

    config: TrainConfig
    pipe: Pipeline
    corpus: Corpus
    folder: RunFolder
    checkpoints: Checkpoints
    console: Console
    _timeline: tuple[int, Timeline, str] | None = None

    def __post_init__(self) -> None:
        self._optimizer = make_optimizer(self.pipe.named_parameters(), self.config)

    def complete(self, stop: GracefulStop) -> Outcome:
        """Train, then measure and save; or stop early, when the ranks have agreed to."""
        say(self.console, self._introduction())
        first = self._resume()
        self.folder.write("config.toml", to_toml(self.config))
        losses = self._train(first)
        if self.pipe.stopping:
            self.checkpoints.wait()
            say(self.console, f"{stop.reason}: {self.checkpoints.last}")
            say(self.console, f"resume with: {command_to_resume(self.folder.path)}")
            return Outcome(losses, None, self.folder.path)
        held_out_loss = self._measure_held_out()
        self.pipe.weights.save(self.folder.path / "weights")
        if self._timeline is not None and self.pipe.is_main_process:
            self._report(*self._timeline)
        say(self.console, f"run folder: {self.folder.path}")
        return Outcome(losses, held_out_loss, self.folder.path)

    def _introduction(self) -> str:
        """The model, its schedule and its text, in three lines."""
        config, corpus, schedule = self.config, self.corpus, self.pipe.schedule
        sharded = ", weights sharded over them" if config.shard else ""
        replicas = f", {config.replicas} replicas{sharded}" if config.replicas > 1 else ""
        training, held_out = (
            bytes_as_text(len(part)) for part in (corpus.training, corpus.held_out)
        )
        return (
            f"model: {make_model(config, 'meta').parameter_count:,} parameters, {config.layers} layers in "
            f"{schedule.stages} stages on {schedule.ranks} ranks{replicas}\n"
            f"schedule: {schedule.name}, {schedule.microbatches} microbatches; {config.device}, "
            f"threads per process: {config.threads}\n"
            f"text: {corpus.name}, {corpus.files:,} files, {training} to train on, {held_out} held out"
        )

    # ---- resume and save

    def _resume(self) -> int:
        """Load a checkpoint if the settings ask for it; return its step, or 0."""
        resume = self.config.resume
        if resume is None:
            return 0
        source = source_of(resume, self.folder.path)
        ours = source == self.checkpoints.folder
        reader = self.checkpoints if ours else Checkpoints(source)
        how: Literal["auto", "newest"] = "auto" if resume == AUTO else "newest"
        step = reader.load(resume=how, pipe=self.pipe, optimizer=self._optimizer)
        if step is None and resume != AUTO:
            raise UsageError(f"resume={resume!r}: there is no checkpoint in {source}")
        done = self.folder.rewind(step or 0)
        if step is None:
            if done:
                say(self.console, f"there is no checkpoint: {done} steps were lost")
            return 0
        older = f", which is not the newest: {'; '.join(reader.skipped)}" if reader.skipped else ""
        lost = f"; {done - step} steps after it were lost" if ours and done > step else ""
        say(self.console, f"resumed from step {step} of {source}{older}{lost}")
        origin = reader.extra if isinstance(reader.extra, dict) else {}
        for name, value in self._origin().items():
            before = origin.get(name)
            if before != value:
                other = "the run will not see the text that an uninterrupted run sees"
                say(self.console, f"{name} was {shortened(str(before))} and is {value}: {other}")
        return step

    def _origin(self) -> dict[str, Any]:
        """The numbers that determine the text on which a step trains."""
        config = self.config
        numbers = {"seed": config.seed, "batch": config.batch, "sequence": config.sequence}
        return {**numbers, "text": len(self.corpus.training)}

    # ---- the steps

    def _train(self, first: int) -> tuple[float, ...]:
        """Train from the step after ``first``; return the losses of the steps."""
        losses, steps, every = [], self.config.steps, self.config.save_every
        with self.console.status("the first step …") as status:
            for step in range(first + 1, steps + 1):
                prints = step % self.config.log_every == 0 or step == steps
                # On a GPU, recording when each action runs slows a step down.
                metrics = self._step(step, record=prints or self.pipe.device.type == "cpu")
                losses.append(metrics["loss"])
                self.folder.log(
                    {name: value for name, value in metrics.items() if value is not None}
                )
                text = summary(metrics, steps)
                status.update(Text(text))
                if prints:
                    say(self.console, text)
                if self.pipe.stopping or (
                    every is not None and (step % every == 0 or step == steps)
                ):
                    saved = self.checkpoints.save(
                        step, pipe=self.pipe, optimizer=self._optimizer, extra=self._origin()
                    )
                    self.folder.log({"step": step, "checkpoint": True, "stall": saved.stall})
                if self.pipe.stopping:
                    break
        return tuple(losses)

    def _step(self, step: int, *, record: bool) -> dict[str, Any]:
        """Train one step; return its metrics."""
        started = perf_counter()
        tokens, target = _training_batch(self.config, self.corpus, step)
        try:
            result = self.pipe.step(self._share(tokens), target=self._share(target), record=record)
        except NonFiniteError as error:
            raise NonFiniteError(
                f"learning_rate={self.config.learning_rate:g}: {error}; use a lower learning rate"
            ) from None
        norm = self.pipe.clip_grad_norm_(self.config.clip)
        rate = learning_rate(step, self.config)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        self.pipe.zero_grad()
        seconds = perf_counter() - started
        if result.timeline is not None:
            self._timeline = (step, result.timeline, str(result.timeline_kind))
        return {
            "step": step,
            "time": time(),
            "rank": self.pipe.local_ranks[0],
            "loss": result.loss,
            "gradient_norm": norm,
            "learning_rate": rate,
            "seconds": seconds,
            "tokens_per_second": tokens.numel() / seconds,
            "memory": self.pipe.job.meet(lambda: result.memory, max),
            "mfu": result.mfu,
            "bubble": result.bubble,
            "clocks": result.timeline_kind,
        }

    def _share(self, batch: Tensor) -> Tensor:
        """The samples of this replica."""
        return batch.tensor_split(self.config.replicas)[self.pipe.replicas.index]

    # ---- after the steps

    def _measure_held_out(self) -> float:
        """The loss on held-out text, in nats per byte."""
        config = self.config
        batches = self.corpus.held_out_batches(
            config.held_out_batches, batch=config.batch, sequence=config.sequence
        )
        losses = [
            self.pipe.evaluate(self._share(x), target=self._share(y)).loss for x, y in batches
        ]
        loss, measured = fmean(losses), len(losses) * config.batch * config.sequence
        self.folder.log({"held_out_loss": loss, "held_out_bytes": measured})
        say(
            self.console,
            f"held-out loss {loss:.4f} nats/byte on {measured:,} bytes "
            f"(a uniform guess: {math.log(VOCABULARY):.4f})",
        )
        return loss

    def _report(self, step: int, timeline: Timeline, clocks: str) -> None:
        """Write a trace, a drawing and a report of a recorded step."""
        schedule, kind = self.pipe.schedule, CLOCKS[clocks]
        size = f"{schedule.ranks} ranks, {schedule.microbatches} microbatches"
        title = f"{schedule.name}: step {step}, {size}"
        plan = self._plan()
        report = planning.report_of([plan], title=title, measured=timeline)
        self.folder.write("plan.json", plan.to_json() + "\n")
        self.folder.write("timeline.json", timeline.to_chrome_trace())
        self.folder.write("timeline.svg", draw_svg(timeline, title=title, note=kind))
        self.folder.write("report.html", report)
        say(self.console, f"timeline of step {step}: bubble {timeline.bubble:.1%}, {kind}")

    def _plan(self) -> Plan:
        """The plan to show next to a measured step: the run's or, without one, that of its settings."""
        if self.pipe.plan is not None:
            return self.pipe.plan
        config, schedule = self.config, self.pipe.schedule
        return planning.plan_for(
            profile_of(config, repeats=2),
            schedule,
            even_stages(config.layers, schedule.stages),
            batch=config.batch // config.replicas,
        )
