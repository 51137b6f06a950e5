"""Find out what a stage returns without running it on data: for given sizes, and then for any sizes.

A model that is called with ever new sequence lengths would have to be tried for each of them. Here that is
done for the first two. For the third, it runs on tensors without data whose sizes are symbols, and every
question that its code asks about a size is recorded. The answers are the conditions, and the sizes of the
output are expressions in the symbols. Later lengths that meet the conditions take the same way through the
code, so that only the expressions need to be evaluated.
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
from penstock.values.value import STRIDED, TensorSpec, ValueSpec, layout_of, version_of

# ---- results for some sizes, and rules for others


T = TypeVar("T")
log = logging.getLogger("penstock")

_BEFORE = 2
"""How many sizes are tried one by one. (A batch and a smaller last batch make two.)"""

_RULES = 4
"""How many ways through the code are followed with symbols; sizes that take others are tried each time."""


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
            NotGeneral: it is not strided.
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
        """Everything but the sizes."""
        return len(self.shape), self.dtype, self.device, self.requires_grad


class Found(NamedTuple):
    """The result of a function.

    Args:
        leaves: the forms of its tensors, numbers that may depend on sizes, and other values.
        rest: what does not depend on sizes.
    """

    leaves: tuple[Any, ...]
    rest: Any = None


class NotGeneral(Exception):
    """The result of a function cannot be told for symbolic sizes."""


class Unknowns(Protocol):
    """The sizes of some tensors as symbols."""

    def within(self, mode: FakeTensorMode) -> AbstractContextManager[list[Tensor]]:
        """A context in which a mode works with symbols; it gives the tensors, none of which requires grad."""


class _Rule(Protocol):
    def at(self, given: Sequence[Form]) -> Found | None:
        """The function's result for tensors that meet the conditions; None for others."""


class Family(Generic[T]):
    """The results of a function for calls that differ only in the sizes of their tensors.

    Args:
        same: whether two results are equal.
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
        """The function's result for a call.

        Args:
            given: the tensors of the call.
            look: finds the result for these sizes.
            follow: finds the result for symbolic sizes; it raises if that is not possible.
            build: makes a result for these sizes from what ``follow`` found.
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
                raise NotGeneral(
                    "its conditions do not hold for the sizes that they were found with"
                )
            for sizes, seen in self._seen.items():
                found = rule.at(sizes)
                if found is not None and not self._same(build(found), seen):
                    raise NotGeneral("it gives something else for sizes that were tried before")
        except Exception as error:  # whatever a model's code raises if it needs more than sizes
            log.debug("the output of a module is found for each size anew: %s", error)
            self._tried = _RULES
        else:
            self._rules.append(rule)


# ---- try a module


Run = Callable[..., Any]
Key = TypeVar("Key")


class Inferred(NamedTuple):
    """What is known of a module's output.

    Args:
        output: its spec.
        reached: for each tensor of the output, the tensors among the arguments that its gradient certainly
            flows to; ``None`` if it requires no gradient.
    """

    output: ValueSpec
    reached: list[list[int] | None]


def new_family() -> Family[Inferred]:
    """A new family for the outputs of a module."""
    return Family(lambda one, other: _told(one) == _told(other))


def _told(found: Inferred) -> tuple[str, list[list[int] | None]]:
    # The digest includes the order of dimensions in memory, which specs do not compare.
    return found.output.digest(), found.reached


class Call(NamedTuple):
    """What a module is tried with: the spec of ``(args, kwargs)``, and more keyword arguments as they are."""

    arguments: ValueSpec
    aside: Mapping[str, Any]


def infer_output(module: nn.Module, arguments: ValueSpec, device: torch.device) -> ValueSpec:
    """The spec of a module's output, see :func:`infer`."""
    return infer(module, arguments, device).output


