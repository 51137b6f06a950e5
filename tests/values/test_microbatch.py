"""Splitting batches and merging outputs: rules, functions of the user's, batches that are split already."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils import _pytree as pytree
from torch.utils.data import default_collate

from penstock._engine.microbatches import (
    MISSING,
    REPLICATE,
    ByImages,
    KnownCuts,
    Microbatch,
    Microbatches,
    Rules,
    Split,
    merge,
    split_batch,
)
from penstock._engine.values import map_tensors, tensors_in
from penstock.errors import MicrobatchError
from penstock.testing import Case, compare
from tests.catalogue.kinds import Frozen, Pair, State
from tests.catalogue.making import Does


def split(
    args: tuple[Any, ...], kwargs: dict[str, Any], count: int, rules: Rules | None = None
) -> Sequence[Microbatch]:
    parts = split_batch(args, kwargs, MISSING, rules, count).parts
    assert parts is not None
    return parts


BATCH, LENGTH = 5, 4
TOKENS = torch.arange(BATCH * LENGTH).reshape(BATCH, LENGTH)
POSITIONS = torch.arange(3 * BATCH * LENGTH).reshape(3, BATCH, LENGTH)


def shapes(parts: Sequence[Any], name: str) -> list[list[int]]:
    return [list(part.kwargs[name].shape) for part in parts]


# ---- splitting


def test_what_is_split_and_what_goes_whole_to_every_microbatch() -> None:
    table, scale = torch.ones(3), torch.tensor(2.0)
    kwargs = {"x": TOKENS, "table": table, "scale": scale, "more": [scale], "n": 2.0}
    rules: Rules = {"table": REPLICATE, "x": Split(-1)}
    parts = split((TOKENS.t(),), kwargs, 2, rules)
    assert [list(part.args[0].shape) for part in parts] == [[2, 5], [2, 5]]
    assert shapes(parts, "x") == [[5, 2], [5, 2]]
    for part in parts:
        assert part.kwargs["table"] is table
        assert part.kwargs["scale"] is part.kwargs["more"][0] is scale
        assert part.kwargs["n"] == 2.0
    assert [(part.args, part.samples) for part in split((3, "text"), {}, 3)] == [
        ((3, "text"), 0)
    ] * 3


def gives_a_list(*_: Any) -> Any:
    return [TOKENS]


def error_of(
    *args: Any, count: int = 1, rules: Rules | None = None, target: Any = None, **kwargs: Any
) -> Any:
    return lambda: split_batch(args, kwargs, target, rules, count)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "too few samples": (error_of(TOKENS, count=6), "5 samples cannot be split into 6"),
    "no such dimension": (error_of(TOKENS, rules={0: Split(2)}), r"\[5, 4\] has no dimension 2"),
    "a scalar to be split": (error_of(torch.tensor(1.0), rules={0: Split()}), "keep it whole with REPLICATE"),
    "another first dimension": (
        error_of(TOKENS, position_ids=POSITIONS),
        r"the batch has 5 samples \(argument 0 of shape \[5, 4\] has 5 in dimension 0\), but argument "
        r"'position_ids' of shape \[3, 5, 4\] has 3 in dimension 0; use split=",
    ),
    "the first, as most are right": (error_of(POSITIONS, TOKENS, mask=TOKENS), "but argument 0 of shape"),
    "those without a rule": (
        error_of(b=TOKENS, c=TOKENS, a=torch.zeros(3), rules={"a": Split()}),
        "has 3 samples .* but argument 'b' of shape"
    ),
    "the target": (error_of(TOKENS, target=torch.zeros(4)), r"but the target of shape \[4\] has 4"),
    "a rule for no item": (
        error_of({"a": TOKENS}, rules={0: {"mask": REPLICATE}}),
        r"rules for \['mask'\] of argument 0, which has \['a'\]",
    ),
    "items of a tensor": (error_of(TOKENS, rules={0: {"mask": REPLICATE}}),
        "argument 0 is a Tensor without items"),
    "a list of images": (
        error_of([torch.zeros(3, 4, 5)] * 8), r"list of 8, and looks like .* split={0: Split\(None\)} splits"
    ),
    "as many images as channels": (
        error_of((torch.zeros(3, 4, 5),) * 3, target=torch.zeros(3)), "is a tuple of 3, and looks like"
    ),
    "a dimension that has no such chunks": (
        error_of(TOKENS, rules={0: Split(0, chunks=2)}), r"\[5, 4\] does not consist of 2 chunks"
    ),
    "entries of a tensor": (
        error_of(TOKENS, rules={0: Split(None)}), r"is a Tensor, but its rule Split\(None\) is for a list"
    ),
    "lists of different lengths": (
        error_of([TOKENS], target=[TOKENS] * 2, rules={0: Split(None), "target": Split(None)}),
        "the batch has 1 samples .argument 0 has 1 entries., but the target has 2 entries",
    ),
    "a function that gives too few": (
        error_of(TOKENS, count=2, rules={0: lambda value, sizes: [value]}),
        "argument 0 gave 1 parts for 2 microbatches"
    ),
    "a function that splits no call": (
        error_of(TOKENS, count=2, rules=gives_a_list), "returned a list; it must return Microbatches"
    ),
    "a function that splits too far": (
        error_of(TOKENS, count=2, rules=lambda *_: Microbatches([1, 2, 3])),
        "returned 3 microbatches of at most 2"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_cannot_be_split_is_refused(name: str) -> None:
    call, says = REFUSED[name]
    with pytest.raises(MicrobatchError, match=says):
        call()


# ---- merging


def merged(
    parts: Sequence[Any], rule: Any = None, sizes: Sequence[int] = (3, 2), **options: Any
) -> Any:
    return merge(parts, rule, [(0, sizes[: len(parts)])], **options)


def test_outputs_are_merged_along_the_samples_or_by_a_rule() -> None:
    parts = [TOKENS[:3], TOKENS[3:]]
    assert torch.equal(merged(parts), TOKENS)
    assert torch.equal(merged([part.t() for part in parts], Split(1)), TOKENS.t())
    assert torch.equal(merged([part.t() for part in parts], Split(-1)), TOKENS.t())
    blocks = [torch.cat([part, -part]) for part in parts]
    assert torch.equal(merged(blocks, Split(0, chunks=2)), torch.cat([TOKENS, -TOKENS]))
    across = merged([part.t() for part in blocks], Split(-1, chunks=2))
    assert torch.equal(across, torch.cat([TOKENS, -TOKENS]).t())
    assert merged([torch.zeros(1, 2)] * 2, REPLICATE).shape == (1, 2)
    assert merged([[1, 2, 3], [4, 5]], Split(None)) == [1, 2, 3, 4, 5]
    assert merged([1.0, 2.0], lambda parts, sizes: [*zip(parts, sizes, strict=True)]) == [
        (1, 3),
        (2, 2),
    ]
    assert merged([{"loss": None, "kind": "a"}] * 2) == {"loss": None, "kind": "a"}
    both = merged(
        [{"x": part, "mems": part.t(), "sum": part.sum()} for part in parts],
        {"mems": Split(1), "sum": lambda parts, sizes: sum(parts)},
    )
    assert torch.equal(both["x"], TOKENS)
    assert torch.equal(both["mems"], TOKENS.t())
    assert both["sum"] == TOKENS.sum()


def test_what_is_no_sample_may_be_the_same_or_tokens() -> None:
    """Such as a temperature beside the logits, in the outputs of a loss."""
    table, sizes = torch.ones(3), (2, 3)
    both = merged([table, table], sizes=sizes, alike=True)
    both.mul_(2)
    assert table.tolist() == [1, 1, 1]
    # Tokens, also without the first one of each row; and what each sequence has, in dimension 0.
    ways = [(1, (6, 9)), (1, (5, 8)), (0, (2, 1))]
    for lacking in (0, 1):
        rows = [torch.zeros(1, 6 - lacking), torch.zeros(1, 9 - lacking)]
        assert merge(rows, None, ways).shape == (1, 15 - 2 * lacking)
    assert merge([torch.zeros(2, 3), torch.zeros(1, 3)], None, ways).shape == (3, 3)
    with pytest.raises(MicrobatchError, match="cannot be put together"):
        merge([torch.zeros(4), torch.zeros(4)], None, ways)


HALVES = [TOKENS[:3], TOKENS[3:]]
UNLIKE: dict[str, tuple[Callable[[], Any], str]] = {
    "types": (lambda: merged([TOKENS, (TOKENS,)]), "different structures"),
    "lengths": (lambda: merged([(1,), (1, 2)]), r"different structures .* split={'output': Split\(None\)}"),
    "keys": (lambda: merged([{"a": 1}, {"b": 1}], {"a": Split(1)}), "different structures"),
    "scalars": (
        lambda: merged([{"loss": torch.tensor(1.0)}] * 2),
        r"output\['loss'\] has the shapes .* split={'output': {'loss': rule}}: if it is a mean .*REPLICATE",
    ),
    "another size": (lambda: merged([TOKENS, TOKENS]), "dimension 0 does not count samples"),
    "another dimension": (lambda: merged([half.t() for half in HALVES]), r"Split\(1\) joins along"),
    "several rows": (
        lambda: merged([half.repeat(2, 1) for half in HALVES]), r"Split\(0, chunks=2\) if it is 2 blocks"
    ),
    "rules for items of a tensor": (lambda: merged(HALVES, {"b": Split(1)}), "is a Tensor without items"),
    "no such dimension": (lambda: merged(HALVES, Split(2)), "no dimension 2"),
    "different replicates": (lambda: merged(HALVES, REPLICATE), "not the same in all microbatches"),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(UNLIKE))
def test_outputs_that_cannot_be_put_together_are_refused(name: str) -> None:
    call, says = UNLIKE[name]
    with pytest.raises(MicrobatchError, match=says):
        call()


# ---- what a process was given


# ---- kinds of batches


class Encoding(UserDict[str, Any]):
    """As the batches of tokenizers are."""


class Inputs(MutableMapping[str, Any]):
    """Keeps its items in a dict of its own, which a copy shares."""

    def __init__(self, items: Any) -> None:
        self.inner = dict(items)

    def __getitem__(self, key: str) -> Any:
        return self.inner[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self.inner[key] = value

    def __delitem__(self, key: str) -> None:
        del self.inner[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.inner)

    def __len__(self) -> int:
        return len(self.inner)


KINDS: dict[str, Callable[[], Any]] = {
    "tuple": lambda: (TOKENS, TOKENS),
    "list": lambda: [TOKENS, None, 3],
    "dict": lambda: {"a": TOKENS, "b": {"c": TOKENS}},
    "dataclass": lambda: State(TOKENS, TOKENS > 2),
    "frozen dataclass": lambda: Frozen(State(TOKENS)),
    "named tuple": lambda: Pair(TOKENS, 3.0),
    "ordered dict": lambda: OrderedDict(tokens=TOKENS, more=[TOKENS]),
    "dict of the user's": lambda: Encoding(tokens=TOKENS),
    "mapping of the user's": lambda: Inputs({"tokens": TOKENS}),
    "dict with a default": lambda: defaultdict(list, tokens=TOKENS),
    "dict that cannot be changed": lambda: MappingProxyType({"tokens": TOKENS}),
}


@pytest.mark.whole
@pytest.mark.parametrize("by_item", [False, True])
@pytest.mark.parametrize("name", sorted(KINDS))
def test_a_batch_keeps_its_kind_and_is_merged_again(name: str, by_item: bool) -> None:
    value = KINDS[name]()
    by_items: Rules = {0: {key: Split(0) for key in value} if isinstance(value, Mapping) else {}}
    parts = [part.args[0] for part in split((value,), {}, 2, by_items if by_item else None)]
    again = merged(parts)
    assert all(type(part) is type(value) for part in (*parts, again))
    flat = [tensors_in(one) for one in (value, again, *parts)]
    for whole, joined, *halves in zip(*flat, strict=True):
        assert [len(half) for half in halves] == [3, 2]
        assert torch.equal(torch.cat(halves), whole)
        assert torch.equal(joined, whole)


ROWS, SCALE = torch.rand(2, 6, 4, dtype=torch.float64)
AS_GIVEN: dict[str, tuple[Callable[..., Tensor], tuple[Any, ...], Any]] = {
    "a mapping of the user's": (
        lambda m, batch: m.last(m.first(batch["x"]) * batch["scale"]),
        (Inputs({"x": ROWS, "scale": SCALE}),), None,
    ),
    "a rule for its items": (
        lambda m, batch: m.last(m.first(batch["x"]) * batch["scale"]),
        (Inputs({"x": ROWS, "scale": SCALE}),), {0: {"x": Split(0)}},
    ),
    "a list as collated": (
        lambda m, batch: m.last(m.first(batch[0]).tanh()) - batch[1], ([ROWS, SCALE],), None
    ),
    "a plain number as the rule of an item": (
        lambda m, x, more: m.last(m.first(x).tanh()) + more["turned"].T,
        (ROWS, {"turned": ROWS.T.contiguous()}), {1: {"turned": 1}},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", AS_GIVEN)
def test_a_loop_trains_on_batches_as_they_are(name: str) -> None:
    function, args, rules = AS_GIVEN[name]
    loss = nn.functional.mse_loss
    layers = {name: nn.Linear(4, 4) for name in ("first", "last")}
    case = Case(Does(function, **layers).double(), args, ROWS.flip(0), loss, split=rules)
    compare(case, schedule="1F1B", ranks=2, microbatches=3, steps=2).check(1e-12)


# ---- rules


def test_items_fields_and_positions_have_rules_of_their_own() -> None:
    batch = {"tokens": TOKENS, "positions": POSITIONS, "table": torch.zeros(7)}
    rules: Rules = {
        "batch": {"positions": Split(1), "table": REPLICATE}, 0: {"mask": Split(1)}, 1: {1: Split(1)},
        "ids": Split(1),
    }  # fmt: skip
    args = (State(TOKENS, POSITIONS), (TOKENS, POSITIONS))
    for part, rows in zip(
        split(args, {"batch": batch, "ids": POSITIONS}, 2, rules), (3, 2), strict=True
    ):
        assert part.kwargs["batch"]["positions"].shape == (3, rows, 4)
        assert len(part.kwargs["batch"]["tokens"]) == rows
        assert part.kwargs["ids"].shape == (3, rows, 4)
        assert part.kwargs["batch"]["table"] is batch["table"]
        assert part.args[0].mask.shape == part.args[1][1].shape == (3, rows, 4)


IMAGES = [torch.full((3, 2, 2 + i), float(i)) for i in range(4)]
"""Of different widths."""


def test_a_list_of_samples_is_split_by_its_entries() -> None:
    boxes = [{"boxes": torch.zeros(2 + i, 4)} for i in range(4)]
    rules: Rules = {0: Split(None), "target": Split(None)}
    batch = split_batch((IMAGES,), {"ids": torch.arange(4)}, boxes, rules, 2)
    assert batch.parts is not None
    assert batch.targets is not None
    assert [part.args for part in batch.parts] == [(IMAGES[:2],), (IMAGES[2:],)]
    assert [*batch.targets] == [boxes[:2], boxes[2:]]
    # Entries may have any shapes; or each has all samples, if a rule says so.
    by_row = split(([TOKENS, TOKENS],), {}, 2, {0: Split(0)})
    assert [[len(t) for t in part.args[0]] for part in by_row] == [[3, 3], [2, 2]]
    assert [part.samples for part in batch.parts] == [2, 2]


@pytest.mark.parametrize("shape", [(4,), (2,), (3, 5), (3, 4, 4, 4)])
def test_a_list_as_collated_holds_all_samples_in_each_tensor(shape: tuple[int, ...]) -> None:
    """Also where it has as many entries as there are samples."""
    pair = default_collate(
        [(torch.rand(shape[1:]), torch.rand(shape[1:])) for _ in range(shape[0])]
    )
    assert type(pair) is list
    for target in (MISSING, torch.zeros(shape[0])):
        batch = split_batch((pair,), {}, target, None, 2)
        assert batch.parts is not None
        halves = [part.args[0] for part in batch.parts]
        assert [type(half) for half in halves] == [list, list]
        for whole, *of_whole in zip(pair, *halves, strict=True):
            assert torch.equal(torch.cat(of_whole), whole)
            assert sum(map(len, of_whole)) == shape[0]


def test_chunks_hold_an_entry_for_every_sample() -> None:
    """Such as the chosen answers of all samples, followed by the rejected ones."""
    pairs = torch.cat([TOKENS, -TOKENS])
    for value, dim in ((pairs, 0), (pairs.t(), -1)):
        parts = split((value, TOKENS), {}, 2, {0: Split(dim, chunks=2)})
        for part in parts:
            assert torch.equal(
                part.args[0].movedim(dim, 0), torch.cat([part.args[1], -part.args[1]])
            )


def filled(value: Any, number: float) -> Any:
    """The same value with other numbers in its tensors."""
    return map_tensors(value, lambda tensor: torch.full_like(tensor, number))


@pytest.mark.parametrize(
    ("args", "kwargs", "target", "rules"),
    [
        ((torch.zeros(5, 3), torch.zeros(())), {}, torch.zeros(5), None),
        ((), {"x": [torch.zeros(4, 2), {"a": torch.zeros(4), "b": None}], "k": 3}, MISSING, None),
        ((torch.zeros(3, 4), torch.zeros(4, 8)), {}, torch.zeros(4), {0: Split(1)}),
        (([torch.zeros(2), torch.zeros(3)],), {}, MISSING, {0: Split(None)}),
        ((torch.zeros(6, 2), torch.zeros(2, 2)), {}, MISSING, {0: Split(chunks=2), 1: REPLICATE}),
        (({"scale": 2.0},), {}, torch.zeros(4), None),
        ((torch.zeros(()),), {}, MISSING, None),
    ],
)
def test_a_batch_that_looks_like_an_earlier_one_is_cut_as_that(
    args: Any, kwargs: Any, target: Any, rules: Rules | None
) -> None:
    known: KnownCuts = {}
    first = split_batch(args, kwargs, target, rules, 2, fewer=True, known=known)
    args, kwargs, target = (filled(value, 7.0) for value in (args, kwargs, target))
    later = split_batch(args, kwargs, target, rules, 2, fewer=True, known=known)
    alone = split_batch(args, kwargs, target, rules, 2, fewer=True)
    assert (later.look, later.samples, later.count) == (first.look, alone.samples, alone.count)
    assert later.look is not None
    assert len(later.parts or ()) == len(alone.parts or ())
    for one, other in zip(later.parts or (), alone.parts or (), strict=True):
        assert_close([one.args, one.kwargs], [other.args, other.kwargs])
        assert one.samples == other.samples
    if target is not MISSING:
        assert_close(later.targets, alone.targets)
    fewer = split_batch(args, kwargs, target, rules, 1, fewer=True, known=known)
    assert (fewer.look, fewer.count) != (first.look, first.count) or first.count == 1


class Scale:
    """Of a registered container: what it holds beside tensors, of which the text does not tell all."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __repr__(self) -> str:
        return "Scale"


