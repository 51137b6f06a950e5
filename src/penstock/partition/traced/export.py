"""One call of a model as a graph, which ``torch.export`` makes of a copy of the model without data."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.function import BackwardCFunction, Function
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from penstock.errors import PartitionError
from penstock.partition.faces import (
    EFFECTS,
    GET_DATA,
    SET_DATA,
    Listener,
    Run,
    seen,
)
from penstock.partition.traced.marks import marked, place_seeds, seeded
from penstock.rng import called_to_draw
from penstock.step.loss import Term, add_loss, collect_losses
from penstock.values import (
    Structure,
    TensorSpec,
    ValueSpec,
    attributes_kept,
    flatten,
    unflatten,
)
from penstock.values.trial import copied

# ---- the functions of torch that do what traced operators do
# A traced graph calls operators. Torch function modes, such as the one that delays weight gradients, know the
# functions above these by name.


_aten = torch.ops.aten


def _embedding(
    weight: Tensor,
    tokens: Tensor,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    padding = None if padding_idx < 0 else padding_idx
    return functional.embedding(
        tokens, weight, padding, scale_grad_by_freq=scale_grad_by_freq, sparse=sparse
    )


_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    _aten.linear.default: functional.linear,
    _aten.embedding.default: _embedding,
    _aten.matmul.default: torch.matmul,
    _aten.mm.default: torch.mm,
    _aten.bmm.default: torch.bmm,
    _aten.addmm.default: torch.addmm,
    _aten.baddbmm.default: torch.baddbmm,
    _aten.conv1d.default: functional.conv1d,
    _aten.conv2d.default: functional.conv2d,
    _aten.conv3d.default: functional.conv3d,
    _aten.conv1d.padding: functional.conv1d,
    _aten.conv2d.padding: functional.conv2d,
    _aten.conv3d.padding: functional.conv3d,
    _aten.conv_transpose1d.default: functional.conv_transpose1d,
    _aten.conv_transpose2d.input: functional.conv_transpose2d,
    _aten.conv_transpose3d.input: functional.conv_transpose3d,
}


def function_of(target: Any) -> Any:
    """What to call for an operator: the function that does the same, or the operator itself."""
    return _FUNCTIONS.get(target, target)


# ---- a copy of a model without its data, so that tracing leaves the model alone


class Skeleton:
    """A model's code, with fake tensors for its parameters and buffers.

    Args:
        model: any model, also one on the meta device, whose tensors become fake ones of the CPU.

    Attributes:
        model: the copy.
        mode: the mode of its fake tensors.
        device: where the model is taken to live.
    """

    def __init__(self, model: nn.Module) -> None:
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        first = next(_tensors(model), None)
        self.device = torch.device("cpu") if first is None else _home(first)
        named = set(map(id, _tensors(model)))
        # Tensors that modules hold as plain attributes are constants, whose data tracing needs. Hooks are
        # copied too: one that only observes may be a mark where to cut.
        self.model = copied(
            model, lambda t: self.like(t) if id(t) in named else t.detach(), isolated=False
        )
        self._modes = modes_of(self.model)
        # Weak, so that the parts of the model that other processes hold can be let go.
        self._original = weakref.ref(model)

    def changed_modes(self) -> tuple[str, ...]:
        """The paths of the modules that the user has put into another mode since."""
        original = self._original()
        now = {} if original is None else modes_of(original)
        return tuple(
            name for name in self._modes if now.get(name, self._modes[name]) != self._modes[name]
        )

    def like(self, tensor: Tensor) -> Tensor:
        """A fake parameter or buffer like a real one."""
        with self.mode:
            fake = _whole_like(tensor) if hasattr(tensor, "full_tensor") else _empty_like(tensor)
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(fake, tensor.requires_grad)
        return fake.requires_grad_(tensor.requires_grad)

    def empty(self, spec: TensorSpec) -> Tensor:
        """A fake argument."""
        with self.mode:
            made = torch.empty(spec.shape, dtype=spec.torch_dtype, device=self.device)
        return made.requires_grad_(spec.requires_grad)

    def set_training(self, training: bool) -> None:
        """Put the copy into a mode; if that is the model's own, each module into the one it was in."""
        if self._modes[""] is not training:
            self.model.train(training)
            return
        for name, module in self.model.named_modules():
            # From the outside in, as train() reaches what is inside.
            module.train(self._modes[name])


def modes_of(model: nn.Module) -> dict[str, bool]:
    """Whether each module is in training, by path."""
    return {name: module.training for name, module in model.named_modules()}


def _empty_like(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device=_home(tensor))


def _whole_like(sharded: Tensor) -> Tensor:
    """Like the gathered tensor, with which a stage computes once its parameters are sharded."""
    home = _home(sharded)
    return torch.empty_strided(sharded.shape, sharded.stride(), dtype=sharded.dtype, device=home)


def _home(tensor: Tensor) -> torch.device:
    return torch.device("cpu") if tensor.is_meta else tensor.device


def _tensors(model: nn.Module) -> Iterator[Tensor]:
    yield from model.parameters()
    yield from model.buffers()


