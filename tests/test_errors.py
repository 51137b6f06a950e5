"""The tree of errors is the one that its page draws."""

from __future__ import annotations

import builtins
import re

from penstock import errors

CLASSES = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, errors.PenstockError)
}


def test_each_error_stands_where_it_is_drawn_and_says_whose_fault_it_is() -> None:
    drawn = dict(re.findall(r"── (\w+)(?: \((\w+)\))?", errors.__doc__ or ""))
    assert {*drawn, "PenstockError"} == set(CLASSES)
    for name, built_in in drawn.items():
        above = getattr(builtins, built_in) if built_in else errors.UsageError
        assert issubclass(CLASSES[name], above), name
    assert [name for name, kind in CLASSES.items() if not (kind.__doc__ or "").strip()] == []
