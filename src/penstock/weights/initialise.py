"""Run the initialisers of modules, each under a seed of its own."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from penstock.rng import Generators, devices_of, seed_of, unwrapped
from penstock.weights.materialise import Blanks

Init = Callable[[nn.Module], object]
"""Fills a module's own parameters and buffers, where it knows how."""


def initialise(
    homes: Sequence[tuple[nn.Module, torch.device]], seed: int, init: Init | None
) -> None:
    """Give the parameters and buffers of modules their first values.

    Args:
        homes: stages, or a whole model, each with where to put what is on the meta device.
        seed: of all values.
        init: what to call for each module after its own initialiser; by default the model's
            ``_init_weights``, where it has one.

    Raises:
        UsageError: what was on the meta device has been filled by nobody.
    """
    blanks, modules = Blanks(homes), [module for module, _ in homes]
    owners = _owners(modules)
    generators = Generators(device for module in modules for device in devices_of(module))
    with generators.kept(), torch.no_grad():
        for called, path, inits in _each_once(modules, init):
            generators.seed(seed_of(seed, f"weights of {unwrapped(path)}"))
            with _others_kept(called, owners), _lent(called) as module:
                inits.run(path, module)
    blanks.check_filled()


def _each_once(
    modules: Sequence[nn.Module], init: Init | None
) -> Iterator[tuple[nn.Module, str, _Inits]]:
    """Every module inside, its first path, and what there is to initialise it with."""
    done: set[nn.Module] = set()
    for root in modules:
        inits = _Inits(root, init)
        for path, module in _children_first(root):
            if module not in done:
                done.add(module)
                yield module, path, inits


def _owners(modules: Sequence[nn.Module]) -> dict[int, nn.Module]:
    """Of each parameter and buffer the module that initialises it: that of its first name."""
    owners: dict[int, nn.Module] = {}
    for root in modules:
        for module in root.modules():
            for tensor in _own(module):
                owners.setdefault(id(tensor), module)
    return owners


def _own(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(recurse=False), *module.buffers(recurse=False)]


def _children_first(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules as they are made: what a container does to its children comes after their own."""
    depths = {module: path.count(".") + bool(path) for path, module in root.named_modules()}
    found = sorted(root.named_modules(), key=lambda item: -depths[item[1]])
    return iter(found)


@contextmanager
def _others_kept(module: nn.Module, owners: dict[int, nn.Module]) -> Iterator[None]:
    """Keep tied weights that belong to another module as they are."""
    others = [tensor for tensor in _own(module) if owners[id(tensor)] is not module]
    before = [tensor.clone() for tensor in others]
    yield
    for tensor, value in zip(others, before, strict=True):
        tensor.copy_(value)


@contextmanager
def _lent(module: Any) -> Iterator[nn.Module]:
    """The module to initialise: that for which this one stands, using what is held here."""
    if not hasattr(module, "stands_for"):
        yield module
        return
    with module.lent():
        yield module.stands_for


class _Inits:
    """What there is to initialise the modules of a tree with."""

    def __init__(self, root: nn.Module, init: Init | None) -> None:
        self._init = init
        self._of: dict[str, Init] = dict(getattr(root, "initialisers", {}))
        for path, module in root.named_modules():
            called = getattr(module, "stands_for", module)
            if callable(found := getattr(called, "_init_weights", None)):
                self._of[path] = found

    def run(self, path: str, module: nn.Module) -> None:
        """A module's own initialiser, and then the user's or that of the model around it."""
        own: Any = getattr(module, "reset_parameters", getattr(module, "_reset_parameters", None))
        if callable(own) and _takes_nothing(own):
            own()
        init = self._init or self._around(path)
        if init is not None:
            init(module)

    def _around(self, path: str) -> Init | None:
        """That of the innermost model that the path leads through."""
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
