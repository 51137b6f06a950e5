"""Packed sequences, and microbatches by tokens: what each gets, and the loss of the whole batch."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import (
    BlockMask,
    create_block_mask,
    create_mask,
    flex_attention,
)
from torch.nn.functional import cross_entropy, mse_loss, scaled_dot_product_attention

from penstock import Pipeline
from penstock._engine.microbatches import MISSING, REPLICATE, Batch, Rules, Split, split_batch
from penstock._engine.values import Structure, flatten, unflatten
from penstock.errors import MicrobatchError, UsageError
from penstock.testing import Case, compare
from tests.catalogue.making import Does

torch.set_num_threads(1)
LENGTHS = (5, 1, 9, 3, 4, 6, 2)
BOUNDS = torch.tensor([0, *LENGTHS]).cumsum(0).int()
POSITIONS = torch.cat([torch.arange(n) for n in LENGTHS])[None]
TOTAL = sum(LENGTHS)
TOKENS = torch.arange(TOTAL)[None] % 11
LABELS = TOKENS.masked_fill(POSITIONS == 0, -100)
ORDINALS = torch.repeat_interleave(torch.arange(7), torch.tensor(LENGTHS))[None].int()
BOUNDED = {"cu_seq_lens_q": BOUNDS, "cu_seq_lens_k": BOUNDS, "max_length_q": 9, "max_length_k": 9}


def split(
    count: int, rules: Rules | None = None, target: Any = MISSING, **kwargs: Any
) -> tuple[Batch, list[dict[str, Any]]]:
    batch = split_batch((), kwargs, target, rules, count, fewer=True)
    assert batch.parts is not None
    return batch, [part.kwargs for part in batch.parts]


@pytest.mark.parametrize("says", ["positions", "bounds", "ordinals"])
def test_a_packed_row_is_split_between_sequences_by_tokens(says: str) -> None:
    ways: dict[str, dict[str, Any]] = {
        "positions": {"position_ids": POSITIONS},
        "bounds": BOUNDED,
        "ordinals": {"seq_idx": ORDINALS, "position_ids": None},
    }
    batch, calls = split(3, input_ids=TOKENS, labels=LABELS, **ways[says])
    rows = [call["input_ids"] for call in calls]
    assert [row.shape[1] for row in rows] == [6, 12, 12] == batch.samples  # the least largest
    assert torch.equal(torch.cat(rows, 1), TOKENS)
    assert batch.weights == [4, 10, 9]  # labels that count
    for call, lengths in zip(calls, [(5, 1), (9, 3), (4, 6, 2)], strict=True):
        bounds = torch.tensor([0, *lengths]).cumsum(0)
        if says == "bounds":
            assert torch.equal(call["cu_seq_lens_q"], bounds)
            assert call["cu_seq_lens_k"].dtype == torch.int32
            assert call["max_length_q"] >= max(lengths)
        if says == "positions":
            assert (call["position_ids"][0, bounds[:-1]] == 0).all()
        if says == "ordinals":
            counts = call["seq_idx"][0].bincount().tolist()
            assert counts == list(lengths)


def test_rows_of_other_shapes() -> None:
    row, square = torch.randn(TOTAL, 3), torch.ones(1, 1, TOTAL, TOTAL)
    kwargs: dict[str, Any] = {
        "x": row,
        "cu_seqlens": BOUNDS,
        "max_seqlen": 9,
        "mask": square,
        "scale": torch.tensor(2.0),
    }
    rotary = torch.stack([POSITIONS] * 3)
    batch, calls = split(
        2, **kwargs, batch={"position_ids": rotary}, each=torch.arange(7), target=row
    )
    assert batch.dim == 0
    assert batch.samples == batch.weights == [15, 15]
    assert [call["mask"].shape for call in calls] == [(1, 1, 15, 15)] * 2
    assert [call["batch"]["position_ids"].shape for call in calls] == [(3, 1, 15)] * 2
    assert [len(call["each"]) for call in calls] == [3, 4]
    assert all(call["scale"] is kwargs["scale"] for call in calls)
    with pytest.raises(
        MicrobatchError, match=r"'x' of shape \[2, 3\] has neither a dimension of the 30"
    ):
        split(2, input_ids=TOKENS, position_ids=POSITIONS, x=torch.zeros(2, 3))
    batch, calls = split(
        2, {"x": REPLICATE, "y": lambda value, sizes: [sizes] * 2, "z": Split(1), "each": Split(0)},
        input_ids=TOKENS, position_ids=POSITIONS, x=torch.zeros(2, 3), y=0, z=torch.zeros(2, TOTAL),
        each=torch.arange(7),
    )  # fmt: skip
    assert [(len(call["x"]), call["y"]) for call in calls] == [(2, [3, 4])] * 2
    assert [(call["z"].shape, len(call["each"])) for call in calls] == [((2, 15), 3), ((2, 15), 4)]


@pytest.mark.parametrize("count", [1, 3, 7])
def test_no_microbatch_has_much_more_than_the_others(count: int) -> None:
    bounds, x = BOUNDS.long(), torch.zeros(1, TOTAL)
    tokens = split(count, x=x, cu_seqlens=bounds)[0].samples
    assert tokens is not None
    assert min(tokens) > 0
    ways = torch.combinations(torch.arange(1, 7), count - 1) if count > 1 else torch.zeros(1, 0)
    ends = [pairwise([0, *way.int().tolist(), 7]) for way in ways]
    assert max(tokens) == min(max(int(bounds[b] - bounds[a]) for a, b in of) for of in ends)
    # A list of sequences likewise.
    rows = [*TOKENS[0].split(list(LENGTHS))]
    batch, _ = split(count, {"x": Split(None, by="tokens")}, x=rows)
    assert batch.weights == tokens


def test_what_is_no_packed_row() -> None:
    plain = torch.arange(30)[None]
    ways: list[dict[str, Any]] = [
        {"position_ids": plain},
        {"position_ids": POSITIONS, "attention_mask": TOKENS},
    ]
    for kwargs in ways:
        assert split(3, input_ids=TOKENS, **kwargs)[0].count == 1
    rules: Rules = {"position_ids": Split(0)}
    assert split(3, rules, input_ids=TOKENS, position_ids=POSITIONS)[0].count == 1
    several, calls = split(
        2, input_ids=TOKENS.view(2, 15), position_ids=POSITIONS.view(2, 15), cu_seq_lens_q=BOUNDS
    )
    assert several.samples == [1, 1]
    assert [call["cu_seq_lens_q"].tolist() for call in calls] == [[0, 5, 6, 15], [0, 3, 7, 13, 15]]


MASK = (torch.arange(20) < torch.tensor([[20], [3], [4], [5], [2], [6]])).long()


def test_padded_sequences_by_tokens() -> None:
    ids, labels = torch.arange(120).view(6, 20), torch.arange(120).view(6, 20)
    labels = labels.masked_fill(MASK == 0, -100)
    rules: Rules = {"input_ids": Split(by="tokens")}
    batch, calls = split(2, rules, input_ids=ids, attention_mask=MASK, target=labels)
    assert batch.samples == [1, 5]
    assert batch.weights == [20, 20]
    assert batch.targets is not None
    assert [call["input_ids"].shape for call in calls] == [(1, 20), (5, 8)]
    assert [t.shape for t in batch.targets] == [(1, 20), (5, 8)]
    assert int(calls[1]["attention_mask"].sum()) == 20
    from_the_end: Rules = {"input_ids": Split(-2, by="tokens")}
    _, alike = split(2, from_the_end, input_ids=ids, attention_mask=MASK)
    assert [call["input_ids"].shape for call in alike] == [(1, 20), (5, 8)]
    # A sequence of padding alone counts as a token, so that its microbatch has some weight.
    batch, _ = split(
        2, rules, input_ids=ids[:2], attention_mask=MASK[:2] * torch.tensor([[1], [0]])
    )
    assert batch.weights == [20, 1]
    with pytest.raises(MicrobatchError, match="nothing says which of its entries are padding"):
        split(2, rules, input_ids=ids)
    wrong: Any = {"by= must be": Split(by="words"), "Split.dim., REPLICATE, a f": Split}  # type: ignore[arg-type]
    for says, rule in wrong.items():
        with pytest.raises(MicrobatchError, match=says):
            Pipeline(Attends(), split={0: rule})


# ---- the loss of the whole batch


class Attends(nn.Module):
    """Tokens that see those before them in their sequence, told by positions or by bounds."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        length = input_ids.shape[-1]
        places = torch.arange(length)
        if cu_seqlens is not None:
            numbers = torch.bucketize(places, cu_seqlens, right=True)
            mask = (numbers[:, None] == numbers) & (places[:, None] >= places)
        elif position_ids is not None:
            numbers = (position_ids == 0).cumsum(-1)
            mask = (numbers[..., :, None] == numbers[..., None, :]) & (places[:, None] >= places)
        else:
            assert attention_mask is not None
            mask = attention_mask[:, None, :].bool() & (places[:, None] >= places)
        hidden = self.embed(input_ids)
        for layer in self.layers:
            scores = hidden @ hidden.transpose(-1, -2)
            hidden = hidden + layer(scores.masked_fill(~mask, -1e9).softmax(-1) @ hidden)
        logits: Tensor = self.head(hidden)
        return logits


