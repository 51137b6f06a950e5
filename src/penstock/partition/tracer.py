"""Run an author's forward once on fake tensors, and record its events.

A function of the model's arguments alone is not an event: every stage computes it itself, from the arguments'
numbers. The run without data uses ones for these numbers, or those of an example.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor, FakeTensorMode
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.autograd import Function
from torch.autograd.graph import increment_version
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from penstock._engine.values import Place, check_tensor, located, map_tensors, opaque_in, tensors_in
from penstock.errors import PartitionError
from penstock.partition.alike import (
    Answer,
    Looks,
    Memo,
    look_of_call,
    look_of_result,
    without_data,
)
from penstock.partition.base import Example, named_tensors
from penstock.partition.functions import (
    REWRITTEN,
    SET_DATA,
    TAKE_GRADIENTS,
    is_ours,
    reads_numbers,
    rewritten,
)
from penstock.partition.held import Changed, Held, may_be_set
from penstock.partition.lines import line_of, place_of, running, where
from penstock.partition.memory import MODEL, Memory, storage_of, takes_gradient
from penstock.partition.mutables import MISSING, Mutables, is_iterator, put_back, replaced, swapped
from penstock.partition.private import Attribute, NotHere, Private, reads_noted
from penstock.partition.seen import (
    Context,
    Door,
    Run,
    hooks_without_data,
    is_checkpoint,
    left,
    opened,
    others_seen,
    uncheckpointed,
)
from penstock.partition.trace import DIRECT, OVERWRITTEN, READ, Change, Event, Homes, Region, Trace
from penstock.partition.work import Work

MOST_CACHED = 20_000
"""The operations without data that torch may remember; it forgets none by itself, as of torch 2.13."""
_DEEP = 5
"""How deep the layers of a cache lie: those of two caches in one, in the arguments."""


def home_of(model: nn.Module) -> torch.device:
    """The device of a model; the CPU for one without data."""
    tensors = [*model.parameters(), *model.buffers()]
    return next((t.device for t in tensors if t.device.type != "meta"), torch.device("cpu"))


def record(  # noqa: PLR0913 - a model, and how to run it
    model: nn.Module,
    forward: Callable[..., Any],
    doors: Sequence[Door],
    call: Example,
    numbers: Example | None = None,
    homes: Homes | None = None,
    inner: Sequence[Door] = (),
    memo: Memo | None = None,
) -> Trace:
    """Run a model's forward without data.

    Args:
        model: the whole model; the run leaves it unchanged.
        forward: its forward.
        doors: the doors of its units.
        call: ``(args, kwargs)``; of their tensors only shapes and types count.
        numbers: other arguments of the same kind, whose numbers the run uses.
        homes: the stages of the units, if they are known.
        inner: the doors of modules inside units, whose operations are counted too.
        memo: what units gave before; those that are alike need not run.
    """
    learns = torch.is_grad_enabled()
    held = Held(model, {door.path: door.module for door in doors})
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    silent, logger.disabled = logger.disabled, True
    # Its fused kernels give other tensors without data than with data. As of torch 2.13.
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        recorder = _Tracer(model, doors, homes or {}, memo or Memo())
        # Outside of inference mode, whose tensors have no versions; that alone would enable gradients.
        with torch.inference_mode(False), torch.set_grad_enabled(learns):
            trace = recorder.run(forward, call, numbers, held, inner)
    finally:
        logger.disabled = silent
        torch.backends.mha.set_fastpath_enabled(fused)
        held.restore()
        if FakeTensorMode.cache_info().size > MOST_CACHED:
            FakeTensorMode.cache_clear()
    recorder.check_nothing_left()
    return trace


def as_written() -> contextlib.AbstractContextManager[Any]:
    """A context in which compiled functions run uncompiled.

    Dynamo cannot compile on fake tensors, and would not try again on real ones.
    """
    if "torch._dynamo" not in sys.modules:
        return contextlib.nullcontext()
    stance: contextlib.AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance


@dataclass(eq=False)
class _Running:
    """The event that runs now.

    Attributes:
        event: the event.
        index: its index.
        near: the memory of attributes that its stage has, whichever event made it.
        arguments: the memory of its arguments.
        originals: the tensors with data among its arguments, by the identity of those that stand for them.
        filled: what lists and caches among its arguments held before.
        is_guessed: whether it ran on numbers that the model's arguments have, or on ones as a whole.
    """

    event: Event
    index: int
    near: Collection[int] = ()
    arguments: Collection[int] = ()
    originals: Mapping[int, Tensor] = field(default_factory=dict)
    filled: Mutables = field(default_factory=Mutables)
    is_guessed: bool = False


class _Tables:
    """Lets each unit make the tables that a module inside several units keeps, as each stage must.

    A table, such as the bias of ALiBi, is made of numbers of the code and of buffers alone.

    Args:
        doors: the doors of the units.
        memory: the tensors of the run.
    """

    def __init__(self, doors: Sequence[Door], memory: Memory) -> None:
        parts = [part for door in doors for part in door.module.modules()]
        common = {one for one, count in Counter(map(id, parts)).items() if count > 1}
        self._memory = memory
        self._common = {
            door.path: [part for part in door.module.modules() if id(part) in common]
            for door in doors
        }
        self._fixed: set[int] = set()

    def are_in(self, unit: str) -> bool:
        """Whether a unit has a module that others have too."""
        return bool(self._common[unit])

    def look_at_buffers(self) -> None:
        """Note the memory of the buffers, now that they are fake."""
        parts = (part for parts in self._common.values() for part in parts)
        buffers = (buffer for part in parts for buffer in part._buffers.values())
        self._fixed = {storage_of(buffer) for buffer in buffers if buffer is not None}

    @contextlib.contextmanager
    def taken_back(self, unit: str) -> Iterator[None]:
        """Take back the tables that a unit makes."""
        tables = [t for part in self._common[unit] for t in (part._buffers, vars(part))]
        before = [dict(table) for table in tables]
        yield
        for table, old in zip(tables, before, strict=True):
            new = {n: t for n, t in table.items() if isinstance(t, Tensor) and t is not old.get(n)}
            for name in [n for n, t in new.items() if self._memory.storage_of(t) in self._fixed]:
                del table[name]
                if name in old:
                    table[name] = old[name]

    def note(self, event: Event, func: Any, call: Any, output: Any) -> None:
        """Note whether what an operation in a unit gives is made of numbers of the code and of buffers."""
        if not self.are_in(event.what):
            return
        read = {storage_of(tensor) for tensor in tensors_in(call)}
        drawn = torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())
        results = {storage_of(tensor) for tensor in tensors_in(output)}
        if read <= self._fixed and not drawn and not event.needs_data:
            self._fixed |= results
        else:
            self._fixed -= results
            self._fixed -= read if func._schema.is_mutable else set()


class _Tracer(TorchFunctionMode):
    def __init__(self, model: nn.Module, doors: Sequence[Door], homes: Homes, memo: Memo) -> None:
        super().__init__()
        self.model, self.doors, self._homes, self._memo = model, doors, homes, memo
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.trace = Trace(self.mode, home_of(model), doors)
        self._memory = Memory(self.trace)
        self._tables = _Tables(doors, self._memory)
        self._running: _Running | None = None
        self._calls: Counter[str] = Counter()
        self._latest = ""
        self._refused: list[Exception] = []
        self._owned: dict[str, list[tuple[Any, str]]] = {}
        self._promoted: dict[int, list[int]] = {}
        self._changed_arguments = False
        self._paths = {id(module): path for path, module in model.named_modules()}
        self._work, self._context = Work(), Context()

    # ---- the model without data

    def _arguments_of(self, call: Example, numbers: Example | None) -> tuple[Any, Any]:
        home = self.trace.device

        def put(tensor: Tensor) -> Tensor:
            ones = _filled(1, tensor, home) if numbers is None else None
            other = tensor.detach().to(home, copy=True) if ones is None else ones
            return other.requires_grad_(tensor.requires_grad)

        args, kwargs = call if numbers is None else numbers
        args, kwargs = map_tensors((tuple(args), dict(kwargs)), put)
        return args, kwargs

    def _stand_ins(self) -> Iterator[tuple[Any, str, Tensor]]:
        """What the model has in a run: fake parameters, and copies of the buffers outside of its units."""
        unit_of = {id(m): door.path for door in self.doors for m in door.module.modules()}
        names = {id(tensor): name for name, tensor in named_tensors(self.model)[::-1]}
        twins: dict[int, Tensor] = {}

        def twin_of(tensor: Tensor, name: str, *, real: bool) -> Tensor:
            if id(tensor) not in twins:
                twins[id(tensor)] = self._twin(tensor, names.get(id(tensor), name), real=real)
            return twins[id(tensor)]

        for path, module in self.model.named_modules():
            if isinstance(module, torch.jit.ScriptModule):
                continue
            unit = unit_of.get(id(module))
            for table in (module._parameters, module._buffers):
                real = unit is None and table is module._buffers
                for name in [name for name, tensor in table.items() if tensor is not None]:
                    yield table, name, twin_of(table[name], "", real=real)
            attributes = vars(module) if unit is not None else {}
            for name in _plain_tensors(attributes):
                twin = twin_of(attributes[name], f"{path}.{name}", real=False)
                value = self._memory.value_of(twin)
                assert value is not None
                value.unit = unit or ""
                yield attributes, name, twin

    def _twin(self, tensor: Tensor, name: str, *, real: bool) -> Tensor:
        """The stand-in for a parameter or buffer: a fake one, or a copy of a buffer between units."""
        if real and tensor.is_meta:
            return torch.ones(tensor.shape, dtype=tensor.dtype, device=self.trace.device)
        if real:
            return tensor.detach().clone()
        parameter = isinstance(tensor, nn.Parameter)
        learns = parameter and tensor.requires_grad
        look = tensor.shape, tensor.stride(), tensor.dtype, self.trace.device, learns
        twin = without_data(self.mode, look)
        # All that nn.Parameter does to a subclass, except a detach, which is slow on fake tensors. As of
        # torch 2.13.
        twin._is_param = parameter
        number = self._memory.add(twin, name, None, parameter=name)
        self.trace.values[number].is_buffer = not parameter
        return twin

    def run(
        self,
        forward: Callable[..., Any],
        call: Example,
        numbers: Example | None,
        held: Held,
        inner: Sequence[Door],
    ) -> Trace:
        trace = self.trace
        args, kwargs = self._arguments_of(call, numbers)
        tensors = tensors_in((args, kwargs))
        self._derived = {id(t): t for t in tensors}
        self._arguments = {id(t): i for i, t in enumerate(tensors)}
        versions = [t._version for t in tensors]
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(devices=[], enabled=True))
            stack.enter_context(replaced(self._stand_ins()))
            self._owned = {door.path: _fakes_in(door.module) for door in self.doors}
            self._tables.look_at_buffers()
            buffers = _looks_of_buffers(held.outside)
            hooks_without_data([door.module for door in self.doors])
            paths = {door.path for door in self.doors}
            stack.enter_context(opened(self.doors, self._unit, paths))
            stack.enter_context(opened(inner, self._counted))
            stack.enter_context(others_seen(self))
            stack.enter_context(self._encoders_watched())
            units = {door.path: door.module for door in self.doors}
            self._before, self._counts = held, bool(inner)
            self._private = Private(units, self._together, self._used_elsewhere)
            try:
                with self:
                    output = forward(*args, **kwargs)
            except Exception as error:
                if self._refused:
                    raise self._refused[0] from None
                raise self._explained(error) from error
            trace.resets = self._private.end()
            trace.kept, trace.outer = self._private.left, held.outer()
            trace.for_any_homes &= not (trace.kept or trace.resets)
            trace.flops = self._work.flops
            trace.set_in = held.set_once()
            trace.state = [
                *held.changes(),
                *self._changed_buffers(buffers, _looks_of_buffers(held.outside)),
                *self._private.between,
                *self._changed_attributes(held),
            ]
            del self._private, self._before
        self._check_output(output)
        trace.output = map_tensors(output, self._memory.bare)
        trace.slots = [self._output_slot(t) for t in tensors_in(output)]
        changed = (i for i, t in enumerate(tensors) if t._version != versions[i])
        trace.changed_arguments.update(changed)
        return trace

    @contextlib.contextmanager
    def _encoders_watched(self) -> Iterator[None]:
        """Refuse PyTorch's encoders that drop padding with nested tensors, if their layers are units."""

        def check(module: nn.Module, args: Any, kwargs: Any) -> None:
            if kwargs.get("src_key_padding_mask", args[2] if len(args) > 2 else None) is not None:
                name = self._paths.get(id(module)) or "the model"
                raise PartitionError(
                    f"{name} (TransformerEncoder) drops padded positions in evaluation, by nested tensors, "
                    "which cannot travel between stages; set its use_nested_tensor = False, or place it as a "
                    "whole by naming it in stages="
                )

        inside = {id(m) for door in self.doors for m in door.module.modules()}
        nested = [
            module
            for module in self.model.modules()
            if isinstance(module, nn.TransformerEncoder)
            and id(module) not in inside
            and getattr(module, "use_nested_tensor", False)
            and not (module.training or torch.is_grad_enabled())
        ]
        hooks = [module.register_forward_pre_hook(check, with_kwargs=True) for module in nested]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _explained(self, error: Exception) -> Exception:
        """What to raise for an error of the author's code."""
        by = "torch.compile" if type(error).__module__.startswith("torch._dynamo") else ""
        if isinstance(error, RuntimeError) and not str(error).strip():
            # A scripted function says nothing on tensors without data.
            by = "torch.jit"
        if not by:
            return error
        after = f"after {self._latest}, " if self._latest else ""
        return PartitionError(
            f"{after}the {type(self.model).__name__} runs code that {by} has compiled between its units, "
            "which cannot be cut; compile modules that are placed as a whole"
        )

    # ---- what units and the code around them keep

    def _together(self, one: str, other: str) -> bool:
        """Whether two units may be in one stage."""
        homes = [self._homes.get(path) for path in (one, other)]
        return None in homes or not {*homes[0]}.isdisjoint(homes[1])  # type: ignore[misc, arg-type]

    def _is_split(self, path: str) -> bool:
        """Whether a unit is in several stages, which share its calls."""
        return len(self._homes.get(path, ())) > 1

    def _used_elsewhere(self, attribute: Attribute) -> Exception:
        """The error for an attribute that a unit has set, and that another stage uses."""
        name = f"the attribute {attribute.name!r} of {attribute.unit}"
        if self._running is None:
            text = (
                f"{self._where()}: the model uses {name}, which is set there and which other stages do not "
                "have; return it from there (a loss: penstock.add_loss)"
            )
        else:
            event = self._running.event
            text = (
                f"{event.where}: {event.name} uses {name}, which is in another stage; return "
                "it from there and pass it on as an argument, or put both into one stage"
            )
        return self._refusal(text)

    def _refusal(self, text: str) -> Exception:
        """An error that counts, whatever the author's code makes of it."""
        self._refused.append(PartitionError(text))
        return self._refused[-1]

    def _changed_buffers(self, before: Any, now: Any) -> Iterator[Changed]:
        """The buffers around units that may not change; notes tables, which each stage may set once."""
        for (module, owner, name), look in now.items():
            old = before.get((module, owner, name))
            if old is None and look is not None and not self.depends(module._buffers[name]):
                self.trace.tables.append((module, name))
            elif old != look:
                yield Changed(f"the buffer {name!r} of {owner}{line_of(module)}")

    def _changed_attributes(self, held: Held) -> Iterator[Changed]:
        """The attributes around units that may not change; notes those that may.

        An attribute that is made from data in every call may be used in that call alone. Any other one may be
        set once, such as a table.
        """
        for module, owner, name, old, new in held.attributes():
            if any(map(self.depends, tensors_in(new))):
                self.trace.written.append((module, name))
            elif may_be_set(old, new):
                self.trace.settled[id(module), name] = new if type(new) in (bool, str) else MISSING
            else:
                yield Changed(f"the attribute {name!r} of {owner}{line_of(module)}")

    def _check_output(self, output: Any) -> None:
        """Refuse an output that runs later; note the tensors that an object of the author's holds."""
        for place, thing in opaque_in(output).items():
            if hasattr(type(thing), "__next__"):
                kind = type(thing).__name__
                raise PartitionError(
                    f"the {type(self.model).__name__}'s forward{line_of(self.model)} returns a {kind}, which "
                    "would run after the stages have ended; return a tuple or list of what it gives"
                )
            if not place:
                mutables = Mutables()
                mutables.look(thing)
                numbers = map(self._memory.number_of, mutables.tensors())
                self.trace.inner = [number for number in numbers if number is not None]

    def check_nothing_left(self) -> None:
        """Check that units have left no tensor where the run without data cannot take it back."""
        calls = [(event.call, event.result) for event in self.trace.events if event.is_unit]
        if opaque_in((calls, self.trace.output)):
            # Objects such as caches hold tensors, and there is no way to find out which.
            return
        maker = self._memory.left_in_containers()
        if maker is not None:
            event = self.trace.events[maker]
            raise PartitionError(
                f"{event.where}: {event.name} leaves a tensor in a list or another object outside of "
                "the model, which later stages and the loss do not have; return it, or add it as a loss "
                "(penstock.add_loss)"
            )

    def depends(self, tensor: Tensor) -> bool:
        """Whether a tensor was made from units' results, or from the model's arguments."""
        return isinstance(tensor, FakeTensor) or id(tensor) in self._derived

    def _output_slot(self, tensor: Tensor) -> int | None:
        if not isinstance(tensor, FakeTensor):
            self._is_followed(tensor)
        return self._memory.number_of(tensor)

    # ---- events

    def _unit(self, door: Door, run: Run, args: Any, kwargs: Any) -> Any:
        if self._running is not None:
            return run(*args, **kwargs)
        is_direct = getattr(run, "__name__", "") == "forward"
        if is_direct:
            self.trace.direct.add(door.path)
        elif not isinstance(door.module, torch.jit.ScriptModule):
            # A compiled module runs as it was written.
            run = getattr(door.module, "_orig_mod", door.module)._call_impl
        plain, (run, kwargs) = kwargs, self._context.beside(run, kwargs)
        self.trace.has_context |= kwargs is not plain
        path, number = door.path, self._calls[door.path]
        self._calls[path] += 1
        event = Event(path, path, where(self._paths, path), number)
        shown = self._private.enter(path)
        split = [one for one in shown if self._is_split(path) or self._is_split(one.unit)]
        # Functions inside the unit are not events: leave the mode while it runs.
        noted = [(one.module, one.name, one.event) for one in split]
        with left(self), as_written(), reads_noted(noted, event.reads.add):
            # The stage of the units that have set these has them, whichever event made the tensors.
            near = set(map(self._memory.storage_of, tensors_in([one.value for one in shown])))
            now = self._at_next(event, near)
            looks = Looks(door.module, path)
            call = None if shown or self._promoted else look_of_call(args, kwargs)
            look = (is_direct, self._counts, call, looks.look)
            answer = None if None in look else self._memo.get(look, looks.numbers)
            if answer is not None:
                event.needs_data, self._latest = answer.needs_data, path
                run = functools.partial(self._answer, path, looks.parts, answer)
                return self._event(now, path, run, args, kwargs)
            reads: set[Any] = set()
            before = self._before_run(path, looks.parts)
            numbers = [(looks.parts[i], name, (i, name)) for i, name in looks.numbers]
            with self._tables.taken_back(path), reads_noted(numbers, reads.add):
                output = self._event(now, path, run, args, kwargs)
        self._running = now
        self._private.leave(path, now.index)
        self._before.after_unit()
        if None not in look and looks == Looks(door.module, path):
            answer = self._answer_of(now, looks.parts, before, output)
            if answer is not None:
                self._memo.put(look, looks.numbers, reads, answer)
        self._running = None
        self._latest = path
        return output

    def _counted(self, door: Door, run: Run, args: Any, kwargs: Any) -> Any:
        """Count the operations of a module inside a unit."""
        before = self._work.total
        output = run(*args, **kwargs)
        work = self.trace.work
        work[id(door.module)] = work.get(id(door.module), 0.0) + self._work.total - before
        return output

    # ---- units that are alike

    def _answer(
        self, path: str, parts: Sequence[nn.Module], answer: Answer, *args: Any, **kwargs: Any
    ) -> Any:
        """Do what a unit has done that is like this one."""
        counts = self._work.counts
        output = answer.result(tensors_in((args, kwargs)), self.mode)
        for table, name in [self._owned[path][position] for position in answer.written]:
            increment_version(table[name])
        self._work.counts = [a + b for a, b in zip(counts, answer.work, strict=True)]
        for position, count in answer.inner.items():
            key = id(parts[position])
            self.trace.work[key] = self.trace.work.get(key, 0.0) + count
        return output

    def _before_run(self, path: str, parts: Sequence[nn.Module]) -> tuple[Any, ...]:
        """What :meth:`_answer_of` compares: a unit's own tensors, the counts of work, what is set."""
        tensors = [(table[name], _looks(table[name])) for table, name in self._owned[path]]
        inner = [self.trace.work.get(id(part), 0.0) for part in parts]
        return tensors, self._work.counts, inner, len(self._private.left)

    def _answer_of(
        self, now: _Running, parts: Sequence[nn.Module], before: tuple[Any, ...], output: Any
    ) -> Answer | None:
        """What a unit gave and did, if another run of it, or of one like it, would do the same."""
        event, (tensors, counts, inner, left_before) = now.event, before
        values = [self.trace.values[slot] for slot in event.slots if isinstance(slot, int)]
        after = [table.get(name) for table, name in self._owned[event.what]]
        written = [i for i, (tensor, look) in enumerate(tensors) if look != _looks(tensor)]
        does_more = (
            event.left
            or event.reads
            or event.generators
            or event.shares
            or now.is_guessed
            or self._changed_arguments
            or len(self._private.left) > left_before
            or self._before.has_changed(event.what)
            or any(place[0] == READ for place, _ in event.inputs)
            or any(value.parameter is not None or value.belongs for value in values)
            or any(value.tensor.requires_grad != value.requires_grad for value in values)
            or any(new is not old for new, (old, _) in zip(after, tensors, strict=True))
            # It has written into an argument, or into what others have too.
            or len(event.changes) != len({id(tensors[i][0]) for i in written})
            or any(change.argument is not None for change in event.changes)
            or (written and self._tables.are_in(event.what))
        )
        look = None if does_more else look_of_result(output, event.slots, [*located(event.call)])
        if look is None:
            return None
        work = tuple(a - b for a, b in zip(self._work.counts, counts, strict=True))
        more = {i: self.trace.work.get(id(part), 0.0) - inner[i] for i, part in enumerate(parts)}
        more = {i: count for i, count in more.items() if count}
        leaves, tree = look
        return Answer(leaves, tree, tuple(written), work, more, event.needs_data)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._running is not None or func in self.trace.metadata:
            return func(*args, **kwargs)
        tensors = tensors_in((args, kwargs))
        for value in args:
            if isinstance(value, NotHere):
                raise value.refuse()
        if not is_ours(func) and not _any(map(self._is_followed, tensors)):
            output = func(*args, **kwargs)
            self.trace.decides |= reads_numbers(func)
            self.trace.foreign |= {id(t): t for t in tensors if isinstance(t, nn.Parameter)}
            if any(id(t) in self._derived for t in tensors):
                self._derived |= {id(t): t for t in tensors_in(output)}
            return output
        if func in REWRITTEN and (call := rewritten(func, args, self._is_followed)):
            return call.result(self.__torch_function__(call.function, types, call.args))
        name = getattr(func, "__name__", str(func))
        if name == "__get__" or name == "__set__":
            name = getattr(getattr(func, "__self__", None), "__name__", name)
        event = self._between(func, name)
        if does := self._does_what_cannot_be_cut(func, name):
            raise self._refusal(
                f"{event.where}: the model {does}; put that into a module that is placed as a whole"
            )
        label = f"{name.strip('_')} after {self._latest}" if self._latest else name.strip("_")
        return self._event(self._at_next(event), label, func, args, kwargs)

    def _does_what_cannot_be_cut(self, func: Any, name: str) -> str:
        if isinstance(func, torch._ops.OpOverload) and _is_dispatched(sys._getframe(3)):
            return "runs compiled code between its units, such as a function of torch.jit"
        if torch._C._functorch.maybe_current_level() is not None:
            return f"calls {name} under a transform of torch.func, such as vmap, between its units"
        if func in TAKE_GRADIENTS:
            return "takes gradients between its units, which no stage has whole"
        return ""

    def _is_followed(self, tensor: Tensor) -> bool:
        while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            tensor = torch._C._functorch.get_unwrapped(tensor)
        if self._memory.number_of(tensor) is not None:
            return True
        if isinstance(tensor, FakeTensor):
            maker = self._memory.maker_of(storage_of(tensor))
            if maker is not None and maker != MODEL:
                raise PartitionError(
                    f"{self._where()}: the model uses a tensor that {self.trace.events[maker].name} left in "
                    "an attribute or a list, which other stages do not have; return it from there (a loss: "
                    "penstock.add_loss)"
                )
            raise PartitionError(
                f"{self._where()}: a tensor was made between units by something that is no function of "
                "PyTorch, such as a transform, compiled code or the apply of a custom function under another "
                "name; put it into a module that is placed as a whole"
            )
        if self._memory.is_overwritten(tensor):
            raise PartitionError(f"{self._where()}: {OVERWRITTEN}")
        return False

    def _at_next(self, event: Event, near: Collection[int] = ()) -> _Running:
        return _Running(event, len(self.trace.events), near)

    def _event(self, now: _Running, label: str, run: Run, args: Any, kwargs: Any) -> Any:
        event, memory = now.event, self._memory
        placed = located((args, kwargs))
        originals = list(placed.values())
        self._note_inputs(event, placed)
        # With containers of its own, which the author's code cannot empty.
        event.call = map_tensors((args, kwargs), memory.bare)
        undo: list[tuple[Any, Any, Any]] = []
        args, kwargs, now.originals = self._on_fakes(originals, args, kwargs, undo)
        if event.is_unit:
            args, kwargs = self._look_at_objects(now, args, kwargs)
        shown = tensors_in((args, kwargs))
        now.arguments = {storage_of(t) for t in shown} - self._promoted.keys()
        before = [_looks(t) for t in shown]
        holders = self._owned.get(event.what, ()) if event.is_unit else ()
        seen = {*map(storage_of, [*shown, *tensors_in([t.get(name) for t, name in holders])])}
        aliases = [(*one, _looks(memory.fake_of(one[0]))) for one in memory.latest_in(seen)]
        output = self._run_event(now, run, args, kwargs)
        self._note_left(now)
        put_back(undo)
        forced = event.what is SET_DATA
        for position, (place, original) in enumerate(placed.items()):
            if _looks(shown[position]) != before[position] or (forced and position == 0):
                self._note_change(now, place, original)
        arguments = {id(t) for t in originals}
        others = [one for one in aliases if id(one[0]) not in arguments]
        changed = [one[:2] for one in others if _looks(memory.fake_of(one[0])) != one[2]]
        for tensor, old in changed:
            new = memory.add(tensor, f"{self.trace.values[old].name}!", now.index)
            event.changes.append(Change(old, new, None))
        if event.changes:
            written = (t for t, look in zip(shown, before, strict=True) if _looks(t) != look)
            memory.overwrite_through(set(map(storage_of, written)))
        if _is_metadata(event, output):
            self.trace.metadata.add(event.what)
            return output
        output = map_tensors(output, lambda t: now.originals.get(id(t), t))
        self._note_results(now, label, output, placed)
        makers = {self.trace.values[number].event for _, number in event.inputs}
        makers -= {None, now.index}
        event.varies = event.needs_data or any(self.trace.events[m].varies for m in makers)  # type: ignore[index]
        self.trace.events.append(event)
        return output

    def _on_fakes(
        self, originals: Sequence[Tensor], args: Any, kwargs: Any, undo: list[Any]
    ) -> tuple[Any, Any, dict[int, Tensor]]:
        """The arguments without data, and the tensors that they were by the identity of these."""
        fakes = {id(t): self._memory.fake_of(t) for t in originals}
        if any(not isinstance(t, FakeTensor) for t in originals):

            def put(tensor: Tensor) -> Tensor:
                return fakes[id(tensor)]

            args = tuple([swapped(value, put, undo) for value in args])
            kwargs = {name: swapped(value, put, undo) for name, value in kwargs.items()}
        return args, kwargs, {id(fakes[id(t)]): t for t in originals}

    def _look_at_objects(self, now: _Running, args: Any, kwargs: Any) -> Any:
        """Note the lists, dictionaries and objects among a unit's arguments; watch how far iterators come."""
        call = [[*args], {**kwargs}]
        mutables = Mutables()
        for part in call:
            for key, value in list(part.items() if isinstance(part, dict) else enumerate(part)):
                if is_iterator(value):
                    value = mutables.replay(part, key, value)
                mutables.look(value, place=(int(part is call[1]), key))
        now.event.objects, now.event.mutable = mutables, bool(mutables)
        now.filled = Mutables(depth=_DEEP, numbers=False)
        if mutables:
            now.filled.look((tuple(args), tuple(kwargs.values())))
        return call

    def _note_left(self, now: _Running) -> None:
        """Note what a unit has changed in its arguments: lists, dictionaries, objects, iterators."""
        self._changed_arguments = False
        event, originals = now.event, now.originals
        mutables = event.objects
        if mutables is None:
            return
        for mutable in mutables.changed():
            self._changed_arguments = True
            change = map_tensors(mutable.change(), lambda t: originals.get(id(t), t))
            if change is not None:
                event.left[mutable.place] = change
            elif not self._homes:
                self.trace.for_any_homes = False
            elif len({stage for stages in self._homes.values() for stage in stages}) > 1:
                raise PartitionError(
                    f"{event.where}: {event.name} changes numbers in an object (of type "
                    f"{type(mutable.value).__name__}) among its arguments, which other stages would not see; "
                    "return what it makes of them"
                )
        mutables.give_back()
        # All others are new objects in the event's call.
        event.objects = mutables.within(opaque_in(event.call).values())

    def _note_inputs(self, event: Event, placed: Mapping[Place, Tensor]) -> None:
        for place, tensor in placed.items():
            number = self._memory.number_of(tensor)
            if number is not None and len(place) > DIRECT and storage_of(tensor) in self._promoted:
                # A unit has put it there; it is an input if the event reads it.
                continue
            if number is not None:
                event.inputs.append((place, number))
                self._check_known(event, tensor, number)
            elif not isinstance(tensor, FakeTensor) or (
                self._memory.maker_of(storage_of(tensor)) is None
            ):
                # A tensor that units put into a cache, say, is no input; this one was made between units.
                self._is_followed(tensor)

    def _check_known(self, event: Event, tensor: Tensor, number: int) -> None:
        value = self.trace.values[number]
        if (
            value.event is not None
            and takes_gradient(self._memory.fake_of(tensor)) != value.requires_grad
        ):
            raise PartitionError(
                f"{event.where}: something that is no function of PyTorch has acted on {value.name} between "
                "units, such as a function compiled by torch.jit, or the apply of a custom function that was "
                "given another name; call it as Function.apply, or put it into a module that is placed as a "
                "whole"
            )

    def _note_change(self, now: _Running, place: Place, tensor: Tensor) -> None:
        old, changes = self._memory.number_of(tensor), now.event.changes
        known = [change.old for change in changes if change.argument is not None]
        if old is not None and old in known:
            return
        name = now.event.name if old is None else self.trace.values[old].name
        if old is None and not isinstance(tensor, FakeTensor):
            self._memory.overwrite(tensor)
            if id(tensor) in self._arguments:
                self.trace.changed_arguments.add(self._arguments[id(tensor)])
        changes.append(Change(old, self._memory.add(tensor, f"{name}!", now.index), place))

    def _note_results(
        self, now: _Running, label: str, output: Any, placed: dict[Place, Tensor]
    ) -> None:
        event, memory = now.event, self._memory
        arguments = {id(t): place for place, t in reversed(placed.items())}
        count = len(tensors_in(output))
        slots: dict[int, int] = {}
        for place, tensor in enumerate(tensors_in((output, list(event.left.values())))):
            if id(tensor) in arguments:
                event.slots.append(arguments[id(tensor)])
                continue
            value = memory.value_of(tensor)
            is_model = value is not None and value.parameter is not None
            if not is_model:
                # First of all, as sparse tensors have no storage.
                check_tensor(tensor, f"{event.where}: what {event.name} returned")
            key = memory.storage_of(tensor)
            number = memory.number_of(tensor) if is_model else slots.get(id(tensor))
            if number is None:
                self._note_read(now, key)
                name = label if count == 1 and place == 0 else f"{label}[{place}]"
                slots[id(tensor)] = number = memory.add(tensor, name, now.index)
                self.trace.values[number].belongs = self._belongs(event, key)
            # A parameter or buffer is in every stage, or gets there.
            event.slots.append(number)
            event.shares |= place < count and key in now.arguments
            if place >= count:
                self._promoted.setdefault(key, []).append(number)
        # With containers of its own, since the code that gets the output may empty the output's.
        event.result = map_tensors(output, memory.bare)
        event.left = {place: map_tensors(kept, memory.bare) for place, kept in event.left.items()}

    def _belongs(self, event: Event, storage: int) -> bool:
        """Whether memory belongs to the model or to an attribute of a unit, which may write into it."""
        if self._memory.maker_of(storage) == MODEL:
            return True
        parts = self.model.get_submodule(event.what).modules() if event.is_unit else ()
        held = [value for part in parts for value in vars(part).values()]
        memory = self._memory
        return any(isinstance(t, Tensor) and memory.storage_of(t) == storage for t in held)

    def _note_read(self, now: _Running, storage: int) -> None:
        """Note that the event that runs reads memory, if it is no argument's."""
        maker = self._memory.maker_of(storage)
        if maker is None or maker in (MODEL, now.index) or storage in now.near:
            return
        if storage in now.arguments:
            return
        event = now.event
        if storage not in self._promoted:
            event.reads.add(maker)
            return
        known = {number for _, number in event.inputs}
        shown = [self.trace.values[n].tensor for place, n in event.inputs if place[0] != READ]
        if any(t.layout is torch.strided and storage_of(t) == storage for t in shown):
            return
        latest = [number for _, number in self._memory.latest_in([storage])]
        event.inputs += [((READ, number), number) for number in latest if number not in known]

    def before_operation(self, call: Any) -> None:
        """Note what an operation of the event that runs reads, and whether it draws."""
        assert self._running is not None
        event = self._running.event
        if event.is_unit:
            for tensor in tensors_in(call):
                if isinstance(tensor, FakeTensor):
                    self._note_read(self._running, storage_of(tensor))
        values = (*call[0], *call[1].values())
        event.generators += [one for one in values if isinstance(one, torch.Generator)]

    def after_operation(self, func: Any, call: Any, output: Any) -> None:
        """Note what an operation of the event that runs has made, and count it."""
        assert self._running is not None
        for tensor in tensors_in(output):
            if isinstance(tensor, FakeTensor) and storage_of(tensor) not in self._running.arguments:
                self._memory.keep(tensor, self._running.index)
        if self._running.event.is_unit:
            self._tables.note(self._running.event, func, call, output)
        args, kwargs = call
        self._work.add(func, args, kwargs, output)

    def original_of(self, tensor: Tensor) -> Tensor:
        """The argument with data that a fake one of the event that runs stands for, or that one."""
        assert self._running is not None
        return self._running.originals.get(id(tensor), tensor)

    def guess(self) -> None:
        """Note that the event that runs has got numbers of the model's arguments."""
        assert self._running is not None
        self._running.is_guessed = True

    def _run_event(self, now: _Running, run: Run, args: Any, kwargs: Any) -> Any:
        self._running, event = now, now.event
        work, nbytes = self._work.total, self._work.nbytes
        try:
            with self.mode, _MadeUp(self, event):
                output = run(*args, **kwargs)
            if self._refused:
                raise self._refused[0]
            return output
        except PartitionError:
            raise
        except Exception as error:
            return self._run_with_data(now, run, (args, kwargs), error)
        finally:
            self._running, now.filled = None, Mutables()
            event.work, event.nbytes = self._work.total - work, self._work.nbytes - nbytes
            # A weight that two units share is cast in each, since each may be in a stage of its own.
            torch.clear_autocast_cache()

    def _run_with_data(self, now: _Running, run: Run, call: Any, reason: Exception) -> Any:
        """Run an event that failed without data on ones, and on the numbers of the model's arguments."""
        event = now.event
        module = self.model.get_submodule(event.what) if event.is_unit else nn.Module()
        # With those that stood for them, whose identity no other tensor may get.
        originals: dict[int, tuple[Tensor, Tensor]] = {}

        def filled(number: int, argument: Tensor) -> Tensor:
            tensor = self.original_of(argument)
            if isinstance(tensor, FakeTensor):
                twin = _filled(1, tensor)
            else:
                is_mask = number == 0 and tensor.dtype is torch.bool
                twin = _filled(0, tensor) if is_mask else tensor.detach().clone()
            originals[id(twin)] = tensor, twin
            return twin.requires_grad_(tensor.requires_grad)

        def back(tensor: Tensor) -> Tensor:
            if id(tensor) in originals:
                return originals[id(tensor)][0]
            twin: Tensor = self.mode.from_tensor(tensor.detach())
            return twin.requires_grad_(tensor.requires_grad)

        failure: Exception | None = None
        now.is_guessed = True
        # A mask of ones may leave nothing.
        for number in (1, 0):
            undo: list[tuple[Any, Any, Any]] = []
            # The run before has filled a list or a cache.
            now.filled.rewind()
            try:
                with replaced(_of_ones(module)), _CountsWork(self._work):
                    put = functools.partial(filled, number)
                    args, kwargs = [swapped(part, put, undo) for part in call]
                    output = map_tensors(run(*args, **kwargs), back)
                put_back(undo)
                now.filled.exchange(back)
                return output
            except Exception as error:
                put_back(undo)
                failure = failure or error
        assert failure is not None
        if not (event.needs_data or isinstance(reason, _NEED_DATA)):
            raise failure
        raise PartitionError(
            f"{event.where}: {event.name} runs neither without data, as stages have tensors of other stages "
            f"({str(reason).splitlines()[0]}), nor on ones ({failure}); put it into a module that is placed "
            "as a whole by naming that in stages=, or, if it needs certain numbers in its arguments, cut "
            "the model by a batch that has them, pipe.cut(...)"
        ) from failure

    # ---- custom functions and checkpoints

    def applied(self, function: type[Function], run: Run, args: Any, kwargs: Any) -> Any:
        followed = not is_checkpoint(function) and self._running is None
        if not followed or not any(self._is_followed(t) for t in tensors_in((args, kwargs))):
            return run(*args, **kwargs)
        self.trace.has_custom = True
        event = self._between(function, function.__name__)
        label = f"{event.name} after {self._latest}"
        with left(self):
            return self._event(self._at_next(event), label, run, args, kwargs)

    def checkpointed(self, run: Run, args: Any, kwargs: Any, options: Mapping[str, Any]) -> Any:
        with uncheckpointed(args[1:], options):
            if self._running is not None:
                return args[0](*args[1:], **kwargs)
            region = Region(len(self.trace.events))
            self.trace.regions.append(region)
            output = args[0](*args[1:], **kwargs)
            region.stop = len(self.trace.events)
            values = map(self._memory.value_of, tensors_in(output))
            region.slots = [None if value is None else value.root for value in values]
            return output

    # ---- for messages

    def _where(self) -> str:
        return where(self._paths)

    def _between(self, what: Any, name: str) -> Event:
        """An event of the author's code that runs now."""
        module, line = running(self._paths)
        path = "" if module is None else self._paths[id(module)]
        return Event(what, name, place_of(self._paths, module, line), module=path)


