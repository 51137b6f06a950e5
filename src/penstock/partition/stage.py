"""A model that was cut: its score, and the stages that play it."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from penstock._engine.rng import Draws
from penstock.errors import PartitionError, UsageError
from penstock.partition.forward import rehearse, write
from penstock.partition.interception import Seeded
from penstock.partition.planning import CallPlan, Homes, lines_of, plan_of
from penstock.partition.playing import Live, Player, Values
from penstock.partition.score import Note, Score
from penstock.partition.templates import BATCH, fill
from penstock.partition.tree import ScoreTree
from penstock.stage import StageCall, StageModule

_NOTHING = CallPlan()
"""The plan of a model in one stage, whose forward runs as it is."""


class CutModel:
    """A model that was cut: everything that is known of its calls.

    Args:
        tree: the lines of its forward, with its units.
        homes: the stages of each unit by path, and of each weight by name.
        stages: the number of stages.
        recomputes: the paths of the units to recompute.

    Attributes:
        loose: the tensors between units that stages hold: path, table, name, and the table of the stage.
        shares: the part of the work that each stage has in the first call; empty before it.
        heaviest: the unit with the most work in that call, and its part of the work.

    Raises:
        PartitionError: a module that is in several stages was compiled as a whole.
    """

    def __init__(
        self, tree: ScoreTree, homes: Homes, stages: int, recomputes: Collection[str]
    ) -> None:
        self.tree, self.model, self.forward = tree, tree.model, tree.forward
        self.homes, self.stages, self.recomputes = homes, stages, frozenset(recomputes)
        self.interceptors = tree.interceptors
        self.outside = [module for _, module in tree.outside]
        self.shares: Sequence[float] = ()
        self.heaviest = ("", 0.0)
        self._held: dict[str, tuple[Any, str, Tensor | None]] = {}
        self._form = _form_of(self.model)
        self.loose: list[Any] = []
        if stages > 1:
            check_not_compiled(self.model, self.outside)

    # ---- a call

    def scores(
        self, calls: Sequence[tuple[Sequence[Any], Mapping[str, Any], Draws | None]]
    ) -> list[Score | None]:
        """Write the scores of microbatches; None where the model's forward runs as it is, in one stage."""
        if self.stages == 1 and not self.recomputes:
            return [None] * len(calls)
        self.tree.refresh()
        scores: list[Score | None] = [*write(self.tree, calls, self.tree.hooked())]
        for path, table, name, mine in self.loose:
            if table.get(name) is not mine[name]:
                # A buffer between units that the author's code has set.
                mine[name] = table[name]
                self.hold(path, table, name)
        return scores

    def plan(self, score: Score | None) -> CallPlan:
        """The plan of a score.

        Raises:
            PartitionError: the model cannot be cut this way; the message names the module and the line.
        """
        if score is None:
            return _NOTHING
        plan = plan_of(score, self.homes, self.stages, self.tree)
        if not self.shares:
            self.shares, self.heaviest = plan.work, plan.heaviest
        return plan

    def flops(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> float:
        """The floating-point operations of the whole model's forward; see :meth:`StageModule.flops`."""
        with torch.no_grad():
            return sum(line.flops for line in lines_of(rehearse(self.tree, (args, kwargs))))

    def rehearsed(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> CallPlan:
        """The plan of a call whose tensors may have no data; the model's code leaves no trace."""
        if self.stages == 1:
            return _NOTHING
        return self.plan(rehearse(self.tree, (args, kwargs), self.tree.hooked()))

    # ---- edits of the model

    def hold(self, path: str, table: Any, name: str) -> None:
        """Note the tensor that stages have for a parameter or buffer between the units."""
        self._held[path] = table, name, table[name]

    def check_unchanged(self) -> None:
        """See :meth:`Partition.check_unchanged`."""
        edited = [
            f"{path}.{name}" if path else name
            for path, table, before in self._form
            if (now := _names_in(table)) != before
            for name in {**before, **now}
            if before.get(name) is not now.get(name)
        ]
        edited += [p for p, (table, name, t) in self._held.items() if table.get(name) is not t]
        if edited:
            raise UsageError(
                f"{edited[0]!r} was replaced, added or taken away in the model after the Pipeline was made, "
                "and its stages have what was there before; change a tensor in place, as by copy_(), or make "
                "a new Pipeline"
            )


class CutStage(StageModule):
    """One stage of a model.

    Args:
        cut: the model that was cut.
        index: the index of the stage.
    """

    def __init__(self, cut: CutModel, index: int) -> None:
        super().__init__()
        # No submodule: its parameters are not this stage's.
        self._cut = cut
        self.index = index
        self.training = cut.model.training
        self._loose = _fill(self, cut, index)
        cut.loose += self._loose
        self._player = Player(cut.tree, cut.homes, index, cut.recomputes)

    def scores(
        self, calls: Sequence[tuple[Sequence[Any], Mapping[str, Any], Draws | None]]
    ) -> list[Score | None]:
        """Write the scores of microbatches; see :meth:`StageModule.scores`."""
        if self._loose:
            self._follow()
        return self._cut.scores(calls)

    def settings(self) -> str:
        """A hash of what scores depend on here; see :meth:`StageModule.settings`."""
        return "" if self._cut.stages == 1 else self._cut.tree.settings()

    def plan(self, score: Score | None) -> CallPlan:
        """The plan of a score; see :meth:`StageModule.plan`."""
        return self._cut.plan(score)

    def flops(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> float:
        """The floating-point operations of the whole model's forward; see :meth:`StageModule.flops`."""
        return self._cut.flops(args, kwargs)

    @property
    def units(self) -> list[nn.Module]:
        """The modules that run as a whole in this stage."""
        mine = set(self.modules())
        return [
            interceptor.module
            for interceptor in self._cut.interceptors
            if interceptor.module in mine
        ]

    @property
    def initialisers(self) -> dict[str, Callable[[nn.Module], Any]]:
        """The ``_init_weights`` of the models around the units, by their paths."""
        inside = {
            id(part)
            for interceptor in self._cut.interceptors
            for part in interceptor.module.modules()
        }
        return {
            path: _shell(module)._init_weights
            for path, module in self._cut.model.named_modules()
            if id(module) not in inside and callable(getattr(module, "_init_weights", None))
        }

    @property
    def around(self) -> list[nn.Module]:
        """The author's modules outside of the units, which all stages call."""
        return self._cut.outside

    def train(self, mode: bool = True) -> CutStage:
        """Set the mode here and on the author's modules around the units."""
        super().train(mode)
        for module in self.around:
            module.training = mode
        return self

    def forward(
        self, call: StageCall, values: Mapping[str, Any], *args: Any, **kwargs: Any
    ) -> tuple[Any, dict[str, Any]]:
        """Play this stage's lines.

        Args:
            call: which score it has, and its plan.
            values: the values of other stages, by their edges.
            args: the tensors of the batch that learn.
            kwargs: "given" for tensors in place of those of :meth:`given`. For a model in one stage, these
                two are its arguments.

        Returns:
            The model's output in the last stage and None in others; and the values to send, by their edges.
        """
        if self._loose:
            self._follow()
        score, plan, stage, tree = call.score, call.plan, self.index, self._cut.tree
        if score is None:
            return self._whole(call, args, kwargs), {}
        if "given" in kwargs:
            given = self._given(score, plan)
            for (note, index), tensor in zip(given, kwargs["given"], strict=True):
                note.given[index] = tensor
        known = Values(tree, score.notes)
        for edge, number in plan.arrives[stage].items():
            known[number] = values[edge]
        for place, tensor in enumerate(args):
            known[BATCH, place] = tensor
        is_last = stage == self._cut.stages - 1
        if is_last and score.call is not None:
            return Live(self._player, tree, known, call).played(*score.call), {}
        sent = self._player.play(plan.mine[stage], known, call, plan.drops[stage])
        for number, edge in plan.sends[stage].items():
            if isinstance(number, str):
                # As the stage leaves it: nothing that comes before reads it elsewhere.
                tensor = tree.tensor_now(number)
                is_weight = isinstance(tensor, nn.Parameter)
                sent[edge] = tensor.view_as(tensor) if is_weight else tensor.clone()
        output = fill(plan.output, known, score.given) if is_last else None
        if is_last:
            score.given.clear()
        return output, sent

    def given(self, score: Score, plan: CallPlan) -> list[Tensor]:
        """The tensors that are given to this stage's lines; see :meth:`StageModule.given`."""
        return [note.given[index] for note, index in self._given(score, plan)]

    def kept(self, score: Score) -> Callable[[], None]:
        """Keep what playing a score uses up; see :meth:`StageModule.kept`."""
        lists = [(given, [*given]) for given in (*(n.given for n in score.notes), score.given)]

        def put_back() -> None:
            for given, before in lists:
                given[:] = before

        return put_back

    def _given(self, score: Score, plan: CallPlan) -> Iterator[tuple[Note, int]]:
        for place in plan.mine[self.index]:
            note = score.notes[place]
            for index, value in enumerate(note.given):
                if isinstance(value, Tensor):
                    yield note, index

    def _whole(self, call: StageCall, args: Any, kwargs: Any) -> Any:
        cut = self._cut
        if call.draws is None:
            return cut.forward(*args, **kwargs)
        seeded = Seeded(cut.interceptors, call.draws, {})
        return seeded.run(cut.forward, args, kwargs)

    def _follow(self) -> None:
        """Make the author's modules use the tensors held here, which may have been moved or wrapped."""
        for path, table, name, mine in self._loose:
            if mine[name] is None and table.get(name) is not None:
                mine[name] = table[name]  # a table that the author's code has made
            elif table.get(name) is not mine[name]:
                table[name] = mine[name]
                self._cut.hold(path, table, name)

    def release(self, put: Callable[[str, Tensor], Tensor]) -> None:
        """Replace each parameter and buffer by what ``put`` makes of it and its name."""
        for path, module in list(self.named_modules(remove_duplicate=False)):
            tables: list[Any] = [module._parameters, module._buffers]
            places = [(table, name, x) for table in tables for name, x in table.items()]
            for table, name, tensor in places:
                if tensor is not None:
                    table[name] = put(f"{path}.{name}" if path else name, tensor)
        self._follow()


def _shell(module: nn.Module) -> Any:
    """The module without its contents: a stage must not keep other stages' tensors alive."""
    shell = copy.copy(module)
    vars(shell).update(_parameters={}, _buffers={}, _modules={})
    return shell


def _fill(stage: nn.Module, cut: CutModel, index: int) -> list[Any]:
    """Put the stage's units, and its share of the tensors outside of them, under their paths."""
    units = {id(interceptor.module): interceptor.path for interceptor in cut.interceptors}
    loose: list[Any] = []
    inside: tuple[str, ...] = ()
    for path, module in cut.model.named_modules(remove_duplicate=False):
        if inside and path.startswith(inside):
            continue
        if id(module) in units:
            inside = (*inside, f"{path}.")
            if index in cut.homes[units[id(module)]]:
                holder, name = _holder(stage, path)
                holder._modules[name] = module
            continue
        prefix = f"{path}." if path else ""
        mine = [
            name
            for name, parameter in module._parameters.items()
            if parameter is not None and index in cut.homes.get(prefix + name, ())
        ]
        named = [("_parameters", name) for name in mine]
        for kind, name in [*named, *(("_buffers", name) for name in module._buffers)]:
            holder, _ = _holder(stage, prefix + name)
            table, held = getattr(module, kind), getattr(holder, kind)
            held[name] = table[name]
            cut.hold(prefix + name, table, name)
            loose.append((prefix + name, table, name, held))
            if name in module._non_persistent_buffers_set:
                holder._non_persistent_buffers_set.add(name)
        with contextlib.suppress(AttributeError):  # the stage has nothing of this module
            hooks = {name: vars(module)[name] for name in _STATE_HOOKS}
            vars(stage.get_submodule(path)).update(hooks)
    return loose


_STATE_HOOKS = ("_load_state_dict_pre_hooks", "_state_dict_hooks", "_state_dict_pre_hooks")
"""Hooks of a module on loading and saving. As of torch 2.13."""


def _holder(root: nn.Module, path: str) -> tuple[nn.Module, str]:
    """The module to hold what has this path, and the name there; makes missing modules on the way."""
    *way, name = path.split(".")
    holder = root
    for step in way:
        if step not in holder._modules:
            holder._modules[step] = nn.Module()
        inner = holder._modules[step]
        assert inner is not None
        holder = inner
    return holder, name


def check_not_compiled(model: nn.Module, outside: Sequence[nn.Module]) -> None:
    """Refuse modules outside of units that were compiled as a whole.

    Raises:
        PartitionError: the message names the first of them.
    """
    for module in outside:
        if module._compiled_call_impl or has_compiled_forward(module):
            paths = {id(part): path for path, part in model.named_modules()}
            raise PartitionError(
                f"{paths[id(module)] or 'the model'} (a {type(module).__name__}) was compiled as a "
                "whole, and its parts are placed by themselves; compile these instead, or place it as a "
                "whole by naming it in stages="
            )


def has_compiled_forward(module: nn.Module) -> bool:
    """Tell whether ``torch.compile`` was applied to a module's ``forward``."""
    return hasattr(vars(module).get("forward"), "_torchdynamo_orig_callable")


def _form_of(model: nn.Module) -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
    """The paths of modules, each with the tables of its parts and weights, and what is in them now."""
    return [
        (path, table, _names_in(table))
        for path, module in model.named_modules()
        if not isinstance(module, torch.jit.ScriptModule)
        for table in (module._modules, module._parameters)
    ]


def _names_in(table: dict[str, Any]) -> dict[str, Any]:
    """The names in a table, with the modules; a parameter may be another one, as where it was moved."""
    return {
        name: value if isinstance(value, nn.Module) else True
        for name, value in table.items()
        if value is not None
    }