# ---- a call as a graph


ROOT = "model."
"""The prefix of the model's own names in the graph."""

Rebuild = Callable[[Sequence[Any]], Any]


@dataclass(frozen=True)
class Exported:
    """The graph of a call.

    Args:
        call: the spec of the ``(args, kwargs)`` it was traced with.
        graph: takes the call's tensors and returns the leaves of the output; parameters, buffers and
            constants are ``get_attr`` nodes, with the model's own names after :data:`ROOT`.
        root: holds what ``get_attr`` nodes name.
        rebuild: makes the model's output of the leaves.
        guard: raises an AssertionError for tensors of sizes that the graph does not hold for.
        free: whether it was traced with free sizes; otherwise it holds for those of ``call`` alone.
        losses: the name and weight of each loss that the model adds; their values come after the leaves.
    """

    call: ValueSpec
    graph: fx.Graph
    root: nn.Module
    rebuild: Rebuild
    guard: Callable[[Sequence[Tensor]], None]
    free: bool
    losses: tuple[tuple[str, float], ...] = ()

    def output(self, given: Sequence[Any]) -> Any:
        """The model's output, made of what the last stage returns; also adds the model's own losses."""
        leaves = len(given) - len(self.losses)
        for (name, weight), value in zip(self.losses, given[leaves:], strict=True):
            add_loss(name, value, weight)
        return self.rebuild(given[:leaves])

    def fits(self, call: ValueSpec) -> bool:
        """Whether the graph does for a call what the model would do."""
        if call.structure != self.call.structure or not all(
            map(_alike, call.tensors, self.call.tensors)
        ):
            return False
        if [spec.shape for spec in call.tensors] == [spec.shape for spec in self.call.tensors]:
            return True
        if not self.free:
            return False
        try:
            self.guard([spec.empty("meta") for spec in call.tensors])
        except AssertionError:
            return False
        return True


def _alike(given: TensorSpec, traced: TensorSpec) -> bool:
    """Whether types agree, and also sizes where one is 0 or 1, which tracing always takes as fixed."""
    return (
        given.dtype == traced.dtype
        and len(given.shape) == len(traced.shape)
        and all(a == b or min(a, b) > 1 for a, b in zip(given.shape, traced.shape, strict=True))
    )


def export(
    skeleton: Skeleton, call: ValueSpec, paths: Iterable[str], *, training: bool
) -> Exported:
    """Trace a call.

    Args:
        skeleton: the copy of the model to trace.
        call: the spec of the ``(args, kwargs)``.
        paths: the modules around whose calls the graph gets marks.
        training: the mode to trace in.

    Raises:
        PartitionError: the model cannot be traced; the message says why.
    """
    skeleton.set_training(training)
    _refuse_what_is_lost(skeleton, call)
    # Before our own hooks are set: a module that has hooks counts as one that may draw.
    drawing = called_to_draw(skeleton.model)
    reasons: list[str] = []
    for free, strict in ((True, False), (False, False), (False, True)):
        try:
            with marked(skeleton.model, paths), seeded(skeleton.model, drawing):
                return _attempt(skeleton, call, free=free, strict=strict)
        except PartitionError:
            raise
        except Exception as error:  # whatever a model's code may raise
            reasons.append(_first_line(error))
    kind = type(skeleton.model).__name__
    raise PartitionError(
        f"torch.export cannot trace this {kind}: {reasons[0]}"
        + (f"; traced strictly: {reasons[-1]}" if reasons[-1] != reasons[0] else "")
        + '; cut it by module calls instead, with how="calls", which runs its code as it is'
    )


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


def _attempt(skeleton: Skeleton, call: ValueSpec, *, free: bool, strict: bool) -> Exported:
    flat = _Flat(skeleton.model, call, strict=strict)
    tensors = tuple(skeleton.empty(spec) for spec in call.tensors)
    dims = (tuple(map(_free_dims, call.tensors)),) if free else None
    plain = nullcontext() if strict else _plainly()
    with undisturbed(), torch.enable_grad(), plain:
        made = torch.export.export(flat, tensors, dynamic_shapes=dims, strict=strict)
        module = made.module()
    place_seeds(module)
    guard = _take_guard(module)
    if strict:
        return Exported(call, module.graph, module, made.call_spec.out_spec.unflatten, guard, free)
    return Exported(call, module.graph, module, flat.rebuild, guard, free, flat.losses)


def _free_dims(spec: TensorSpec) -> dict[int, Any]:
    return {dim: torch.export.Dim.AUTO for dim, size in enumerate(spec.shape) if size > 1}


