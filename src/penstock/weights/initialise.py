"""First weights that do not depend on how the model is cut."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import UsageError
from penstock.parallel import path_without_wrappers
from penstock.rng import generators_kept, seed_generators, seed_of
from penstock.stage import PipelineStage

# ---- give tensors on the meta device memory, and find those that no initialiser has filled


class Blanks:
    """The tensors that were on the meta device, marked with values that no initialiser leaves.

    Each tensor stays the same object, so that ties, optimizers and anything else that holds it stay valid.

    Args:
        modules: modules whose parameters and buffers get memory, each with its device.
    """

    def __init__(self, modules: Sequence[tuple[nn.Module, torch.device]]) -> None:
        self._places = [place for module, _ in modules for place in _places(module)]
        self._blanks: dict[int, tuple[Tensor, int]] = {}
        for module, device in modules:
            for tensor in (*module.parameters(), *module.buffers()):
                if tensor.is_meta:
                    blank = torch.empty_like(tensor, device=device, requires_grad=False)
                    give_data(tensor, blank.fill_(_mark(tensor.dtype)))
                    self._blanks[id(tensor)] = tensor, tensor._version

    def check_filled(self) -> None:
        """Check that all of them have been filled.

        Raises:
            UsageError: some have not; the message names them and their modules.
        """
        left = {
            path: f"{path} ({type(owner).__name__})"
            for path, owner, name in self._places
            if self._is_blank(getattr(owner, name))
        }
        if left:
            raise UsageError(
                f"no value was given to {', '.join(left.values())}: these were on the meta device, and "
                "neither a reset_parameters() of their modules nor an _init_weights(module) of the model "
                "fills them; pass init= a function of a module that does, or build these modules on a real "
                "device"
            )

    def _is_blank(self, tensor: Tensor) -> bool:
        blank = self._blanks.get(id(tensor))
        if blank is None or not tensor.numel():
            return False
        if tensor.is_floating_point() or tensor.is_complex():
            return bool(tensor.isnan().any())
        return tensor._version == blank[1] and bool((tensor == _mark(tensor.dtype)).all())


def _places(module: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """For each parameter and buffer: its path, the module that holds it, and its name there."""
    for path, owner in module.named_modules():
        held = [*owner.named_parameters(recurse=False), *owner.named_buffers(recurse=False)]
        for name, _ in held:
            yield f"{path}.{name}" if path else name, owner, name


def give_data(tensor: Tensor, data: Tensor) -> None:
    """Give a tensor on the meta device data; it stays the same object."""
    filled = nn.Parameter(data, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else data
    filled.__dict__.update(tensor.__dict__)
    torch.utils.swap_tensors(tensor, filled)


def _mark(dtype: torch.dtype) -> float | int | bool:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return True if dtype is torch.bool else torch.iinfo(dtype).min


# ---- run the initialisers of modules, each with its own seed


Init = Callable[[nn.Module], object]
"""Fills a module's own parameters and buffers, for the modules that it knows."""


def initialise(
    homes: Sequence[tuple[nn.Module, torch.device]], seed: int, init: Init | None
) -> None:
    """Give the parameters and buffers of modules their first values.

    Args:
        homes: stages or whole models, each with the device for what is on the meta device.
        seed: of all values.
        init: called for each module after the module's own initialiser; by default the model's
            ``_init_weights``, if it has one.

    Raises:
        UsageError: nothing has filled a tensor that was on the meta device.
    """
    blanks, modules = Blanks(homes), [module for module, _ in homes]
    owners = _owners(modules)
    tensors = (t for module in modules for t in (*module.parameters(), *module.buffers()))
    devices = {tensor.device for tensor in tensors}
    with generators_kept(devices), torch.no_grad():
        for called, path, inits in _each_once(modules, init):
            number = seed_of(seed, f"weights of {path_without_wrappers(path)}")
            seed_generators(number, devices)
            with _others_kept(called, owners), _lent(called) as module:
                inits.run(path, module)
    blanks.check_filled()


