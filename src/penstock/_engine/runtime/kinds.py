"""What is known of microbatches that look the same: one record for each kind, the same ones on all ranks.

How a microbatch's arguments look, what the call does, and the state of the stages on *all* ranks make its
kind. Whatever was found out once for a kind is in its record, and nowhere else.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock._engine.microbatches import Batch, Microbatch, Ways
from penstock._engine.runtime.loss import StepLoss, Weights
from penstock._engine.values import (
    PLAIN,
    Layout,
    TensorLayout,
    check_plain,
    flatten,
    layout_in,
    layout_of,
    restrided,
    tensors_in,
    unflatten,
)
from penstock.errors import AgreementError, UsageError
from penstock.stage import Binding

Key = int | str
"""An argument, by position or name."""
MOST_KINDS = 256
"""The number of kinds that are known at most."""
_MOST_CALLS = 1024


# ---- what one rank brings to a call


class Brought:
    """What one rank brings to a call: how its arguments and its stages look.

    Args:
        mode: what the call does, see :attr:`penstock._engine.runtime.Call.mode`.
        state: what plans depend on in the stages of this rank, as JSON data.
        batch: as much of the batch as this process was given.
        paths: for each microbatch, a hash of what the author's code does in it; None where that is not known.

    Attributes:
        digest: a hash of it all, at least 0.
    """

    def __init__(
        self,
        mode: str,
        state: Any,
        batch: Batch,
        paths: Sequence[str] | None = None,
    ) -> None:
        self._facts = {
            "mode": mode,
            "state": state,
            "count": batch.count,
            "samples": None if batch.samples is None else list(batch.samples),
            "target": batch.targets is not None,
            "learning": None if batch.targets is None else _learning(batch.targets),
            "presplit": None if batch.count is None else batch.presplit,
            "counted": batch.counted,
            "weighted": batch.weights is not None,
            "dim": batch.dim,
            "data": has_data(batch),
            "sequences": None if batch.sequences is None else list(batch.sequences),
        }
        self._of: list[int] = []
        self._parts: list[Microbatch] = []
        looks: dict[Any, int] = {}
        for index, part in enumerate(batch.parts or ()):
            look = look_of(part), paths[index] if paths else ""
            number = looks.setdefault(look, len(looks))
            if number == len(self._parts):
                self._parts.append(part)
            self._of.append(number)
        text = repr((self._facts, self._of, list(looks)))
        self.digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) >> 2

    def describe(self) -> dict[str, Any]:
        """It as JSON data for :func:`merge`.

        Raises:
            SpecError: an argument cannot travel.
        """
        described = [[_described(part), _local(part)] for part in self._parts]
        return {**self._facts, "parts": described, "of": self._of}


def has_data(batch: Batch) -> bool:
    """Tell whether arguments are there, and none of them is on the meta device."""
    if batch.look is not None or batch.parts is None:
        return batch.parts is not None  # tensors on the meta device have no look
    tensors = tensors_in([[part.args, part.kwargs] for part in batch.parts])
    return True not in [tensor.is_meta for tensor in tensors]


def _learning(targets: Sequence[Any]) -> list[list[Any]]:
    """The layouts of the tensors that require grad in each target, as JSON data; an empty list for none."""
    if True not in [tensor.requires_grad for tensor in tensors_in([*targets])]:
        return []
    return [[[*layout_of(t)] for t in tensors_in(target) if t.requires_grad] for target in targets]


def _named(part: Microbatch) -> dict[Key, Any]:
    named: dict[Key, Any] = dict(enumerate(part.args))
    return named | part.kwargs


def _described(part: Microbatch) -> list[Any]:
    """The layouts of a microbatch's arguments, as JSON data."""
    named = _named(part)
    for key, value in named.items():
        check_plain(value, f"argument {key!r}")
    return [[key, layout_in(value).describe()] for key, value in named.items()]


