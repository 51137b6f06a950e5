"""Forward hooks of a module that is only tried out: what they change counts, what they note does not."""

from __future__ import annotations

import copy
import dis
import sys
import types
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

_KINDS = ("_forward_hooks", "_forward_pre_hooks")
_LIBRARIES = {*sys.stdlib_module_names, "numpy", "penstock", "torch"} - {"__main__"}
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
    if not _may_change(hook.__code__):
        return None
    try:
        return _function(hook, memo)
    except Exception:  # whatever cannot be copied: rather not called than twice
        return None


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


def _function(function: types.FunctionType, memo: Memo) -> Callable[..., Any]:
    """The same code over copies of its closure and of what it names, also in functions that it calls."""
    if id(function) in memo:
        return memo[id(function)]  # type: ignore[no-any-return]
    names = dict(function.__globals__)
    cells = tuple(types.CellType() for _ in function.__closure__ or ())
    made = types.FunctionType(
        function.__code__, names, function.__name__, function.__defaults__, cells
    )
    made.__kwdefaults__ = function.__kwdefaults__
    memo[id(function)] = made  # before what it names, which may name it again
    for name in _named(function.__code__) & set(names):
        names[name] = _own(names[name], memo)
    for cell, theirs in zip(cells, function.__closure__ or (), strict=True):
        cell.cell_contents = _own(theirs.cell_contents, memo)
    return made


def _named(code: types.CodeType) -> set[str]:
    inside = [const for const in code.co_consts if isinstance(const, types.CodeType)]
    return set(code.co_names).union(*map(_named, inside))


def _own(value: Any, memo: Memo) -> Any:
    """A copy of what a call could change; modules, classes and the functions of libraries stay."""
    if isinstance(value, types.FunctionType) and not _is_of_library(value):
        return _function(value, memo)
    return value if isinstance(value, types.ModuleType | type) else copy.deepcopy(value, memo)


def _is_of_library(function: types.FunctionType) -> bool:
    return function.__module__.partition(".")[0] in _LIBRARIES
