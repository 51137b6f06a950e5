"""Plans for training runs: what the settings leave open is chosen by the costs of the model."""

from __future__ import annotations

import torch

from penstock import plan as planning
from penstock.plan import Plans, Profile
from penstock.train.config import TrainConfig
from penstock.train.model import GPT, next_byte_loss
from penstock.train.plan import device_of, ranks_of, shape_of


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
    given = {"target": tokens, "loss_fn": next_byte_loss, "tokens": config.sequence}
    if device is not None:
        with torch.device("meta"):
            model = GPT(shape_of(config))
        return planning.predict(model, tokens, device=device, **given)  # type: ignore[arg-type]
    torch.set_num_threads(config.threads)
    model = GPT(shape_of(config), config.seed).to(device_of(config))
    return planning.measure(model, tokens, repeats=repeats, **given)  # type: ignore[arg-type]


def plans_of(
    config: TrainConfig, profile: Profile, *, memory: float | None = None, seconds: float = 5.0
) -> Plans:
    """The plans for a run on its ranks."""
    ranks = ranks_of(config)
    return planning.search(
        profile, ranks=ranks, pipeline=ranks, batch=config.batch, memory=memory, seconds=seconds
    )