class Scaled:
    def __init__(self, x: Tensor, scale: Scale) -> None:
        self.x, self.scale = x, scale


def test_containers_of_a_batch_are_its_own() -> None:
    pytree.register_pytree_node(
        Scaled, lambda of: ([of.x], of.scale), lambda x, scale: Scaled(next(iter(x)), scale)
    )
    known: KnownCuts = {}
    for factor in (1.0, 2.0):
        batch = (Scaled(torch.zeros(4, 2), Scale(factor)), {"a": torch.zeros(4)})
        parts = split_batch(batch, {}, MISSING, None, 2, known=known).parts
        assert parts is not None
        assert [part.args[0].scale.factor for part in parts] == [factor, factor]
    assert not known


def test_batches_look_alike_if_only_their_data_differ() -> None:
    batches: list[tuple[Any, int]] = [
        (torch.zeros(4, 2), 2),
        (torch.zeros(4, 2), 4),
        (torch.zeros(4, 3), 2),
        (torch.zeros(4, 2, dtype=torch.float64), 2),
        (torch.zeros(2, 4).t(), 2),
        (torch.zeros(4, 2, requires_grad=True), 2),
        ([torch.zeros(4, 2)], 2),
        ([torch.zeros(4, 2), 1], 2),
        ([torch.zeros(4, 2), True], 2),
        ([torch.zeros(4, 2), len], 2),
        ({"a": torch.zeros(4, 2)}, 2),
    ]
    known: KnownCuts = {}

    def look(value: Any, count: int) -> Any:
        return split_batch((value,), {}, MISSING, None, count, known=known).look

    looks = [look(x, count) for x, count in batches]
    again = [look(filled(x, 3.0), count) for x, count in batches[:5]]
    assert len({*looks}) == len(batches)
    assert again == looks[:5]
    named = split_batch((), {"x": torch.zeros(4, 2)}, torch.zeros(4), None, 2, known=known).look
    assert named not in looks


