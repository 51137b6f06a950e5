"""The loss that a model of transformers computes itself, as a Pipeline's."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from penstock._engine.runtime import Loss


def own_loss(model: nn.Module) -> Loss:
    """The loss that a transformers model computes from its labels, which a Pipeline of it trains with.

    It is a mean over the labels that count, so each microbatch is weighted by their number: the loss of the
    batch is the mean over all its labels, as without a pipeline. The labels are the target too.

    A Pipeline without ``loss_fn`` takes this one; give it where you add metrics, as in
    ``dataclasses.replace(own_loss(model), metrics=...)``.

    Args:
        model: the model.
    """
    shifts = _shifts_labels(model)

    def weight(labels: Any) -> Any:
        """The number of labels that the loss averages over."""
        if isinstance(labels, Mapping):
            labels = labels.get("labels", next(iter(labels.values())))
        if not isinstance(labels, Tensor) or labels.is_floating_point():
            return len(labels)
        return ((labels[..., 1:] if shifts and labels.dim() > 1 else labels) != -100).sum()

    return Loss(lambda output, labels: output.loss, weight=weight, target="labels")


def default_loss(model: nn.Module) -> Loss | None:
    """The own loss of a model of transformers that takes labels; None for any other model."""
    if not (is_named(type(model), "PreTrainedModel") or is_named(type(model), "PeftModel")):
        return None
    return own_loss(model) if label_names(model) else None


def label_names(model: nn.Module) -> list[str]:
    """The arguments of a transformers model that are labels."""
    return [
        name
        for name in inspect.signature(type(author_of(model)).forward).parameters
        if "label" in name or name in ("start_positions", "end_positions")
    ]


def _shifts_labels(model: Any) -> bool:
    """Whether the model predicts each label from the tokens before it, and so never the first."""
    base = author_of(model)
    function = getattr(base, "loss_function", None)
    causal = getattr(function, "__name__", "") == "ForCausalLMLoss"
    # Virtual tokens in front of a prompt predict its first token.
    configs = getattr(model, "peft_config", None) or {}
    prompts = {"PROMPT_TUNING", "P_TUNING"}
    virtual = any(getattr(c, "peft_type", "") in prompts for c in configs.values())
    return causal and not virtual and not getattr(base.config, "is_encoder_decoder", False)


def author_of(model: Any) -> Any:
    """The transformers model, which may be inside a model of PEFT."""
    return model.get_base_model() if is_named(type(model), "PeftModel") else model


def is_named(kind: type, name: str) -> bool:
    """Whether a class is or extends transformers' or PEFT's class of this name; this imports neither."""
    return any(
        base.__name__ == name and base.__module__.partition(".")[0] in ("transformers", "peft")
        for base in kind.__mro__
    )
