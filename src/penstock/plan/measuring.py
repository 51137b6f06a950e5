"""Profiles: what the units of a model cost, measured on the model's device or predicted for another."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock._engine.devices import is_accelerator, memory_of, name_of
from penstock._engine.microbatches import MISSING, Rules, RulesGiven, read_rules, split_batch
from penstock.errors import InputFileError, UsageError
from penstock.partition import unit_calls
from penstock.plan.candidates import whole
from penstock.plan.costs import Profile, UnitCosts, Units
from penstock.plan.devices import Device, device_named
from penstock.plan.units import measure_units

REPEATS = 5
"""The number of timed runs by default, after a first run that does not count."""
LARGEST = 2**31 - 1
"""The most samples of a batch, and tokens of a sample."""
LossFunction = Callable[..., Any]


def measure(  # noqa: PLR0913 - the arguments of a step, by name
    model: nn.Module,
    *args: Any,
    target: Any = MISSING,
    loss_fn: LossFunction | None = None,
    split: RulesGiven | None = None,
    stages: int = 1,
    repeats: int = REPEATS,
    memory: float = 0.0,
    latency: float = 0.0,
    bandwidth: float = float("inf"),
    handling: float = 0.0,
    tokens: int = 0,
    **kwargs: Any,
) -> Profile:
    """Measure what the units of a model cost on the device of the model.

    Nothing runs yet: each size of microbatch is measured on its first use. The model, its gradients, buffers
    and random states are left unchanged.

    Args:
        model: any module, with data.
        args: the model's arguments for a batch, from which microbatches are taken.
        target: the target of the loss.
        loss_fn: ``(output, target) -> scalar``, as for a Pipeline.
        split: how arguments are split, as for a Pipeline.
        stages: the most stages into which the model may be cut, which decides how small its units are.
        repeats: how often each unit runs, after a first run that does not count.
        memory: bytes of the device; by default those of the GPU, and unknown for a CPU.
        latency: the latency of a message between ranks, in seconds.
        bandwidth: the bandwidth of a channel between ranks, in bytes per second.
        handling: how long a rank is busy around an action that sends or receives, in seconds.
        tokens: tokens in a sample; 0 to count samples instead of tokens.
        kwargs: the model's arguments by name.

    Raises:
        UsageError: the model has no data, the batch cannot be split so, or a number is not valid.
    """
    if any(parameter.is_meta for parameter in model.parameters()):
        raise UsageError(
            "a model on the meta device cannot be measured; predict its costs for a device instead: "
            "penstock.plan.predict(model, ..., device='h100')"
        )
    whole("repeats", repeats)
    home = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    has_own = is_accelerator(home)
    return Profile(
        name_of(home) if has_own else home.type,
        memory=memory or (float(memory_of(home)) if has_own else 0.0),
        latency=latency,
        bandwidth=bandwidth,
        handling=handling,
        tokens=tokens,
        measured=True,
        model=type(model).__name__,
        coster=_UnitCoster(
            model, (args, kwargs, target), loss_fn, read_rules(split), stages, repeats=repeats
        ),
    )


def predict(
    model: nn.Module,
    *args: Any,
    device: Device | str,
    target: Any = MISSING,
    loss_fn: LossFunction | None = None,
    split: RulesGiven | None = None,
    stages: int = 1,
    tokens: int = 0,
    **kwargs: Any,
) -> Profile:
    """Predict what the units of a model cost on a device that need not be present.

    Args:
        model: any module; on the meta device it takes no memory.
        args: the model's arguments for a batch; only shapes and types count, so meta tensors will do.
        device: a name in ``penstock.plan.DEVICES``, or a ``penstock.plan.Device``.
        target: the target of the loss.
        loss_fn: ``(output, target) -> scalar``, as for a Pipeline.
        split: how arguments are split, as for a Pipeline.
        stages: the most stages into which the model may be cut.
        tokens: tokens in a sample; 0 to count samples instead of tokens.
        kwargs: the model's arguments by name.

    Raises:
        UsageError: the device is unknown, or the batch cannot be split so.
    """
    on = device_named(device)
    latency, bandwidth = on.wire(1)
    return Profile(
        on.name,
        memory=on.memory,
        latency=latency,
        bandwidth=bandwidth,
        node=on.node,
        network=on.wire(on.node + 1),
        tokens=tokens,
        model=type(model).__name__,
        coster=_UnitCoster(
            model, (args, kwargs, target), loss_fn, read_rules(split), stages, device=on
        ),
    )


class _UnitCoster:
    """Finds what the units of a model cost, by the samples of a microbatch.

    Args:
        model: the model.
        call: its arguments by position and by name, and the target.
        loss_fn: as for a Pipeline.
        rules: as for a Pipeline.
        stages: the most stages into which the model may be cut.
        device: predicts times for this device; by default they are measured.
        repeats: how often times are measured.
    """

    def __init__(
        self,
        model: nn.Module,
        call: tuple[tuple[Any, ...], dict[str, Any], Any],
        loss_fn: LossFunction | None,
        rules: Rules | None,
        stages: int,
        *,
        device: Device | None = None,
        repeats: int = 0,
    ) -> None:
        args, kwargs, target = call
        self._model, self._call, self._rules = model, call, rules
        self._loss = loss_fn
        if loss_fn is not None and target is MISSING:
            self._loss = lambda output, _: loss_fn(output)
        self._device, self._repeats = device, repeats
        self._calls = unit_calls(model, stages, (args, kwargs))
        sizes = split_batch(args, kwargs, MISSING, rules, 1).samples
        self._batch = sizes[0] if sizes else 1
        self._units = cache(self._units_of)

    def __call__(self, samples: int, device: Device | None) -> UnitCosts:
        """The costs for so many samples: on the device of the profile, or as predicted for another."""
        units, device = self._units(samples), device or self._device
        costs = units.costs if device is None else units.on(device)
        return UnitCosts(samples, costs, units.values)

    def _units_of(self, samples: int) -> Units:
        batch, (args, kwargs, target) = self._batch, self._call
        # Parts differ by a sample where the batch cannot be divided evenly.
        for count in (max(1, batch // samples), -(-batch // samples)):
            parts = split_batch(args, kwargs, target, self._rules, count)
            if not parts.parts:
                raise UsageError("give the arguments of the model for a batch")
            for place, part in enumerate(parts.parts):
                if part.samples == samples:
                    wanted = parts.targets[place] if parts.targets is not None else None
                    return measure_units(
                        self._model, self._calls, part.args, part.kwargs,
                        target=wanted, loss=self._loss, repeats=self._repeats,
                    )  # fmt: skip
        raise UsageError(
            f"a batch of {batch} samples has no part of {samples}; give a batch that has one"
        )


# ---- a model of transformers, from its config file alone: neither weights nor a network are needed


DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
LONGEST = 4096
"""Tokens in a sample by default, if the model takes as many."""


def next_token_loss(output: Any, target: Tensor) -> Tensor:
    """Mean cross-entropy of a language model, in float32; the targets are the tokens, not shifted."""
    logits = output.logits.float()
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), target[:, 1:].flatten())


def predict_hf(
    config: str | Path,
    *,
    batch: int,
    device: Device | str,
    sequence: int | None = None,
    dtype: str = "bfloat16",
    stages: int = 1,
) -> Profile:
    """Predict what the units of a causal language model cost.

    Args:
        config: a file such as ``config.json``, or its folder.
        batch: samples in a step.
        device: a name in ``penstock.plan.DEVICES``, or a ``penstock.plan.Device``.
        sequence: tokens in a sample; by default as many as the model takes, at most 4096.
        dtype: the type of the weights: ``bfloat16``, ``float16`` or ``float32``.
        stages: the most stages into which the model may be cut.

    Raises:
        UsageError: there is no such file or dtype, a number is not valid, or transformers is not installed.
        InputFileError: the file is not a config of a causal language model.
    """
    if dtype not in DTYPES:
        raise UsageError(f"dtype={dtype!r}: must be one of {', '.join(DTYPES)}")
    on = device_named(device)
    for name, number in (("batch", batch), ("sequence", 1 if sequence is None else sequence)):
        whole(name, number, most=LARGEST)
    model = _causal_model(Path(config))
    longest = getattr(model.config, "max_position_embeddings", None)
    if sequence is None:
        # XLNet's is -1: it takes any number.
        sequence = min(LONGEST, longest) if isinstance(longest, int) and longest > 0 else LONGEST
    tokens = torch.zeros(batch, sequence, dtype=torch.long, device="meta")
    profile = predict(
        model.to(DTYPES[dtype]),
        input_ids=tokens,
        target=tokens,
        loss_fn=next_token_loss,
        device=on,
        stages=stages,
        tokens=sequence,
    )
    profile.model = f"{profile.model} of {Path(config).name}"
    return profile


def _causal_model(path: Path) -> nn.Module:
    """The model of a config file, without data."""
    if not path.exists():
        raise UsageError(f"hf={str(path)!r}: no such file; give a config.json of transformers")
    try:
        library = import_module("transformers")
    except ImportError:
        raise UsageError(
            "hf= needs transformers: pip install 'penstock-pipeline[transformers]'"
        ) from None
    try:
        config = library.AutoConfig.from_pretrained(str(path), local_files_only=True)
        config.use_cache = False
        with torch.device("meta"):
            model: nn.Module = library.AutoModelForCausalLM.from_config(config)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputFileError(
            f"{path}: not the config of a causal language model of transformers: {error}"
        ) from error
    return model.train()
