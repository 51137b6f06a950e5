"""Seed the default generators before each module call that may draw, after it, and after each draw.

What is drawn then depends on the seed, the step, the microbatch, the module calls that lead there and how
much was drawn since the last of them began or ended, and on nothing else: not on what ran before on this
rank, nor on the stage that the code is in. A stage that leaves out a call or a draw goes on as if it had
made it.

The seed that the generators were started at last tells the place in the forward. A checkpoint, which puts
their state back before it runs a part of it again, so puts back the place, and the same calls follow.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, ClassVar

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import Generator, nn

from penstock.rng.drawing import OwnHook, called_to_draw, may_draw, noticed, visible
from penstock.rng.generators import Draw, Generators, Place, Seeds, following


class _Record:
    """The calls of one microbatch, kept until its backward is over.

    Args:
        key: of its seeds.
        root: the place of the model's own call.
    """

    def __init__(self, key: bytes, root: Place) -> None:
        self.key = key
        self._known: dict[tuple[int, nn.Module], tuple[Place, Seeds]] = {}
        self._open = [(root, root.seeds(key))]

    def begin(self, module: nn.Module, paths: tuple[str, ...], under: int) -> Seeds:
        """The seeds of a call that begins now, or of the one that is being repeated.

        Args:
            module: what is called.
            paths: of the module.
            under: the seed that the generators were started at last. No two calls begin under the same one.
        """
        found = self._known.get((under, module))
        if found is None:
            place = self._open[-1][0].next(paths)
            found = self._known[under, module] = place, place.seeds(self.key)
        self._open.append(found)
        return found[1]

    def end(self) -> Seeds:
        """The seeds of the call that ends now."""
        return self._open.pop()[1]

    def end_all(self) -> None:
        """Nothing is being called any more, however it was left."""
        del self._open[1:]


def in_backward() -> bool:
    """Whether a backward pass is running, in which a checkpoint calls modules again."""
    # No public name tells. Seen in torch 2.13.
    return torch._C._current_graph_task_id() != -1


class Streams:
    """The streams of the calls inside one module, such as a stage's.

    Args:
        module: a stage's, or a whole model.
        generators: what is drawn from there.
        part: what the module's own code draws as, where that is only a part of a model's.
        compiled: whether the module is compiled: what it calls is not seeded by itself then.
    """

    # Stages of one process may share a module, which then has the hooks of each of them.
    _at_work: ClassVar[Streams | None] = None

    def __init__(
        self,
        module: nn.Module,
        generators: Generators,
        part: str = "",
        *,
        compiled: bool = False,
    ) -> None:
        self._module = module
        self._compiled = compiled
        self._generators = generators
        self._root, self._part = "", part
        self._record = _Record(b"", Place())
        self._records: dict[int, _Record] = {}
        self._draw = Draw(0, 0)
        self._paths: dict[nn.Module, tuple[str, ...]] | None = None
        self._here: list[nn.Module] = []
        self._traits: list[tuple[nn.Module, bool]] | None = None
        self._may_draw = False

    @property
    def names(self) -> list[str]:
        """The paths of the modules that may draw and call no others."""
        modules = visible(self._module).items()
        return [p for m, paths in modules if may_draw(m) and not any(m.children()) for p in paths]

    def put_before(self, prefix: str) -> None:
        """Let nothing be drawn alike in another module."""
        self._root = prefix

    def find(self) -> None:
        """Find the modules whose calls are seeded; anew where their user has changed some."""
        whole = getattr(self._module, "stands_for", self._module)
        traits = [(module, may_draw(module)) for module in whole.modules()]
        if self._traits != traits:
            self._traits = traits
            self._paths = {} if self._compiled else called_to_draw(whole)
            self._may_draw = self._compiled or bool(self._paths) or may_draw(whole)
            self._here = [module for module in visible(self._module) if module in self._paths]

    @contextmanager
    def installed(self, draw: Draw) -> Iterator[None]:
        """Seed what is drawn in this context as that of a step."""
        self._draw = draw
        self.find()
        with ExitStack() as stack:
            stack.enter_context(noticed(Streams._drew))
            stack.enter_context(_checkpoints_keep_states())
            stack.callback(self._forget)
            for module in self._here:
                stack.callback(module.register_forward_pre_hook(OwnHook(self._enter)).remove)
                # Also where the module raises: so ends what a checkpoint repeats only a part of.
                handle = module.register_forward_hook(OwnHook(self._leave), always_call=True)
                stack.callback(handle.remove)
            yield

    def _forget(self) -> None:
        Streams._at_work = None
        self._records.clear()

    # ---- of a microbatch

    def forward(self, microbatch: int) -> None:
        """A microbatch's forward begins."""
        Streams._at_work = self
        if self._may_draw:
            key = self._draw.key(microbatch)
            self._record = self._records[microbatch] = _Record(key, Place(self._root))
            own = Place(f"{self._root}{self._part}")
            self._generators.seed(own.seeds(key).inside)

    def loss(self, microbatch: int) -> None:
        """Its loss begins, which draws what the model's caller would."""
        self._generators.seed(Place().seeds(self._draw.key(microbatch)).after)

    def backward(self, microbatch: int) -> None:
        """Its backward begins, or a half of it."""
        Streams._at_work = self
        if self._may_draw:
            self._record = self._records[microbatch]
            self._record.end_all()

    def done(self, microbatch: int) -> None:
        """Its backward is over."""
        self._records.pop(microbatch, None)

    # ---- of a call

    def _enter(self, module: nn.Module, *_: Any) -> None:
        if not torch.compiler.is_compiling() and Streams._at_work is self:
            self._generators.seed(self._begun(module).inside)

    def _leave(self, *_: Any) -> None:
        if not torch.compiler.is_compiling() and Streams._at_work is self:
            self._generators.seed(self._record.end().after)

    def _begun(self, module: nn.Module) -> Seeds:
        assert self._paths is not None
        return self._record.begin(module, self._paths[module], self._generators.started_at)

    def _go_on(self, seed: int, draws: int) -> None:
        for _ in range(draws):
            seed = following(seed)
        self._generators.seed(seed)

    @classmethod
    def _drew(cls, generator: Generator | None) -> None:
        streams = cls._at_work
        if streams is not None and generator is None:
            streams._go_on(streams._generators.started_at, 1)

    # ---- of what does not run here

    @classmethod
    def left_out(cls, module: nn.Module) -> None:
        """A module was not called here; what follows draws as if it had been."""
        streams = cls._at_work
        if streams is not None and streams._paths is not None and module in streams._paths:
            streams._begun(module)
            streams._generators.seed(streams._record.end().after)

    @classmethod
    def not_drawn(cls, draws: int) -> None:
        """So much was not drawn here; what follows draws as if it had been."""
        streams = cls._at_work
        if streams is not None and draws:
            streams._go_on(streams._generators.started_at, draws)

    @classmethod
    def go_to(cls, address: str, draws: int, *, after: bool) -> None:
        """Draw what is drawn in a module's call, or after it, where a graph stands for the modules."""
        streams = cls._at_work
        if streams is not None:
            seeds = Place(f"{streams._root}{address}").seeds(streams._record.key)
            streams._go_on(seeds.after if after else seeds.inside, draws)


