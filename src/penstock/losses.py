"""Losses over large vocabularies, computed from hidden states so that logits never exist as a whole.

A language model's logits are often its largest tensor: 8,192 tokens by 128,256 words take 4.2 GB in float32,
and their gradient as much again. The functions here multiply a chunk of tokens at a time with the head's
weight. Between forward and backward they keep one number a token beside the hidden states; backward computes
the logits of each chunk again. That costs one more product with the head, a third of its work, but a schedule
that has several forwards under way holds neither logits nor gradients of the weight for them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.overrides import handle_torch_function, has_torch_function

from penstock.errors import UsageError

CHUNK = 1024
"""Tokens whose logits are computed at a time, if nothing else is said."""


def chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    reduction: Literal["mean", "sum", "none"] = "mean",
    label_smoothing: float = 0.0,
    chunk: int = CHUNK,
) -> Tensor:
    """Return the cross entropy of ``hidden @ weight.T + bias`` without logits of more than a chunk of tokens.

    The loss and its gradients are those of :func:`torch.nn.functional.cross_entropy`. Logits in half
    precision are taken to float32 first. Under autocast, the products are computed in its type.

    Args:
        hidden: the hidden states, ``[..., width]``.
        weight: the head's weight, ``[vocabulary, width]``.
        target: the label of each hidden state, ``[...]``; not shifted here.
        bias: the head's bias, ``[vocabulary]``.
        ignore_index: the label of tokens that do not count.
        reduction: ``"mean"`` over the labels that count, ``"sum"``, or ``"none"`` for a loss of each token.
        label_smoothing: the share of the probability that is spread over all words, from 0 to 1.
        chunk: the tokens of a chunk. The memory that the loss needs for the time of its forward or backward
            is about three times ``chunk * vocabulary`` numbers.

    Raises:
        UsageError: the shapes do not fit together, or an option has an invalid value.
    """
    tensors = (hidden, weight, target, bias)
    options: dict[str, Any] = {
        "ignore_index": ignore_index, "reduction": reduction,
        "label_smoothing": label_smoothing, "chunk": chunk,
    }  # fmt: skip
    if has_torch_function(tensors):
        # Between the units of a model, the stage that has the hidden states computes it as one function.
        of_mode: Tensor = handle_torch_function(
            chunked_cross_entropy, tensors, hidden, weight, target, bias=bias, **options
        )
        return of_mode
    if hidden.shape[:-1] != target.shape or weight.shape[1:] != hidden.shape[-1:]:
        raise UsageError(
            f"chunked_cross_entropy got hidden states of {[*hidden.shape]}, a weight of {[*weight.shape]} "
            f"and a target of {[*target.shape]}: they must be [..., width], [vocabulary, width] and [...]"
        )
    if weight.numel() and not weight.untyped_storage().nbytes():
        raise UsageError(
            "the head's weight has no memory here, since FSDP has sharded it again after the stage's "
            "forward; let the model's forward return penstock.losses.cross_entropy(self.head(hidden), labels)"
        )
    if reduction not in ("mean", "sum", "none"):
        raise UsageError(f"reduction={reduction!r}: must be 'mean', 'sum' or 'none'")
    if chunk < 1:
        raise UsageError(f"chunk={chunk}: must be at least 1 token")
    if not 0 <= label_smoothing <= 1:
        raise UsageError(f"label_smoothing={label_smoothing}: must be from 0 to 1")
    if torch.is_autocast_enabled(hidden.device.type):
        kind = torch.get_autocast_dtype(hidden.device.type)
        hidden, weight = hidden.to(kind), weight.to(kind)
        bias = None if bias is None else bias.to(kind)
    counts = target != ignore_index
    losses: Tensor = cast("Any", _TokenLosses).apply(
        hidden.flatten(0, -2), weight, bias,
        target.where(counts, 0).flatten(), counts.flatten(), label_smoothing, chunk,
    )  # fmt: skip
    if reduction == "none":
        return losses.view(target.shape)
    return losses.sum() / counts.sum() if reduction == "mean" else losses.sum()


class _TokenLosses(torch.autograd.Function):
    """The loss of each token, 0 where it does not count."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        counts: Tensor,
        smoothing: float,
        chunk: int,
    ) -> Tensor:
        losses, norms = [], []
        with torch.autocast(hidden.device.type, enabled=False):
            for part, logits in _logits(hidden, weight, bias, chunk):
                norm = logits.logsumexp(1)
                loss = norm - (1 - smoothing) * logits.gather(1, target[part, None]).squeeze(1)
                if smoothing:
                    loss -= smoothing * logits.mean(1)
                losses.append(loss)
                norms.append(norm)
        ctx.save_for_backward(hidden, weight, bias, target, counts, torch.cat(norms))
        ctx.smoothing, ctx.chunk = smoothing, chunk
        return torch.cat(losses).where(counts, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, target, counts, norms = ctx.saved_tensors
        of_hidden, of_weight, of_bias = [
            torch.zeros_like(tensor) if needed else None
            for tensor, needed in zip((hidden, weight, bias), ctx.needs_input_grad, strict=False)
        ]
        grad = grad.where(counts, 0)[:, None]
        with torch.autocast(hidden.device.type, enabled=False):
            for part, logits in _logits(hidden, weight, bias, ctx.chunk):
                # Its own memory is used for the probabilities, and for the gradient of the logits.
                gradient = logits.sub_(norms[part, None]).exp_()
                if ctx.smoothing:
                    gradient -= ctx.smoothing / len(weight)
                label = target[part, None]
                gradient.scatter_add_(
                    1, label, gradient.new_full((), ctx.smoothing - 1).expand_as(label)
                )
                gradient = gradient.mul_(grad[part]).to(hidden.dtype)
                if of_hidden is not None:
                    torch.mm(gradient, weight, out=of_hidden[part])
                if of_weight is not None:
                    of_weight.addmm_(gradient.t(), hidden[part])
                if of_bias is not None:
                    of_bias += gradient.sum(0)
        return of_hidden, of_weight, of_bias, None, None, None, None


def _logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, chunk: int
) -> Iterator[tuple[slice, Tensor]]:
    """Yield the logits of a chunk of tokens at a time, in float32 or float64."""
    for start in range(0, max(1, len(hidden)), chunk):
        part = slice(start, start + chunk)
        logits = functional.linear(hidden[part], weight, bias)
        yield part, logits.float() if logits.dtype.itemsize < 4 else logits