def _looks_of_buffers(modules: Iterable[tuple[nn.Module, str]]) -> dict[Any, Any]:
    """The identity and the version of each buffer, by its module, the module's name and its own."""
    return {
        (module, owner, name): None if buffer is None else (id(buffer), buffer._version)
        for module, owner in modules
        for name, buffer in module._buffers.items()
    }


def _plain_tensors(table: Mapping[str, Any]) -> list[str]:
    return [n for n, t in table.items() if type(t) is Tensor and t.layout is torch.strided]


class _MadeUp(TorchDispatchMode):
    """Memo with ones where an operation needs a tensor's numbers, and notes what a unit reads."""

    def __init__(self, recorder: _Tracer, event: Event) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder, self._event = recorder, event
        self._memo = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._recorder.before_operation((args, kwargs))
        try:
            output = func(*args, **kwargs)
        except Exception as error:
            # Any operation that fails without data is tried on ones; if that fails too, this error counts.
            self._event.needs_data |= isinstance(error, _NEED_DATA)
            output = self._on_ones(func, args, kwargs, error)
        self._recorder.after_operation(func, (args, kwargs), output)
        return output

    def _on_ones(self, func: Any, args: Any, kwargs: Any, reason: Exception) -> Any:
        mode = self._recorder.mode
        self._memo += 1
        # Code that draws until a condition holds may need zeros to get out.
        for number in (1, 0) if self._memo < _PATIENCE else (0, 1):
            with contextlib.suppress(Exception), _disable_current_modes():
                fill = functools.partial(self._with_numbers, number)
                filled, named = map_tensors((args, kwargs), fill)
                output = func(*filled, **named)
                return map_tensors(output, lambda t: mode.from_tensor(t.detach()))
        raise reason

    def _with_numbers(self, number: int, tensor: Tensor) -> Tensor:
        """A tensor of this number; one that every stage has, such as a mask of the arguments, as it is."""
        original = self._recorder.original_of(tensor)
        if isinstance(original, FakeTensor):
            return _filled(number, tensor)
        self._recorder.guess()
        return original.detach().clone()


