"""Specs of tensors and values."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from penstock.errors import SpecError
from penstock.values import TensorSpec, ValueSpec, flatten, spec_of_arguments

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.complex64]


def value() -> dict[str, Any]:
    return {"hidden": torch.zeros(2, 3, requires_grad=True), "mask": torch.ones(2).bool(), "n": 4}


def through_json(spec: ValueSpec) -> ValueSpec:
    return ValueSpec.from_json(json.loads(json.dumps(spec.to_json())))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_tensor_of_the_spec(dtype: torch.dtype) -> None:
    spec = TensorSpec.of(torch.zeros(2, 0, dtype=dtype))
    made = spec.empty("cpu")
    assert (made.dtype, made.shape, made.requires_grad) == (dtype, (2, 0), False)


def test_a_spec_reads_as_one_would_say_it() -> None:
    assert str(TensorSpec((2, 3), "bfloat16", True)) == "bfloat16[2, 3], requires grad"
    assert str(TensorSpec((), "int64", False)) == "int64[]"


def test_specs_travel_as_json() -> None:
    spec = ValueSpec.of(value())
    assert through_json(spec) == spec
    assert through_json(spec).digest() == spec.digest()


def test_only_some_tensors_are_differentiable() -> None:
    assert ValueSpec.of(value()).differentiable == (TensorSpec((2, 3), "float32", True),)


def test_fill_puts_tensors_into_the_structure() -> None:
    assert ValueSpec.of(value()).fill(["a", "b"]) == {"hidden": "a", "mask": "b", "n": 4}


BROKEN: dict[str, Any] = {
    "nothing": {},
    "no structure": {"tensors": []},
    "an unknown dtype": {
        "tensors": [{"shape": [1], "dtype": "float31", "requires_grad": False}],
        "structure": {"tensor": 0},
    },
    "a shape of words": {
        "tensors": [{"shape": ["wide"], "dtype": "float32", "requires_grad": False}],
        "structure": {"tensor": 0},
    },
    "no list": {"tensors": 3, "structure": {"tensor": 0}},
    "an unknown structure": {"tensors": [], "structure": {"set": []}},
    "a tensor that is not there": {"tensors": [], "structure": {"tensor": 0}},
    "a structure of two": {"tensors": [], "structure": {"tuple": [], "list": []}},
}


@pytest.mark.parametrize("name", sorted(BROKEN))
def test_other_data_is_no_spec(name: str) -> None:
    with pytest.raises(SpecError, match=r"not the spec of a value|there is no dtype 'float31'"):
        ValueSpec.from_json(BROKEN[name])


# ---- fits and difference


def changed(**parts: Any) -> dict[str, Any]:
    return value() | parts


OTHERS: dict[str, tuple[Any, str]] = {
    "shape": (
        changed(hidden=torch.zeros(2, 4, requires_grad=True)),
        r"\['hidden'\]: expected float32\[2, 3\], requires grad, found float32\[2, 4\]",
    ),
    "dtype": (changed(mask=torch.ones(2)), r"\['mask'\]: expected bool\[2\], found float32\[2\]"),
    "gradient": (changed(hidden=torch.zeros(2, 3)), r"requires grad, found float32\[2, 3\]$"),
    "plain value": (changed(n=5), r"\['n'\]: expected 4, found 5"),
    "type of a plain value": (changed(n=4.0), r"\['n'\]: expected 4, found 4\.0"),
    "structure": ([torch.zeros(2, 3)], r"\['hidden'\]: expected a tensor, found nothing there"),
}


@pytest.mark.parametrize("name", sorted(OTHERS))
def test_what_differs_is_told(name: str) -> None:
    other, says = OTHERS[name]
    spec = ValueSpec.of(value())
    assert not spec.fits(*flatten(other))
    with pytest.raises(AssertionError, match=says):
        raise AssertionError(spec.difference(ValueSpec.of(other)))


def test_a_value_fits_its_own_spec() -> None:
    assert ValueSpec.of(value()).fits(*flatten(value()))
    assert ValueSpec.of(value()).difference(ValueSpec.of(value())) is None


def test_not_a_number_equals_itself() -> None:
    spec = ValueSpec.of(float("nan"))
    assert spec.fits(*flatten(float("nan")))


def test_gradients_need_not_agree_without_training() -> None:
    frozen = changed(hidden=torch.zeros(2, 3))
    assert not ValueSpec.of(value()).fits(*flatten(frozen))
    assert ValueSpec.of(value()).fits(*flatten(frozen), gradients=False)


# ---- calls


def test_a_spec_of_a_call_holds_args_and_kwargs() -> None:
    spec = spec_of_arguments((torch.zeros(2),), {"mask": None})
    assert spec.fill(["x"]) == (("x",), {"mask": None})
