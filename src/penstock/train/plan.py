"""Plans for training runs: what the settings leave open is chosen by the costs of the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from penstock import plan as planning
from penstock.errors import ConfigError, InputFileError
from penstock.pipeline import Pipeline
from penstock.plan import Plan, Profile
from penstock.plan.report import report_of
from penstock.schedule import Timeline
from penstock.train.config import TrainConfig
from penstock.train.model import GPT, next_byte_loss
from penstock.train.settings import device_of, ranks_of, shape_of, stages_of

AUTO = "auto"
SECONDS = 5.0
"""How long the best plans are improved."""


def profile_of(
    config: TrainConfig, device: planning.Device | str | None = None, *, repeats: int = 3
) -> Profile:
    """What the model of a run costs.

    Args:
        config: the settings.
        device: for which it is predicted; by default it is measured on the run's own.
        repeats: how often it is measured.
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
    """The plan that a run is made by, the same on every rank.

    Args:
        config: the settings.
        usual: a pipeline as the settings have it without a plan, where one is to be found: a step of it is
            recorded, and what was measured of the model alone is corrected by that.
        batch: tokens and target of that step.

    Raises:
        ConfigError: no such file, or the plan is for another run.
        InputFileError: the file holds no plan.
    """
    if config.plan is None:
        return None
    if usual is None:
        return _fitting(config, _read(Path(config.plan)))
    tokens, target = batch
    # The first step warms up.
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
            seconds=SECONDS,
        )[0].to_json()
    told: list[str] = usual.agree(text)
    return Plan.from_json(told[0])


def plans_itself(config: TrainConfig) -> bool:
    """Whether a plan is to be found, and not read.

    Raises:
        ConfigError: there are several pipelines, whose plan is another one.
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
    """The report of a run: a measured step beside what the costs of the model say of it."""
    if plan is None:
        profile = profile_of(config, repeats=2)
        plan = planning.plan_for(
            profile, pipe.schedule, stages_of(config), batch=config.batch // config.replicas
        )
    return report_of([plan], title=title, measured=timeline)
