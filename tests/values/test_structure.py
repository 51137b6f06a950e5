"""Taking values apart and putting them together."""

from __future__ import annotations

import json
import sys
from collections import OrderedDict, defaultdict
from dataclasses import dataclass, fields, is_dataclass
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import SpecError
from penstock.values import flatten, unflatten
from penstock.values.structure import check, difference, paths
from tests.values.zoo import VALUES, A, Answer, B, C, Computed, Mode, Pair, State, computed


def through_json(structure: Any) -> Any:
    return json.loads(json.dumps(structure))


@pytest.mark.parametrize("name", sorted(VALUES))
def test_unflatten_undoes_flatten(name: str) -> None:
    tensors, structure = flatten(VALUES[name])
    found = unflatten(through_json(structure), tensors)
    assert same(found, VALUES[name]), found
    assert flatten(found)[1] == structure


@pytest.mark.parametrize("name", sorted(VALUES))
def test_structures_survive_json(name: str) -> None:
    tensors, structure = flatten(VALUES[name])
    assert through_json(structure) == structure
    check(through_json(structure), len(tensors))
    assert len(list(paths(structure))) == len(tensors)


def same(found: Any, expected: Any) -> bool:
    """Equal and of the same types, with the very same tensors."""
    if isinstance(expected, torch.Tensor):
        return found is expected
    if type(found) is not type(expected):
        return False
    if isinstance(expected, dict):
        return list(found) == list(expected) and all(same(found[k], expected[k]) for k in expected)
    if is_dataclass(expected):
        return all(
            same(getattr(found, f.name), getattr(expected, f.name)) for f in fields(expected)
        )
    if isinstance(expected, tuple | list):
        return len(found) == len(expected) and all(map(same, found, expected))
    return bool(found == expected)


PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
NESTED = st.recursive(
    PLAIN | st.sampled_from([A, B, C, Mode.FAST, torch.int8]),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.integers(), inner)
        | st.builds(State, inner, inner)
        | st.builds(Pair, inner, inner)
    ),
    max_leaves=12,
)


@given(NESTED)
def test_any_nested_value_comes_back(value: Any) -> None:
    tensors, structure = flatten(value)
    assert same(unflatten(through_json(structure), tensors), value)
    assert len(list(paths(structure))) == len(tensors)


def test_tensors_come_in_order() -> None:
    tensors, _ = flatten({"b": [B, C], "a": A, "s": State(C, B)})
    assert tensors == [B, C, A, C, B]


def test_paths_say_where_tensors_stand() -> None:
    _, structure = flatten(({"hidden": A, "mask": None}, [B], Pair(1, State(C)), slice(A)))
    assert list(paths(structure)) == ["[0]['hidden']", "[1][0]", "[2].second.hidden", "[3][1]"]


def test_the_path_of_a_bare_tensor() -> None:
    assert list(paths(flatten(A)[1])) == ["the tensor"]


def test_not_a_number_and_infinities_come_back() -> None:
    _, structure = flatten((float("nan"), -float("inf"), complex("nan"), -0.0))
    assert repr(unflatten(through_json(structure), ())) == "(nan, -inf, (nan+0j), -0.0)"


def test_a_default_dict_keeps_its_factory() -> None:
    tensors, structure = flatten(defaultdict(int, x=A))
    assert unflatten(structure, tensors)["new"] == 0


def test_a_dataclass_is_made_without_a_call() -> None:
    tensors, structure = flatten(computed())
    found = unflatten(structure, [B, C])
    assert (found.x, found.total, found.note) == (B, C, "times 3")
    assert "doubled" not in vars(found)
    assert len(tensors) == 2
    assert found.doubled.tolist() == [2.0, 2.0]


def test_a_field_that_was_never_set_stays_so() -> None:
    bare = object.__new__(Computed)
    bare.x = A
    tensors, structure = flatten(bare)
    assert vars(unflatten(structure, tensors)) == {"x": A}


def test_items_beside_the_fields_of_a_models_output() -> None:
    value = Answer(logits=A)
    value["extra"] = B
    found = unflatten(*reversed(flatten(value)))  # type: ignore[arg-type]
    assert list(found.items()) == [("logits", A), ("extra", B)]


# ---- refusals


@dataclass
class Letters(str):
    more: int = 0


def local() -> Any:
    @dataclass
    class Local:
        x: Any

    return Local(A)


def endless() -> list[Any]:
    found: list[Any] = []
    found.append(found)
    return found


class Mine(list[Any]):
    pass


