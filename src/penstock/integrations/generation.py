"""Generation with a transformers model whose parts live on several ranks.

Every rank runs the model's own ``generate``, and in it the author's forward. Each unit of the model runs on
one of the ranks that hold it, which sends its result to the others. So each rank keeps the cache of its own
layers; for other layers it records only the length, from which masks and positions are computed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from penstock._engine.parallel import is_sharded
from penstock._engine.rng import generator_states, set_generator_states
from penstock._engine.runtime import contents_of
from penstock._engine.values import flatten, tensors_in, unflatten
from penstock.errors import AgreementError, UsageError, error_named, public_name
from penstock.partition import Interceptor
from penstock.pipeline import Pipeline
from penstock.stage import StageModule

_SPLIT = {"DynamicLayer", "DynamicSlidingWindowLayer"}
"""The classes of cache layers that hold nothing but the keys and values of their tokens."""


def generate(pipe: Pipeline, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Run the model's ``generate``; all ranks call this with the same arguments, and get the same result.

    Raises:
        UsageError: the model cannot generate here, or its cache cannot be split.
        AgreementError: the ranks were given different arguments.
    """
    model: Any = pipe.model
    if any(is_sharded(parameter) for _, parameter in pipe.weights.here.named_parameters()):
        raise UsageError(
            "generate needs whole weights, and those of a stage are sharded; save them with save(), and "
            "generate with the model that from_pretrained makes of them"
        )
    with torch.no_grad(), pipe.evaluating():
        if len(pipe.local_ranks) == pipe.job.ranks:
            return model.generate(*args, **kwargs)
        contents = contents_of((args, dict(kwargs))).hex()
        if len({*_told(pipe, contents)}) > 1:
            raise AgreementError("generate was called with different arguments on different ranks")
        # All ranks draw the random numbers of rank 0.
        states = [pipe.job.share(state, 0).cpu() for state in generator_states([pipe.device])]
        set_generator_states(states, [pipe.device])
        if not pipe.is_cut:
            return model.generate(*args, **kwargs)
        split = _SpreadModel(pipe, model)
        split.open()
        try:
            return model.generate(*args, **kwargs)
        finally:
            split.close()


def _told(pipe: Pipeline, value: Any) -> list[Any]:
    """The JSON values of all ranks."""
    values: list[Any] = pipe.job.meet(lambda: value, among=pipe.job.pipeline)
    return values


class _SpreadModel:
    """The units of a model, each of which runs on one rank."""

    def __init__(self, pipe: Pipeline, model: nn.Module) -> None:
        self._pipe = pipe
        codes = [stage.code for stage in pipe.stages if isinstance(stage.code, StageModule)]
        here = {id(unit) for code in codes for unit in code.units}
        mine = [path for path, module in model.named_modules() if id(module) in here]
        self._owners: dict[str, int] = {}
        for rank, paths in enumerate(_told(pipe, mine)):
            for path in paths:
                self._owners.setdefault(path, rank)
        self._interceptors = [Interceptor(model.get_submodule(path), path) for path in self._owners]
        inside = {
            id(p) for interceptor in self._interceptors for p in interceptor.module.parameters()
        }
        loose = [n for n, p in model.named_parameters() if id(p) not in inside and p.is_meta]
        missing = sorted({name for names in _told(pipe, loose) for name in names})
        if missing:
            raise UsageError(
                f"generate cannot run here: the model uses {', '.join(missing)} outside of the modules that "
                "are placed as a whole, and not all ranks have it; put it into a module of its own"
            )

    def open(self) -> None:
        for interceptor in self._interceptors:
            interceptor.open(self._call, direct=False)

    def close(self) -> None:
        for interceptor in self._interceptors:
            interceptor.close()

    def _call(self, interceptor: Interceptor, run: Any, /, *args: Any, **kwargs: Any) -> Any:
        owner = self._owners[interceptor.path]
        cache = _cache_in((*args, *kwargs.values()))
        layers = sorted(
            {layer for m in interceptor.module.modules() if (layer := _layer_of(m)) is not None}
        )
        if owner != self._pipe.rank:
            problem, lengths, places, shared = self._pipe.job.share(None, owner)
            if problem is not None:
                raise error_named(problem[0])(f"rank {owner}: {problem[1]}")
            if lengths:
                _note_lengths(cache, lengths, next(iter(tensors_in(shared))))
            leaves, tree = flatten(shared)
            return unflatten(
                [cache if p in places else leaf for p, leaf in enumerate(leaves)], tree
            )
        try:
            output = run(*args, **kwargs)
            lengths = [] if cache is None else _lengths(cache, layers, interceptor.path)
        except Exception as error:
            problem = ["StageError", f"{interceptor.path}: {type(error).__name__}: {error}"]
            if isinstance(error, UsageError):
                problem = [public_name(type(error)), str(error)]
            self._pipe.job.share([problem, [], [], None], owner)
            raise
        # The cache stays here; the other ranks return theirs.
        leaves, tree = flatten(output)
        places = [p for p, leaf in enumerate(leaves) if cache is not None and leaf is cache]
        leaves = [None if p in places else leaf for p, leaf in enumerate(leaves)]
        self._pipe.job.share([None, lengths, places, unflatten(leaves, tree)], owner)
        return output


def _layer_of(module: nn.Module) -> int | None:
    layer = getattr(module, "layer_idx", None)
    return layer if isinstance(layer, int) else None


def _cache_in(values: Any) -> Any:
    """The cache among arguments, if there is one."""
    return next((value for value in values if hasattr(value, "get_seq_length")), None)


def _lengths(cache: Any, layers: list[int], path: str) -> list[tuple[int, int]]:
    """The lengths of some layers of a cache, by index; layers with more than keys and values are refused."""
    of_self = getattr(cache, "self_attention_cache", cache)
    there = [layer for layer in layers if layer < len(of_self.layers)]
    for layer in there:
        kind = type(of_self.layers[layer]).__name__
        if kind not in _SPLIT:
            raise UsageError(
                f"generate cannot split the cache of {path}, a {kind}, over ranks: only layers that keep "
                "keys and values as they come can be on different ranks. Call generate with use_cache=False"
            )
    return [(layer, of_self.get_seq_length(layer)) for layer in there]


def _note_lengths(cache: Any, lengths: list[tuple[int, int]], like: Tensor) -> None:
    """Give a cache's layers of another rank the length that they have there, at next to no memory."""
    of_self = getattr(cache, "self_attention_cache", cache)
    for layer, length in lengths:
        # Parts of a layer that come later, such as an attention to the encoder, add nothing.
        if more := length - of_self.get_seq_length(layer):
            nothing = like.new_zeros(like.shape[0], 1, more, 1)
            of_self.update(nothing, nothing, layer)