@contextmanager
def undisturbed() -> Iterator[None]:
    """Keep the random state, and silence warnings of tracing about attributes that modules set."""
    with torch.random.fork_rng([]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class _Plain(Listener):
    """Calls what is called while a model is traced in such a way that the graph contains it."""

    def applied(
        self, function: type[Function], run: Run, args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        """Apply a custom function, and note in the graph that gradients are again as they were before it."""
        result = run(*args, **kwargs)
        torch.set_grad_enabled(torch.is_grad_enabled())
        return result


def _plainly() -> AbstractContextManager[None]:
    return seen([], _Plain())


class _Flat(nn.Module):
    """A model as a function from tensors to tensors; if traced strictly, with the model's own output."""

    def __init__(self, model: nn.Module, call: ValueSpec, *, strict: bool) -> None:
        super().__init__()
        self.model = model
        self._call, self._strict = call, strict
        seen: list[tuple[Structure, list[Term]]] = []
        # Not the list itself: torch.export undoes what forward changes in a module's attributes.
        self._note, self._noted = seen.append, seen.__getitem__

    def forward(self, *tensors: Tensor) -> Any:
        args, kwargs = self._call.fill(tensors)
        with collect_losses() as added:
            output = self.model(*args, **kwargs)
        if self._strict:
            if len(added):
                raise RuntimeError(
                    "it adds losses, and can only be traced strictly, which loses them"
                )
            return output
        leaves, structure = flatten(output)
        self._note((structure, list(added)))
        # A clone, so that there is a node for it even if the loss is an input or a parameter.
        return (*leaves, *(term.value.clone() for term in added))

    def rebuild(self, leaves: Sequence[Any]) -> Any:
        """The model's output."""
        return unflatten(self._noted(-1)[0], leaves)

    @property
    def losses(self) -> tuple[tuple[str, float], ...]:
        """The name and weight of each loss that the model adds."""
        return tuple((term.name, term.weight) for term in self._noted(-1)[1])


def _take_guard(module: fx.GraphModule) -> Callable[[Sequence[Tensor]], None]:
    """Take the checks of shapes out of the graph: they are made beforehand, not while a stage runs."""
    inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
    checks = []
    for node in [node for node in module.graph.nodes if node.op == "call_module"]:
        checks.append((module.get_submodule(node.target), [inputs.index(a) for a in node.args]))
        module.graph.erase_node(node)

    def guard(tensors: Sequence[Tensor]) -> None:
        for check, positions in checks:
            check(*(tensors[position] for position in positions))

    return guard


# ---- what tracing would lose


class _Lost(TorchFunctionMode):
    """Notes what a model does that a graph would lack."""

    def __init__(self) -> None:
        super().__init__()
        self._data: list[tuple[Tensor, int]] = []
        self._found: set[str] = set()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """A function is called."""
        result = func(*args, **(kwargs or {}))
        if func in EFFECTS:
            self._found.add("hooks on the gradients of tensors")
        elif func == GET_DATA:
            self._data.append((result, result._version))
        elif func == SET_DATA:
            self._found.add("an assignment to .data")
        return result

    def found(self) -> set[str]:
        """What that was, in words."""
        written = any(tensor._version != before for tensor, before in self._data)
        return self._found | ({"changes of .data in place"} if written else set())


def _refuse_what_is_lost(skeleton: Skeleton, call: ValueSpec) -> None:
    """Refuse a model that does what tracing would drop: it records only what forward computes."""
    lost = _Lost()
    with attributes_kept(skeleton.model):
        with lost:
            outputs = _run(skeleton, call)
        own = {f"{name}, with a backward of its own" for name in _own_functions(outputs)}
        # Two calls: an attribute that the first one sets, such as a cache, is fine if the next one keeps it.
        before = _plain_attributes(skeleton.model)
        _run(skeleton, call)
        after = _plain_attributes(skeleton.model)
    counted = {
        f"the attribute {name}, which every call changes"
        for name, value in after.items()
        if name in before and before[name] != value
    }
    found = sorted(own | lost.found() | counted)
    if found:
        raise PartitionError(
            f"the {type(skeleton.model).__name__} uses {'; '.join(found)}: torch.export would drop that; cut "
            'the model by module calls instead, with how="calls"'
        )


def _plain_attributes(model: nn.Module) -> dict[str, Any]:
    """The plain attributes of a model's modules, such as numbers and strings, by path."""
    return {
        f"{path}.{name}" if path else name: value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if type(value) in (bool, int, float, str, bytes, type(None))
    }


def _run(skeleton: Skeleton, call: ValueSpec) -> list[Tensor]:
    args, kwargs = call.fill([skeleton.empty(spec) for spec in call.tensors])
    try:
        with (
            undisturbed(),
            torch.enable_grad(),
            skeleton.mode,
            _plainly(),
            collect_losses() as added,
        ):
            outputs = flatten(skeleton.model(*args, **kwargs))[0]
    except Exception:  # torch.export will report it, and better
        return []
    return [*outputs, *(term.value for term in added)]


def _own_functions(outputs: Iterable[Tensor]) -> set[str]:
    waiting = [tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None]
    seen = set(waiting)
    found: set[str] = set()
    while waiting:
        node = waiting.pop()
        if isinstance(node, BackwardCFunction):
            found.add(type(node).__name__.removesuffix("Backward"))
        fresh = {step for step, _ in node.next_functions if step is not None} - seen
        seen |= fresh
        waiting += fresh
    return found
