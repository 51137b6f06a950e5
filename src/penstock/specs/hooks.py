"""Forward hooks of a module that is only tried out: what they change counts, what they note does not."""

from __future__ import annotations

import copy
import dis
import types
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

_KINDS = ("_forward_hooks", "_forward_pre_hooks")
_CONTAINERS = (dict, list, set, deque)
Memo = dict[int, Any]


def isolate_hooks(module: nn.Module, memo: Memo) -> None:
    """Part the hooks of a module from what they share with the world.

    A function that can change neither arguments nor outputs is taken out: it only notes something, and
    would note it twice. Others are replaced by copies that work on copies of what they refer to. Objects and
    methods are left: they are copied with the module.

    Args:
        module: a copy of the user's, or his own whose hooks are put back later.
        memo: what was copied already, as for ``copy.deepcopy``.
    """
    for hooks in [vars(part)[kind] for part in module.modules() for kind in _KINDS]:
        own = {key: _isolated(hook, memo) for key, hook in hooks.items()}
        hooks.clear()
        hooks.update((key, hook) for key, hook in own.items() if hook is not None)


def _isolated(hook: Any, memo: Memo) -> Callable[..., Any] | None:
    if isinstance(hook, partial):
        inner = _isolated(hook.func, memo)
        return None if inner is None else partial(inner, *hook.args, **hook.keywords)
    if isinstance(hook, types.BuiltinFunctionType):
        return None
    if not isinstance(hook, types.FunctionType):
        return hook  # type: ignore[no-any-return] # whatever a user registers
    return _function(hook, memo) if _may_change(hook.__code__) else None


def _may_change(code: types.CodeType) -> bool:
    """Whether a function returns something, or calls what by its name works in place."""
    if any(name.endswith("_") and not name.endswith("__") for name in code.co_names):
        return True
    before = None
    for step in dis.get_instructions(code):
        if step.opname == "STORE_SUBSCR" or (
            step.opname == "RETURN_CONST" and step.argval is not None
        ):
            return True
        if step.opname == "RETURN_VALUE" and not _loads_none(before):
            return True
        before = step
    return False


def _loads_none(step: dis.Instruction | None) -> bool:
    return step is not None and step.opname == "LOAD_CONST" and step.argval is None


def _function(function: types.FunctionType, memo: Memo) -> Callable[..., Any] | None:
    """The same code over copies of its closure and of the containers that it names."""
    named = {name: function.__globals__.get(name) for name in function.__code__.co_names}
    try:
        shared = {n: copy.deepcopy(v, memo) for n, v in named.items() if isinstance(v, _CONTAINERS)}
        cells = tuple(_cell(cell, memo) for cell in function.__closure__ or ())
    except Exception:  # whatever cannot be copied: rather not called than twice
        return None
    made = types.FunctionType(
        function.__code__,
        function.__globals__ | shared,
        function.__name__,
        function.__defaults__,
        cells,
    )
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def _cell(cell: types.CellType, memo: Memo) -> types.CellType:
    return types.CellType(copy.deepcopy(cell.cell_contents, memo))
