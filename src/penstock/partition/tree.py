"""The lines of an author's forward, and the tensors that stand for its weights."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import PartitionError
from penstock.partition.alike import Memo, without_data
from penstock.partition.base import home_of
from penstock.partition.interception import Interceptor
from penstock.partition.names import Fakes
from penstock.partition.score import Line
from penstock.partition.templates import Look, look_of, text_of

_MOST_LINES = 50_000
"""How many lines a tree has at most; it then begins anew."""


class ScoreTree:
    """The lines of an author's forward.

    Args:
        model: the whole model.
        forward: its forward.
        units: the paths of the modules that are placed as a whole.
        memo: what units gave, so that those that are alike need not run.

    Attributes:
        ever_set: by unit, the modules in it and names of attributes that the author's code between units has
            set.
    """

    def __init__(
        self, model: nn.Module, forward: Callable[..., Any], units: Sequence[str], memo: Memo
    ) -> None:
        self.model, self.forward, self.memo = model, forward, memo
        self.units = {path: model.get_submodule(path) for path in units}
        self.interceptors = [Interceptor(module, path) for path, module in self.units.items()]
        self.mode = Fakes(allow_non_fake_inputs=True)
        self.metadata: set[Any] = set()
        self.by_numbers: set[Any] = set()
        self.borrowed = dict[str, frozenset[str]]()
        self.ever_set = dict[str, dict[tuple[int, str], nn.Module]]()
        self.roots: dict[Any, Line] = {}
        self.lines = 0
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
        self._places = {full: (table, name) for table, name, full in self._tables}
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
        # Objects that modules hold are the same in all calls.
        self.fixed = {
            id(value): value
            for module in self.modules
            for value in vars(module).values()
            if not isinstance(value, list | dict | Tensor | int | str | None)
        }

    def tensor_now(self, name: str) -> Tensor:
        """A tensor of the model as it is at this moment: whole, while a wrapper has gathered it."""
        table, key = self._places[name]
        tensor: Tensor = table[key]
        return tensor

    def start(self, settings: tuple[Any, ...], batch: Sequence[Tensor]) -> Line:
        """The root of the tree.

        Args:
            settings: those of the model's modules.
            batch: the tensors of the batch that learn.
        """
        state = (tuple(map(look_of, batch)), *settings)
        root = self.roots.get(state)
        if root is None:
            if self.lines > _MOST_LINES:
                self.roots.clear()
                self.lines = 0
            text = text_of(state[0])  # each rank's settings are its own
            digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
            root = self.roots[state] = Line(None, digest=digest)
        return root

    def settings_now(self) -> tuple[Any, ...]:
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
        now = self.settings_now()
        if now != self._hashed[0]:
            self._hashed = now, hashlib.blake2b(repr(now).encode(), digest_size=16).hexdigest()
        return self._hashed[1]

    def hooked(self) -> list[Interceptor]:
        """Interceptors of modules between units with hooks: each call is in one stage, like a unit's.

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
        interceptors: list[Interceptor] = []
        for path, module in self._between:
            within = interceptors and path.startswith(f"{interceptors[-1].path}.")
            if not within and any(map(_has_hooks, module.modules())):
                interceptors.append(Interceptor(module, path))
        return interceptors

    def forget(self) -> None:
        """Forget all lines: a unit has done something else than its line says."""
        self.memo.distrust()
        self.roots.clear()
        self.lines = 0

    def buffer_between(self, tensor: Tensor) -> str:
        """The name of a buffer of a module outside of units; empty if it is none."""
        named = ((p, n, b) for p, module in self.outside for n, b in module._buffers.items())
        return next((f"{p}.{n}" if p else n for p, n, b in named if b is tensor), "")

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

    def lent(self, path: str) -> frozenset[str]:
        """The weights that a unit was seen to use though it does not hold them."""
        return self.borrowed.get(path, frozenset())

    def stand_ins(self, path: str, module: nn.Module) -> Iterator[tuple[Any, str, Tensor]]:
        """Fake tensors in place of a unit's parameters and buffers, and of weights that it has borrowed.

        These may be placeholders now, on which no operation runs.
        """
        for name in self.lent(path):
            yield *self._places[name], self.twin(self.tensors[name])
        for part in module.modules():
            if isinstance(part, torch.jit.ScriptModule):
                continue
            for table in (part._parameters, part._buffers):
                for name, tensor in [(n, t) for n, t in table.items() if t is not None]:
                    yield table, name, self.twin(tensor)
            state = vars(part)
            for name in [n for n, x in state.items() if type(x) is Tensor and not x.is_sparse]:
                yield state, name, self.mode.from_tensor(state[name].detach())


def _has_hooks(module: nn.Module) -> bool:
    return bool(
        module._forward_pre_hooks
        or module._forward_hooks
        or module._backward_pre_hooks
        or module._backward_hooks
    )