def infer(
    module: nn.Module,
    arguments: ValueSpec,
    device: torch.device,
    aside: Mapping[str, Any] | None = None,
    family: Family[Inferred] | None = None,
) -> Inferred:
    """Find the output of ``module`` for arguments of a spec.

    If the module's code allows it, a copy without data runs on the meta device, which computes nothing.
    Otherwise, a copy that shares its parameters runs on zeros. If the module cannot be copied, it runs
    itself, and what it does to its attributes is undone. Parameters, buffers, gradients, attributes and
    random numbers stay as they were. Forward hooks that may change something run as copies, and others do
    not run.

    Args:
        module: a stage.
        arguments: the spec of ``(args, kwargs)``.
        device: where the stage lives.
        aside: more keyword arguments, as they are.
        family: its outputs for other sizes, as long as nothing else has changed.

    Raises:
        Exception: whatever the module raises when it runs on zeros.
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
    """The result of a function that gives tensors.

    Raises:
        NotGeneral: a tensor is not plain and strided.
    """
    if any(layout_of(tensor) != STRIDED for tensor in tensors):
        raise NotGeneral("it gives tensors that are not plain and strided")
    return Found(tuple(map(Form.of, tensors)), rest)


def spec_of_forms(forms: Sequence[Form], structure: Structure) -> ValueSpec:
    """The spec of a value from the forms of its tensors."""
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
        except Exception as error:  # whatever code raises that needs data
            log.debug("found no shapes without data: %s", error)
        # With other data it may take another way, so no gradient is certain.
        output, reached = _infer_for_real(module, call, device)
        return Inferred(output, [[] for _ in reached])


def _shards_itself(module: nn.Module) -> bool:
    """Whether hooks gather and free its parameters, as FSDP2's do, which know the module and not a copy."""
    return any(
        kind.__name__ == "FSDPModule" for part in module.modules() for kind in type(part).__mro__
    )


def _free(module: nn.Module) -> None:
    """Free the parameters that it has gathered, since the outermost part keeps them for a backward."""
    for part in module.modules():
        if hasattr(part, "reshard"):
            part.reshard()  # type: ignore[operator]


def _without_data(module: nn.Module) -> nn.Module | None:
    if autocast_types():
        # Autocast does nothing on the meta device.
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
    return [version_of(parameter) for parameter in module.parameters()]


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
        # A module may change its inputs in place, which a leaf that requires grad does not allow.
        args, kwargs = call.arguments.fill([t * 1 if t.requires_grad else t for t in leaves])
        return flatten(run(*args, **kwargs, **call.aside))


def _reached(outputs: Sequence[Tensor], leaves: Sequence[Tensor]) -> list[list[int] | None]:
    edges = {i: get_gradient_edge(t) for i, t in enumerate(leaves) if t.requires_grad}
    return [sorted(surely_reached(edges, [t])) if t.requires_grad else None for t in outputs]


def surely_reached(
    edges: Mapping[Key, GradientEdge], outputs: Sequence[Tensor], losses: Sequence[Tensor] = ()
) -> set[Key]:
    """The tensors for which a gradient certainly comes back.

    Args:
        edges: where the gradients of the tensors arrive.
        outputs: the loss uses at least one of these; it is not known which.
        losses: these are added to the loss.

    Returns:
        Keys of ``edges``.
    """
    below = [_below(output) for output in outputs if output.requires_grad]
    sure = set.intersection(*below) if below else set()
    sure.update(*(_below(loss) for loss in losses if loss.requires_grad))
    return {key for key, edge in edges.items() if (edge.node, edge.output_nr) in sure}


def _is_own(node: Any) -> bool:
    return str(node._forward_cls.__module__).startswith("penstock.")


def _below(output: Tensor) -> set[tuple[Node, int]]:
    """The edges that the gradient of a tensor certainly passes."""
    edge = get_gradient_edge(output)
    todo = [(edge.node, edge.output_nr)]
    seen = set(todo)
    while todo:
        node, _ = todo.pop()
        if isinstance(node, BackwardCFunction) and not _is_own(node):
            # A user's function, or a reentrant checkpoint, may return None as a gradient.
            continue
        following = {(to, place) for to, place in node.next_functions if to is not None} - seen
        seen |= following
        todo += following
    return seen


def autocast_types() -> list[str]:
    """The types that autocast currently casts to, on this machine's devices; empty without autocast."""
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
