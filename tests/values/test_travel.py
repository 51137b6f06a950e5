"""Any value between stages by hand: the gradients of the unsplit model, in one process and on gloo.

The catalogue has models with the same values between their modules.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from penstock import Pipeline, PipelineStage
from penstock._engine.values import Structure
from penstock.errors import PartitionError, PeerFailed, PenstockError, SpecError
from penstock.testing import plain_loop
from tests import played
from tests.catalogue.kinds import (
    KINDS,
    WIDTH,
    Cache,
    Frozen,
    Kind,
    Layer,
    State,
    X,
    case_of,
    layers,
    loss,
)
from tests.catalogue.making import Does
from tests.device import DEVICE
from tests.processes import in_processes

SPARSE = pytest.mark.skipif(DEVICE == played.NAME, reason="a played device has no sparse tensors")


def by_hand(group: Any, *parts: nn.Module, schedule: str = "1F1B", **options: Any) -> Pipeline:
    """A pipeline of a stage for each part; of several processes each has its own."""
    count = len(parts)
    turned = [min(stage, count - 1 - stage) for stage in range(count)]
    rank_of = turned if schedule == "ZB-V" else list(range(count))
    stages = [
        PipelineStage(part, index, count)
        for index, part in enumerate(parts)
        if group is None or rank_of[index] == group.rank()
    ]
    usual: dict[str, Any] = {"microbatches": 2, "loss_fn": loss, "mesh": group}
    return Pipeline.from_stages(stages, schedule=schedule, **(usual | options))


def train(group: Any = None, every: int = 1) -> None:
    """Two steps with the gradients of the plain loop, for every kind or some."""
    for name, kind in [*KINDS.items()][::every]:
        parts = layers(kind)
        with by_hand(group, *parts, schedule="ZB-V", microbatches=4) as pipe:
            for _ in range(2):
                pipe.step(X, target=X.flip(0))
        grads: Any = plain_loop(case_of(kind), 2)[1]
        mine = {
            n: p.grad for n, p in nn.Sequential(*parts).named_parameters() if p.grad is not None
        }
        assert len(mine) == (len(grads) if group is None else len(grads) // 2)
        wanted = {n: grads[n] for n in mine}
        torch.testing.assert_close(mine, wanted, rtol=0, atol=1e-12, msg=f"{name}: {{}}".format)


def test_stages_by_hand_have_the_gradients_of_the_unsplit_model() -> None:
    train(every=3)


@in_processes(2, 120.0)
def test_so_they_have_between_processes(group: Any) -> None:
    train(group)


def test_a_stage_may_change_what_the_one_before_still_needs_for_its_backward() -> None:
    """Which saves its output, as tanh does."""
    weights: list[Any] = []
    for kind in (Kind(lambda h: h, lambda v: v * 2), Kind(lambda h: h, lambda v: v.mul_(2))):
        parts = layers(kind)
        by_hand(None, *parts).step(X, target=X.flip(0))
        weights.append([p.grad for part in parts for p in part.parameters()])
    torch.testing.assert_close(*weights, rtol=0, atol=0)


class Watching(Layer):
    """Notes what has arrived."""

    def forward(self, *values: Any) -> Any:
        self.seen = values[0]
        return super().forward(*values)


def test_structure_and_strides_arrive_as_they_were() -> None:
    kind = Kind(
        lambda h: Frozen(State(h.t(), h[:, None].expand(-1, 3, -1), 2), ("a",)),
        lambda v: v.inner.hidden.t() + v.inner.mask.sum(1),
    )
    taker = Watching(kind, None)
    by_hand(None, Layer(None, kind), taker, microbatches=1).step(X, target=X)
    assert isinstance(taker.seen, Frozen)
    assert (taker.seen.names, taker.seen.inner.layer) == (("a",), 2)
    assert taker.seen.inner.hidden.stride() == (1, 4)
    assert taker.seen.inner.mask is not None
    assert taker.seen.inner.mask.stride() == (4, 0, 1)


# ---- what cannot travel is refused by name and path


class Nameless(Cache):
    """Registered with torch, but under no name that another rank could look up."""

    def __init__(self, keys: Tensor) -> None:
        super().__init__(keys, 1)


pytree.register_pytree_node(Nameless, lambda x: ([x.keys], None), lambda items, _: Nameless(*items))


class Unregistered:
    def __init__(self, x: Tensor) -> None:
        self.x = x


def gives(wrap: Callable[[Tensor], Any]) -> Any:
    return Does(lambda m, x: wrap(m.lin(x)), lin=nn.Linear(WIDTH, WIDTH, dtype=torch.float64))


REFUSED: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "set": (lambda h: {"a": [h, {h}]}, "['a'][1] is a set"),
    "class": (lambda h: {"a": Unregistered(h)}, "['a'] is a Unregistered"),
    "complex number": (lambda h: [h, 1j], "[1] is a complex"),
    "constant": (lambda h: {"h": h, "dtype": torch.float32}, "['dtype'] is a dtype"),
    "sparse tensor": (lambda h: [h.to_sparse()], "[0] is a sparse_coo tensor"),
    "quantized tensor": (
        lambda h: [h, torch.quantize_per_tensor(h.detach().float(), 0.1, 0, torch.quint8)],
        "[1] is a quantized tensor",
    ),
    "class without a name": (lambda h: {"h": Nameless(h)}, f" is a {__name__}.Nameless"),
    "key": (lambda h: {(1, 2): h}, " is a dict with ((1, 2),)"),
    "bytes": (lambda h: {"h": h, "bytes": b"a"}, "['bytes'] is a bytes"),
}


def refuse(name: str, *errors: type[Exception], group: Any = None) -> None:
    says = re.escape(f"what stage 0 returned{REFUSED[name][1]}")
    pipe = by_hand(group, gives(REFUSED[name][0]), Layer(None, None))
    with pytest.raises(errors, match=says), pipe:
        pipe.step(X, target=X)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=SPARSE if "sparse" in name else ()) for name in REFUSED],
)
def test_what_cannot_travel_is_refused(name: str) -> None:
    refuse(name, SpecError)


@in_processes(2)
def test_so_it_is_on_every_rank_of_several_processes(group: Any) -> None:
    refuse("set", SpecError, PeerFailed, group=group)


CUT: dict[str, tuple[Kind, type[Exception], str]] = {
    "sparse": (
        Kind(lambda h: [h.to_sparse()], lambda v: v[0].to_dense()),
        SpecError,
        "0 returned.*sparse",
    ),
    "set": (
        Kind(lambda h: {h}, lambda v: v.pop()),
        PartitionError,
        "1 in stage 1 reads a (tensor|value) that 0 in",
    ),
    "number of the data": (
        Kind(lambda h: (h, float(h.detach().sum())), lambda v: v[0] * v[1]),
        PartitionError,
        "0 in stage 0 gave .* where the run without data gave",
    ),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=SPARSE if name == "sparse" else ()) for name in CUT]
)
def test_nor_can_a_model_be_cut_there(name: str) -> None:
    kind, error, says = CUT[name]
    model = nn.Sequential(gives(kind.wrap), Layer(kind, None))
    pipe = Pipeline(model, ranks=2, microbatches=2, loss_fn=loss)
    with pytest.raises(error, match=says):
        pipe.step(X, target=X)


@pytest.mark.parametrize("name", ["os:system", "builtins:set", "no_such_module:Kind", "nothing"])
def test_a_description_names_containers_that_this_process_knows(name: str) -> None:
    """What another rank sends never makes anything else of a class, and imports nothing."""
    with pytest.raises(SpecError, match=f"does not know .{name}.; define it at the top level"):
        Structure.read([name, None, [None]])
    assert "no_such_module" not in sys.modules


@in_processes(2)
def test_what_differs_from_the_first_message_of_its_kind_is_refused(group: Any) -> None:
    """What a stage returns hangs on the numbers that it is given."""
    signs = gives(lambda h: {"h": h, "sign": float(h.detach().sum().sign())})
    nn.init.eye_(signs.lin.weight)
    pipe = by_hand(group, signs, Layer(Kind(lambda h: h, lambda v: v["h"] * v["sign"]), None))
    says = "1.0 where the first message of this kind had -1.0"
    with pytest.raises(PenstockError, match=says), pipe:
        pipe.step(X * 9, target=X)
