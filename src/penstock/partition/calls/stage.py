"""A stage that runs its own part of the author's forward."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from penstock.errors import PartitionError, UsageError
from penstock.partition.calls.cutting import Cutting
from penstock.partition.calls.recorder import depends_on_data
from penstock.partition.calls.routing import Homes
from penstock.partition.calls.runner import Left, Runner
from penstock.partition.calls.tape import replaced, tensors_in


class Holder(nn.Module):
    """Holds a stage's share of a module whose forward is run by several stages.

    It is in training mode whenever that module is.

    Args:
        module: the author's module.
    """

    def __init__(self, module: nn.Module) -> None:
        # Not as a submodule: its parameters are not this stage's.
        self.__dict__["_shared_module"] = module
        training = module.training
        super().__init__()
        module.training = training

    @property
    def training(self) -> bool:
        """The module's own flag."""
        return bool(self.__dict__["_shared_module"].training)

    @training.setter
    def training(self, mode: bool) -> None:
        self.__dict__["_shared_module"].training = mode

    @property
    def stands_for(self) -> nn.Module:
        """The author's module, which is what runs, draws random numbers and is initialised."""
        found: nn.Module = self.__dict__["_shared_module"]
        return found

    def hold_parameter(self, name: str) -> None:
        """Hold a parameter of the module."""
        self.take(name, self.__dict__["_shared_module"]._parameters[name])

    def take(self, name: str, parameter: nn.Parameter) -> None:
        """Hold a parameter; whatever the module has under this name later was put there by its user."""
        self._parameters[name] = parameter
        self.__dict__.setdefault("_taken", {})[name] = parameter

    def follow(self) -> None:
        """Take over the parameters that the user has put into the module since.

        Raises:
            UsageError: one that was there is gone.
        """
        shared = self.__dict__["_shared_module"]
        for name, taken in self.__dict__.get("_taken", {}).items():
            found = shared._parameters.get(name)
            if found is None:
                raise UsageError(
                    f"the parameter {name!r} of a {type(shared).__name__} was taken away or parametrised "
                    "after the Pipeline was made; make a new Pipeline"
                )
            if found is not taken:
                found.data = found.data.to(taken.device)
                self.take(name, found)

    def hold_buffers(self, *, copies: bool) -> None:
        """Hold the module's buffers, on request ``copies`` of those that are not saved.

        A buffer that is saved is one tensor, which the stages share.
        """
        shared = self.__dict__["_shared_module"]
        for name, buffer in shared._buffers.items():
            saved = name not in shared._non_persistent_buffers_set
            copied = copies and buffer is not None and not saved
            self.register_buffer(name, buffer.clone() if copied else buffer, saved)

    @contextlib.contextmanager
    def lent(self) -> Iterator[None]:
        """Let the module use the tensors held here, which may have been moved or replaced."""
        state = self.__dict__["_shared_module"].__dict__
        before = state["_parameters"], state["_buffers"]
        if self._parameters:
            state["_parameters"] = {**before[0], **self._parameters}
        if self._buffers:
            state["_buffers"] = self._buffers
        try:
            yield
        finally:
            state["_parameters"], state["_buffers"] = before


