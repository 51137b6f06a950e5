"""Seed the default generators before each module call that may draw, and after it.

What a call draws then depends on the seed, the step, the microbatch, the module's path and how often it
was called before in this microbatch, and on nothing else: not on what ran before on this rank, nor on the
stage that the module is in. What a container's own code draws between two calls is seeded by the call
before it, so a cut between modules does not matter to it either.

Recomputation (``torch.utils.checkpoint``) calls modules again. It is told from a first call by the seed
that the generators were started at last: no two calls of a microbatch begin under the same one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, TypeVar

import torch
from torch import nn

from penstock.draws.drawing import OwnHook, may_draw, visible
from penstock.draws.generators import Generators
from penstock.draws.keys import Draw, Seeds, seeds_of

ROOT = b""


Name = TypeVar("Name", str, bytes)


def named(names: Sequence[Name], call: int) -> tuple[Name, int]:
    """Name and number of a call of a module that stands at several paths."""
    last = len(names) - 1
    return names[min(call, last)], max(call - last, 0)


class _Site:
    """A module whose calls are seeded."""

    def __init__(self, paths: Sequence[str]) -> None:
        self._names = [path.encode() for path in paths]
        self.open: list[Seeds] = []

    def named(self, call: int) -> tuple[bytes, int]:
        """Name and number of its call: a module at several paths is called under one after the other."""
        return named(self._names, call)


class _Record:
    """The calls of one microbatch, kept until its backward is over."""

    def __init__(self, key: bytes) -> None:
        self.key = key
        self._known: dict[tuple[int, _Site], Seeds] = {}
        self._calls: dict[_Site, list[Seeds]] = {}
        self._again: dict[_Site, int] = {}

    def call(self, site: _Site, under: int) -> Seeds:
        """The seeds of a call that begins now, or of the one that is being repeated.

        Args:
            site: the module.
            under: the seed that the generators were started at last.
        """
        found = self._known.get((under, site))
        if found is None:
            found = self._repeated(site) if in_backward() else None
            found = self._known[under, site] = found or self._new(site)
        return found

    def _new(self, site: _Site) -> Seeds:
        calls = self._calls.setdefault(site, [])
        calls.append(seeds_of(self.key, *site.named(len(calls))))
        return calls[-1]

    def _repeated(self, site: _Site) -> Seeds | None:
        """A checkpoint that does not keep the generators' state repeats the last call first."""
        calls = self._calls.get(site)
        if not calls:
            return None
        self._again[site] = self._again.get(site, 0) - 1
        return calls[self._again[site] % len(calls)]


def in_backward() -> bool:
    """Whether a backward pass is running, in which a checkpoint calls modules again."""
    # No public name tells. Seen in torch 2.13.
    return torch._C._current_graph_task_id() != -1


class Streams:
    """The streams of the calls inside one module, such as a stage's.

    Args:
        module: a stage's, or a whole model.
        generators: what is drawn from there.
    """

    # Stages of one process may share a module, which then has the hooks of each of them.
    _at_work: ClassVar[Streams | None] = None

    def __init__(self, module: nn.Module, generators: Generators) -> None:
        self._module = module
        self._generators = generators
        self._record = _Record(b"")
        self._records: dict[int, _Record] = {}
        self._draw = Draw(0, 0)
        self._prefix = ""
        self._sites: list[_Site] = []
        self._hooks: list[tuple[Callable[..., Any], Callable[..., None]]] | None = None

    @property
    def names(self) -> list[str]:
        """The paths of the modules that may draw and call no others."""
        modules = visible(self._module).items()
        return [p for m, paths in modules if may_draw(m) and not any(m.children()) for p in paths]

    def put_before(self, prefix: str) -> None:
        """Call the modules by other names than their paths alone."""
        self._prefix, self._hooks = prefix, None

    @contextmanager
    def installed(self, draw: Draw) -> Iterator[None]:
        """Seed the calls in this context as those of a step."""
        self._draw = draw
        if self._hooks is None:
            self._hooks = self._found()
        handles = [register(hook) for register, hook in self._hooks]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            Streams._at_work = None
            self._records.clear()
            for site in self._sites:
                site.open.clear()

    def _found(self) -> list[tuple[Callable[..., Any], Callable[..., None]]]:
        """What to register where. A module that can draw nothing costs nothing."""
        modules = visible(self._module)
        drawing = [module for module in modules if may_draw(module)]
        sites = {module: _Site([self._prefix + p for p in ps]) for module, ps in modules.items()}
        self._sites = list(sites.values())
        found: list[Any] = [
            (module.register_forward_pre_hook, OwnHook(self._enter, sites[module]))
            for module in drawing
        ]
        if any(any(module.children()) for module in drawing):
            found += [
                (module.register_forward_hook, OwnHook(self._leave, site, module in drawing))
                for module, site in sites.items()
            ]
        return found

    # ---- of a microbatch

    def forward(self, microbatch: int) -> None:
        """A microbatch's forward begins."""
        Streams._at_work = self
        if self._hooks:
            self._record = self._records[microbatch] = _Record(self._draw.key(microbatch))
            self._generators.seed(seeds_of(self._record.key, ROOT, 0).inside)

    def loss(self, microbatch: int) -> None:
        """Its loss begins, which draws what the model's caller would."""
        self._generators.seed(seeds_of(self._draw.key(microbatch), ROOT, 0).after)

    def backward(self, microbatch: int) -> None:
        """Its backward begins, or a half of it."""
        Streams._at_work = self
        if self._hooks:
            self._record = self._records[microbatch]

    def done(self, microbatch: int) -> None:
        """Its backward is over."""
        self._records.pop(microbatch, None)

    # ---- of a call

    @classmethod
    def seed_as(cls, path: str, call: int, *, after: bool) -> None:
        """Seed as for a module's call, or for what follows it, where a graph stands for the modules."""
        streams = cls._at_work
        if streams is not None:
            name = f"{streams._prefix}{path}".encode()
            seeds = seeds_of(streams._record.key, name, call)
            streams._generators.seed(seeds.after if after else seeds.inside)

    def _enter(self, site: _Site, *_: Any) -> None:
        if torch.compiler.is_compiling() or Streams._at_work is not self:
            return
        seeds = self._record.call(site, self._generators.started_at)
        site.open.append(seeds)
        self._generators.seed(seeds.inside)

    def _leave(self, site: _Site, entered: bool, *_: Any) -> None:
        if torch.compiler.is_compiling() or Streams._at_work is not self:
            return
        record, under = self._record, self._generators.started_at
        seeds = site.open.pop() if entered else record.call(site, under)
        self._generators.seed(seeds.after)
