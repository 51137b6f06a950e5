"""A copy of a model without its data, in which the analysis runs: it leaves no trace in the model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor, FakeTensorMode

from penstock.errors import PartitionError
from penstock.partition.calls.tape import Loose
from penstock.values import Family, Found, autocast_types, isolate_hooks


def home_of(model: nn.Module) -> torch.device:
    """Where a model is; the CPU for one without data."""
    tensors = [*model.parameters(), *model.buffers()]
    devices = [t.device for t in tensors if t.device.type != "meta"]
    return devices[0] if devices else torch.device("cpu")


class Outline:
    """A model without data.

    Args:
        model: what to copy.
        units: the paths of its units; what stands elsewhere keeps its buffers, for code between the units
            may look into them.
    """

    def __init__(self, model: nn.Module, units: Sequence[str]) -> None:
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.device = home_of(model)
        self._original = model
        self._form = _form_of(model)
        self.model = self._copied(model, units)
        self._pairs = list(zip(model.modules(), self.model.modules(), strict=True))
        self._loose = self._find_loose(model, units)
        self._families: dict[Any, dict[Any, Family[Found | None]]] = {}
        # By name: what other processes hold is let go, see `CallStage.release`.
        self._named = [
            (module, name, mine._parameters[name])
            for module, mine in self._pairs
            for name, parameter in module._parameters.items()
            if parameter is not None
        ]

    def _copied(self, model: nn.Module, units: Sequence[str]) -> nn.Module:
        inside = {id(b) for path in units for b in model.get_submodule(path).buffers()}
        memo: dict[int, Any] = {}
        for parameter in model.parameters():
            memo[id(parameter)] = nn.Parameter(self._fake(parameter), parameter.requires_grad)
        for buffer in model.buffers():
            fake = id(buffer) in inside
            memo[id(buffer)] = self._fake(buffer) if fake else self._real(buffer)
        for module in model.modules():
            for kept in vars(module).values():
                if isinstance(kept, Tensor) and id(kept) not in memo:
                    memo[id(kept)] = self._real(kept)
        try:
            copied = copy.deepcopy(model, memo)
            isolate_hooks(copied, memo)
            return copied
        except Exception as error:
            raise PartitionError(
                f"the {type(model).__name__} cannot be copied without its data ({error}), but that is how "
                "the values between its stages are found; use how='traced'"
            ) from error

    def _find_loose(
        self, model: nn.Module, units: Sequence[str]
    ) -> list[tuple[Loose, nn.Module, nn.Module]]:
        """The modules that neither are in a unit nor hold one."""
        inside = {part for path in units for part in model.get_submodule(path).modules()}
        pairs = zip(model.named_modules(), self.model.modules(), strict=True)
        return [
            (Loose(path), module, mine)
            for (path, module), mine in pairs
            if inside.isdisjoint(module.modules())
        ]

    def _fake(self, tensor: Tensor) -> Tensor:
        with self.mode:
            return torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self.device
            )

    def _real(self, tensor: Tensor) -> Tensor:
        if tensor.is_meta:
            return torch.ones(tensor.shape, dtype=tensor.dtype, device=self.device)
        return tensor.detach().clone()

    def named_tensors(self) -> dict[Tensor, str]:
        """Parameters, and the buffers that have no data here, with their names."""
        named = [*self.model.named_parameters(), *self.model.named_buffers()]
        parameters = {id(p) for p in self.model.parameters()}
        return {t: name for name, t in named if id(t) in parameters or isinstance(t, FakeTensor)}

    # ---- the buffers that every stage has

    def real_buffers(self) -> dict[str, tuple[Tensor, int]]:
        """The buffers outside of the units, with how often they were written into."""
        named = self.model.named_buffers()
        return {n: (b, b._version) for n, b in named if not isinstance(b, FakeTensor)}

    def written(
        self, before: dict[str, tuple[Tensor, int]], is_value: Callable[[Tensor], bool]
    ) -> tuple[str, ...]:
        """Those of them that would not be after a call what they are after one of the unsplit model.

        What is made of the arguments alone each stage writes into its own; but of those that are saved there
        is one for all.

        Args:
            before: as they were before a call.
            is_value: tells of which it wrote into them what units gave.
        """
        after, saved = dict(self.model.named_buffers()), self.model.state_dict(keep_vars=True)
        return tuple(
            name
            for name, (buffer, version) in before.items()
            if is_value(buffer)
            or isinstance(after.get(name), FakeTensor)
            or (name in saved and buffer._version != version)
        )

    # ---- what the model may have become since

    def is_outdated(self) -> bool:
        """Whether the model has other modules or parameters by now, as where some were parametrised."""
        return self._form != _form_of(self._original)

    def modes(self) -> tuple[Any, ...]:
        """Which of the model's modules are in training, and which loose ones have hooks."""
        hooked = tuple(path for path, *_ in self._hooked())
        return tuple(module.training for module, _ in self._pairs), hooked

    def hooked(self, *, copies: bool = False) -> dict[nn.Module, str]:
        """The loose modules that have hooks by now, or hold some that have; or what stands for them here."""
        return {mine if copies else module: path for path, module, mine in self._hooked()}

    def _hooked(self) -> Iterator[tuple[Loose, nn.Module, nn.Module]]:
        return (one for one in self._loose if any(map(_has_hooks, one[1].modules())))

    def traits(self) -> tuple[Any, ...]:
        """What of the model's state values may depend on."""
        return self.modes(), tuple(
            module._parameters[name].requires_grad  # type: ignore[union-attr]
            for module, name, _ in self._named
        )

    def families(self, *, training: bool) -> dict[Any, Family[Found | None]]:
        """What the units have given so far, as long as nothing but the sizes of arguments differs."""
        key = (training, self.traits(), tuple(autocast_types()))
        return self._families.setdefault(key, {})

    def follow(self, *, training: bool) -> None:
        """Take over the model's state.

        Args:
            training: whether gradients are wanted; without them everything is in evaluation mode.
        """
        for module, mine in self._pairs:
            mine.training = module.training and training
        for module, name, parameter in self._named:
            assert parameter is not None
            parameter.requires_grad_(getattr(module, name).requires_grad)
        for buffer in self.model.buffers():
            # An earlier analysis may have written into it what depends on parameters.
            buffer.detach_()


def _has_hooks(module: nn.Module) -> bool:
    """Whether somebody else than this library has set hooks."""
    found = (
        *module._forward_pre_hooks.values(),
        *module._forward_hooks.values(),
        *module._backward_pre_hooks.values(),
        *module._backward_hooks.values(),
    )
    return any(not str(getattr(hook, "__module__", "")).startswith("penstock.") for hook in found)


def _form_of(model: nn.Module) -> list[tuple[int, tuple[str, ...]]]:
    return [
        (id(module), tuple(n for n, p in module._parameters.items() if p is not None))
        for module in model.modules()
    ]
