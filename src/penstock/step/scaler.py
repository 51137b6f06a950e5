"""A loss scaler for training in float16, where small gradients would vanish if they were not scaled up."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.errors import UsageError
from penstock.parallel import global_norms, is_sharded, local_part, with_local

Agree = Callable[[bool], bool]
"""From whether something was found on this rank: whether it was found on any."""


class LossScaler:
    """Scales the loss, and skips steps whose gradients are not finite, on all ranks together.

    The rule, the arguments and the state are those of ``torch.amp.GradScaler``. It is used in the same way,
    except that the loss is scaled inside ``pipe.step``::

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
        growth_interval: the number of finite steps, one after the other, after which the scale grows.
        enabled: if False, the scale is 1 and every step is taken.

    Raises:
        UsageError: the factors would not make the scale grow and shrink.
    """

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        *,
        enabled: bool = True,
    ) -> None:
        if not growth_factor > 1 or not 0 < backoff_factor < 1:
            raise UsageError(
                f"growth_factor={growth_factor} must be above 1 and backoff_factor={backoff_factor} "
                "between 0 and 1"
            )
        self.enabled = enabled
        self._scale = _rounded(init_scale)
        self._growth_factor = growth_factor
        self._backoff_factor = backoff_factor
        self._growth_interval = growth_interval
        self._good_steps = 0
        self._found: dict[torch.optim.Optimizer, bool] = {}
        self._stepped: dict[torch.optim.Optimizer, bool] = {}
        self._agree: Agree = bool

    def attach(self, agree: Agree) -> None:
        """Decide together with the other ranks; ``pipe.step(..., scaler=...)`` calls it."""
        self._agree = agree

    def get_scale(self) -> float:
        """The factor of the next loss."""
        return self._scale if self.enabled else 1.0

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients of an optimizer by the scale; all ranks call it, once per step at most.

        Raises:
            UsageError: it was already called in this step, or gradients are float16.
        """
        if not self.enabled:
            return
        if optimizer in self._found:
            raise UsageError(
                "unscale_() was already called on this optimizer since the last update()"
            )
        self._found[optimizer] = self._agree(_unscale(optimizer, 1.0 / self._scale))

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Take the optimizer's step, unless some rank found a gradient that is not finite.

        Args:
            optimizer: the optimizer; its gradients are divided by the scale, unless that was done already.
            args: for the optimizer's step.
            kwargs: for the optimizer's step.

        Returns:
            What the optimizer's step returned; None if it was skipped.

        Raises:
            UsageError: it was already called since the last update.
        """
        if not self.enabled:
            return optimizer.step(*args, **kwargs)
        if optimizer in self._stepped:
            raise UsageError("step() was already called on this optimizer since the last update()")
        if optimizer not in self._found:
            self.unscale_(optimizer)
        self._stepped[optimizer] = True
        return None if self._found[optimizer] else optimizer.step(*args, **kwargs)

    def update(self, new_scale: float | None = None) -> None:
        """Choose the next scale, after the step of every optimizer.

        Args:
            new_scale: the next scale, instead of what the rule says.

        Raises:
            UsageError: no optimizer has stepped since the last update.
        """
        if not self.enabled:
            return
        if new_scale is None and not self._found:
            raise UsageError("update() comes after step(optimizer), once for all optimizers")
        if new_scale is None:
            self._follow_rule(any(self._found.values()))
        else:
            self._scale = _rounded(new_scale)
        self._found.clear()
        self._stepped.clear()

    def _follow_rule(self, found: bool) -> None:
        if found:
            self._scale = _rounded(self._scale * self._backoff_factor)
            self._good_steps = 0
            return
        self._good_steps += 1
        if self._good_steps == self._growth_interval:
            grown = _rounded(self._scale * self._growth_factor)
            self._scale = grown if grown != float("inf") else self._scale
            self._good_steps = 0

    def state_dict(self) -> dict[str, Any]:
        """The state, with torch's keys; the same on every rank."""
        if not self.enabled:
            return {}
        return {
            "scale": self._scale,
            "growth_factor": self._growth_factor,
            "backoff_factor": self._backoff_factor,
            "growth_interval": self._growth_interval,
            "_growth_tracker": self._good_steps,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state, of this scaler or of torch's.

        Raises:
            UsageError: it is not such a state.
        """
        if not self.enabled:
            return
        missing = self.state_dict().keys() - state.keys()
        if missing:
            raise UsageError(
                f"a scaler's state has {sorted(self.state_dict())}; {sorted(missing)} are missing, as "
                "they are in the state of a scaler that is not enabled"
            )
        self._scale = _rounded(state["scale"])
        self._growth_factor = float(state["growth_factor"])
        self._backoff_factor = float(state["backoff_factor"])
        self._growth_interval = int(state["growth_interval"])
        self._good_steps = int(state["_growth_tracker"])


def _rounded(scale: float) -> float:
    """Rounded to float32, in which torch keeps its scale."""
    return float(torch.tensor(float(scale), dtype=torch.float32))


def _unscale(optimizer: torch.optim.Optimizer, factor: float) -> bool:
    """Multiply an optimizer's gradients by a factor; returns whether any of them was not finite."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    found: list[Tensor] = [each.grad for each in parameters if each.grad is not None]
    if any(gradient.dtype is torch.float16 for gradient in found):
        raise UsageError(
            "gradients in float16 cannot be unscaled without loss; keep the weights in float32 and "
            "compute in float16 under torch.autocast"
        )
    bad = _any_bad(found)
    for gradient in found:
        gradient.mul_(factor)
    return bad


def _any_bad(gradients: Sequence[Tensor]) -> bool:
    """Whether any gradient is not finite; for DTensors, on any process of their mesh."""
    flags = [_bad(gradient).any() for gradient in gradients if not is_sharded(gradient)]
    devices = {flag.device for flag in flags}
    here = [torch.stack([f for f in flags if f.device == device]).any() for device in devices]
    sharded = [gradient for gradient in gradients if is_sharded(gradient)]
    marks = [with_local(gradient, _bad(local_part(gradient)).float()) for gradient in sharded]
    beyond = bool(global_norms(marks, float("inf")).any()) if marks else False
    return beyond or any(flag.item() for flag in here)


def _bad(gradient: Tensor) -> Tensor:
    held = gradient.coalesce().values() if gradient.is_sparse else gradient
    return held.detach().isfinite().logical_not()
