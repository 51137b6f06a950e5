"""The loss that a model of transformers computes itself, as a Pipeline's."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from penstock._engine.microbatches import Rule
from penstock._engine.runtime import Loss
from penstock.errors import UsageError


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

    names = label_names(model)
    target = "labels" if "labels" in names else next(iter(names), None)
    inside = LossInside(type(author_of(model)).__name__, names)
    return Loss(inside, weight=weight, target=target, check=not _is_known_mean(model))


_MEANS = (
    "ForCausalLMLoss",
    "ForMaskedLMLoss",
    "ForSequenceClassificationLoss",
    "ForTokenClassification",
)
"""Loss functions of transformers that are means over the labels that are not -100."""


def _is_known_mean(model: nn.Module) -> bool:
    """Tell whether a model's code says that its loss is a mean over labels, so that it need not be asked."""
    author = author_of(model)
    code = getattr(inspect.unwrap(type(author).forward), "__code__", None)
    if code is None or not type(author).__module__.startswith("transformers."):
        return False
    losses = {name for name in code.co_names if "loss" in name.lower() and name != "loss"}
    if losses == {"loss_function"}:
        return getattr(author.loss_function, "__name__", "") in _MEANS
    return losses == {"CrossEntropyLoss"}


class LossInside:
    """The loss function of a model that computes its loss itself.

    Args:
        model: the name of its class.
        labels: its arguments that are labels.
    """

    def __init__(self, model: str, labels: Sequence[str]) -> None:
        self._model, self._labels = model, labels

    def __call__(self, output: Any, _: Any) -> Tensor:
        """The loss in the output of a microbatch."""
        if not isinstance(output, Mapping):
            raise UsageError(
                f"the {self._model} returned a {type(output).__name__}, and its loss is an item of what it "
                "returns with return_dict=True"
            )
        loss = output.get("loss")
        if loss is None:
            raise UsageError(
                f"the {self._model} computed no loss, as it does without labels: give it "
                f"{', '.join(f'{name}=' for name in self._labels)}, or the Pipeline a loss_fn of yours"
            )
        return cast("Tensor", loss)

    def with_loss(self, rule: Rule | None, counts: Sequence[float]) -> Rule | None:
        """The rule for outputs, with one for the loss: the mean by the weights of the microbatches."""

        def mean(losses: Sequence[Tensor], _: Any) -> Tensor:
            # Where there is nothing to average over, the loss is no number.
            counted = [loss * count for loss, count in zip(losses, counts, strict=True) if count]
            return sum(counted, torch.zeros_like(losses[0])) / (sum(counts) or 1.0)

        return {"loss": mean, **(rule or {})} if isinstance(rule, Mapping | None) else rule


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
    """Tell whether the model predicts each label from the tokens before it, and so never the first."""
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
    """Tell whether a class is or extends transformers' or PEFT's class of this name; this imports neither."""
    return any(
        base.__name__ == name and base.__module__.partition(".")[0] in ("transformers", "peft")
        for base in kind.__mro__
    )