# ---- recomputation

_keeping = 0


@contextmanager
def _checkpoints_keep_states() -> Iterator[None]:
    """Let checkpoints keep the generators' states, without which a repeated call could be any one."""
    global _keeping
    names = vars(torch_checkpoint)
    if not _keeping:
        # What `checkpoint` calls, wherever that was imported from. Seen in torch 2.13.
        names["CheckpointFunction"] = _Reentrant
        names["_checkpoint_without_reentrant_generator"] = _without_reentrant
    _keeping += 1
    try:
        yield
    finally:
        _keeping -= 1
        if not _keeping:
            names["CheckpointFunction"] = _REENTRANT
            names["_checkpoint_without_reentrant_generator"] = _WITHOUT_REENTRANT


_REENTRANT: Any = torch_checkpoint.CheckpointFunction
_WITHOUT_REENTRANT: Any = torch_checkpoint._checkpoint_without_reentrant_generator


class _Reentrant:
    @staticmethod
    def apply(function: Any, preserve_rng_state: bool, *args: Any) -> Any:
        """Checkpoint with the states, whatever was asked for."""
        del preserve_rng_state
        return _REENTRANT.apply(function, True, *args)


def _without_reentrant(function: Any, preserve_rng_state: bool, *args: Any, **kwargs: Any) -> Any:
    del preserve_rng_state
    return _WITHOUT_REENTRANT(function, True, *args, **kwargs)