REFUSED: dict[str, tuple[Any, str]] = {
    "a set": ({A}, "a value of type set cannot travel between ranks; a set has no order"),
    "deep inside": (
        [{"x": object()}],
        r"type object at \[0\]\['x'\] cannot travel between ranks; .*register_type",
    ),
    "in a field": (
        (1, Pair(A, {1: lambda: 0})),
        r"type function at \[1\]\.second\[1\] cannot travel between ranks;",
    ),
    "a subclass": (Mine([A]), "type Mine"),
    "a dataclass with content of its own": (Letters(1), "type Letters"),
    "a number of numpy": (
        {"n": np.float64(1)},
        r"float64 at \['n'\] cannot travel between ranks; .*as_tensor.*item",
    ),
    "a tensor as key": (
        {"x": {A: 1}},
        r"the key tensor.* at \['x'\] cannot travel between ranks; keys are",
    ),
    "an object as key": (
        {"x": {object(): 1}},
        r"the key <object.* at \['x'\] cannot travel between ranks",
    ),
    "a factory": (defaultdict(lambda: A), "a defaultdict of <function .* cannot travel"),
    "a class inside a function": (
        (A, local()),
        r"a Local at \[1\] cannot travel between ranks; other ranks cannot "
        "find the class .*local.*Local; define it at",
    ),
    "itself": (endless(), "a list contains itself"),
}


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_cannot_travel_is_named(name: str) -> None:
    value, says = REFUSED[name]
    with pytest.raises(SpecError, match=says):
        flatten(value)


def record(name: str) -> dict[str, Any]:
    return {"record": [name, [["x", {"int": 1}]]]}


def test_a_class_is_never_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, structure = flatten(State(A))
    monkeypatch.delitem(sys.modules, State.__module__)
    for use in (unflatten, lambda structure, _: check(structure, 1)):
        with pytest.raises(SpecError, match=r"knows no dataclass or named tuple .*zoo:State"):
            use(structure, tensors)
    assert State.__module__ not in sys.modules


FORGED = [
    "os:system",
    "subprocess:Popen",
    "builtins:exec",
    "collections:OrderedDict",
    "tests.values.test_structure:Mine",
    "tests.values.test_structure:VALUES",
    "tests.values.zoo:Outer.Missing",
    "antigravity:Joke",
    "tests.values.test_structure:State",
    "",
]


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_name_is_refused(name: str) -> None:
    with pytest.raises(SpecError, match="knows no dataclass"):
        unflatten(record(name), ())
    with pytest.raises(SpecError, match="knows no dataclass"):
        check(record(name), 0)
    with pytest.raises(SpecError, match="knows no enum"):
        unflatten({"enum": [name, "x"]}, ())


def test_a_module_that_makes_names_up_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    lazy = ModuleType("lazy")
    lazy.__getattr__ = asked.append  # type: ignore[method-assign]
    monkeypatch.setitem(sys.modules, "lazy", lazy)
    with pytest.raises(SpecError, match="knows no"):
        unflatten(record("lazy:Anything"), ())
    assert asked == []


def test_an_enum_has_only_its_members() -> None:
    with pytest.raises(SpecError, match=r"the enum .*Mode has no member 'mro'"):
        unflatten({"enum": ["tests.values.zoo:Mode", "mro"]}, ())


# ---- differences

DIFFERENCES: dict[str, tuple[Any, Any, str]] = {
    "a number": ({"n": 4}, {"n": 5}, r"^\['n'\]: expected 4, found 5$"),
    "its type": ({"n": 4}, {"n": 4.0}, r"^\['n'\]: expected 4, found 4\.0$"),
    "a bool": ((1,), (True,), r"^\[0\]: expected 1, found True$"),
    "None for a tensor": (State(A), State(A, B), r"^\.mask: expected None, found a tensor$"),
    "less": ([A, B], [A], r"^\[1\]: expected a tensor, found nothing there$"),
    "more": (A, {"x": A}, r"^the value: expected a tensor, found nothing there$"),
    "a container": ((A,), [A], "^expected the structure .*tuple.*, found .*list"),
    "an empty one": ({}, OrderedDict(), "^expected the structure"),
    "an enum": (Mode.FAST, Mode.SLOW, "^the value: expected <Mode.FAST: 'fast'>, found <Mode.SLOW"),
}


@pytest.mark.parametrize("name", sorted(DIFFERENCES))
def test_differences_are_told_by_place(name: str) -> None:
    expected, found, says = DIFFERENCES[name]
    with pytest.raises(AssertionError, match=says):
        raise AssertionError(difference(flatten(expected)[1], flatten(found)[1]))
    assert difference(flatten(found)[1], flatten(found)[1]) is None
