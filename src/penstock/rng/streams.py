"""Random numbers that depend only on the seed, the step, the microbatch and the module call.

The default generators are seeded before each module call that may draw, after it, and after each draw. So
what
is drawn does not depend on what ran before on this rank, nor on the stage that the code is in: a stage that
leaves out a call or a draw continues as if it had made it.

The seed that the generators were last started with identifies the place in the forward. A checkpoint
restores the generators' state before it runs a part of forward again, and with it the place, so the same
calls follow.
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

# ---- the default generators of the CPU and of accelerators


class Generators:
    """The default generators of the CPU and of some devices, which dropout and others draw from.

    ``torch.manual_seed`` would seed those of every possible backend, which takes a hundred times as long.

    Args:
        devices: besides the CPU.
    """

    def __init__(self, devices: Iterable[torch.device] = ()) -> None:
        others = sorted({d for d in devices if d.type not in {"cpu", "meta"}}, key=str)
        self._cpu = torch.default_generator
        self._all = [self._cpu, *map(_generator, others)]
        self._alone = not others

    def seed(self, number: int) -> None:
        """Seed all of them."""
        if self._alone:
            self._cpu.manual_seed(number)
            return
        for generator in self._all:
            generator.manual_seed(number)

    @property
    def started_at(self) -> int:
        """The seed that they were last started with, or that of a state that was restored since."""
        return self._cpu.initial_seed()

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Restore them afterwards."""
        states = [generator.get_state() for generator in self._all]
        try:
            yield
        finally:
            for generator, state in zip(self._all, states, strict=True):
                generator.set_state(state)


def _generator(device: torch.device) -> Any:
    module: Any = torch.get_device_module(device)
    index = module.current_device() if device.index is None else device.index
    # There are no generators before the backend is initialised.
    module.init()
    return module.default_generators[index]


def devices_of(module: nn.Module) -> set[torch.device]:
    """The devices of a module's parameters and buffers."""
    return {tensor.device for tensor in (*module.parameters(), *module.buffers())}


# ---- seeds, which are hashes of what numbers are drawn for, and so the same in every process


class Seeds(NamedTuple):
    """The seeds of a module call.

    Args:
        inside: for what the module itself draws, until it calls another module.
        after: for what its caller draws afterwards, until it calls another module.
    """

    inside: int
    after: int


@dataclass(frozen=True)
class Draw:
    """The step that numbers are drawn for.

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
    """The place of a module call in the model's forward, given by all calls on the way down to it.

    So it does not depend on which other calls of the same module are made in other stages.

    Args:
        address: the calls on the way, each with its number among the calls of its caller.
        path: the one of its paths under which the module is called.
    """

    address: str = ""
    path: str = ""
    _calls: dict[str, int] = field(default_factory=dict)

    def next(self, paths: Sequence[str]) -> Place:
        """The place of the next call that is made from here.

        Args:
            paths: the paths of the called module. If it has several paths below the caller, its calls are
                taken to be under one path after the other.
        """
        below = f"{self.path}." if self.path else ""
        found = [path for path in paths if path.startswith(below)] if len(paths) > 1 else paths
        names = found or paths
        count = self._calls.get(names[0], 0)
        self._calls[names[0]] = count + 1
        last = min(count, len(names) - 1)
        if names[last] == self.path and not count:
            # A wrapper calls what it wraps; the place is the one that it would have without the wrapper.
            return Place(self.address, self.path)
        name = names[last].removeprefix(below) if found else names[last]
        return Place(f"{self.address}/{name}:{count - last}", names[last])

    def seeds(self, key: bytes) -> Seeds:
        """The seeds of this call for a microbatch's key."""
        found = _digest(self.address.encode(), key)
        return Seeds(_number(found[:8]), _number(found[8:]))


def following(seed: int) -> int:
    """The seed for the next draw after one with ``seed``: one step of splitmix64."""
    mixed = (seed + 0x9E3779B97F4A7C15) & _ALL
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _ALL
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _ALL
    return (mixed ^ (mixed >> 31)) >> 1


_ALL = 2**64 - 1


def seed_of(seed: int, name: str) -> int:
    """A seed for something that is drawn once, such as a module's first weights."""
    return _number(_digest(f"{seed} {name}".encode())[:8])


def _digest(text: bytes, key: bytes = b"") -> bytes:
    return hashlib.blake2b(text, key=key, digest_size=16).digest()


def _number(digest: bytes) -> int:
    # 63 bits, which every generator accepts.
    return int.from_bytes(digest, "little") >> 1


# ---- the streams of the calls inside one module


class _Record:
    """The calls of one microbatch, kept until its backward is over.

    Args:
        key: the key of its seeds.
        root: the place of the model's own call.
    """

    def __init__(self, key: bytes, root: Place) -> None:
        self.key = key
        self._known: dict[tuple[int, nn.Module], tuple[Place, Seeds]] = {}
        self._open = [(root, root.seeds(key))]

    def begin(self, module: nn.Module, paths: tuple[str, ...], under: int) -> Seeds:
        """The seeds of a call that begins, or is repeated by a checkpoint.

        Args:
            module: the called module.
            paths: of the module.
            under: the seed that the generators were last started with, which is different for each call.
        """
        found = self._known.get((under, module))
        if found is None:
            place = self._open[-1][0].next(paths)
            found = self._known[under, module] = place, place.seeds(self.key)
        self._open.append(found)
        return found[1]

    def end(self) -> Seeds:
        """The seeds of the call that ends."""
        return self._open.pop()[1]

    def end_all(self) -> None:
        """No call is open any more, even if some did not end properly."""
        del self._open[1:]


def in_backward() -> bool:
    """Whether a backward pass is running; a module call then comes from a checkpoint."""
    # There is no public way to find out. Seen in torch 2.13.
    return torch._C._current_graph_task_id() != -1


