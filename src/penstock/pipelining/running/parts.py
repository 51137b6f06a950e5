"""A schedule's parts of a step that subclasses may replace: how a batch is split, its loss, its output."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from penstock.errors import MicrobatchError
from penstock.pipelining.microbatch import merge_chunks, split_args_kwargs_into_chunks
from penstock.pipelining.refusals import CallError


class StepParts:
    """What a step does besides running stages. A subclass may replace each; ``step`` calls it."""

    _n_microbatches: int
    _loss_fn: Callable[..., Any] | None
    _args_chunk_spec: Any
    _kwargs_chunk_spec: Any
    _output_merge_spec: Any

    def _split_inputs(
        self, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> tuple[list[Any], list[Any]]:
        """Each microbatch's positional arguments, and those by name."""
        if not args and not kwargs:
            count = self._n_microbatches
            return [()] * count, [{} for _ in range(count)]
        return split_args_kwargs_into_chunks(
            args, kwargs, self._n_microbatches, self._args_chunk_spec, self._kwargs_chunk_spec
        )

    def _check_inputs(
        self,
        arg_mbs: list[Any] | None = None,
        kwarg_mbs: list[Any] | None = None,
        target_mbs: list[Any] | None = None,
        losses: list[Any] | None = None,
    ) -> tuple[list[Any], list[Any]]:
        """Check a split batch; what is not given is empty for each microbatch.

        Raises:
            TypeError: something is no list.
            MicrobatchError: a list of another length than there are microbatches.
        """
        count = self._n_microbatches
        given = {"arg_mbs": arg_mbs, "kwarg_mbs": kwarg_mbs, "target_mbs": target_mbs}
        for name, found in {**given, "losses": losses}.items():
            if found is not None and not isinstance(found, list):
                raise TypeError(f"{name} must be a list, not a {type(found).__name__}")
        for name, found in given.items():
            if found is not None and len(found) != count:
                raise MicrobatchError(
                    f"expected {count} microbatches, but {name} has {len(found)}; give one for each"
                )
        return (
            [()] * count if arg_mbs is None else arg_mbs,
            [{} for _ in range(count)] if kwarg_mbs is None else kwarg_mbs,
        )

    def _compute_loss(
        self, output: Any, target: Any, loss_kwargs: dict[str, Any] | None = None
    ) -> Any:
        """A microbatch's loss.

        Raises:
            CallError: the schedule has no loss function.
        """
        if self._loss_fn is None:
            raise CallError("there is no loss; give the schedule a loss_fn")
        return self._loss_fn(output, target, **(loss_kwargs or {}))

    def _merge_outputs(self, output_chunks: list[Any]) -> Any:
        """The output of the batch from those of its microbatches."""
        return merge_chunks(output_chunks, self._output_merge_spec)
