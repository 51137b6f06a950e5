"""Initial weights that do not depend on how the model is cut."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from penstock._engine.parallel import path_without_wrappers
from penstock._engine.rng import generators_kept, seed_generators, seed_of
from penstock.errors import UsageError
from penstock.stage import PipelineStage

Init = Callable[[nn.Module], object]
"""Fills the own parameters and buffers of the modules that it handles."""
_Blanks = dict[int, tuple[Tensor, int]]
"""Tensors that were on the meta device, each with its version after marking."""


def initialise(
    homes: Sequence[tuple[nn.Module, torch.device]], seed: int, init: Init | None
) -> None:
    """Give the parameters and buffers of modules their first values; see :func:`init_weights`.

    Args:
        homes: stages or whole models, each with the device for its meta tensors: the CPU, if that is meta.
        seed: the seed of all values.
        init: called for each module after the module's own initialiser; by default the model's
            ``_init_weights``, if it has one.
    """
    blanks = _give_memory(homes)
    # A tied weight belongs to the module of its first name.
    owners: dict[int, nn.Module] = {}
    for root, _ in homes:
        for module in root.modules():
            for tensor in _tensors_of(module):
                owners.setdefault(id(tensor), module)
    devices = {
        tensor.device for root, _ in homes for tensor in (*root.parameters(), *root.buffers())
    }
    # Each module once, under its first path.
    calls: dict[nn.Module, tuple[str, Init | None]] = {}
    for root, _ in homes:
        inits = _inits_of(root)
        for path, module in _children_first(root):
            calls.setdefault(module, (path, init or _innermost(inits, path)))
    with generators_kept(devices), torch.no_grad():
        for module, (path, around) in calls.items():
            seed_generators(seed_of(seed, f"weights of {path_without_wrappers(path)}"), devices)
            with _others_kept(module, owners):
                _initialise(module, around)
    _check_filled([root for root, _ in homes], blanks)


def _tensors_of(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(recurse=False), *module.buffers(recurse=False)]


def _children_first(root: nn.Module) -> list[tuple[str, nn.Module]]:
    """Modules in order of construction: one may change its children after their own initialisers ran."""
    named = list(root.named_modules())
    return sorted(named, key=lambda item: -(item[0].count(".") + bool(item[0])))


def _inits_of(root: nn.Module) -> dict[str, Init]:
    """The ``_init_weights`` of models in a tree, by their paths."""
    inits: dict[str, Init] = dict(getattr(root, "initialisers", {}))
    for path, module in root.named_modules():
        if callable(init := getattr(module, "_init_weights", None)):
            inits[path] = init
    return inits


def _innermost(inits: dict[str, Init], path: str) -> Init | None:
    while path not in inits and path:
        path = path.rpartition(".")[0]
    return inits.get(path)


def _initialise(module: nn.Module, around: Init | None) -> None:
    """Run a module's own initialiser, unless it needs arguments, and then the surrounding model's."""
    reset: Any = getattr(module, "reset_parameters", getattr(module, "_reset_parameters", None))
    if callable(reset) and _takes_nothing(reset):
        reset()
    if around is not None:
        around(module)


def _takes_nothing(function: Callable[..., Any]) -> bool:
    try:
        inspect.signature(function).bind()
    except TypeError:
        return False
    return True


@contextmanager
def _others_kept(module: nn.Module, owners: dict[int, nn.Module]) -> Iterator[None]:
    """Keep tied weights that another module initialises as they are."""
    others = [tensor for tensor in _tensors_of(module) if owners[id(tensor)] is not module]
    before = [tensor.clone() for tensor in others]
    yield
    for tensor, value in zip(others, before, strict=True):
        tensor.copy_(value)


# ---- give meta tensors memory, and find those that no initialiser has filled


def _give_memory(homes: Sequence[tuple[nn.Module, torch.device]]) -> _Blanks:
    """Give meta tensors memory, marked with values that no initialiser leaves."""
    blanks: _Blanks = {}
    for root, device in homes:
        device = torch.device("cpu") if device.type == "meta" else device
        for tensor in (*root.parameters(), *root.buffers()):
            if tensor.is_meta:
                blank = torch.empty_like(tensor, device=device, requires_grad=False)
                give_data(tensor, blank.fill_(_mark(tensor.dtype)))
                blanks[id(tensor)] = tensor, tensor._version
    return blanks


def give_data(tensor: Tensor, data: Tensor) -> None:
    """Give data to a tensor on the meta device.

    The tensor stays the same object, so that ties, optimizers and all other references stay valid.
    """
    filled = nn.Parameter(data, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else data
    filled.__dict__.update(tensor.__dict__)
    torch.utils.swap_tensors(tensor, filled)


def _mark(dtype: torch.dtype) -> float | int | bool:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return True if dtype is torch.bool else torch.iinfo(dtype).min


def _check_filled(roots: Sequence[nn.Module], blanks: _Blanks) -> None:
    """Refuse blanks that no initialiser has filled."""
    left = {
        f"{path}.{name}".removeprefix("."): type(owner).__name__
        for root in roots
        for path, owner in root.named_modules()
        for name, tensor in (
            *owner.named_parameters(recurse=False),
            *owner.named_buffers(recurse=False),
        )
        if id(tensor) in blanks and _is_blank(*blanks[id(tensor)])
    }
    if left:
        raise UsageError(
            f"no value was given to {', '.join(f'{path} ({kind})' for path, kind in left.items())}: these "
            "were on the meta device, and neither a reset_parameters() of their modules nor an "
            "_init_weights(module) of the model fills them; pass init= a function of a module that does, or "
            "build these modules on a real device"
        )


def _is_blank(tensor: Tensor, version: int) -> bool:
    if not tensor.numel():
        return False
    if tensor.is_floating_point() or tensor.is_complex():
        return bool(tensor.isnan().any())
    return tensor._version == version and bool((tensor == _mark(tensor.dtype)).all())


# ---- the public function


def init_weights(
    target: Any,
    seed: int,
    init: Init | None = None,
    *,
    device: torch.device | str | None = None,
) -> None:
    """Give all weights their first values, the same bits however the model is cut.

    For each module, its own ``reset_parameters()`` runs, and then ``init`` or the surrounding model's
    ``_init_weights(module)``, as in transformers; both with a seed made from ``seed`` and the module's path.
    Meta tensors get memory first. A tied weight is initialised by the module of its first name. Tensors that
    no initialiser fills keep the constructor's values. Torch's generators keep their states.

    Args:
        target: a model, one of its stages (a module or a ``PipelineStage``), several stages, or a
            ``Pipeline``; for a ``Pipeline``, every rank calls this.
        seed: the seed of all values.
        init: called with each module, children first, in place of the model's ``_init_weights``.
        device: the device for meta tensors; by default the CPU, or the stage's device.

    Raises:
        UsageError: no initialiser has filled a tensor that was on the meta device; the message names it.
    """
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise UsageError(f"seed={seed!r}: must be a whole number")
    if isinstance(target, nn.Module | PipelineStage):
        initialise([_home(target, device)], seed, init)
    elif callable(of_pipeline := getattr(getattr(target, "weights", None), "init_weights", None)):
        if device is not None:
            raise UsageError("a Pipeline knows where its stages live; leave out device=")
        of_pipeline(seed, init)
    elif isinstance(target, Iterable):
        initialise([_home(stage, device) for stage in target], seed, init)
    else:
        raise UsageError(
            f"{type(target).__name__} has no weights; give a model, stages, or a Pipeline"
        )


def _home(stage: Any, device: torch.device | str | None) -> tuple[nn.Module, torch.device]:
    if isinstance(stage, PipelineStage):
        return stage.code, torch.device(device or stage.device)
    if isinstance(stage, nn.Module):
        return stage, torch.device(device or "cpu")
    raise UsageError(
        f"{type(stage).__name__} is neither a module nor a stage; give modules, PipelineStages or a Pipeline"
    )