class Streams:
    """The streams of the calls inside one module, such as a stage's.

    Args:
        module: of a stage, or a whole model.
        generators: the generators that it draws from.
        part: the name for draws of the module's own code, if that is only a part of the model's code.
        compiled: whether the module is compiled, so that the calls inside it are not seeded separately.
    """

    # Stages of one process may share a module, which then has the hooks of all of them.
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
        """The paths of modules without children that may draw."""
        modules = visible(self._module).items()
        return [p for m, paths in modules if may_draw(m) and not any(m.children()) for p in paths]

    def put_before(self, prefix: str) -> None:
        """Put a prefix in front of all places, so that other modules with the same paths draw differently."""
        self._root = prefix

    def find(self) -> None:
        """Find the modules whose calls are seeded, again if the user has changed some."""
        whole = getattr(self._module, "stands_for", self._module)
        traits = [(module, may_draw(module)) for module in whole.modules()]
        if self._traits != traits:
            self._traits = traits
            self._paths = {} if self._compiled else called_to_draw(whole)
            self._may_draw = self._compiled or bool(self._paths) or may_draw(whole)
            self._here = [module for module in visible(self._module) if module in self._paths]

    @contextmanager
    def installed(self, draw: Draw) -> Iterator[None]:
        """Seed everything that is drawn in this context for a step."""
        self._draw = draw
        self.find()
        with ExitStack() as stack:
            stack.enter_context(noticed(Streams._drew))
            stack.enter_context(_checkpoints_keep_states())
            stack.callback(self._forget)
            for module in self._here:
                stack.callback(module.register_forward_pre_hook(OwnHook(self._enter)).remove)
                # Also if the module raises: a checkpoint ends early in this way, when it has what it needs.
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
        """Its loss begins, which draws as the caller of the model would."""
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
        """A module is not called here; continue as if it had been."""
        streams = cls._at_work
        if streams is not None and streams._paths is not None and module in streams._paths:
            streams._begun(module)
            streams._generators.seed(streams._record.end().after)

    @classmethod
    def not_drawn(cls, draws: int) -> None:
        """So many draws are left out here; continue as if they had been made."""
        streams = cls._at_work
        if streams is not None and draws:
            streams._go_on(streams._generators.started_at, draws)

    @classmethod
    def go_to(cls, address: str, draws: int, *, after: bool) -> None:
        """Go to a place inside or after a module call, for a graph that has taken the place of modules."""
        streams = cls._at_work
        if streams is not None:
            seeds = Place(f"{streams._root}{address}").seeds(streams._record.key)
            streams._go_on(seeds.after if after else seeds.inside, draws)


# ---- recomputation

_keeping = 0


@contextmanager
def _checkpoints_keep_states() -> Iterator[None]:
    """Make checkpoints restore the generators' states: without them a repeated call cannot be identified."""
    global _keeping
    names = vars(torch_checkpoint)
    if not _keeping:
        # `checkpoint` looks these up here, wherever it was imported from. Seen in torch 2.13.
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
        """Checkpoint with the generators' states, whatever was asked for."""
        del preserve_rng_state
        return _REENTRANT.apply(function, True, *args)


def _without_reentrant(function: Any, preserve_rng_state: bool, *args: Any, **kwargs: Any) -> Any:
    del preserve_rng_state
    return _WITHOUT_REENTRANT(function, True, *args, **kwargs)


# ---- the seed of a training, and the number of its next step


Seed = int | Literal["off"] | None
"""A seed, ``"off"``, or ``None`` for torch's own seed."""


class Randomness:
    """The seed of a pipeline's random numbers, and the number of its next step.

    After it is saved with a checkpoint and loaded again, steps draw what they would have drawn without the
    interruption, whatever the ranks, stages and schedule of the new pipeline.

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
        """The :class:`Draw` of the next step; None if torch's generators are left alone."""
        return None if self._seed == "off" else Draw(self._seed, self._step)

    @property
    def last(self) -> Draw | None:
        """The :class:`Draw` of the last step, to run it again; None if torch's generators are left alone."""
        last = max(self._step - 1, 0)
        return None if self._seed == "off" else Draw(self._seed, last)

    def advance(self) -> None:
        """Go on to the next step."""
        self._step += 1

    def state_dict(self) -> dict[str, int | str]:
        """What to save."""
        return {"seed": self._seed, "step": self._step}

    def load_state_dict(self, state: Mapping[str, int | str]) -> None:
        """Continue from what was saved, the same on every rank.

        Raises:
            UsageError: it is not what :meth:`state_dict` returns.
        """
        if state.keys() != {"seed", "step"}:
            raise UsageError(
                f"a state of randomness holds 'seed' and 'step', not {sorted(state)}; "
                "load what state_dict() returned"
            )
        step = state["step"]
        if not isinstance(step, int) or step < 0:
            raise UsageError(f"step={step!r}: must be a whole number of at least 0")
        self._seed, self._step = _checked(state["seed"]), step


def _checked(seed: object) -> int | Literal["off"]:
    """A seed, after a check that it is valid.

    Raises:
        UsageError: it is not.
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
    """A valid seed; torch's own if it is None."""
    return torch.initial_seed() if seed is None else _checked(seed)


# ---- a pipeline's random numbers in a plain loop


@contextmanager
def randomness(
    model: nn.Module, *, seed: int, step: int = 0, microbatch: int = 0
) -> Iterator[None]:
    """Draw what a pipeline would draw for a microbatch: the same dropout masks, bit for bit.

    The forward, loss and backward of the microbatch must each be run once in the context. Afterwards torch's
    generators are as they were before.

    Args:
        model: the whole model, or a part of it with the same names as in the model.
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
