"""Stand-ins for weights that lie on other ranks, in a process of several.

A stand-in is absent in, absent out: work on it gives stand-ins, so that copies and averages of weights run as
they are written. Whatever would make a number, bytes or a file of one, or mixes it with values that are
present, is an error that says where the weight lies and which call does this for the whole model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeGuard, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from penstock._engine.devices import kinds, numbered
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

_NUMBERS = frozenset(
    ("item", "tolist", "numpy", "__array__", "__bool__", "__float__", "__int__", "__index__", "__complex__",
     "__contains__", "equal", "allclose", "is_nonzero", "backward", "grad", "norm", "new")
)  # fmt: skip
"""Functions that make a number of a tensor, or a gradient of one."""
_BYTES = frozenset(
    ("data_ptr", "storage", "untyped_storage", "_typed_storage", "__dlpack__", "share_memory_")
)
"""Functions that reach for a tensor's memory."""
_MOVES = frozenset(("to", "type", *kinds()))
_NEW = frozenset(("new_tensor", "new_zeros", "new_ones", "new_empty", "new_full"))
"""Methods that make a tensor of which only the type and the device are those of the given one."""
_OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")
_CHANGES = frozenset((*(f"__i{name}__" for name in _OPERATORS), "__setitem__"))
"""Operators that change a tensor in place."""
_ITSELF = frozenset(
    ("requires_grad_", "detach_", "t_", "squeeze_", "unsqueeze_", "transpose_", "swapaxes_", "resize_",
     "register_hook", "register_post_accumulate_grad_hook", "retain_grad", "size", "stride", "dim", "numel",
     "nelement", "ndimension", "is_contiguous", "is_floating_point", "is_complex", "is_signed",
     "element_size", "storage_offset", "is_inference", "is_same_size", "__len__", "__format__")
)  # fmt: skip
"""Methods that concern a tensor itself, not its numbers, and are carried out."""


class Norms(Protocol):
    """What finds the norms of gradients that lie elsewhere."""

    def __call__(self, order: float, present: int, absent: Sequence[str]) -> Tensor | None:
        """The norms of all gradients of the model; None if the given ones are not all of them.

        Args:
            order: as for :func:`torch.linalg.vector_norm`.
            present: the number of gradients whose norms are known here.
            absent: the names of the weights whose gradients lie elsewhere.
        """


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
        """After a step: weights elsewhere that learn have stand-ins as gradients."""
        global _stepping
        self.count, _stepping = self.count + 1, False

    def drop_gradients(self) -> None:
        """Drop the gradients of all weights elsewhere."""
        self.cleared = self.count


class Whereabouts(NamedTuple):
    """Where a weight lies.

    Attributes:
        name: its name in the unsplit model.
        rank: the rank that has it.
        device: the device of this process's stages, where it would be.
    """

    name: str
    rank: int
    device: torch.device


