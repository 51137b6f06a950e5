"""Specs of tensors: types, the order of their data, and what cannot travel."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from penstock.errors import SpecError
from penstock.values import TensorSpec, ValueSpec, flatten

BASE = torch.arange(24.0).reshape(2, 3, 4)

LYING: dict[str, Tensor] = {
    "in order": BASE,
    "transposed": BASE.transpose(0, 2),
    "permuted": BASE.permute(1, 2, 0),
    "channels last": torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "sliced": BASE[:, ::2],
    "a chunk": BASE.chunk(2, -1)[1],
    "expanded": BASE[:, :1].expand(2, 3, 4),
    "expanded from a number": torch.tensor(3.0).expand(2, 2),
    "without dimensions": torch.tensor(1.5),
    "empty": torch.zeros(0, 3),
    "empty and transposed": torch.zeros(2, 0, 3).transpose(0, 2),
    "conjugated": torch.view_as_complex(torch.rand(3, 2, 2)).conj().t(),
    "negated": torch.view_as_complex(torch.rand(3, 2, 2)).conj().imag,
    "of one": torch.zeros(1, 1, 4).transpose(0, 1),
}


def through_json(spec: TensorSpec) -> TensorSpec:
    return TensorSpec.from_json(json.loads(json.dumps(spec.to_json())))


@pytest.mark.parametrize("name", sorted(LYING))
def test_the_same_numbers_arrive(name: str) -> None:
    tensor = LYING[name]
    spec = through_json(TensorSpec.of(tensor))
    packed = spec.pack(tensor)
    assert packed.is_contiguous()
    assert not packed.is_conj()
    assert not packed.is_neg()
    assert TensorSpec.of(packed) == spec.packed
    # As over a wire: bytes in, bytes out.
    arrived = spec.packed.empty("cpu").copy_(packed)
    assert torch.equal(spec.unpack(arrived), tensor)


IN_ONE_PIECE = ["in order", "transposed", "permuted", "channels last", "of one"]


@pytest.mark.parametrize("name", IN_ONE_PIECE)
def test_what_lies_in_one_piece_is_not_copied_and_keeps_its_order(name: str) -> None:
    tensor = LYING[name]
    spec = TensorSpec.of(tensor)
    assert spec.pack(tensor).data_ptr() == tensor.data_ptr()
    for made in (spec.empty("cpu"), spec.unpack(spec.pack(tensor)), spec.zeros("meta")):
        assert (made.shape, made.stride()) == (tensor.shape, tensor.stride())


def test_the_order_agreed_on_holds_for_data_in_another() -> None:
    spec = TensorSpec.of(BASE.transpose(0, 2))
    other = BASE.transpose(0, 2).contiguous()
    assert spec.fits(other, gradients=True)
    assert spec == TensorSpec.of(other)
    assert torch.equal(spec.unpack(spec.pack(other)), other)


TYPES = "bool uint8 int16 uint32 int64 bfloat16 float16 float64 complex64 complex128 float8_e5m2"


@pytest.mark.parametrize("name", [*TYPES.split(), "float8_e4m3fn", "float8_e8m0fnu"])
def test_types_can_be_described_and_made(name: str) -> None:
    spec = TensorSpec((2, 0, 3), name, False)
    assert TensorSpec.of(spec.empty("meta")) == through_json(spec) == spec


@pytest.mark.parametrize("order", [[0], [0, 0], [0, 2], ["a", "b"], 3])
def test_another_order_is_none(order: object) -> None:
    data = {"shape": [1, 2], "dtype": "int8", "requires_grad": False, "order": order}
    with pytest.raises((SpecError, TypeError)):
        TensorSpec.from_json(data)


# ---- what cannot travel


class Marked(Tensor):
    """A tensor with more to it."""


def quantized() -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(torch.rand(2), 0.1, 0, torch.quint8)


def nested() -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([torch.zeros(1), torch.zeros(2)])


def jagged() -> Tensor:
    return torch.nested.nested_tensor([torch.zeros(1), torch.zeros(2)], layout=torch.jagged)


def csr() -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.eye(2).to_sparse_csr()


STAYING: dict[str, tuple[Callable[[], Tensor], str]] = {
    "sparse": (lambda: torch.eye(2).to_sparse(), "layout sparse_coo cannot travel; .*to_dense"),
    "compressed": (csr, "layout sparse_csr cannot travel; .*to_dense"),
    "quantized": (quantized, "a quantized tensor cannot travel; .*dequantize"),
    "nested": (nested, "a nested tensor cannot travel"),
    "jagged": (jagged, "a nested tensor cannot travel"),
    "a class of its own": (
        lambda: torch.zeros(2).as_subclass(Marked),
        "of the class Marked cannot travel; return a plain one, .*as_subclass",
    ),
}


@pytest.mark.parametrize("name", sorted(STAYING))
def test_what_cannot_travel_is_named(name: str) -> None:
    make, says = STAYING[name]
    spec = ValueSpec.of({"x": [torch.zeros(1), make()]})
    with pytest.raises(SpecError, match=rf"^the value 'h', \['x'\]\[1\]: .*{says}"):
        spec.check_travels("the value 'h'")


@pytest.mark.parametrize("name", sorted(STAYING))
def test_it_does_not_fit_where_a_plain_one_was_agreed(name: str) -> None:
    tensor = STAYING[name][0]()
    plain = ValueSpec((TensorSpec((2, 2), "float32", False),), {"tensor": 0})
    assert not plain.fits(*flatten(tensor))


def test_a_plain_value_travels() -> None:
    ValueSpec.of((torch.zeros(2), torch.nn.Parameter(torch.zeros(2)), 3)).check_travels("it")
