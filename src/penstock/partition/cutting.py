"""Cut a model into stages: by one call, which shows the order and the work of its modules, or by lists."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NamedTuple

from torch import nn

from penstock.errors import PartitionError, PenstockError, StageError, UsageError
from penstock.partition.alike import Memo
from penstock.partition.balance import Room, choose_cuts, use_up_to
from penstock.partition.base import Example, Partition, count_parameters, find_shared, named_tensors
from penstock.partition.forward import rehearse
from penstock.partition.interception import Interceptor
from penstock.partition.order import CallOrder
from penstock.partition.planning import deciding_early, first_uses, lines_of
from penstock.partition.score import Score
from penstock.partition.stage import (
    CutModel,
    CutStage,
    check_not_compiled,
    has_compiled_forward,
)
from penstock.partition.tree import ScoreTree
from penstock.partition.units import (
    at_points,
    find_units,
    has_forward,
    in_lists,
    is_sequential,
    loose_parameters,
    once,
    units_at_points,
)
from penstock.schedule import Placement

Where = int | Sequence[str] | Sequence[Sequence[str]]
"""The number of stages; or the module paths to cut before; or for each stage the paths of its modules."""
Homes = dict[str, list[int]]
"""Where a model is cut, as JSON data: the stages of each unit, and of each parameter outside of units."""
_BALANCES = ("flops", "parameters", "memory")
_MANY = 2**31
_ROUNDS = 4
"""How often units are taken apart for the sake of even stages, each time with another run without data."""


class Cutting:
    """How a model is to be cut.

    Args:
        model: any module; the stages hold its parameters, not copies of them.
        stages: as for :func:`partition`.
        example: arguments whose numbers the runs without data use.
        balance: as for :func:`partition`.
        placement: as for :func:`partition`.
        recompute: as for :func:`partition`.
        room: the memory of the stages.

    Raises:
        PartitionError: the model cannot be cut this way, whatever it is called with.
        UsageError: an argument is wrong.
    """

    def __init__(
        self,
        model: nn.Module,
        stages: Where,
        *,
        example: Example | None = None,
        balance: str | Sequence[float] | None = None,
        placement: Placement | None = None,
        recompute: bool | Sequence[str] = False,
        room: Room | None = None,
    ) -> None:
        self.model, self._stages = model, stages
        self._balance, self._placement, self._recompute = balance, placement, recompute
        self._room = room
        if not isinstance(stages, int) and (balance is not None or placement is not None):
            raise UsageError(
                "balance= and placement= say where to cut if the number of stages is given; stages= names "
                "the modules here: leave them out"
            )
        if isinstance(balance, str) and balance not in _BALANCES:
            raise UsageError(
                f"balance={balance!r}: must be {', '.join(_BALANCES)} or a weight for each module, or cut by "
                "times: profile.at(samples).cut(stages) of penstock.plan.measure"
            )
        if stages != 1:
            _check_compiled(model)
        if isinstance(stages, int) and stages != 1 and not has_forward(model):
            raise PartitionError(
                f"a {type(model).__name__} has no forward; name the modules of each stage in the order of "
                "their calls: stages=[[...], [...]]"
            )
        self._listed = self._units_in_lists()
        self.count = self._count()
        if not self._listed and isinstance(stages, int):
            most = len(find_units(model, _MANY))
            if not most or (is_sequential(model) and most < stages):
                raise self._too_few(most)
        self._forward: Callable[..., Any] = (
            model if has_forward(model) else _chain(model, [p for of in self._listed for p in of])
        )
        self._memo = Memo()
        self._draft: _Draft | None = None

    def _count(self) -> int:
        if isinstance(self._stages, int):
            return self._stages
        return len(self._listed) or len(self._stages) + 1

    def _units_in_lists(self) -> list[list[str]]:
        """The units of each stage, where they are known without a call; else nothing."""
        model, stages = self.model, self._stages
        if stages == 1:
            choose_cuts([1.0], 1, self._placement)  # for its checks
            return [find_units(model, 1)]
        if isinstance(stages, int):
            return self._children_of_sequential(stages) if is_sequential(model) else []
        if stages and all(isinstance(path, str) for path in stages):
            points = [str(path) for path in stages]
            units = units_at_points(model, points)
            return at_points(model, points, units) if is_sequential(model) else []
        return in_lists(model, [list(paths) for paths in stages])

    def _children_of_sequential(self, stages: int) -> list[list[str]]:
        """The children of each stage; nothing if only a call shows their work, or there are too few."""
        children, balance = list(self.model._modules), self._balance
        if stages > len(children) or balance in ("flops", "memory"):
            return []
        starts = [0] * stages
        if balance is None and self._placement is None:
            # Of several equally even cuts, the one whose first stages are the larger ones.
            size, rest = divmod(len(children), stages)
            starts = [index * size + min(index, rest) for index in range(stages)]
        else:
            weights = self._weights_of(children)
            starts = list(choose_cuts(weights or [1.0] * len(children), stages, self._placement))
        return [children[a:b] for a, b in pairwise([*starts, len(children)])]

    def _weights_of(self, paths: Sequence[str]) -> list[float]:
        """Return how heavy units are by ``balance=``, as far as it says so without a call."""
        balance = self._balance
        if balance == "parameters":
            return [float(count_parameters(self.model.get_submodule(path))) for path in paths]
        if not isinstance(balance, Sequence) or isinstance(balance, str):
            return []
        if len(balance) != len(paths):
            raise PartitionError(
                f"balance= has {len(balance)} weights for {len(paths)} modules: {', '.join(paths)}"
            )
        return [float(weight) for weight in balance]

    @property
    def needs_call(self) -> bool:
        """Whether only a call of the model shows where it is to be cut."""
        if not self._listed:
            return True
        paths = [path for of in self._listed for path in of]
        return (
            self.count > 1 and has_forward(self.model) and bool(loose_parameters(self.model, paths))
        )

    # ---- where to cut

    def decide(self, call: Example | None = None) -> Homes:
        """Return where the model is cut.

        Args:
            call: the arguments of the model for a microbatch, as ``(args, kwargs)``; only shapes, types and
                plain values count, as long as the model's code goes on with ones.

        Raises:
            PartitionError: the model cannot be cut, or only by a call, and there is none.
        """
        self._draft = None
        return self._with_borrowed(self._decided(call))

    def _decided(self, call: Example | None) -> Homes:
        if call is None:
            if self.needs_call:
                why = f"the {type(self.model).__name__} is cut in the order in which it calls its modules"
                if self._balance in ("flops", "memory"):
                    why = f"stages are balanced by {self._balance}"
                raise PartitionError(
                    f"{why}, which a call shows: give example=(args, kwargs), arguments for one microbatch"
                )
            return self._with_loose(self._homes_of(self._listed))
        if self._listed and (not isinstance(self._stages, int) or self.count == 1):
            homes = self._homes_of(self._listed)
            if self.needs_call:
                self._draft = self._write(list(homes), call)
            return self._with_loose(homes)
        if not isinstance(self._stages, int):
            return self._with_loose(self._at_points(call))
        return self._with_loose(self._by_work(call))

    def _with_borrowed(self, homes: Homes) -> Homes:
        """The stages, also of units whose weights others use without holding them: stages share these."""
        lines = lines_of(self._draft.score) if self._draft is not None else ()
        borrowing = [line for line in lines if line.borrowed and line.what in homes]
        if not borrowing:
            return homes
        modules = dict(self.model.named_modules(remove_duplicate=False))
        named = dict(named_tensors(self.model))
        lent: dict[int, set[int]] = {}
        for line in borrowing:
            for name in line.borrowed:
                lent.setdefault(id(named[name]), set()).update(homes[line.what])

        def shared(path: str, stages: Sequence[int]) -> list[int]:
            held = dict(named_tensors(modules[path])).values() if path in modules else [named[path]]
            others = set[int]().union(*(lent.get(id(tensor), ()) for tensor in held))
            return sorted([*stages, *(others - {*stages})])

        return {path: shared(path, stages) for path, stages in homes.items()}

    def _homes_of(self, placed: Sequence[Sequence[str]]) -> Homes:
        """The stages of each unit, of lists of units."""
        homes: Homes = {}
        every = [path for of in placed for path in of]
        first = {id(self.model.get_submodule(path)): path for path in reversed(every)}
        for stage, paths in enumerate(placed):
            for path in paths:
                homes.setdefault(first[id(self.model.get_submodule(path))], []).append(stage)
        return homes

    def _with_loose(self, homes: Homes) -> Homes:
        """The stages, also of each parameter that no unit holds: where it is used first."""
        loose = loose_parameters(self.model, list(homes))
        if not loose:
            return homes
        uses: Mapping[str, int] = {}
        if self._draft is not None:
            uses = first_uses(self._draft.score, _with_weights(self.model, homes))
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        known = {id(tensor): uses[n] for n, tensor in parameters.items() if n in uses}
        for name, near in loose.items():
            # One that nothing uses is with its neighbours.
            other = min((stage for path in near for stage in homes[path]), default=0)
            homes[name] = [known.setdefault(id(parameters[name]), other)]
        return homes

    def _write(self, units: Sequence[str], call: Example, *, counts: bool = False) -> _Draft:
        """The score of a call; with ``counts``, the work of modules inside units is counted."""
        tree = ScoreTree(self.model, self._forward, once(self.model, units), self._memo)
        outside = [module for _, module in tree.outside]
        hooked: list[Interceptor] = []
        if self.count > 1:
            check_not_compiled(self.model, outside)
            hooked = tree.hooked()
        placed = {id(module) for module in tree.units.values()}
        inner = [
            Interceptor(module, path)
            for path, module in self.model.named_modules()
            if counts
            and id(module) in tree.unit_of
            and id(module) not in placed
            and next(module.children(), None) is not None
        ]
        score = rehearse(tree, call, hooked, inner)
        work = dict(score.inner_work)
        for line in lines_of(score):
            if line.unit and line.what in tree.units:
                key = id(tree.units[line.what])
                work[key] = work.get(key, 0.0) + line.work
        return _Draft(tree, score, work)

    def _at_points(self, call: Example) -> Homes:
        points = [str(path) for path in self._stages]  # type: ignore[union-attr] # no number
        units = units_at_points(self.model, points)
        self._draft = self._write(units, call)
        order = CallOrder(self.model, units, lines_of(self._draft.score))
        paths = [item.path for item in order.once()]
        return self._homes_of(at_points(self.model, points, paths))

    def _by_work(self, call: Example) -> Homes:
        """The stages of equal work, of parts that are whole where numbers decide what they do."""
        order = self.order(call)
        homes = order.even(self.count, self._placement, self._room)
        if homes is None:
            raise self._too_few(len(order.again(self.count)))
        whole: set[str] = set()
        while deciding := self._deciding(homes, self.count) - whole:
            whole |= deciding
            draft = self._draft
            coarser = self.order(call, whole).even(self.count, self._placement, self._room)
            if coarser is None:
                # The refusal of these says more than that there are too few.
                self._draft = draft
                break
            homes = coarser
        return homes

    def calls(self, call: Example) -> list[str]:
        """The units in the order of their calls, as :func:`unit_calls` returns them."""
        whole: set[str] = set()
        while True:
            paths = [item.path for item in self.order(call, whole).items]
            deciding = (
                self._deciding(self._homes_of([[path] for path in paths]), len(paths)) - whole
            )
            if not deciding:
                return paths
            whole |= deciding

    def _deciding(self, homes: Homes, stages: int) -> set[str]:
        """The modules with units inside, whose code needs numbers that not all later stages have."""
        assert self._draft is not None
        early = deciding_early(lines_of(self._draft.score), homes, stages)
        return {_holder(line.module, homes) for line in early} - {""}

    def _too_few(self, most: int) -> PartitionError:
        return PartitionError(
            f"a {type(self.model).__name__} has {most} modules that can be placed, too few for "
            f"{self.count} stages; {use_up_to(most)}"
        )

    def order(self, call: Example, whole: Collection[str] = ()) -> CallOrder:
        """The units in the order of their calls, taken apart as far as even stages need it.

        Args:
            call: as for :meth:`decide`.
            whole: the paths of parts that stay whole.
        """
        model, whole = self.model, {*whole}
        units = find_units(model, self.count, whole=whole)
        draft: _Draft | None = None
        rounds = 0
        while draft is None or rounds < _ROUNDS:
            finer = units
            if draft is not None:
                finer = find_units(model, self.count, draft.work_of, units, whole)
                rounds += 1
                if finer == units:
                    break
            try:
                draft, units = self._write(finer, call, counts=True), finer
            except Exception as error:
                if draft is not None:
                    # What cannot be taken apart stays whole. On made-up numbers its code may raise anything.
                    whole |= {*units} - {*finer}
                    continue
                coarse = find_units(model, 1, whole=whole)
                if coarse == units or isinstance(error, PartitionError):
                    raise
                whole |= {*coarse} - {*units}
                units = coarse
        self._draft = draft
        order = CallOrder(model, units, lines_of(draft.score))
        self._weigh(order)
        return order

    def _weigh(self, order: CallOrder) -> None:
        """Let units be as heavy as ``balance=`` says."""
        items = order.once()
        weights = self._weights_of([item.path for item in items])
        if self._balance == "memory":
            weights = [item.held + item.activations for item in items]
        if weights:
            order.weigh({item.path: of for item, of in zip(items, weights, strict=True)})

    # ---- the stages

    def make(self, homes: Homes, call: Example | None = None) -> Partition:
        """The stages of a model that is cut at given places.

        Args:
            homes: what :meth:`decide` has given, here or on another rank.
            call: the arguments of the call that will come first, which is planned now.

        Raises:
            PartitionError: the model cannot be cut there.
        """
        draft, self._draft = self._draft, None
        model = self.model
        modules = dict(model.named_modules(remove_duplicate=False))
        units = once(model, [path for path in homes if path in modules])
        if draft is not None and {*draft.tree.units} != {*units}:
            draft = None
        if draft is None and call is not None and self.count > 1:
            draft = self._write(units, call)
        tree = ScoreTree(model, self._forward, units, self._memo) if draft is None else draft.tree
        recomputes = _recomputed(units, self._recompute)
        cut = CutModel(tree, _with_weights(model, homes), self.count, recomputes)
        stages = tuple(CutStage(cut, index) for index in range(self.count))
        result = Partition(stages, find_shared(model, stages), cut)
        result.check_covers(model)
        if draft is not None and self.count > 1:
            cut.plan(draft.score)
        return result


class _Draft(NamedTuple):
    """A score by which a model is cut.

    Attributes:
        tree: its lines.
        score: the score.
        work: the operations of each unit, and of the modules in it, by their identity.
    """

    tree: ScoreTree
    score: Score
    work: dict[int, float]

    def work_of(self, module: nn.Module) -> float:
        """The operations of a module."""
        return self.work.get(id(module), 0.0)


def _holder(path: str, units: Iterable[str]) -> str:
    """The innermost module around a path that has units inside; empty for the model itself."""
    while path and not any(unit.startswith(f"{path}.") for unit in units):
        path = path.rpartition(".")[0]
    return path


def partition(
    model: nn.Module,
    stages: Where,
    *,
    example: Example | None = None,
    balance: str | Sequence[float] | None = None,
    placement: Placement | None = None,
    recompute: bool | Sequence[str] = False,
) -> Partition:
    """Cut a model into stages that together compute what it computes.

    Each stage plays its own lines of the author's forward; see docs/how-cutting-works.md.

    Args:
        model: any module; the stages hold its parameters, not copies of them.
        stages: the number of stages; or the paths of the modules before which to cut; or for each stage the
            paths of its modules.
        example: arguments for one microbatch, as ``(args, kwargs)``, which show in which order the model
            calls its modules, and their work. Not needed for lists of paths that cover all parameters, nor
            for an ``nn.Sequential``.
        balance: what to make equal, if you give the number of stages: ``"flops"``, ``"parameters"`` or
            ``"memory"``; or a weight for each module that is placed, in the order of their calls. By default
            the work of the forward; in an ``nn.Sequential`` without example, the number of children.
        placement: which rank holds which stage, if you give the number: balances ranks instead of stages.
        recompute: recompute units in the backward instead of keeping their activations: all units, or
            those at or inside these paths.

    Raises:
        PartitionError: the model cannot be cut this way; the message says why, and what to do.
    """
    _check_example(example)
    cutting = Cutting(
        model, stages, example=example, balance=balance, placement=placement, recompute=recompute
    )
    with explained(model):
        return cutting.make(cutting.decide(example), example)


def _check_example(example: Any) -> None:
    # A named tuple is a batch.
    is_call = type(example) in (tuple, list) and len(example) == 2
    if example is None or (
        is_call and isinstance(example[0], list | tuple) and isinstance(example[1], Mapping)
    ):
        return
    by_name = isinstance(example, Mapping)
    raise UsageError(
        f"example= is a {type(example).__name__}, and must be (args, kwargs), a tuple of the model's "
        "arguments by position and a dict of those by name: "
        f"{'example=((), inputs) for inputs by name' if by_name else 'example=((x,), {}) for one argument'}"
    )


def unit_calls(model: nn.Module, stages: int, example: Example) -> list[str]:
    """The calls of the modules that are placed for a number of stages.

    Args:
        model: any module.
        stages: the number of stages: the model is taken apart only as far as it requires.
        example: arguments for one microbatch.

    Returns:
        The module's path for each call, in order, and once for a module that the example does not call. With
        ``[path]`` for each stage they are a ``stages=`` of :func:`partition`; so is a run of the different
        ones for each stage.
    """
    with explained(model):
        return Cutting(model, stages, example=example).calls(example)


def _with_weights(model: nn.Module, homes: Homes) -> Homes:
    """The stages of units and parameters, also by the names of all weights that units hold."""
    tensors: dict[int, set[int]] = {}
    modules = dict(model.named_modules(remove_duplicate=False))
    for path, stages in homes.items():
        for _, tensor in named_tensors(modules[path]) if path in modules else ():
            tensors.setdefault(id(tensor), set()).update(stages)
    named = ((name, id(tensor)) for name, tensor in named_tensors(model))
    return {**homes, **{name: sorted(tensors[key]) for name, key in named if key in tensors}}


@contextmanager
def explained(model: nn.Module) -> Iterator[None]:
    """A context in which errors of the model's code say that it was run with an example."""
    try:
        yield
    except PenstockError:
        raise
    except Exception as error:
        raise StageError(
            f"the {type(model).__name__} failed in the run that shows where to cut it, on tensors without "
            f"data where that is possible: {type(error).__name__}: {error}"
        ) from error