def _local(part: Microbatch) -> str:
    """Return how those arguments look that no other rank hears of."""
    rows = [(key, type(x).__name__, flatten(x)[0]) for key, x in part.local.items()]
    return repr([(*row, list(map(_look_of_leaf, leaves))) for *row, leaves in rows]) if rows else ""


def look_of(part: Microbatch) -> Any:
    """A key that quickly tells microbatches of different kinds apart."""
    looks: list[Any] = [_local(part)] if part.local else []
    for key, value in (*enumerate(part.args), *part.kwargs.items()):
        leaves, tree = flatten(value)
        looks += [key, str(tree), *map(_look_of_leaf, leaves)]
    return tuple(looks)


def contents_of(value: Any) -> bytes:
    """A hash of the numbers and plain values in a value; tensors without data count by their shapes."""
    digest = hashlib.sha256()
    for leaf in flatten(value)[0]:
        if not isinstance(leaf, Tensor):
            digest.update(repr(leaf).encode())
            continue
        digest.update(f"{tuple(leaf.shape)} {leaf.dtype}".encode())
        if leaf.layout is torch.strided and not leaf.is_meta and not leaf.is_nested:
            plain = leaf.detach().reshape(-1).contiguous().cpu()
            digest.update(plain.view(torch.uint8).numpy().data)
    return digest.digest()


