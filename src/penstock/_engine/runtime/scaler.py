"""A loss scaler for training in float16, where small gradients would underflow without it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class LossScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler``, which skips a step on all ranks together.

    The rule, the arguments and the state are torch's; only the loss is scaled inside ``pipe.step``::

        scaler = penstock.LossScaler()
        for x, y in loader:
            pipe.step(x, target=y, scaler=scaler)
            scaler.unscale_(opt)          # only before gradients are clipped or looked at
            pipe.clip_grad_norm_(1.0)
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()

    Args:
        init_scale: the first scale.
        growth_factor: the factor of the scale after ``growth_interval`` finite steps.
        backoff_factor: the factor of the scale after a step that was not finite.
        growth_interval: the number of consecutive finite steps after which the scale grows.
        enabled: if False, the scale is 1 and every step is taken.
        device: where the stages live.
    """

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        *,
        enabled: bool = True,
        device: str = "cpu",
    ) -> None:
        super().__init__(
            device, init_scale, growth_factor, backoff_factor, growth_interval, enabled
        )
        self._sum: Callable[[Tensor], Tensor] | None = None
        if enabled:
            self._lazy_init_scale_growth_tracker(torch.device("cpu"))

    def attach(self, sum_over_ranks: Callable[[Tensor], Tensor]) -> float:
        """Decide together with the other ranks; ``pipe.step(..., scaler=...)`` calls it.

        Returns:
            The factor of the next loss.
        """
        self._sum = sum_over_ranks
        return float(self.get_scale())

    def _unscale_grads_(self, *args: Any, **kwargs: Any) -> dict[torch.device, Tensor]:
        """Unscale gradients, and add up over the ranks whether any was infinite or NaN."""
        infinite: dict[torch.device, Tensor] = super()._unscale_grads_(*args, **kwargs)
        if self._sum is None:
            return infinite
        device = next(iter(infinite), torch.device(self._device))
        here = torch.tensor(
            [sum(float(flag) for flag in infinite.values())], dtype=torch.float64, device="cpu"
        )
        total = self._sum(here)
        return {device: total.to(device=device, dtype=torch.float32).reshape(1)}