class CallStage(Holder):
    """One stage of a model that is cut by the calls of its modules.

    Args:
        cutting: the cut.
        index: which stage.
        homes: the stages of each unit by path, and of each parameter outside of them by name.
    """

    wired = True

    def __init__(self, cutting: Cutting, index: int, homes: Homes) -> None:
        super().__init__(cutting.model)
        self.index = index
        self.__dict__["_cutting"] = cutting
        inside = set(cutting.paths)
        _fill(self, cutting.model, "", _Share(inside, homes, index))
        self.__dict__["_lenders"] = [
            holder for holder in self.modules() if isinstance(holder, Holder)
        ]

    @property
    def traits(self) -> tuple[str, ...]:
        """The loose modules that are called as wholes because they have hooks."""
        cutting: Cutting = self.__dict__["_cutting"]
        return tuple(cutting.hooked().values())

    def follow(self) -> None:
        """Take over the parameters that the user has put into the model."""
        for holder in self.__dict__["_lenders"]:
            Holder.follow(holder)

    @contextlib.contextmanager
    def called_as(self, args: Any, kwargs: Any) -> Iterator[None]:
        """Look calls up by these arguments: what wraps the stage changes the types of those it gets."""
        self.__dict__["_called_as"] = args, kwargs
        try:
            yield
        finally:
            del self.__dict__["_called_as"]

    @property
    def pieces(self) -> list[nn.Module]:
        """The modules that run here as wholes: the parts of the stage that can be compiled."""
        units = self.__dict__["_cutting"].paths
        return [module for module in self.modules() if module in units]

    def forward(self, values: Mapping[str, Any], args: Any, kwargs: Any) -> Any:
        """Run the stage's part; return its values by name or, in the last stage, the model's output."""
        cutting: Cutting = self.__dict__["_cutting"]
        called_as = self.__dict__.get("_called_as")
        route = cutting.route(*(called_as or (args, kwargs)))
        part = route.parts[self.index]
        if part.end == -1:
            return {}
        device = self._device(args, kwargs)
        args, kwargs, absent = _present(args, kwargs, device)
        watched = cutting.paths | cutting.hooked()
        runner = Runner(route.tape, part, watched, values, device, casts=called_as is not None)
        output = None
        with contextlib.ExitStack() as stack:
            for holder in self.__dict__["_lenders"]:
                if holder._parameters or holder._buffers:
                    stack.enter_context(holder.lent())
            stack.enter_context(cutting.attributes.of(self.index))
            runner.enter(cutting.tensor)
            stack.enter_context(runner.watching(list(watched)))
            try:
                output = cutting.model(*args, **kwargs)
            except Left:
                pass
            except Exception as error:
                if absent and depends_on_data(error):
                    raise PartitionError(_absent(self.index, absent)) from error
                raise
        return runner.output(output) if part.end is None else runner.results()

    def release(self, kept: Collection[Tensor]) -> None:
        """Let go of the data that this stage alone holds, because it runs in another process.

        Args:
            kept: the tensors that the stages of this process hold.
        """
        keep = {id(tensor) for tensor in kept}
        made: dict[int, nn.Parameter] = {}
        for module in self.modules():
            _release_parameters(module, keep, made)
            if not isinstance(module, Holder):
                _release_buffers(module, keep)

    def _device(self, args: Any, kwargs: Any) -> torch.device:
        given = [t for t in tensors_in((args, kwargs)) if t.device.type != "meta"]
        first = next(self.parameters(), *given[:1]) if given else next(self.parameters(), None)
        return torch.device("cpu") if first is None else first.device


def _release_parameters(module: nn.Module, keep: set[int], made: dict[int, nn.Parameter]) -> None:
    for name, parameter in list(module._parameters.items()):
        if parameter is None or id(parameter) in keep:
            continue
        if id(parameter) not in made:
            # One for each parameter, so that tied weights stay tied.
            data = parameter.detach().to("meta")
            made[id(parameter)] = nn.Parameter(data, parameter.requires_grad)
        if isinstance(module, Holder):
            module.take(name, made[id(parameter)])
        for holder in (module, module.__dict__.get("_shared_module", module)):
            holder.register_parameter(name, made[id(parameter)])


def _release_buffers(module: nn.Module, keep: set[int]) -> None:
    for name, buffer in list(module._buffers.items()):
        if buffer is not None and id(buffer) not in keep:
            saved = name not in module._non_persistent_buffers_set
            module.register_buffer(name, buffer.to("meta"), saved)


class _Share:
    """Tells which units belong to a stage."""

    def __init__(self, units: set[nn.Module], homes: Homes, index: int) -> None:
        self.units, self.homes, self.index = units, homes, index
        self.at_home: dict[nn.Module, bool] = {}

    def has(self, unit: nn.Module, path: str) -> bool:
        """Whether the stage has a unit, which may be asked under any of its paths."""
        if path in self.homes:
            self.at_home[unit] = self.index in self.homes[path]
        return self.at_home[unit]


def _fill(holder: Holder, module: nn.Module, path: str, share: _Share) -> None:
    """Put the stage's share of a module into its holder, under the module's own names."""
    for name in module._parameters:
        full = f"{path}{name}"
        if module._parameters[name] is not None and share.index in share.homes[full]:
            holder.hold_parameter(name)
    holder.hold_buffers(copies=share.index > 0)
    for name, child in module._modules.items():
        if child is None:
            continue
        full = f"{path}{name}"
        if child in share.units:
            if share.has(child, full):
                holder.add_module(name, child)
        elif next(child.parameters(), None) is None and next(child.buffers(), None) is None:
            holder.add_module(name, child)
        else:
            made = Holder(child)
            _fill(made, child, f"{full}.", share)
            holder.add_module(name, made)


def _present(args: Any, kwargs: Any, device: torch.device) -> tuple[Any, Any, list[str]]:
    """The arguments, with fake tensors where this process was given none; and the names of these."""
    absent = [
        str(key)
        for key, value in (*enumerate(args), *kwargs.items())
        if any(t.is_meta for t in tensors_in(value))
    ]
    if not absent:
        return args, kwargs, absent
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def without_data(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.is_meta:
            return leaf
        with mode:
            return torch.empty(leaf.shape, dtype=leaf.dtype, device=device)

    args, kwargs = replaced((tuple(args), dict(kwargs)), without_data)
    return args, kwargs, absent


def _absent(stage: int, names: list[str]) -> str:
    return (
        f"stage {stage} uses the data of one of the arguments {', '.join(names)}, which this process was "
        "not given; pass them to every rank whose stages use them, or to all"
    )
