"""Random numbers that depend on the seed, the step, the microbatch and the module call, and on nothing else.

The default generators are seeded before each module call that may draw, after it, and after each draw. What
is drawn then does not depend on what ran before on this rank, nor on the stage that the code is in: a stage
that leaves out a call or a draw goes on as if it had made it.

The seed that the generators were started at last tells the place in the forward. A checkpoint, which puts
their state back before it runs a part of it again, so puts back the place, and the same calls follow.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import Generator, nn

from penstock.errors import UsageError
from penstock.rng.drawing import OwnHook, called_to_draw, may_draw, noticed, visible

# ---- the default generators of the CPU and of accelerators: what dropout and its like draw from


class Generators:
    """The default generators of the CPU and of some devices.

    ``torch.manual_seed`` seeds those of every backend there may be, which takes a hundred times as long.

    Args:
        devices: besides the CPU.
    """

    def __init__(self, devices: Iterable[torch.device] = ()) -> None:
        others = sorted({d for d in devices if d.type not in {"cpu", "meta"}}, key=str)
        self._cpu = torch.default_generator
        self._all = [self._cpu, *map(_generator, others)]
        self._alone = not others

    def seed(self, number: int) -> None:
        """Start them all at a seed."""
        if self._alone:
            self._cpu.manual_seed(number)
            return
        for generator in self._all:
            generator.manual_seed(number)

    @property
    def started_at(self) -> int:
        """The seed they were last started at, or that of a state that was put back since."""
        return self._cpu.initial_seed()

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Put them back afterwards to where they are now."""
        states = [generator.get_state() for generator in self._all]
        try:
            yield
        finally:
            for generator, state in zip(self._all, states, strict=True):
                generator.set_state(state)


def _generator(device: torch.device) -> Any:
    module: Any = torch.get_device_module(device)
    index = module.current_device() if device.index is None else device.index
    # Nothing is there before the backend has begun.
    module.init()
    return module.default_generators[index]


def devices_of(module: nn.Module) -> set[torch.device]:
    """Where a module's parameters and buffers are."""
    return {tensor.device for tensor in (*module.parameters(), *module.buffers())}


# ---- seeds that are the same in every process: by a hash of what the numbers are drawn for


class Seeds(NamedTuple):
    """The seeds of a module call.

    Args:
        inside: of what the module itself draws, until it calls another.
        after: of what its caller draws from then on, until it calls another.
    """

    inside: int
    after: int


@dataclass(frozen=True)
class Draw:
    """For which step the numbers are drawn.

    Args:
        seed: the seed of the whole training.
        step: the number of the step, from 0.
    """

    seed: int
    step: int

    def key(self, microbatch: int) -> bytes:
        """The key of all seeds of a microbatch."""
        return _digest(f"{self.seed} {self.step} {microbatch}".encode())


@dataclass
class Place:
    """A module call, by where it stands in the model's forward: the whole way down to it.

    So it is the same place whichever calls of the same module are made in other stages.

    Args:
        address: the calls on the way, each with its number among those of its caller.
        path: under which of its paths the module is called.
    """

    address: str = ""
    path: str = ""
    _calls: dict[str, int] = field(default_factory=dict)

    def next(self, paths: Sequence[str]) -> Place:
        """The place of the next call that is made from here.

        Args:
            paths: of the module that is called. One that stands at several places below the caller is called
                under one path after the other.
        """
        below = f"{self.path}." if self.path else ""
        found = [path for path in paths if path.startswith(below)] if len(paths) > 1 else paths
        names = found or paths
        count = self._calls.get(names[0], 0)
        self._calls[names[0]] = count + 1
        last = min(count, len(names) - 1)
        if names[last] == self.path and not count:
            # A wrapper calls what it wraps, which is then where it would be without.
            return Place(self.address, self.path)
        name = names[last].removeprefix(below) if found else names[last]
        return Place(f"{self.address}/{name}:{count - last}", names[last])

    def seeds(self, key: bytes) -> Seeds:
        """The seeds of this call for a microbatch's key."""
        found = _digest(self.address.encode(), key)
        return Seeds(_number(found[:8]), _number(found[8:]))