def test_what_numbers_cut_is_cut_by_its_own() -> None:
    """Positions that start again make a packed row of two sequences; those that do not, one sequence."""
    known: KnownCuts = {}
    ids = torch.arange(6)[None]
    for positions, count in ((ids, 1), (ids % 3, 2), (ids, 1)):
        batch = split_batch(
            (ids,), {"position_ids": positions}, MISSING, None, 2, fewer=True, known=known
        )
        assert (batch.count, batch.look) == (count, None)


# ---- functions


PATCHES = torch.arange(12.0).reshape(6, 2)
"""Of five images: 1, 2, 1, 1 and 1 patches."""


def test_a_function_splits_an_argument_and_the_target() -> None:
    asked: list[Sequence[int]] = []

    def patches(value: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        asked.append(list(sizes))
        ends = torch.tensor([0, 1, 3, 4, 5, 6])[torch.tensor([0, *sizes]).cumsum(0)].tolist()
        return [value[a:b] for a, b in pairwise(ends)]

    rules: Rules = {"patches": patches, "target": patches}
    batch = split_batch((TOKENS,), {"patches": PATCHES}, PATCHES, rules, 3)
    assert batch.parts is not None
    assert batch.targets is not None
    assert [part.samples for part in batch.parts] == [2, 2, 1]
    assert shapes(batch.parts, "patches") == [[3, 2], [2, 2], [1, 2]]
    assert [len(target) for target in batch.targets] == [3, 2, 1]
    # Another batch of these shapes may be cut elsewhere.
    assert batch.look is None
    # Alone it learns the sizes of the target, or of the first argument that is split.
    batch = split_batch((TOKENS,), {}, TOKENS, {0: patches}, 2)
    assert batch.samples == asked[-1] == [3, 2]
    split_batch((TOKENS,), {}, MISSING, {0: patches}, 4)
    assert asked[-1] == [2, 1, 1, 1]
    # Samples without images get None, which models take for a text without any.
    first, second, third = ByImages([2, 0, 0, 1])(PATCHES[:3], [1, 2, 1])
    assert second is None
    assert (first.tolist(), third.tolist()) == (PATCHES[:2].tolist(), PATCHES[2:3].tolist())


# ---- ready ones

RAGGED = [torch.zeros(2, 3), torch.zeros(1, 5), torch.zeros(2, 1)]


def ready(target: Any = MISSING, **options: Any) -> Any:
    return split_batch((Microbatches(RAGGED, **options),), {}, target, None, 8)


def test_ready_microbatches() -> None:
    batch = ready([1, 2, 3])
    assert (batch.count, batch.samples, batch.targets) == (3, [2, 1, 2], [1, 2, 3])
    assert [part.args[0] for part in batch.parts] == RAGGED
    calls = [(RAGGED[0], 2), {"x": RAGGED[1], "scale": 3}, RAGGED[2]]
    parts = Microbatches(calls, samples=[4, 5, 6]).parts
    assert [len(part.args) for part in parts] == [2, 0, 1]
    assert parts[1].kwargs == {"x": RAGGED[1], "scale": 3}
    assert [part.samples for part in parts] == [4, 5, 6]
    # They count their targets, if all have some.
    rows = Microbatches([torch.zeros(3, 2), torch.zeros(2, 2)])
    assert rows.batch([torch.zeros(1), torch.zeros(4)]).samples == [1, 4]
    assert rows.batch([torch.zeros(1), "none"]).samples == [3, 2]
    assert ready().targets is None
    assert ready(None).targets == [None] * 3
    assert ready(targets="abc").targets == ready(None, targets="abc").targets == "abc"


def with_others(*args: Any, **kwargs: Any) -> Any:
    return split_batch(args, kwargs, None, None, 8)


def test_what_is_no_set_of_ready_microbatches() -> None:
    calls: list[tuple[str, Callable[[], Any]]] = [
        ("holds no microbatches", lambda: Microbatches([])),
        (r"3 microbatches, but \{'targets': 1\}", lambda: Microbatches(RAGGED, targets=[1])),
        (r"3 microbatches, but \{'samples': 4\}", lambda: Microbatches(RAGGED, samples=[1] * 4)),
        ("3 microbatches, but target=2; give a list", lambda: ready([1, 2])),
        ("but target=Tensor; give a list", lambda: ready(torch.zeros(3))),
        ("passed both", lambda: ready([1, 2, 3], targets=[1, 2, 3])),
        ("pass no others beside them", lambda: with_others(Microbatches(RAGGED), 1)),
        ("pass no others beside them", lambda: with_others(x=Microbatches(RAGGED))),
    ]
    for says, call in calls:
        with pytest.raises(MicrobatchError, match=says):
            call()
