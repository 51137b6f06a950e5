"""Find what a stage gives without running it for real: for arguments of one size, then of any.

A model that is called with ever new sequence lengths would have to be looked at for each of them. Here it is
for the first two; for the third it runs on tensors without data whose sizes are unknowns, which notes every
question that the code asks about them. The answers are the conditions, and what comes out has sizes that are
terms in the unknowns. For later lengths that meet the conditions the same way through the code is certain,
and only the terms are evaluated.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from importlib import import_module
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from penstock.errors import SpecError
from penstock.values.structure import Structure, flatten
from penstock.values.trial import (
    TypesChecked,
    copy_as_fakes,
    copy_with_data,
    copy_without_data,
    randomness_kept,
    run_itself,
    uncompiled,
)
from penstock.values.value import STRIDED, TensorSpec, ValueSpec, layout_of

# ---- what was found for some sizes, and what follows for others


T = TypeVar("T")
log = logging.getLogger("penstock")

_BEFORE = 2
"""So many sizes are looked at one by one: a batch and its rest are two."""

_RULES = 4
"""So many ways through the code are followed with unknown sizes; what takes others is looked at each time."""


class Form(NamedTuple):
    """A tensor without its data."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    @staticmethod
    def of(tensor: Tensor) -> Form:
        """The form of a tensor.

        Raises:
            NotGeneral: it is none of a plain layout.
        """
        if tensor.layout is not torch.strided:
            raise NotGeneral(f"a tensor is {tensor.layout}")
        shape, strides = tuple(tensor.shape), tuple(tensor.stride())
        return Form(shape, strides, tensor.dtype, tensor.device, tensor.requires_grad)

    def empty(self, device: str | torch.device | None = None) -> Tensor:
        """A tensor of this form."""
        where = self.device if device is None else device
        made = torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=where)
        return made.requires_grad_(self.requires_grad)

    @property
    def kind(self) -> tuple[Any, ...]:
        """All but the sizes."""
        return len(self.shape), self.dtype, self.device, self.requires_grad


class Found(NamedTuple):
    """What a function gave.

    Args:
        leaves: the forms of its tensors, numbers that may follow from sizes, and what else it gave.
        rest: what does not depend on sizes.
    """

    leaves: tuple[Any, ...]
    rest: Any = None


class NotGeneral(Exception):
    """What a function gives cannot be told for unknown sizes."""


class Unknowns(Protocol):
    """Some tensors' sizes as unknowns."""

    def within(self, mode: FakeTensorMode) -> AbstractContextManager[list[Tensor]]:
        """The tensors, in a mode that works with unknowns while the context lasts; none requires grad."""


class _Rule(Protocol):
    def at(self, given: Sequence[Form]) -> Found | None:
        """What the function gives for tensors, if these meet the conditions."""


class Family(Generic[T]):
    """What one function gives for calls that differ in nothing but the sizes of their tensors.

    Args:
        same: whether two results of it are equal.
    """

    def __init__(self, same: Callable[[T, T], bool] = operator.eq) -> None:
        self._same = same
        self._seen: dict[tuple[Form, ...], T] = {}
        self._rules: list[_Rule] = []
        self._tried = 0

    def find(
        self,
        given: Sequence[Form],
        look: Callable[[], T],
        follow: Callable[[Unknowns], Found],
        build: Callable[[Found], T],
    ) -> T:
        """What the function gives.

        Args:
            given: the tensors of the call.
            look: works it out for these sizes.
            follow: works it out for unknown sizes; where it raises, they cannot be.
            build: makes the result of what was found so, for these sizes.
        """
        sizes = tuple(given)
        found = self._by_rule(sizes)
        if found is None and len(self._seen) >= _BEFORE and self._tried < _RULES:
            self._tried += 1
            self._follow(sizes, follow, build)
            found = self._by_rule(sizes)
        if found is not None:
            return build(found)
        made = look()
        if len(self._seen) < _BEFORE:
            self._seen[sizes] = made
        return made

    def _by_rule(self, given: tuple[Form, ...]) -> Found | None:
        return next((found for rule in self._rules if (found := rule.at(given)) is not None), None)

    def _follow(
        self,
        given: tuple[Form, ...],
        follow: Callable[[Unknowns], Found],
        build: Callable[[Found], T],
    ) -> None:
        try:
            symbolic: Any = import_module("penstock.values.unknowns")
            unknowns = symbolic.Symbols(given)
            rule = symbolic.Terms(unknowns, follow(unknowns))
            if rule.at(given) is None:
                raise NotGeneral("its conditions do not hold for the sizes that they come from")
            for sizes, seen in self._seen.items():
                found = rule.at(sizes)
                if found is not None and not self._same(build(found), seen):
                    raise NotGeneral("it gives something else for sizes that were looked at")
        except Exception as error:  # whatever a model's code raises that asks for more than sizes
            log.debug("what a module gives is found for each size anew: %s", error)
            self._tried = _RULES
        else:
            self._rules.append(rule)