def following(seed: int) -> int:
    """The seed of what is drawn next, after something was under ``seed``: one step of splitmix64."""
    mixed = (seed + 0x9E3779B97F4A7C15) & _ALL
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _ALL
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _ALL
    return (mixed ^ (mixed >> 31)) >> 1


_ALL = 2**64 - 1


def seed_of(seed: int, name: str) -> int:
    """A seed for what is drawn once, such as a module's first weights."""
    return _number(_digest(f"{seed} {name}".encode())[:8])


def _digest(text: bytes, key: bytes = b"") -> bytes:
    return hashlib.blake2b(text, key=key, digest_size=16).digest()


def _number(digest: bytes) -> int:
    # 63 bits: every generator takes them.
    return int.from_bytes(digest, "little") >> 1


# ---- the streams of the calls inside one module


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


# ---- how far a training's random numbers have come


Seed = int | Literal["off"] | None
"""A seed, ``"off"``, or ``None`` for torch's own."""


class Randomness:
    """The seed of a pipeline's random numbers, and the number of its next step.

    Saved with a checkpoint and loaded again, steps draw what they would have drawn without the stop,
    whatever the new pipeline's ranks, stages and schedule.

    Args:
        seed: of the training; ``"off"`` leaves torch's generators alone.

    Raises:
        UsageError: the seed is something else.
    """

    def __init__(self, seed: int | Literal["off"]) -> None:
        self._seed = _checked(seed)
        self._step = 0

    @property
    def seed(self) -> int | Literal["off"]:
        """The seed, or ``"off"``."""
        return self._seed

    @property
    def step(self) -> int:
        """The number of the next step."""
        return self._step

    @property
    def next(self) -> Draw | None:
        """What the next step draws for; None where torch's generators are left alone."""
        return None if self._seed == "off" else Draw(self._seed, self._step)

    @property
    def last(self) -> Draw | None:
        """What the last step drew for, to run it again."""
        last = max(self._step - 1, 0)
        return None if self._seed == "off" else Draw(self._seed, last)

    def advance(self) -> None:
        """Go on to the next step."""
        self._step += 1

    def state_dict(self) -> dict[str, int | str]:
        """What to save."""
        return {"seed": self._seed, "step": self._step}

    def load_state_dict(self, state: Mapping[str, int | str]) -> None:
        """Go on from what was saved, the same on every rank.

        Raises:
            UsageError: it is not what :meth:`state_dict` gives.
        """
        if state.keys() != {"seed", "step"}:
            raise UsageError(
                f"a state of randomness holds 'seed' and 'step', not {sorted(state)}; "
                "load what state_dict() gave"
            )
        step = state["step"]
        if not isinstance(step, int) or step < 0:
            raise UsageError(f"step={step!r}: must be a number from 0")
        self._seed, self._step = _checked(state["seed"]), step


def _checked(seed: object) -> int | Literal["off"]:
    """A seed as it can be used.

    Raises:
        UsageError: it cannot.
    """
    if seed == "off":
        return "off"
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise UsageError(
            f"seed={seed!r}: must be a whole number, 'off' to leave torch's generators alone, or None "
            "for the seed that torch was given"
        )
    return seed


def own_seed(seed: Seed) -> int | Literal["off"]:
    """A seed as it can be used, torch's own where none was given."""
    return torch.initial_seed() if seed is None else _checked(seed)


# ---- the random numbers of a pipeline's step, in a plain loop


@contextmanager
def randomness(
    model: nn.Module, *, seed: int, step: int = 0, microbatch: int = 0
) -> Iterator[None]:
    """Draw what a pipeline would draw for a microbatch: the same dropout masks, bit for bit.

    Forward, loss and backward of the microbatch belong into the context, each once. Afterwards torch's
    generators are where they were.

    Args:
        model: the whole model, or a part under the names that it has in the model.
        seed: of the training, as given to :class:`penstock.Pipeline`.
        step: the number of the step, from 0.
        microbatch: its index.
    """
    generators = Generators(devices_of(model))
    streams = Streams(model, generators)

    def leave(*_: Any) -> None:
        streams.loss(microbatch)

    with generators.kept(), streams.installed(Draw(seed, step)):
        streams.forward(microbatch)
        handle = model.register_forward_hook(leave)
        try:
            yield
        finally:
            handle.remove()