def _each_once(
    modules: Sequence[nn.Module], init: Init | None
) -> Iterator[tuple[nn.Module, str, _Inits]]:
    """Every module once, with its first path, and the initialisers of its root."""
    done: set[nn.Module] = set()
    for root in modules:
        inits = _Inits(root, init)
        for path, module in _children_first(root):
            if module not in done:
                done.add(module)
                yield module, path, inits


def _owners(modules: Sequence[nn.Module]) -> dict[int, nn.Module]:
    """For each parameter and buffer, the module that initialises it: the one of its first name."""
    owners: dict[int, nn.Module] = {}
    for root in modules:
        for module in root.modules():
            for tensor in _own(module):
                owners.setdefault(id(tensor), module)
    return owners


def _own(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(recurse=False), *module.buffers(recurse=False)]


def _children_first(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules in the order of construction.

    A container may change its children after their own initialisers.
    """
    depths = {module: path.count(".") + bool(path) for path, module in root.named_modules()}
    return iter(sorted(root.named_modules(), key=lambda item: -depths[item[1]]))


@contextmanager
def _others_kept(module: nn.Module, owners: dict[int, nn.Module]) -> Iterator[None]:
    """Keep tied weights that another module initialises as they are."""
    others = [tensor for tensor in _own(module) if owners[id(tensor)] is not module]
    before = [tensor.clone() for tensor in others]
    yield
    for tensor, value in zip(others, before, strict=True):
        tensor.copy_(value)


@contextmanager
def _lent(module: Any) -> Iterator[nn.Module]:
    """The module to initialise; for a stand-in, the module that it stands for, with the weights held here."""
    if not hasattr(module, "stands_for"):
        yield module
        return
    with module.lent():
        yield module.stands_for


class _Inits:
    """The initialisers for the modules of a tree."""

    def __init__(self, root: nn.Module, init: Init | None) -> None:
        self._init = init
        self._of: dict[str, Init] = dict(getattr(root, "initialisers", {}))
        for path, module in root.named_modules():
            called = getattr(module, "stands_for", module)
            if callable(init := getattr(called, "_init_weights", None)):
                self._of[path] = init

    def run(self, path: str, module: nn.Module) -> None:
        """Run a module's own initialiser, and then the user's or that of the model around it."""
        reset: Any = getattr(module, "reset_parameters", getattr(module, "_reset_parameters", None))
        if callable(reset) and _takes_nothing(reset):
            reset()
        init = self._init or self._around(path)
        if init is not None:
            init(module)

    def _around(self, path: str) -> Init | None:
        """The ``_init_weights`` of the innermost model around a path."""
        while path not in self._of:
            if not path:
                return None
            path = path.rpartition(".")[0]
        return self._of[path]


def _takes_nothing(function: Callable[..., Any]) -> bool:
    try:
        inspect.signature(function).bind()
    except TypeError:
        return False
    return True


# ---- the user's function


def init_weights(
    target: Any,
    seed: int,
    init: Init | None = None,
    *,
    device: torch.device | str | None = None,
) -> None:
    """Give all weights their first values, the same bits however the model is cut.

    For each module, its own ``reset_parameters()`` runs, and then ``init`` or the ``_init_weights(module)``
    of the model around it, such as that of transformers; both with a seed made from ``seed`` and the
    module's path. What is on the meta device gets memory first. A tied weight is initialised by the module
    of its first name. What no initialiser fills stays as the constructor left it. Torch's generators are
    left as they were.

    Args:
        target: a model, one of its stages (a module or a ``PipelineStage``), several stages, or a
            ``Pipeline``; in the last case every rank calls this.
        seed: of all values.
        init: called with each module, children first, in place of the model's ``_init_weights``.
        device: where to put what is on the meta device; by default the CPU, or the stage's device.

    Raises:
        UsageError: nothing has filled a tensor that was on the meta device; the message names it.
    """
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise UsageError(f"seed={seed!r}: must be a whole number")
    if isinstance(target, nn.Module | PipelineStage):
        initialise([_home(target, device)], seed, init)
    elif callable(of_pipeline := getattr(target, "init_weights", None)):
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