def _look_of_leaf(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return repr(leaf) if type(leaf) in PLAIN else type(leaf).__name__
    if leaf.is_nested or leaf.layout is not torch.strided:
        return type(leaf).__name__
    return tuple(leaf.shape), leaf.dtype, leaf.stride(), leaf.requires_grad


# ---- what all ranks bring together


@dataclass(frozen=True)
class ModelCall:
    """The arguments of the model, which some ranks were given, and others hear of.

    Args:
        layouts: for each microbatch, its arguments' layouts, by position or name.
        texts: for each microbatch, a text that is equal for those of one kind.
        samples: the number of samples in each microbatch.
        holders: the ranks that were given the arguments.
        targets: for each rank, whether it was given the target.
        presplit: whether the user split the batch.
        counted: whether the samples are those of first tensors, since nobody said what counts them.
        weighted: whether microbatches count by something else than their samples.
        dim: the dimension of the tokens, if the batch is a packed row.
        sequences: the number of sequences in each microbatch of a packed row.
        learning: for each microbatch, the layouts of the tensors in its target that require grad; empty if
            there are none.
    """

    layouts: tuple[Mapping[Key, Layout], ...]
    texts: tuple[str, ...]
    samples: tuple[int, ...]
    holders: frozenset[int]
    targets: tuple[bool, ...]
    presplit: bool = False
    counted: bool = False
    weighted: bool = False
    dim: int | None = None
    sequences: tuple[int, ...] = ()
    learning: Sequence[Sequence[Any]] = ()

    @property
    def ways(self) -> Ways:
        """What the entries of a tensor in the output may be, see :func:`merge`."""
        if self.dim is None:
            return [(0, self.samples)]
        # Losses of single labels lack that of the first token.
        of_labels = [tokens - 1 for tokens in self.samples]
        return [(self.dim, self.samples), (self.dim, of_labels), (0, self.sequences)]

    @property
    def count(self) -> int:
        """The number of microbatches."""
        return len(self.texts)

    @cached_property
    def sums_gradients(self) -> bool:
        """Whether several ranks were given tensors that require grad, so that each needs their gradients."""
        leaves = (leaf for of in self.layouts for layout in of.values() for leaf in layout.tensors)
        of_inputs = len(self.holders) > 1 and any(leaf.learns for leaf in leaves)
        return of_inputs or (sum(self.targets) > 1 and bool(self.learning))

    @cached_property
    def learns(self) -> bool:
        """Whether a tensor among the arguments requires grad."""
        return any(leaf.learns for of in self.layouts for x in of.values() for leaf in x.tensors)

    def learners(self, parts: Sequence[Microbatch], targets: Sequence[Any] | None) -> list[Tensor]:
        """The tensors of the batch that require grad, in one order on every rank.

        Args:
            parts: a rank's microbatches, completed.
            targets: its targets; None if it was given none, for which tensors on the meta device stand.
        """
        values = [
            [part.args, [part.kwargs[name] for name in sorted(part.kwargs)]] for part in parts
        ]
        if targets is not None:
            return [t for t in tensors_in([values, targets]) if t.requires_grad]
        absent = [
            TensorLayout(*row).empty(torch.device("meta")) for of in self.learning for row in of
        ]
        return [*(t for t in tensors_in(values) if t.requires_grad), *absent]

    def complete(self, rank: int, parts: Sequence[Microbatch] | None) -> Sequence[Microbatch]:
        """A rank's microbatches; tensors that it was not given are on the meta device."""
        if parts is not None and (rank in self.holders or not self.holders):
            return parts
        mine = parts or [Microbatch((), {}, samples) for samples in self.samples]
        return [filled(part, layouts) for part, layouts in zip(mine, self.layouts, strict=True)]


def filled(part: Microbatch, layouts: Mapping[Key, Layout]) -> Microbatch:
    """A microbatch with arguments of these layouts on the meta device."""
    values = {key: _placeholder(layout) for key, layout in layouts.items()}
    args = tuple(value for key, value in values.items() if isinstance(key, int))
    kwargs = {key: value for key, value in values.items() if isinstance(key, str)}
    return replace(part, args=args, kwargs=kwargs)


def _placeholder(layout: Layout) -> Any:
    device = torch.device("meta")
    leaves = [
        restrided(x.empty(device), x.strides).requires_grad_(x.learns)
        if isinstance(x, TensorLayout)
        else x
        for x in layout.leaves
    ]
    return unflatten(leaves, layout.tree)


def merge(rows: Sequence[Mapping[str, Any]]) -> ModelCall:
    """Return what all ranks bring together. The result is the same on every rank, and so are errors.

    Args:
        rows: each rank's :meth:`Brought.describe`, in rank order.

    Raises:
        AgreementError: ranks differ in something that several of them were given.
        UsageError: no rank was given arguments, or one was given some of them.
    """
    mode = _common(rows, "mode", "what they do")
    count = _common(rows, "count", "the number of microbatches")
    counted = any(row["counted"] for row in rows)
    presplit = bool(_common(rows, "presplit", "whether the batch is split already"))
    counting: Sequence[Mapping[str, Any]] = rows
    if counted or presplit:
        # Targets say how many there are, unless the user does, beside the arguments.
        who = "target" if counted else "parts"
        counting = [row for row in rows if row[who] and row["samples"]] or rows
    samples = _common(counting, "samples", "the samples of the microbatches")
    if count is None or not any(row["parts"] for row in rows):
        name = next(method for start, method in _METHODS.items() if mode.startswith(start))
        raise UsageError(
            f"{name}() was given no batch; call it with the model's arguments, at least on the rank of the "
            "first stage. A Pipeline has no train() mode: step trains, and evaluate and predict evaluate"
        )
    holders = [rank for rank, row in enumerate(rows) if any(named for named, _ in row["parts"])]
    for rank in holders[1:]:
        _check_same(holders[0], rows[holders[0]], rank, rows[rank])
    named: list[Any] = []
    texts: list[str] = []
    nothing: Any = [[], ""]
    for microbatch in range(count):
        parts = [row["parts"][row["of"][microbatch]] if row["parts"] else nothing for row in rows]
        named.append(parts[holders[0]][0] if holders else [])
        facts = [mode, [row["state"] for row in rows], named[-1], [local for _, local in parts]]
        texts.append(hashlib.sha256(json.dumps(facts).encode()).hexdigest())
    # A rank that was given tensors without data gets those of another.
    holders = [rank for rank in holders if rows[rank]["data"]] or holders
    layouts = {
        text: {key: Layout.read(layout) for key, layout in of}
        for text, of in dict(zip(texts, named, strict=True)).items()
    }
    return ModelCall(
        tuple(layouts[text] for text in texts),
        tuple(texts),
        tuple(samples or [0] * count),
        frozenset(holders),
        tuple(bool(row["target"]) for row in rows),
        presplit,
        counted,
        any(row["weighted"] for row in rows),
        _common(rows, "dim", "the dimension of the tokens"),
        tuple(_common(rows, "sequences", "the sequences of the microbatches") or ()),
        _common(rows, "learning", "which tensors of the target require grad") or (),
    )


_METHODS = {"train": "step", "evaluate with loss": "evaluate", "evaluate": "predict"}
"""The method that the user called, by the start of the mode."""


def _common(rows: Sequence[Mapping[str, Any]], key: str, what: str) -> Any:
    """The value that all ranks with one have in common."""
    values = {rank: row[key] for rank, row in enumerate(rows) if row[key] is not None}
    if len({json.dumps(value) for value in values.values()}) > 1:
        listed = "; ".join(f"rank {rank}: {value}" for rank, value in values.items())
        raise AgreementError(f"ranks differ in {what}: {listed}")
    return next(iter(values.values()), None)


def _check_same(first: int, row: Mapping[str, Any], rank: int, other: Mapping[str, Any]) -> None:
    """Check that two ranks were given the same arguments."""
    for microbatch, numbers in enumerate(zip(row["of"], other["of"], strict=True)):
        mine, others = dict(row["parts"][numbers[0]][0]), dict(other["parts"][numbers[1]][0])
        if mine.keys() != others.keys():
            raise UsageError(
                f"rank {first} was given the arguments {[*mine]} of the model, and rank {rank} {[*others]}; "
                "give a rank all of them, or the target alone, or nothing"
            )
        for key, layout in mine.items():
            if layout != others[key]:
                shown = [", ".join(map(str, Layout.read(x).leaves)) for x in (layout, others[key])]
                raise AgreementError(
                    f"ranks were called with different shapes: argument {key!r} of microbatch {microbatch} "
                    f"is {shown[0]} on rank {first} and {shown[1]} on rank {rank}; give every rank the same "
                    "batch"
                )


# ---- the records


@dataclass(eq=False)
class Kind:
    """What is known of one kind of microbatch.

    Attributes:
        text: what makes the kind, but for what the author's code does.
        number: its part of the tags of messages; of two kinds that are known, each has its own.
        arguments: the layouts of the model's arguments, by position or name.
        path: a hash of what the author's code does in it.
        plan: what the partition plans for it; None for stages that were placed by hand.
        keywords: for each stage that was placed by hand, the names of the keyword arguments that it gets.
        bindings: how each stage of this process is called.
        layouts: of the messages, by the number of the wire.
        missing: for each edge of which a gradient was missing once, the layouts of its gradients.
        plain: the edges whose values are known to be able to travel.
        flops: the floating-point operations of the model's forward, once they were asked for.
        calls: how many calls of it are known.
    """

    text: str
    number: int
    arguments: Mapping[Key, Layout]
    path: str = ""
    plan: Any = None
    keywords: Mapping[int, Sequence[str]] = field(default_factory=dict)
    bindings: Mapping[int, Binding] = field(default_factory=dict)
    layouts: dict[int, Layout] = field(default_factory=dict)
    missing: dict[str, list[TensorLayout]] = field(default_factory=dict)
    plain: set[str] = field(default_factory=set)
    flops: float | None = None
    calls: int = 0

    @property
    def example(self) -> Microbatch:
        """A microbatch of the kind, on the meta device."""
        return filled(Microbatch((), {}, 0), self.arguments)


EACH = 2
"""How many numbers that a process says before a call are of that call alone."""


class Settled(NamedTuple):
    """What follows from what the processes said before a call, and holds while they say the same again.

    Attributes:
        rows: what each of them said, in the numbers of a :class:`~penstock._engine.runtime.calls.Head`
            without the first ones, which are of one call.
        digests: what the ranks of this pipeline brought.
        loss: the loss, if one is computed.
        weights: how much each microbatch counts in it.
    """

    rows: Sequence[Sequence[int]]
    digests: tuple[int, ...]
    loss: StepLoss | None
    weights: Weights

    def is_said_again(self, rows: Sequence[Sequence[int]]) -> bool:
        """Tell whether the processes say the same in these rows, and agree in what is of one call."""
        for row, before in zip(rows, self.rows, strict=True):
            if row[:EACH] != rows[0][:EACH] or row[EACH:] != before:
                return False
        return True


@dataclass(eq=False)
class Agreement:
    """What the ranks agreed on; it holds for every call to which they bring the same digests.

    Attributes:
        model_call: the arguments of the model.
        kinds: each microbatch's kind.
        program: the program of this process.
        flows: for each microbatch, the flow of its values in the program.
        number: counts the agreements of this pipeline from 1, the same on all of its ranks.
        settled: what the latest call settled for those that follow; None if each must look again.
    """

    model_call: ModelCall
    kinds: tuple[Kind, ...]
    program: Any
    flows: tuple[Any, ...]
    number: int = 0
    settled: Settled | None = None


class KnownCalls:
    """The calls that are known, by the digests of all ranks, and with them their kinds.

    The call that was made the longest ago is forgotten first, and a kind with the last of its calls. All
    ranks make the same calls, so all of them forget the same.

    Args:
        rank: this process's rank.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._calls: dict[tuple[int, ...], Agreement] = {}
        self._by_mine: dict[int, Agreement] = {}
        self._kinds: dict[tuple[str, str], Kind] = {}
        self._number = 0

    def __iter__(self) -> Iterator[Agreement]:
        return iter(self._calls.values())

    def get(self, digests: tuple[int, ...]) -> Agreement | None:
        """Return what was agreed on when the ranks brought these digests before."""
        agreement = self._calls.pop(digests, None)
        if agreement is not None:
            self._calls[digests] = self._by_mine[digests[self._rank]] = agreement
        return agreement

    def expected(self, digest: int) -> Agreement | None:
        """Return what was agreed on when this rank brought this digest last."""
        return self._by_mine.get(digest)

    @property
    def kinds(self) -> Iterator[Kind]:
        """The kinds that are known, the latest first."""
        return reversed(self._kinds.values())

    def free_numbers(self) -> Iterator[int]:
        """The numbers that no known kind has, from the smallest."""
        taken = {kind.number for kind in self._kinds.values()}
        return (number for number in itertools.count() if number not in taken)

    def add(self, digests: tuple[int, ...], agreement: Agreement) -> None:
        """Number and remember a call, and forget the oldest if there are too many."""
        self._number += 1
        agreement.number = self._number
        self._calls[digests] = self._by_mine[digests[self._rank]] = agreement
        for kind in set(agreement.kinds):
            self._kinds[kind.text, kind.path] = kind
            kind.calls += 1
        while len(self._calls) > 1 and (
            len(self._calls) > _MOST_CALLS or len(self._kinds) > MOST_KINDS
        ):
            self._forget(next(iter(self._calls)))

    def drop(self, agreement: Agreement) -> None:
        """Forget the kinds of a call, and all calls of these: they are planned anew."""
        for digests, known in list(self._calls.items()):
            if not {*agreement.kinds}.isdisjoint(known.kinds):
                self._forget(digests)

    def _forget(self, digests: tuple[int, ...]) -> None:
        agreement = self._calls.pop(digests)
        if self._by_mine.get(digests[self._rank]) is agreement:
            del self._by_mine[digests[self._rank]]
        for kind in set(agreement.kinds):
            kind.calls -= 1
            if not kind.calls:
                del self._kinds[kind.text, kind.path]