class _CountsWork(TorchDispatchMode):
    """Counts the operations of a unit that runs on ones."""

    supports_higher_order_operators = True
    """FlexAttention is one."""

    def __init__(self, work: Work) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._work = work

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        self._work.add(func, args, kwargs or {}, output)
        return output


_PATIENCE = 64
"""The number of answers with ones after which an event gets zeros."""
_NEED_DATA = (DataDependentOutputException, DynamicOutputShapeException)


def _filled(number: int, tensor: Tensor, device: torch.device | None = None) -> Tensor:
    shape, strides, home = tensor.shape, tensor.stride(), device or tensor.device
    return torch.empty_strided(shape, strides, dtype=tensor.dtype, device=home).fill_(number)


def _is_metadata(event: Event, output: Any) -> bool:
    """Whether a function returned metadata only, which placeholders have too."""
    acts = event.is_unit or event.changes or event.needs_data or is_ours(event.what)
    return not acts and not event.sets_hook and not tensors_in(output)


def _of_ones(module: nn.Module) -> Iterator[tuple[Any, str, Tensor]]:
    """Ones in place of a module's fake parameters and buffers."""
    for table, name in _fakes_in(module, attributes=False):
        tensor = table[name]
        ones = _filled(1, tensor)
        is_parameter = isinstance(tensor, nn.Parameter)
        yield table, name, nn.Parameter(ones, tensor.requires_grad) if is_parameter else ones


def _fakes_in(module: nn.Module, *, attributes: bool = True) -> list[tuple[Any, str]]:
    """The tables and names of a module's fake parameters and buffers, and of those in attributes."""
    parts = [part for part in module.modules() if not isinstance(part, torch.jit.ScriptModule)]
    tables: list[Any] = [table for part in parts for table in (part._parameters, part._buffers)]
    tables += [vars(part) for part in parts if attributes]
    return [(table, n) for table in tables for n, t in table.items() if isinstance(t, FakeTensor)]


def _is_dispatched(frame: Any) -> bool:
    """Whether an operation is called from within the dispatcher: no function of PyTorch was seen before."""
    return "fake_tensor" in frame.f_code.co_filename


def _any(answers: Iterable[bool]) -> bool:
    """Whether any answer is true; evaluates all of them."""
    return True in list(answers)


def _looks(tensor: Tensor) -> tuple[Any, ...]:
    return tensor._version, tensor.requires_grad, tensor.shape