class Elsewhere(Tensor):
    """A stand-in, on the meta device, for a weight that lies on another rank, or for what was made of one.

    Its shape, type and ``requires_grad`` are those of the weight. ``device`` says where the weight would be
    if it were here, as code that asks a model for its device expects.
    """

    place: Whereabouts
    norms: Norms | None
    _steps: Steps | None
    _cleared: int
    _gradient: Elsewhere | None
    _is_gradient: bool
    _order: float | None

    @staticmethod
    def of(tensor: Tensor, place: Whereabouts, *, parameter: bool = False) -> Elsewhere:
        """A stand-in for a tensor.

        Args:
            tensor: what it stands for; only shape, type and ``requires_grad`` count.
            place: where the tensor lies.
            parameter: whether it counts as an ``nn.Parameter``.
        """
        with torch._C.DisableTorchFunctionSubclass():
            bare = tensor.detach()
            bare = (bare if bare.is_meta else torch.empty_like(bare, device="meta")).as_subclass(
                Tensor
            )
            learns = parameter and tensor.requires_grad
            new = Tensor._make_subclass(Elsewhere, bare, learns)
        new.place = place
        new.norms = new._gradient = new._order = new._steps = None
        new._is_gradient, new._cleared = False, 0
        new._is_param = parameter  # isinstance(..., nn.Parameter) reads it
        return new

    def refusal(self, what: str, remedy: str) -> UsageError:
        """The error for something that needs the weight itself."""
        return UsageError(
            f"{what} needs {self.place.name!r}, which lies on rank {self.place.rank}, not in this process; "
            f"{remedy}"
        )

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The device of this process's stages."""
        return self.place.device

    @property
    def grad(self) -> Tensor | None:
        """The stand-in for the gradient, after a step; optimizers do not see it."""
        steps = self._steps
        if _stepping or steps is None or steps.count in (self._cleared, steps.cleared):
            return None
        if self._gradient is None:
            with torch._C.DisableTorchFunctionSubclass():
                if not self.requires_grad:
                    return None
                self._gradient = Elsewhere.of(self.detach(), self.place)
            self._gradient._is_gradient, self._gradient.norms = True, steps.norms
        return self._gradient

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if value is not None and not isinstance(value, Elsewhere):
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
        where = self.place
        return f"Elsewhere({where.name!r}, rank {where.rank}, {list(self.shape)}, {self.dtype})"

    def __hash__(self) -> int:
        # As that of the tensor that it was, so that dictionaries of parameters find it.
        return id(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Elsewhere:
        # What calls this keeps the copy in ``memo``.
        return Elsewhere.of(self, self.place, parameter=isinstance(self, nn.Parameter))

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise self.refusal("saving or copying this", _FILES)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Describe stand-ins, make new ones of them, or refuse."""
        kwargs = dict(kwargs or {})
        name: str = getattr(func, "__name__", str(func))
        if name in _ITSELF:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if name == "__get__":
            with torch._C.DisableTorchFunctionSubclass():
                value = func(*args, **kwargs)
            return _stand_in(args[0], value) if isinstance(value, Tensor) else value
        tensors = tensors_in((args, kwargs))
        absent = [tensor for tensor in tensors if isinstance(tensor, Elsewhere)]
        if name in _NUMBERS or name in _BYTES:
            raise absent[0].refusal(f"{name}()", _remedy(name, absent[0]))
        if name == "__set__":
            return _set(func, args)
        if "_foreach_" in name:
            return _one_by_one(func, name, args, kwargs)
        if name in _CHANGES or (name.endswith("_") and not name.endswith("__")):
            return _changed(name, args, tensors)
        if name in _MOVES and isinstance(args[0], Elsewhere):
            return _moved(func, name, args, kwargs)
        if name in _NEW:
            kwargs.setdefault("device", absent[0].place.device)
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if name == "stack" and absent[0]._order is not None:
            return _all_norms(args[0], absent)
        return _ran(func, *_on_meta(name, args, kwargs, tensors))


def is_elsewhere(tensor: Any) -> TypeGuard[Elsewhere]:
    """Whether a tensor stands for one that lies on another rank."""
    return isinstance(tensor, Elsewhere)


# ---- what a function of stand-ins gives


def _remedy(name: str, absent: Elsewhere) -> str:
    if name in _BYTES:
        return _FILES
    if name == "new":  # LBFGS makes a vector of all weights by it
        return "use an optimizer that takes one weight at a time, or all ranks in one process"
    return _NORMS if absent._is_gradient or name == "norm" else _WEIGHTS


def _ran(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """The result of a function on the meta device, with stand-ins for its tensors."""
    absent = next(one for one in tensors_in((args, kwargs)) if isinstance(one, Elsewhere))
    # Functions of torch that are written in Python read the device, so they get plain tensors.
    args, kwargs = map_tensors((args, kwargs), _bare)
    with torch._C.DisableTorchFunctionSubclass():
        output = func(*args, **kwargs)
    name = getattr(func, "__name__", "?")
    order = _order_of(name, args, kwargs) if absent._is_gradient else None

    def put(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if not value.dim() and absent.dim() and order is None and not name.endswith("_like"):
            raise absent.refusal(f"{name}()", _remedy(name, absent))
        new = _stand_in(absent, value)
        new._order = order
        return new

    return type(output)(map(put, output)) if type(output) in (list, tuple) else put(output)


def _stand_in(absent: Elsewhere, value: Tensor) -> Elsewhere:
    """The stand-in for what was made of another one."""
    new = value if isinstance(value, Elsewhere) else Elsewhere.of(value, absent.place)
    new._is_gradient, new.norms = absent._is_gradient, absent.norms
    return new


def _order_of(name: str, args: Any, kwargs: Mapping[str, Any]) -> float | None:
    """The order of a norm that :func:`torch.nn.utils.clip_grad_norm_` takes of one gradient."""
    if name not in ("linalg_vector_norm", "_foreach_norm") or kwargs.keys() & {"dim", "keepdim"}:
        return None
    order = args[1] if len(args) > 1 else kwargs.get("ord", 2.0)
    return float(order) if len(args) < 3 else None


def _on_meta(
    name: str, args: Any, kwargs: dict[str, Any], tensors: Sequence[Tensor]
) -> tuple[Any, dict[str, Any]]:
    """The arguments on the meta device: numbers beside tensors that are absent do no harm.

    Raises:
        UsageError: values that are present would be mixed with others that are not.
    """
    absent = [tensor for tensor in tensors if isinstance(tensor, Elsewhere)]
    present = [tensor for tensor in tensors if not isinstance(tensor, Elsewhere)]
    if "device" in kwargs:
        kwargs["device"] = "meta"
    if not present:
        return args, kwargs
    if any(tensor.dim() for tensor in present) or not any(_dims(tensor) for tensor in absent):
        raise absent[0].refusal(f"{name}() of values that are present here", _INPUTS)
    bare = {id(tensor): tensor.detach().to("meta") for tensor in present}
    args, kwargs = map_tensors((args, kwargs), lambda tensor: bare.get(id(tensor), tensor))
    return args, kwargs


def _bare(value: Tensor) -> Tensor:
    if not isinstance(value, Elsewhere):
        return value
    with torch._C.DisableTorchFunctionSubclass():
        return value.detach().as_subclass(Tensor)


def _dims(tensor: Tensor) -> int:
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.dim()


def _set(func: Any, args: Any) -> None:
    """Set an attribute of a tensor, such as ``data``."""
    tensor, *values = args
    if not isinstance(tensor, Elsewhere):
        raise values[0].refusal("setting an attribute", _WEIGHTS)
    # The data of another rank's weight changes there.
    if not isinstance(values[0], Tensor) or isinstance(values[0], Elsewhere):
        with torch._C.DisableTorchFunctionSubclass():
            func(tensor, *values)
        if isinstance(values[0], Elsewhere):
            tensor.place = tensor.place._replace(device=values[0].place.device)


def _changed(name: str, args: Any, tensors: Sequence[Tensor]) -> Any:
    """A stand-in stays what it is if it is changed in place: its rank does the same."""
    first = args[0] if args else tensors[0]
    if not isinstance(first, Elsewhere):
        absent = next(tensor for tensor in tensors if isinstance(tensor, Elsewhere))
        raise absent.refusal(f"{name}() of a tensor that is present here", _INPUTS)
    return None if name == "__setitem__" else first


def _moved(func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
    """A stand-in of another type, or on another device."""
    tensor, *rest = args
    device, dtype = None, None
    if name in kinds():
        index = rest[0] if rest else kwargs.get("device")
        device = (
            torch.device(name, index) if isinstance(index, int) else torch.device(index or name)
        )
    elif name == "to" and rest and isinstance(rest[0], Tensor):
        device, dtype = rest[0].device, rest[0].dtype
    elif name == "to":
        device, dtype, *_ = torch._C._nn._parse_to(
            *rest, **{key: value for key, value in kwargs.items() if key != "copy"}
        )
    elif name == "type":
        if not rest and not kwargs:
            return _ran(func, args, kwargs)
        dtype = rest[0] if rest and isinstance(rest[0], torch.dtype) else None
    device = tensor.place.device if device is None else numbered(device)
    with torch._C.DisableTorchFunctionSubclass():
        unchanged = dtype in (None, tensor.dtype) and device == tensor.place.device
        if unchanged and not kwargs.get("copy"):
            return tensor
        bare = tensor.detach().to(dtype=dtype or tensor.dtype)
    new = _stand_in(tensor, Elsewhere.of(bare, tensor.place._replace(device=device)))
    new._order = tensor._order
    return new


def _one_by_one(func: Any, name: str, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """A function of lists: those places whose tensor is absent apart from the others."""
    first = args[0]
    lists = [at for at, value in enumerate(args) if isinstance(value, list | tuple)]
    lists = [at for at in lists if len(args[at]) == len(first)]
    absent = [place for place, tensor in enumerate(first) if isinstance(tensor, Elsewhere)]
    there = [place for place in range(len(first)) if place not in {*absent}]

    def picked(places: Sequence[int]) -> list[Any]:
        return [
            [value[place] for place in places] if at in lists else value
            for at, value in enumerate(args)
        ]

    results: dict[int, Any] = {}
    if there:
        here = picked(there)
        mixed = [one for one in tensors_in(here) if isinstance(one, Elsewhere)]
        if mixed:
            raise mixed[0].refusal(f"{name}() of values that are present here", _INPUTS)
        results |= zip(there, func(*here, **kwargs) or [None] * len(there), strict=True)
    if name.endswith("_"):
        return None if None in results.values() or not results else first
    for place in absent:
        mine = picked([place])
        output = _ran(func, *_on_meta(name, mine, dict(kwargs), tensors_in(mine)))
        results[place] = output[0]
    return type(first)(results[place] for place in range(len(first)))


def _all_norms(norms_here: Sequence[Tensor], absent: Sequence[Elsewhere]) -> Tensor:
    """The norms of all gradients of the model, of which some lie elsewhere."""
    first, present = absent[0], [one for one in norms_here if not isinstance(one, Elsewhere)]
    orders = {one._order for one in absent}
    norms = None
    if first.norms is not None and len(orders) == 1 and None not in orders:
        norms = first.norms(
            cast("float", first._order), len(present), [a.place.name for a in absent]
        )
    if norms is None:
        raise first.refusal("the norm of some of the model's gradients", _NORMS)
    like = present[0] if present else None
    device, dtype = (first.place.device, first.dtype) if like is None else (like.device, like.dtype)
    # In float16 the norm of a large gradient would be infinite.
    return norms.to(device, torch.promote_types(dtype, torch.float32))


# ---- weights that become stand-ins, and their gradients

_hooked = False
_stepping = False
"""Whether an optimizer steps, which sees no gradient of a weight elsewhere."""
_stepped = WeakKeyDictionary[Optimizer, None]()
"""The optimizers of weights here and elsewhere that have stepped, in the order of their first steps."""


def put_elsewhere(tensor: Tensor, place: Whereabouts) -> Tensor:
    """Free a tensor's data and leave a stand-in: the same object if possible, so that lists keep it."""
    _hook_optimizers()
    new = Elsewhere.of(tensor, place, parameter=isinstance(tensor, nn.Parameter))
    try:
        tensor.__class__, new.__class__ = Elsewhere, type(tensor)  # type: ignore[assignment]
    except TypeError:
        return new  # a DTensor has slots
    marks = {key: value for key, value in vars(tensor).items() if key not in vars(new)}
    tensor.__dict__, new.__dict__ = vars(new) | marks, vars(tensor)
    # torch.utils.swap_tensors refuses tensors with weak references, or that a graph has saved. Here both may
    # keep what they have: the object, and the data. Of torch 2.13.
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
    kept = [w for w in state if isinstance(w, Elsewhere) and _keeps_values(state[w])]
    weights = (weight for group in optimizer.param_groups for weight in group["params"])
    if kept and not all(weight in state for weight in weights if weight.requires_grad):
        name, rank, _ = kept[0].place
        raise StateDictError(
            f"this optimizer was given the state of another one: it keeps values for {name!r}, which rank "
            f"{rank} has. An optimizer's own state_dict() holds the part of its rank alone; save and load "
            "with penstock.Checkpoints, or with pipe.weights.optimizer_state_dict(optimizer, full=True) and "
            "pipe.weights.load_optimizer_state_dict()"
        )
    # It was made, or given the states of all weights, when all of them were here: each rank keeps its own.
    for weight in kept:
        del state[weight]
    _stepping = True


def _keeps_values(state: Mapping[str, Any]) -> bool:
    """Whether an optimizer's state of a weight holds more than numbers and stand-ins."""
    kept = [one for one in state.values() if isinstance(one, Tensor) and one.dim()]
    return any(not isinstance(one, Elsewhere) for one in kept)


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
        if any(isinstance(weight, Elsewhere) for weight in weights):
            _stepped[optimizer] = None


def optimizers_of(absent: Iterable[Elsewhere]) -> list[Optimizer]:
    """The optimizers that have stepped with some of these stand-ins among their weights."""
    ids = {id(weight) for weight in absent}
    return [
        optimizer
        for optimizer in _stepped
        if any(id(p) in ids for group in optimizer.param_groups for p in group["params"])
    ]
