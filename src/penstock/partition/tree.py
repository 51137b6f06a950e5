"""The lines of an author's forward, and the tensors that stand for its weights."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from penstock._engine.rng import Draws, generators_kept
from penstock._engine.values import map_tensors, tensors_in
from penstock.errors import PartitionError
from penstock.partition.alike import Memo, without_data
from penstock.partition.base import home_of
from penstock.partition.doors import Door, Run, opened, others_seen
from penstock.partition.kept import Kept, replaced
from penstock.partition.names import FakeTensor, FakeTensorMode
from penstock.partition.score import Line, Score
from penstock.partition.templates import Look, look_of, text_of
from penstock.partition.writer import Writer

_MOST_LINES = 50_000
"""How many lines a tree has at most; it then begins anew."""
_HELD_BY_LINE = 3
"""The references to a placeholder that nothing but its line has, and what counts them."""


class ScoreTree:
    """The lines of an author's forward.

    Args:
        model: the whole model.
        forward: its forward.
        units: the paths of the modules that are placed as a whole.
        memo: what units gave, so that those that are alike need not run.
    """

    def __init__(
        self, model: nn.Module, forward: Callable[..., Any], units: Sequence[str], memo: Memo
    ) -> None:
        self.model, self.forward, self.memo = model, forward, memo
        self.units = {path: model.get_submodule(path) for path in units}
        self.doors = [Door(module, path) for path, module in self.units.items()]
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.metadata: set[Any] = set()
        self.by_numbers: set[Any] = set()
        self.roots: dict[Any, Line] = {}
        self.lines = 0
        self.writer: Writer | None = None
        self._doors_open: list[Door] = []
        self._open: dict[str, nn.Module] = {}
        self.modules = list(model.modules())
        self.paths = {id(module): path for path, module in model.named_modules()}
        inside = {id(p): path for path, unit in self.units.items() for p in unit.modules()}
        self.unit_of = inside
        self.outside = [
            (path, module) for path, module in model.named_modules() if id(module) not in inside
        ]
        units_of = set(map(id, self.units.values()))
        self._around, self._between = list[tuple[str, nn.Module]](), list[tuple[str, nn.Module]]()
        for path, module in self.outside:
            is_around = any(id(part) in units_of for part in module.modules())
            (self._around if is_around else self._between).append((path, module))
        self._tables = [
            (table, name, f"{path}.{name}" if path else name)
            for path, module in model.named_modules(remove_duplicate=False)
            if not isinstance(module, torch.jit.ScriptModule)
            for table in (
                # Tensors in attributes of units are theirs, like buffers.
                [module._parameters, module._buffers, vars(module)]
                if id(module) in inside
                else [module._parameters]
            )
            for name, tensor in table.items()
            if isinstance(tensor, nn.Parameter)
            or type(tensor) is Tensor
            or (table is not vars(module) and tensor is not None)
        ]
        self._written = [
            module for module in self.modules if not type(module).__module__.startswith("torch.")
        ]
        self._settings: tuple[Any, ...] = ()
        self._hashed: tuple[tuple[Any, ...], str] = (), ""
        self._weights: list[Any] | None = None
        self.weights: dict[int, str] = {}
        self.tensors: dict[str, Tensor] = {}
        self._twins: dict[int, tuple[Tensor, Tensor]] = {}
        self.fixed: dict[int, Any] = {}
        self.refresh()
        self.device = home_of(model)

    def refresh(self) -> None:
        """Learn which tensors the model has now: they may have been moved, sharded or freed."""
        now = [table.get(name) for table, name, _ in self._tables]
        if self._weights is not None:
            for one, known in zip(now, self._weights, strict=True):
                if one is not known:
                    break
            else:
                return
        self._weights = now
        self.weights, self.tensors = {}, {}
        for tensor, (_, _, name) in zip(now, self._tables, strict=True):
            if isinstance(tensor, Tensor):
                self.tensors[name] = tensor
                self.weights.setdefault(id(tensor), name)
        self.parameters = list(self.model.parameters())
        self.buffers = {
            id(buffer): f"{path}.{name}" if path else name
            for path, module in self.outside
            for name, buffer in module._buffers.items()
            if buffer is not None
        }
        # Objects that modules hold are the same in all calls.
        self.fixed = {
            id(value): value
            for module in self.modules
            for value in vars(module).values()
            if not isinstance(value, list | dict | Tensor | int | str | None)
        }

    def start(self, batch: Sequence[Tensor] = ()) -> Line:
        """The root of the tree for the settings of the model's modules, and which weights learn.

        Args:
            batch: the tensors of the batch that learn.
        """
        state = (tuple(map(look_of, batch)), *(self._settings or self._settings_now()))
        root = self.roots.get(state)
        if root is None:
            if self.lines > _MOST_LINES:
                self.roots.clear()
                self.lines = 0
            text = text_of(state[0])  # each rank's settings are its own
            digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
            root = self.roots[state] = Line(None, digest=digest)
        return root

    def _settings_now(self) -> tuple[Any, ...]:
        """The modes and hooks of modules, which weights learn, and the author's flags and words."""
        hooks, flags = list[int](), list[Any]()
        for module in self.modules:
            hooks.append(len(module._forward_hooks) + len(module._forward_pre_hooks))
        for module in self._written:
            for value in vars(module).values():
                if value is True or value is False or type(value) is str:
                    flags.append(value)
        return (
            tuple([module.training for module in self.modules]),
            tuple([parameter.requires_grad for parameter in self.parameters]),
            tuple(hooks),
            tuple(flags),
            torch.get_default_dtype(),
        )

    def settings(self) -> str:
        """A hash of the settings on which scores depend."""
        now = self._settings_now()
        if now != self._hashed[0]:
            self._hashed = now, hashlib.blake2b(repr(now).encode(), digest_size=16).hexdigest()
        return self._hashed[1]

    def hooked(self) -> list[Door]:
        """Doors of the modules between units that have hooks: each call is in one stage, like a unit's.

        Raises:
            PartitionError: a module that is in several stages has backward hooks: no stage has both its ends.
        """
        for path, module in self._around:
            if module._backward_hooks or module._backward_pre_hooks:
                raise PartitionError(
                    f"{path or 'the model'} has backward hooks, and its parts are placed by themselves: no "
                    "stage has its gradients on both ends. Set the hooks on its parts, or place it as a "
                    "whole by naming it in stages="
                )
        doors: list[Door] = []
        for path, module in self._between:
            within = doors and path.startswith(f"{doors[-1].path}.")
            if not within and any(map(_has_hooks, module.modules())):
                doors.append(Door(module, path))
        return doors

    def forget(self) -> None:
        """Forget all lines: a unit has done something else than its line says."""
        self.memo.distrust()
        self.roots.clear()
        self.lines = 0

    # ---- fake tensors

    def twin(self, tensor: Tensor) -> Tensor:
        """The fake tensor of a weight."""
        known = self._twins.get(id(tensor))
        if known is not None and known[0] is tensor:
            twin = known[1]
            if twin.requires_grad is tensor.requires_grad and twin.shape == tensor.shape:
                return twin
        learns = tensor.requires_grad and tensor.is_leaf
        look = (tensor.shape, tensor.stride(), tensor.dtype, self.device, learns)
        twin = without_data(self.mode, look)
        twin._is_param = isinstance(tensor, nn.Parameter)
        self._twins[id(tensor)] = tensor, twin
        return twin

    def blank(self, look: Look) -> Tensor:
        """A new placeholder."""
        tensor = without_data(self.mode, look)
        # Code between units may change it in place, which a leaf does not allow.
        if not tensor.requires_grad:
            return tensor
        with torch.enable_grad():
            return tensor.clone()

    def names_of(self, parts: Sequence[nn.Module], places: Sequence[tuple[int, str]]) -> list[str]:
        """The names of weights and buffers, given by the positions of their modules."""
        tensors = [
            next(
                (t[name] for t in (part._parameters, part._buffers, vars(part)) if name in t), None
            )
            for part, name in [(parts[at], name) for at, name in places]
        ]
        return [self.weights[id(t)] for t in tensors if id(t) in self.weights]

    def stand_ins(self, module: nn.Module) -> Iterator[tuple[Any, str, Tensor]]:
        """Fake tensors in place of a module's parameters and buffers."""
        for part in module.modules():
            if isinstance(part, torch.jit.ScriptModule):
                continue
            for table in (part._parameters, part._buffers):
                for name, tensor in [(n, t) for n, t in table.items() if t is not None]:
                    yield table, name, self.twin(tensor)
            state = vars(part)
            for name in [n for n, x in state.items() if type(x) is Tensor and not x.is_sparse]:
                yield state, name, self.mode.from_tensor(state[name].detach())

    # ---- writing

    def write(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        draws: Draws | None = None,
        doors: Sequence[Door] = (),
        inner: Sequence[Door] = (),
    ) -> Score:
        """Run the author's forward on placeholders, and write down what happens.

        Args:
            args: the model's arguments, with their numbers.
            kwargs: its keyword arguments.
            draws: seeds what functions between units draw; None leaves the generators alone.
            doors: the doors of other modules to place as a whole, such as those with hooks.
            inner: the doors of modules inside units, whose operations are counted too.

        Raises:
            PartitionError: the model cannot be cut this way; the message names the module and the line.
        """
        tensors = tensors_in((tuple(args), dict(kwargs)))
        if any(tensor.is_inference() for tensor in tensors):
            args, kwargs = map_tensors((tuple(args), dict(kwargs)), Tensor.clone)
        batch = [tensor for tensor in tensors if tensor.requires_grad]
        writer = Writer(self, draws, batch)
        output = self.run(writer, args, kwargs, doors, inner)
        call = (args, kwargs) if writer.decides else None
        score = Score(*writer.ended(output), writer.root, batch, draws, writer.inner_work, call)
        writer.let_go()
        del writer, output
        for note in score.notes:
            for shown in note.line.shown.values():
                if sys.getrefcount(shown) > _HELD_BY_LINE:
                    del shown
                    self._replace_leaked(note.line)
                    break
        return score

    def _replace_leaked(self, line: Line) -> None:
        """Give a line other placeholders in place of those that the author's code has kept somewhere.

        In a later microbatch, or outside of the model, they stand for nothing, and using them is refused.
        """
        for number in list(line.shown):
            tensor = line.shown[number]
            if (
                type(tensor) is FakeTensor
                and tensor.layout is torch.strided
                and sys.getrefcount(tensor) > _HELD_BY_LINE
            ):
                line.first.setdefault(number, tensor)  # its memory says what shares it
                blank = self.blank((*look_of(tensor)[:4], line.looks[number][4]))
                line.marks = {k: n for k, n in line.marks.items() if n != number}
                line.marks[id(blank)] = number
                line.shown[number] = blank

    def rehearse(
        self,
        call: tuple[Sequence[Any], Mapping[str, Any]],
        doors: Sequence[Door] = (),
        inner: Sequence[Door] = (),
    ) -> Score:
        """Write a score of a call that does not count; whatever the author's code changes is put back.

        Args:
            call: the model's arguments; ones stand for tensors without data.
            doors: as for :meth:`write`.
            inner: as for :meth:`write`.
        """
        self.refresh()
        args, kwargs = map_tensors((tuple(call[0]), dict(call[1])), self._with_data)
        tables: list[Any] = [t for _, m in self.outside for t in (m._buffers, vars(m))]
        held = [(t, n, x) for t in tables for n, x in t.items() if type(x) is Tensor]
        copies = [(table, name, self._with_data(x)) for table, name, x in held]
        buffers, kept = self.buffers, Kept(self.modules)
        # A change of a copy is one of the buffer.
        named = zip(copies, held, strict=True)
        self.buffers = {id(y): buffers[id(x)] for (_, _, y), (_, _, x) in named if id(x) in buffers}
        try:
            with generators_kept([self.device]), replaced(copies):
                return self.write(args, kwargs, None, doors, inner)
        finally:
            self.buffers = buffers
            kept.restore()

    def _with_data(self, tensor: Tensor) -> Tensor:
        """A copy of a tensor, of ones where it has no data."""
        if not tensor.is_meta:
            return tensor.detach().clone().requires_grad_(tensor.requires_grad)
        ones = torch.ones(tensor.shape, dtype=tensor.dtype, device=self.device)
        return ones.requires_grad_(tensor.requires_grad)

    @contextmanager
    def open(self, doors: Sequence[Door] = ()) -> Iterator[None]:
        """A context in which calls of units are answered, for several microbatches.

        Args:
            doors: the doors of other modules to place as a whole, such as those with hooks.
        """
        self._settings = self._settings_now()
        self._doors_open = [*self.doors, *doors]
        self._open = {door.path: door.module for door in self._doors_open}
        padded = [
            module.register_forward_pre_hook(self._check_padding, with_kwargs=True)
            for _, module in self.outside
            if isinstance(module, nn.TransformerEncoder)
            and getattr(module, "use_nested_tensor", False)
            and not (module.training or torch.is_grad_enabled())
        ]
        try:
            with opened(self._doors_open, _unanswered, self._open), self._sets_noted():
                yield
        finally:
            self._doors_open, self._open, self._settings = [], {}, ()
            for hook in padded:
                hook.remove()

    @contextmanager
    def _sets_noted(self) -> Iterator[None]:
        """Tell the writer which attributes of units the author's code sets."""
        set_plainly = nn.Module.__setattr__

        def set_noted(module: nn.Module, name: str, value: Any) -> None:
            set_plainly(module, name, value)
            if self.writer is not None and id(module) in self.unit_of:
                self.writer.has_set(self.unit_of[id(module)], module, name)

        nn.Module.__setattr__ = set_noted  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            nn.Module.__setattr__ = set_plainly  # type: ignore[method-assign]

    def _check_padding(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Refuse PyTorch's encoders that drop padding with nested tensors, if their layers are units."""
        if kwargs.get("src_key_padding_mask", args[2] if len(args) > 2 else None) is not None:
            raise PartitionError(
                f"{self.paths.get(id(module)) or 'the model'} (TransformerEncoder) drops padded positions in "
                "evaluation, by nested tensors, which cannot travel between stages; set its "
                "use_nested_tensor = False, or place it as a whole by naming it in stages="
            )

    def run(
        self,
        writer: Writer,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        doors: Sequence[Door] = (),
        inner: Sequence[Door] = (),
    ) -> Any:
        """Run the author's forward, of which a writer answers the calls."""
        with ExitStack() as stack:
            if not self._open:
                stack.enter_context(self.open(doors))
            writer.units = self._open
            for door in self._doors_open:
                door.call = writer.unit
            stack.enter_context(writer.settled())
            if inner:
                stack.enter_context(opened(inner, writer.counted))
            stack.enter_context(others_seen(writer))
            stack.enter_context(writer)
            self.writer = writer
            try:
                output: Any = self.forward(*args, **kwargs)
            except Exception as error:
                if writer.refused:
                    raise writer.refused[0] from None
                raise writer.explained(error) from error
            finally:
                self.writer = None
            for door in self._doors_open:
                door.call = _unanswered
        if writer.refused:
            raise writer.refused[0]
        return output


def _unanswered(door: Door, run: Run, args: Any, kwargs: Any) -> Any:
    """The module's own call, between microbatches."""
    return run(*args, **kwargs)


def _has_hooks(module: nn.Module) -> bool:
    return bool(
        module._forward_pre_hooks
        or module._forward_hooks
        or module._backward_pre_hooks
        or module._backward_hooks
    )