def _check_compiled(model: nn.Module) -> None:
    compiled = type(model).__name__ == "OptimizedModule" or model._compiled_call_impl
    if compiled or has_compiled_forward(model):
        name = type(getattr(model, "_orig_mod", model)).__name__
        raise PartitionError(
            f"the {name} was compiled as a whole, which cannot be cut. Give the model as it was before, and "
            "compile its blocks: for block in model.layers: block.compile()"
        )


def _recomputed(units: Sequence[str], recompute: bool | Sequence[str]) -> list[str]:
    if isinstance(recompute, bool):
        return list(units) if recompute else []
    if isinstance(recompute, str) or not isinstance(recompute, Sequence):
        raise PartitionError(
            f"recompute={recompute!r}: must be True, False, or a list of module paths, such as ['blocks.1']"
        )
    recomputes = []
    for path in recompute:
        inside = [u for u in units if u == path or u.startswith(f"{path}.")]
        if not inside:
            raise PartitionError(
                f"recompute={path!r}: must name a module that is placed as a whole, or one that holds such: "
                f"{', '.join(units[:5])}{' and more' if len(units) > 5 else ''}"
            )
        recomputes += inside
    return recomputes


def _chain(model: nn.Module, paths: Sequence[str]) -> Callable[..., Any]:
    """A forward that calls modules in a chain. It unpacks a tuple into the next one's arguments."""
    names = {path: _takes(model.get_submodule(path)) for path in paths}

    def forward(*args: Any, **kwargs: Any) -> Any:
        first, *rest = paths
        value = model.get_submodule(first)(
            *args, **{n: v for n, v in kwargs.items() if n in names[first]}
        )
        for path in rest:
            passed = value if type(value) is tuple else (value,)
            more = {name: kwargs[name] for name in names[path][len(passed) :] if name in kwargs}
            value = model.get_submodule(path)(*passed, **more)
        return value

    return forward


def _takes(module: nn.Module) -> tuple[str, ...]:
    """The names of a module's arguments."""
    parameters = inspect.signature(module.forward).parameters.values()
    return tuple(p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))
