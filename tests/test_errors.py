"""The tree of errors is the one that its page draws."""

from __future__ import annotations

import builtins
import re

import pytest

from penstock import errors

CLASSES = {
    name: found
    for name, found in vars(errors).items()
    if isinstance(found, type) and issubclass(found, errors.PenstockError)
}
DRAWN = dict(re.findall(r"── (\w+)(?: \((\w+)\))?", errors.__doc__ or ""))


def test_every_error_is_drawn() -> None:
    assert set(DRAWN) | {"PenstockError"} == set(CLASSES)


@pytest.mark.parametrize("name", sorted(name for name, built_in in DRAWN.items() if built_in))
def test_each_is_the_built_in_error_beside_it(name: str) -> None:
    assert issubclass(CLASSES[name], getattr(builtins, DRAWN[name]))


@pytest.mark.parametrize("name", sorted(name for name, built_in in DRAWN.items() if not built_in))
def test_the_others_hang_below_a_usage_error(name: str) -> None:
    assert issubclass(CLASSES[name], errors.UsageError)


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_each_says_whose_fault_it_is(name: str) -> None:
    assert (CLASSES[name].__doc__ or "").strip()