# ---- look at a module


Run = Callable[..., Any]
Key = TypeVar("Key")


class Inferred(NamedTuple):
    """What a module gives.

    Args:
        output: its spec.
        reached: for each tensor of the output, those of the arguments that a gradient of it surely
            flows to; ``None`` where it requires none.
    """

    output: ValueSpec
    reached: list[list[int] | None]


def new_family() -> Family[Inferred]:
    """Nothing is known yet of what a module gives for arguments of various sizes."""
    return Family(lambda one, other: _told(one) == _told(other))


def _told(found: Inferred) -> tuple[str, list[list[int] | None]]:
    # With the order of the dimensions in memory, which specs do not compare.
    return found.output.digest(), found.reached


class Call(NamedTuple):
    """What a module is tried out with: the spec of ``(args, kwargs)``, and arguments as they are."""

    arguments: ValueSpec
    aside: Mapping[str, Any]


def infer_output(module: nn.Module, arguments: ValueSpec, device: torch.device) -> ValueSpec:
    """The spec of what ``module`` gives, see :func:`infer`."""
    return infer(module, arguments, device).output


def infer(
    module: nn.Module,
    arguments: ValueSpec,
    device: torch.device,
    aside: Mapping[str, Any] | None = None,
    family: Family[Inferred] | None = None,
) -> Inferred:
    """What ``module`` gives for arguments of a spec.

    A copy of it without data runs on the meta device where the module's code allows that, which computes
    nothing; else a copy that shares its parameters runs for real, on zeros; else, where it cannot be copied,
    the module itself, and what it does to its attributes is undone. Parameters, buffers, gradients,
    attributes and random numbers stay as they were. Forward hooks that can change something run as copies,
    those that only look do not.

    Args:
        module: a stage.
        arguments: the spec of ``(args, kwargs)``.
        device: where the stage lives.
        aside: more arguments by name, as they are.
        family: what it gave for other sizes, while nothing else has changed.

    Raises:
        Exception: whatever the module raises when run for real.
    """
    call = Call(arguments, aside or {})
    with uncompiled():
        if family is None or aside:
            return _look(module, call, device)
        return family.find(
            forms_of_arguments(arguments, device),
            lambda: _look(module, call, device),
            lambda unknowns: _follow(module, call, device, unknowns),
            _built,
        )


def _built(found: Found) -> Inferred:
    structure, reached = found.rest
    return Inferred(spec_of_forms(found.leaves, structure), reached)


def forms_of_arguments(arguments: ValueSpec, device: torch.device) -> list[Form]:
    """The tensors of a call on a device."""
    return [Form.of(spec.empty("meta"))._replace(device=device) for spec in arguments.tensors]


def found_of(tensors: Sequence[Tensor], rest: Any) -> Found:
    """What a function gave that gives tensors.

    Raises:
        NotGeneral: some of them are more than their data.
    """
    if any(layout_of(tensor) != STRIDED for tensor in tensors):
        raise NotGeneral("it gives tensors that are more than their data")
    return Found(tuple(map(Form.of, tensors)), rest)


def spec_of_forms(forms: Sequence[Form], structure: Structure) -> ValueSpec:
    """The spec of a value whose tensors have these forms."""
    return ValueSpec(tuple(TensorSpec.of(form.empty("meta")) for form in forms), structure)


def _follow(module: nn.Module, call: Call, device: torch.device, unknowns: Unknowns) -> Found:
    if _shards_itself(module):
        raise NotGeneral("it gathers its parameters itself")
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with randomness_kept(device):
        copied = copy_as_fakes(module, mode)
        with unknowns.within(mode) as leaves:
            for leaf, spec in zip(leaves, call.arguments.tensors, strict=True):
                leaf.requires_grad_(spec.requires_grad)
            tensors, structure = _given(copied, call, leaves, device)
            reached = _reached(tensors, leaves)
    return found_of(tensors, (structure, reached))


def _look(module: nn.Module, call: Call, device: torch.device) -> Inferred:
    with randomness_kept(device):
        if _shards_itself(module):
            try:
                output, reached = _inferred(module, call, device)
            finally:
                _free(module)
            return Inferred(output, [[] for _ in reached])
        copied = _without_data(module)
        if copied is None:
            return _infer_for_real(module, call, device)
        try:
            return _inferred(copied, call, torch.device("meta"))
        except Exception as error:  # whatever code raises that looks at data which are not there
            log.debug("found no shapes without data: %s", error)
        # With other data it may take other ways.
        output, reached = _infer_for_real(module, call, device)
        return Inferred(output, [[] for _ in reached])


def _shards_itself(module: nn.Module) -> bool:
    """Whether its hooks gather and free its parameters, as FSDP2's do: they know the module, not a copy."""
    return any(
        kind.__name__ == "FSDPModule" for part in module.modules() for kind in type(part).__mro__
    )


