"""Placeholders for weights that lie on other ranks, in a process of several.

Work on placeholders gives placeholders, so that copies and averages of weights run as they are written.
Whatever would make a number, bytes or a file of one, or mixes it with values that are present, is an error
that says where the weight lies and which call does this for the whole model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from penstock._engine.devices import kinds
from penstock._engine.values import map_tensors, tensors_in
from penstock.errors import StateDictError, UsageError

_WEIGHTS = (
    "pipe.weights.state_dict(full=True) gives rank 0 the weights of the whole model; a term of the loss that "
    "is made of weights is for the modules that have them: penstock.add_loss"
)
_NORMS = (
    "pipe.clip_grad_norm_(...) and pipe.weights.grad_norm() measure the gradients of the whole model, and "
    "pipe.weights.grad_norms() those of each weight, by name"
)
_FILES = (
    "save the whole model with pipe.weights.save(folder), penstock.Checkpoints, or "
    "pipe.weights.state_dict(full=True)"
)
_INPUTS = (
    "in a pipeline only the stages that hold a weight compute with it: pipe.predict runs the whole model, "
    "a loss that needs a weight gets it if the model returns it with its output, and a copy or an average of "
    "weights is made when the model is cut, for which pipe.cut(...) comes before it"
)

_BYTES = ("data_ptr", "storage", "untyped_storage", "_typed_storage", "__dlpack__", "share_memory_")
_REFUSED = {
    **dict.fromkeys(_BYTES, _FILES),
    **dict.fromkeys(("backward", "grad"), _WEIGHTS),
    # LBFGS makes a vector of all weights by it.
    "new": "use an optimizer that takes one weight at a time, or all ranks in one process",
}
"""Functions that would run on the meta device, and what to do instead."""
_LIKE_IT = frozenset(
    ("to", "type", *kinds(), "new_tensor", "new_zeros", "new_ones", "new_empty", "new_full")
)
"""Methods whose result depends on the type and the device of the tensor."""
_OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")
_CHANGES = frozenset((*(f"__i{name}__" for name in _OPERATORS), "__setitem__"))
"""Operators that change a tensor in place."""
_ITSELF = frozenset(
    ("requires_grad_", "detach_", "t_", "squeeze_", "unsqueeze_", "transpose_", "swapaxes_", "resize_",
     "register_hook", "register_post_accumulate_grad_hook", "retain_grad", "size", "stride", "dim", "numel",
     "nelement", "ndimension", "is_floating_point", "is_complex", "element_size", "__len__")
)  # fmt: skip
"""Methods that concern a tensor object, not its numbers; they are carried out on it."""


Norms = Callable[[float, int, Sequence[str]], Tensor | None]
"""Finds the norms of all gradients of the model, given their order (as for ``torch.linalg.vector_norm``), how
many are known here, and the names of the weights whose gradients lie elsewhere; None if these are not all."""


class Steps:
    """The training steps of a pipeline, which leave gradients on all ranks.

    Args:
        norms: finds the norms of all gradients.

    Attributes:
        count: the number of steps that have left gradients.
        cleared: that number when all gradients were last dropped.
    """

    def __init__(self, norms: Norms) -> None:
        self.norms, self.count, self.cleared = norms, 0, 0

    def leave_gradients(self) -> None:
        """After a step: weights elsewhere that learn have placeholders as gradients."""
        global _stepping
        self.count, _stepping = self.count + 1, False

    def drop_gradients(self) -> None:
        """Drop the gradients of all weights elsewhere."""
        self.cleared = self.count


class Location(NamedTuple):
    """Where a weight lies.

    Attributes:
        name: its name in the unsplit model.
        rank: the rank that has it.
        device: the device of this process's stages, where it would be.
    """

    name: str
    rank: int
    device: torch.device


class Placeholder(Tensor):
    """A placeholder, on the meta device, for a weight that lies on another rank, or for what was made of one.

    Its shape, type and ``requires_grad`` are those of the weight. ``device`` says where the weight would be
    if it were here, as code that asks a model for its device expects.
    """

    location: Location
    norms: Norms | None  # of a gradient, and what is made of it
    _steps: Steps | None
    _cleared: int
    _gradient: Placeholder | None
    _order: float | None

    @staticmethod
    def of(tensor: Tensor, location: Location, *, parameter: bool = False) -> Placeholder:
        """A placeholder for a tensor.

        Args:
            tensor: what it stands for; only shape, type and ``requires_grad`` count.
            location: where the tensor lies.
            parameter: whether it counts as an ``nn.Parameter``.
        """
        with torch._C.DisableTorchFunctionSubclass():
            bare = tensor.detach()
            bare = (bare if bare.is_meta else torch.empty_like(bare, device="meta")).as_subclass(
                Tensor
            )
            learns = parameter and tensor.requires_grad
            new = Tensor._make_subclass(Placeholder, bare, learns)
        new.location = location
        new.norms = new._gradient = new._order = new._steps = None
        new._cleared = 0
        new._is_param = parameter  # isinstance(..., nn.Parameter) reads it
        return new

    def refusal(self, what: str, remedy: str) -> UsageError:
        """The error for something that needs the weight itself."""
        name, rank, _ = self.location
        return UsageError(
            f"{what} needs {name!r}, which lies on rank {rank}, not in this process; {remedy}"
        )

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The device of this process's stages."""
        return self.location.device

    @property
    def requires_grad(self) -> bool:
        """True if the weight learns; each step asks all weights, so not by ``__torch_function__``."""
        with torch._C.DisableTorchFunctionSubclass():
            return super().requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            self.requires_grad_(value)

    @property
    def grad(self) -> Tensor | None:
        """The placeholder for the gradient, after a step; optimizers do not see it."""
        steps = self._steps
        if _stepping or steps is None or steps.count in (self._cleared, steps.cleared):
            return None
        if self._gradient is None:
            with torch._C.DisableTorchFunctionSubclass():
                if not self.requires_grad:
                    return None
                self._gradient = Placeholder.of(self.detach(), self.location)
            self._gradient.norms = steps.norms
        return self._gradient

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if value is not None and not isinstance(value, Placeholder):
            raise self.refusal("setting .grad", "only the rank that has a weight sets its gradient")
        if value is not None or self._cleared < 0:
            self._gradient = value
        # That of a step is kept for the next.
        self._cleared = -1 if value is not None or self._steps is None else self._steps.count

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    def follow(self, steps: Steps) -> None:
        """Have a gradient after each of these steps."""
        self._steps, self._cleared, self._gradient = steps, steps.count, None

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        where = self.location
        return f"Placeholder({where.name!r}, rank {where.rank}, {list(self.shape)}, {self.dtype})"

    def __hash__(self) -> int:
        # As that of the tensor that it was, so that dictionaries of parameters find it.
        return id(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Placeholder:
        # What calls this keeps the copy in ``memo``.
        return Placeholder.of(self, self.location, parameter=isinstance(self, nn.Parameter))

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise self.refusal("saving or copying this", _FILES)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run a function on the meta device, where what needs numbers fails; it gives placeholders."""
        name: str = getattr(func, "__name__", str(func))
        kwargs = dict(kwargs or {})
        if name in _ITSELF or name == "__get__":
            with torch._C.DisableTorchFunctionSubclass():
                value = func(*args, **kwargs)
            return _like(args[0], value) if isinstance(value, Tensor) else value
        if name == "__set__":
            return _set(func, *args)
        tensors = tensors_in((args, kwargs))
        absent = [tensor for tensor in tensors if isinstance(tensor, Placeholder)]
        if name in _REFUSED:
            raise absent[0].refusal(f"{name}()", _REFUSED[name])
        if name in _LIKE_IT and isinstance(args[0], Placeholder):
            return _by_an_empty_one(func, args, kwargs)
        if "_foreach_" in name and name.endswith("_"):
            return _changed_here(func, name, args, kwargs)
        if name in _CHANGES or (name.endswith("_") and not name.endswith("__")):
            # A placeholder stays what it is: its rank changes the weight.
            first = args[0] if args else tensors[0]
            if not isinstance(first, Placeholder):
                raise absent[0].refusal(f"{name}() of a tensor that is present here", _INPUTS)
            return None if name == "__setitem__" else first
        if name == "stack" and absent[0]._order is not None:
            return _all_norms(args[0], absent)
        return _ran(func, name, args, kwargs, tensors)


def is_placeholder(tensor: Any) -> TypeGuard[Placeholder]:
    """Tell whether a tensor stands for one that lies on another rank."""
    return isinstance(tensor, Placeholder)


# ---- what a function of placeholders gives


def _ran(func: Any, name: str, args: Any, kwargs: dict[str, Any], tensors: Sequence[Tensor]) -> Any:
    """The result of a function on the meta device, with placeholders for its tensors.

    Raises:
        UsageError: it needs numbers, or mixes what is absent with values that are present.
    """
    absent = next(tensor for tensor in tensors if isinstance(tensor, Placeholder))
    remedy = _NORMS if absent.norms or name == "norm" else _WEIGHTS
    present = [tensor for tensor in tensors if not isinstance(tensor, Placeholder)]
    if "device" in kwargs:
        kwargs["device"] = "meta"
    # Functions of torch that are written in Python read the device, so they get plain tensors.
    args, kwargs = map_tensors((args, kwargs), lambda tensor: _bare(tensor).detach().to("meta"))
    # One number beside tensors does no harm.
    alone = all(not tensor.dim() for tensor in tensors_in((args, kwargs)))
    if present and (alone or any(tensor.dim() for tensor in present)):
        raise absent.refusal(f"{name}() of values that are present here", _INPUTS)
    try:
        output = func(*args, **kwargs)
    except (RuntimeError, TypeError, BufferError) as error:
        if "meta" not in str(error).lower():
            raise
        raise absent.refusal(f"{name}()", remedy) from error
    order = _order_of(name, args, kwargs) if absent.norms else None
    has_dims = absent.dim() > 0

    def put(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if not value.dim() and has_dims and order is None and not name.endswith("_like"):
            raise absent.refusal(f"{name}()", remedy)
        new = _like(absent, value)
        new._order = order
        return new

    if isinstance(output, list | tuple):
        return type(output)([put(one) for one in output])
    return put(output)


def _like(absent: Placeholder, value: Tensor) -> Placeholder:
    """The placeholder for what was made of another one."""
    new = value if isinstance(value, Placeholder) else Placeholder.of(value, absent.location)
    new.norms = absent.norms
    return new


def _bare(value: Tensor) -> Tensor:
    """A plain tensor without data in the place of a placeholder."""
    if not isinstance(value, Placeholder):
        return value
    with torch._C.DisableTorchFunctionSubclass():
        return value.detach().as_subclass(Tensor)


def _order_of(name: str, args: Any, kwargs: Mapping[str, Any]) -> float | None:
    """The order of a norm that :func:`torch.nn.utils.clip_grad_norm_` takes of one gradient."""
    if name not in ("linalg_vector_norm", "_foreach_norm") or kwargs.keys() & {"dim", "keepdim"}:
        return None
    order = args[1] if len(args) > 1 else kwargs.get("ord", 2.0)
    return float(order) if len(args) < 3 else None


def _set(func: Any, tensor: Tensor, value: Any) -> None:
    """Set an attribute of a tensor, such as ``data``."""
    if not isinstance(tensor, Placeholder):
        raise value.refusal("setting an attribute", _WEIGHTS)
    # The data of another rank's weight changes there.
    if not isinstance(value, Tensor) or isinstance(value, Placeholder):
        with torch._C.DisableTorchFunctionSubclass():
            func(tensor, value)
        if isinstance(value, Placeholder):
            tensor.location = tensor.location._replace(device=value.location.device)


def _by_an_empty_one(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """What depends on type and device alone: done with an empty tensor that has those of the weight."""

    def empty(tensor: Placeholder) -> Tensor:
        return torch.empty(0, dtype=_bare(tensor).dtype, device=tensor.location.device)

    tensor, *rest = args
    probe = empty(tensor)
    rest = [empty(one) if isinstance(one, Placeholder) else one for one in rest]
    done = func(probe, *rest, **kwargs)
    if func.__name__.startswith("new_") or not isinstance(done, Tensor):
        return done
    if done is probe:
        return tensor
    bare, location = _bare(tensor).to(done.dtype), tensor.location._replace(device=done.device)
    new = _like(tensor, Placeholder.of(bare, location))
    new._order = tensor._order
    return new


def _changed_here(func: Any, name: str, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Change lists of tensors in place where these are present: the others change on their ranks."""
    first = args[0]
    here = [place for place, tensor in enumerate(first) if not isinstance(tensor, Placeholder)]
    picked = [
        [value[place] for place in here]
        if isinstance(value, list | tuple) and len(value) == len(first)
        else value
        for value in args
    ]
    if mixed := [one for one in tensors_in(picked) if isinstance(one, Placeholder)]:
        raise mixed[0].refusal(f"{name}() of values that are present here", _INPUTS)
    if here:
        func(*picked, **kwargs)


def _all_norms(norms_here: Sequence[Tensor], absent: Sequence[Placeholder]) -> Tensor:
    """The norms of all gradients of the model, of which some lie elsewhere."""
    first, present = absent[0], [one for one in norms_here if not isinstance(one, Placeholder)]
    orders, norms = {one._order for one in absent}, None
    if first.norms is not None and first._order is not None and len(orders) == 1:
        norms = first.norms(first._order, len(present), [one.location.name for one in absent])
    if norms is None:
        raise first.refusal("the norm of some of the model's gradients", _NORMS)
    like: Tensor = present[0] if present else first
    # In float16 the norm of a large gradient would be infinite.
    return norms.to(like.device, torch.promote_types(like.dtype, torch.float32))


# ---- weights that become placeholders, and their gradients

_hooked = False
_stepping = False
"""Whether an optimizer steps, which sees no gradient of a weight elsewhere."""
_stepped = WeakKeyDictionary[Optimizer, None]()
"""The optimizers of weights here and elsewhere that have stepped, in the order of their first steps."""


def leave_placeholder(tensor: Tensor, location: Location) -> Tensor:
    """Free a tensor's data and leave a placeholder: the same object if possible, so that lists keep it."""
    _hook_optimizers()
    new = Placeholder.of(tensor, location, parameter=isinstance(tensor, nn.Parameter))
    try:
        tensor.__class__, new.__class__ = Placeholder, type(tensor)  # type: ignore[assignment]
    except TypeError:
        return new  # a DTensor has slots
    marks = {key: value for key, value in vars(tensor).items() if key not in vars(new)}
    tensor.__dict__, new.__dict__ = vars(new) | marks, vars(tensor)
    # torch.utils.swap_tensors refuses tensors with weak references, or that a graph has saved. Here both may
    # keep what they have: the object, and the data. Of torch 2.13:
    # https://github.com/pytorch/pytorch/blob/v2.13.0/torch/utils/__init__.py#L43
    torch._C._swap_tensor_impl(tensor, new)
    return tensor


def _hook_optimizers() -> None:
    global _hooked
    if not _hooked:
        register_optimizer_step_pre_hook(_hidden_in_step)
        register_optimizer_step_post_hook(_shown_after_step)
        _hooked = True


def _hide(optimizer: Optimizer) -> None:
    global _stepping
    state = optimizer.state
    absent = [weight for weight in state if isinstance(weight, Placeholder)]
    kept = [weight for weight in absent if _keeps_values(state[weight])]
    weights = (weight for group in optimizer.param_groups for weight in group["params"])
    if kept and not all(weight in state for weight in weights if weight.requires_grad):
        name, rank, _ = kept[0].location
        raise StateDictError(
            f"this optimizer was given the state of another one: it keeps values for {name!r}, which rank "
            f"{rank} has. An optimizer's own state_dict() holds the part of its rank alone; save and load "
            "with penstock.Checkpoints, or with pipe.weights.optimizer_state_dict(optimizer, full=True) and "
            "pipe.weights.load_optimizer_state_dict()"
        )
    # It was made, or given the states of all weights, when all of them were here: each rank keeps its own.
    for weight in absent:
        del state[weight]
    _stepping = True


def _keeps_values(state: Mapping[str, Any]) -> bool:
    """Tell whether an optimizer's state of a weight holds more than numbers and placeholders."""
    kept = [one for one in state.values() if isinstance(one, Tensor) and one.dim()]
    return any(not isinstance(one, Placeholder) for one in kept)


def _hidden_in_step(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
    """Before an optimizer's step: it sees no gradient of a weight elsewhere, and leaves it out."""
    closure = kwargs.get("closure") or next(iter(args[1:2]), None)
    _hide(optimizer)
    if not callable(closure):
        return None

    def then_hidden() -> Any:
        value = closure()
        _hide(optimizer)
        return value

    if "closure" in kwargs:
        return args, {**kwargs, "closure": then_hidden}
    return (args[0], then_hidden, *args[2:]), kwargs


def _shown_after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    global _stepping
    del args, kwargs
    _stepping = False
    if optimizer not in _stepped:
        weights = (weight for group in optimizer.param_groups for weight in group["params"])
        if any(isinstance(weight, Placeholder) for weight in weights):
            _stepped[optimizer] = None


def optimizers_of(absent: Iterable[Placeholder]) -> list[Optimizer]:
    """The optimizers that have stepped with some of these placeholders among their weights."""
    ids = {id(weight) for weight in absent}
    return [
        optimizer
        for optimizer in _stepped
        if any(id(p) in ids for group in optimizer.param_groups for p in group["params"])
    ]