def loss_fn(logits: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(logits.flatten(0, -2), labels.flatten())


PADDED = {"input_ids": torch.arange(120).view(6, 20) % 11, "attention_mask": MASK}
PADDED_LABELS = PADDED["input_ids"].masked_fill(MASK == 0, -100)
BATCHES: dict[str, tuple[dict[str, Any], Tensor, Rules | None]] = {
    "positions": ({"input_ids": TOKENS, "position_ids": POSITIONS}, LABELS, None),
    "bounds": ({"input_ids": TOKENS[0], "cu_seqlens": BOUNDS}, LABELS[0], None),
    "padded": (PADDED, PADDED_LABELS, {"input_ids": Split(by="tokens")}),
}


@pytest.mark.parametrize("name", sorted(BATCHES))
def test_the_loss_and_gradients_are_those_of_the_whole_batch(name: str) -> None:
    kwargs, labels, rules = BATCHES[name]
    case = Case(Attends().double(), (), labels, loss_fn, kwargs=kwargs, split=rules)
    verdict = compare(case, schedule="ZB-V", ranks=2, microbatches=3)
    assert verdict.whole
    verdict.check(1e-12)
    pipe = Pipeline(case.model, ranks=2, microbatches=3, loss_fn=loss_fn, split=rules)
    result = pipe.step(**kwargs, target=labels, outputs=name != "padded")
    assert result.weight == int((labels != -100).sum())
    if name != "padded":
        torch.testing.assert_close(result.outputs, case.model(**kwargs))


# ---- FlexAttention's masks


def attend(m: Any, x: Tensor, mask: BlockMask) -> Tensor:
    """Attends by a block mask: by FlexAttention, or by its function where a gradient is needed."""
    q = m.linear(x)[:, None]
    if not torch.is_grad_enabled():
        return x + flex_attention(q, q, q, block_mask=mask)[:, 0]
    b, h, length, _ = mask.shape  # FlexAttention has no backward on a CPU
    seen = create_mask(mask.mask_mod, b, h, length, length, device="cpu")
    return x + scaled_dot_product_attention(q, q, q, attn_mask=seen)[:, 0]


def flexes() -> nn.Module:
    def run(m: Any, x: Tensor, mask: BlockMask, cu_seqlens: Any = None) -> Tensor:
        for layer in m.layers:
            x = layer(x, mask)
        return x

    torch.manual_seed(0)
    return Does(run, layers=[Does(attend, linear=nn.Linear(8, 8)) for _ in range(2)])


def from_start(start: Tensor) -> Any:
    return lambda b, h, q, kv: (q >= kv) & (kv >= start[b])


def in_one_document(number: Tensor) -> Any:
    return lambda b, h, q, kv: (q >= kv) & (number[q] == number[kv])


START = torch.tensor([0, 3, 5, 2])
MASKS: dict[str, tuple[Any, dict[str, Any]]] = {
    "of each sample": (from_start(START), {}),
    "of packed sequences": (in_one_document(ORDINALS[0]), {"cu_seqlens": BOUNDS}),
}


@pytest.mark.on_cpu("makes its masks on a CPU")
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("name", sorted(MASKS))
def test_a_block_mask_is_split_with_the_batch(name: str) -> None:
    function, packed = MASKS[name]
    batch, length = (1, TOTAL) if packed else (4, 8)
    mask = create_block_mask(function, batch, None, length, length, device="cpu", BLOCK_SIZE=4)
    x, y = torch.randn(2, batch, length, 8)
    case = Case(flexes(), (x,), y, mse_loss, kwargs={"mask": mask, **packed}, evaluates=False)
    verdict = compare(case, schedule="1F1B", ranks=2, microbatches=2)
    assert verdict.whole
    verdict.check(1e-6)
    pipe, plain = Pipeline(case.model, ranks=2, microbatches=2), case.model
    if not packed:
        with torch.no_grad():
            torch.testing.assert_close(pipe.predict(x, mask=mask), plain(x, mask))


@pytest.mark.on_cpu("makes its masks on a CPU")
def test_block_masks_inside_an_argument_are_split_with_the_batch() -> None:
    """As transformers passes one for each kind of layer."""
    own, same = (
        create_block_mask(function, batch, None, 8, 8, device="cpu", BLOCK_SIZE=4)
        for function, batch in ((from_start(START), 4), (in_one_document(torch.ones(8)), None))
    )
    _, calls = split(2, x=torch.zeros(4, 8), masks={"full": own, "sliding": same})
    for call, begin in zip(calls, (0, 2), strict=True):
        dense = create_mask(call["masks"]["full"].mask_mod, 2, None, 8, 8, device="cpu")
        whole = create_mask(own.mask_mod, 4, None, 8, 8, device="cpu")
        assert torch.equal(dense, whole[begin : begin + 2])
        assert call["masks"]["sliding"] is same


@pytest.mark.on_cpu("makes its masks on a CPU")
def test_a_block_mask_looks_alike_in_other_processes() -> None:
    """Its function is not sent: a rank that was not given the batch plans with another one."""
    mask = create_block_mask(MASKS["of each sample"][0], 4, None, 8, 8, device="cpu", BLOCK_SIZE=4)
    leaves, tree = flatten(mask)
    assert any(leaf is START for leaf in leaves)
    read = Structure.read(json.loads(json.dumps(tree.describe("it"))))
    assert read == tree
    twin = unflatten([torch.empty_like(leaf, device="meta") for leaf in leaves], read)
    assert (twin.shape, twin.BLOCK_SIZE) == (mask.shape, mask.BLOCK_SIZE)
    assert twin.kv_indices.is_meta


def test_a_loss_that_counts_otherwise_is_refused() -> None:
    def of_all(logits: Tensor, labels: Tensor) -> Tensor:
        return (
            cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="sum") / labels.numel()
        )

    pipe = Pipeline(Attends().double(), ranks=2, microbatches=3, loss_fn=of_all)
    with pytest.raises(UsageError, match=r"Loss\(fn, weight="):
        pipe.step(input_ids=TOKENS, position_ids=POSITIONS, target=LABELS)