def _free(module: nn.Module) -> None:
    """Let go of the parameters that it has gathered: the outermost part keeps them for a backward."""
    for part in module.modules():
        if hasattr(part, "reshard"):
            part.reshard()  # type: ignore[operator]


def _without_data(module: nn.Module) -> nn.Module | None:
    if autocast_types():
        # Which does nothing on the meta device.
        return None
    try:
        return copy_without_data(module)
    except Exception as error:  # whatever a module's attributes raise when they are copied
        log.debug("a module cannot be copied: %s", error)
        return None


def _infer_for_real(module: nn.Module, call: Call, device: torch.device) -> Inferred:
    before = _versions(module)
    try:
        return _inferred(_runnable(module), call, device)
    finally:
        if _versions(module) != before:
            log.warning("a forward that changes parameters in place has run once on zeros")


def _versions(module: nn.Module) -> list[int]:
    return [p._version for p in module.parameters() if not p.is_inference()]


def _runnable(module: nn.Module) -> Run:
    try:
        return copy_with_data(module)
    except Exception as error:  # whatever a module's attributes raise when they are copied
        log.debug("a module that cannot be copied runs itself: %s", error)
        return partial(run_itself, module)


def _inferred(run: Run, call: Call, device: torch.device) -> Inferred:
    specs = call.arguments.tensors
    leaves = [spec.zeros(device).requires_grad_(spec.requires_grad) for spec in specs]
    with TypesChecked() if device.type == "meta" else nullcontext():
        tensors, structure = _given(run, call, leaves, device)
    spec = ValueSpec(tuple(map(TensorSpec.of, tensors)), structure)
    return Inferred(spec, _reached(tensors, leaves))


def _given(
    run: Run, call: Call, leaves: Sequence[Tensor], device: torch.device
) -> tuple[list[Tensor], Structure]:
    with device, torch.enable_grad():
        # A module may change its input in place, which a leaf that requires grad would refuse.
        args, kwargs = call.arguments.fill([t * 1 if t.requires_grad else t for t in leaves])
        return flatten(run(*args, **kwargs, **call.aside))


def _reached(outputs: Sequence[Tensor], leaves: Sequence[Tensor]) -> list[list[int] | None]:
    edges = {i: get_gradient_edge(t) for i, t in enumerate(leaves) if t.requires_grad}
    return [sorted(surely_reached(edges, [t])) if t.requires_grad else None for t in outputs]


def surely_reached(
    edges: Mapping[Key, GradientEdge], outputs: Sequence[Tensor], losses: Sequence[Tensor] = ()
) -> set[Key]:
    """For which tensors a gradient comes back, whatever is made of some others.

    Args:
        edges: where the gradients of the tensors arrive.
        outputs: of which a loss uses one at least, one does not know which.
        losses: which are added to it.

    Returns:
        The keys of ``edges``.
    """
    below = [_below(output) for output in outputs if output.requires_grad]
    sure = set.intersection(*below) if below else set()
    sure.update(*(_below(loss) for loss in losses if loss.requires_grad))
    return {key for key, edge in edges.items() if (edge.node, edge.output_nr) in sure}


def _is_own(node: Any) -> bool:
    return str(node._forward_cls.__module__).startswith("penstock.")


def _below(output: Tensor) -> set[tuple[Node, int]]:
    """Where a gradient of a tensor comes by."""
    edge = get_gradient_edge(output)
    todo = [(edge.node, edge.output_nr)]
    seen = set(todo)
    while todo:
        node, _ = todo.pop()
        if isinstance(node, BackwardCFunction) and not _is_own(node):
            # A function of the user's, or a reentrant checkpoint, may give back None.
            continue
        following = {(to, place) for to, place in node.next_functions if to is not None} - seen
        seen |= following
        todo += following
    return seen


def autocast_types() -> list[str]:
    """The types that autocast casts to now, on this machine's devices; empty without autocast."""
    accelerator = torch.accelerator.current_accelerator()
    kinds = ["cpu"] if accelerator is None else ["cpu", accelerator.type]
    return [
        f"{kind}:{torch.get_autocast_dtype(kind)}"
        for kind in kinds
        if torch.is_autocast_enabled(kind)
    ]


def spec_of_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> ValueSpec:
    """The spec of a call's arguments.

    Raises:
        SpecError: one holds something that cannot be described; the message names the argument.
    """
    try:
        return ValueSpec.of((args, kwargs))
    except SpecError:
        for at, value in enumerate(args):
            _check_argument(at, value)
        for name, value in kwargs.items():
            _check_argument(name, value)
        raise


def _check_argument(name: int | str, value: Any) -> None:
    try:
        flatten(value)
    except SpecError as error:
        raise SpecError(f"argument {name!r}: {error}") from None