# ---- a head that leaves its product to the loss


@dataclass(frozen=True)
class HeadOutput:
    """What a head would multiply: it stands for the logits in the output of a model that trains.

    Attributes:
        hidden: the hidden states, ``[..., width]``.
        weight: the head's weight, ``[vocabulary, width]``.
        bias: its bias, if it has one.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None = None

    def logits(self) -> Tensor:
        """Compute the logits as a whole, ``[..., vocabulary]``."""
        return functional.linear(self.hidden, self.weight, self.bias)


class ChunkedHead(nn.Linear):
    """A head of a language model that leaves the logits to the loss while the model trains.

    It takes over the parameters of the head, under the same names, so that weights stay tied and files fit.
    In training mode it returns a :class:`HeadOutput`, which :func:`cross_entropy` takes; in evaluation mode,
    the logits::

        model.head = penstock.losses.ChunkedHead(model.head)
        loss_fn = penstock.Loss(penstock.losses.cross_entropy, over="tokens")

    Args:
        head: the head.

    Raises:
        UsageError: the head is no plain linear layer.
    """

    def __init__(self, head: nn.Module) -> None:
        plain = nn.Linear.forward, ChunkedHead.forward
        if not isinstance(head, nn.Linear) or type(head).forward not in plain:
            raise UsageError(
                f"ChunkedHead takes the place of an nn.Linear, not of a {type(head).__name__}; call "
                "penstock.losses.chunked_cross_entropy in the model's forward, with the weight that counts"
            )
        nn.Module.__init__(self)
        self.in_features, self.out_features = head.in_features, head.out_features
        self.weight, self.bias = head.weight, head.bias
        self.train(head.training)

    def forward(self, input: Tensor) -> Any:
        """Return the hidden states with the parameters, or the logits in evaluation mode."""
        if self.training:
            # As views: a weight itself would be read from the module again, where it may be sharded.
            bias = None if self.bias is None else self.bias.view_as(self.bias)
            return HeadOutput(input, self.weight.view_as(self.weight), bias)
        return super().forward(input)


def cross_entropy(
    output: HeadOutput | Tensor, target: Tensor, *, chunk: int = CHUNK, **options: Any
) -> Tensor:
    """Return the cross entropy of a model's output, of a :class:`ChunkedHead` or as logits.

    Args:
        output: the output, for which logits would be ``[..., vocabulary]``.
        target: the labels, ``[...]``; not shifted here.
        chunk: the tokens whose logits are computed at a time, if they come from a :class:`ChunkedHead`.
        options: ``ignore_index``, ``reduction`` and ``label_smoothing`` of :func:`chunked_cross_entropy`.
    """
    if isinstance(output, HeadOutput):
        return chunked_cross_entropy(
            output.hidden, output.weight, target, bias=output.bias, chunk=chunk, **options
        )
    return functional.cross_entropy(output.flatten(0, -2), target.flatten(), **options)


def use_chunked_loss(model: Any, *, chunk: int = CHUNK) -> None:
    """Let a causal language model of transformers compute its loss in chunks while it trains.

    It replaces the model's head by a :class:`ChunkedHead` and its ``loss_function`` by one of the same
    numbers. The ``logits`` in the model's output are then a :class:`HeadOutput`, which the author's forward
    must not scale or cap.

    Args:
        model: a model such as ``LlamaForCausalLM``.
        chunk: the tokens whose logits are computed at a time.

    Raises:
        UsageError: the model has another loss or head.
    """
    author = getattr(model, "loss_function", None)
    if author is None or getattr(author, "__name__", "") != "ForCausalLMLoss":
        raise UsageError(
            f"use_chunked_loss knows the loss of causal language models of transformers, which the "
            f"{type(model).__name__} does not compute; call chunked_cross_entropy in its forward"
        )

    @functools.wraps(author)
    def loss_function(
        logits: Any, labels: Any, vocab_size: int, num_items_in_batch: Any = None,
        ignore_index: int = -100, shift_labels: Any = None, **others: Any,
    ) -> Tensor:  # fmt: skip
        if not isinstance(logits, HeadOutput):
            others |= {"num_items_in_batch": num_items_in_batch, "ignore_index": ignore_index}
            return cast(
                "Tensor", author(logits, labels, vocab_size, shift_labels=shift_labels, **others)
            )
        if shift_labels is None:
            shift_labels = functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        options: dict[str, Any] = {"ignore_index": ignore_index, "chunk": chunk}
        if num_items_in_batch is None:
            return cross_entropy(logits, shift_labels, **options)
        total = cross_entropy(logits, shift_labels, reduction="sum", **options)
        return cast("Tensor", total / num_items_in_batch)

    model.set_output_embeddings(ChunkedHead(model.get_output_embeddings()))
    model.loss_function = loss_function
