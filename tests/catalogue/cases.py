"""Models and batches that are trained in a pipeline and in a plain loop: one family, for all comparisons."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from penstock import REPLICATE, Loss, Microbatches, Pipeline, Split, add_loss
from penstock._engine.microbatches import Rules
from penstock.schedule import Edge
from penstock.testing import Case
from tests.catalogue.draws import BETWEEN, noisy
from tests.pipeline.models import (
    WIDTH,
    X,
    Y,
    chain,
    mean_loss,
    named,
    sum_loss,
)

WORDS, SAMPLES, IGNORED = 11, 8, -100


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(1, WORDS, shape, generator=torch.Generator().manual_seed(seed))


# ---- a language model, in many variants


class Block(nn.Module):
    """Attends, and perhaps drops, adds a loss that balances its gates, or computes itself again."""

    def __init__(self, *, adds: str = "", drop: float = 0.0, recompute: bool = False) -> None:
        super().__init__()
        self.adds, self.recompute = adds, recompute
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.drop = nn.Dropout(drop)

    def forward(self, hidden: Tensor) -> Tensor:
        again: Tensor = (
            checkpoint(self.mixed, hidden, use_reentrant=False)
            if self.recompute
            else self.mixed(hidden)
        )
        return again

    def mixed(self, hidden: Tensor) -> Tensor:
        query, key, value = self.mix(self.norm(hidden)).chunk(3, -1)
        if self.adds:
            add_loss(self.adds, query.softmax(-1).mean((0, 1)).square().sum(), weight=0.25)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        mixed: Tensor = self.out(self.drop(attended))
        return hidden + mixed


class Language(nn.Module):
    """Four blocks between an embedding and a head.

    Args:
        tied: the head's weight is the embedding's.
        detached: of the tied weight's two uses the head's gives no gradient.
        looped: the four blocks are one.
        skips: what the embedding gives is used by each block and the head.
        placed: it has an embedding of places, of three kinds.
        options: of each block.
    """

    def __init__(
        self, *, tied: bool = False, detached: bool = False, looped: bool = False, skips: bool = False,
        placed: bool = False, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        self.detached, self.looped, self.skips = detached, looped, skips
        self.embed = nn.Embedding(WORDS, WIDTH)
        if placed:
            self.places = nn.Embedding(9, WIDTH)
        self.blocks = nn.ModuleList([Block(**options) for _ in range(1 if looped else 4)])
        self.head = nn.Linear(WIDTH, WORDS, bias=not tied)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, places: Tensor | None = None, scale: Any = None) -> Tensor:
        hidden: Tensor = self.embed(tokens)
        if places is not None:
            hidden = hidden + self.places(places).sum(0)
        first = hidden = hidden if scale is None else hidden * scale
        for block in list(self.blocks) * (4 if self.looped else 1):
            hidden = block(hidden + first if self.skips else hidden)
        if self.detached:
            return functional.linear(hidden, self.head.weight.detach())
        logits: Tensor = self.head(hidden * first if self.skips else hidden)
        return logits


LOOPED = [["embed", "blocks.0"], ["blocks.0"], ["blocks.0"], ["blocks.0", "head"]]
"""How a looped one is cut into four stages."""


def token_loss(logits: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, -2), target.flatten(), ignore_index=IGNORED)


def token_sum(logits: Tensor, target: Tensor) -> Tensor:
    flat = logits.flatten(0, -2)
    return functional.cross_entropy(flat, target.flatten(), ignore_index=IGNORED, reduction="sum")


def valid(target: Tensor) -> Tensor:
    return (target != IGNORED).sum()


BY_TOKENS = Loss(token_loss, weight=valid)
"""A mean over the tokens that count."""


TOKENS = draw(SAMPLES, 6)
NEXT = TOKENS.roll(-1, 1)
LENGTHS = torch.tensor([[1], [5], [0], [0], [2], [4], [1], [6]])
RAGGED_NEXT = torch.where(torch.arange(6) < LENGTHS, NEXT, IGNORED)
"""Of four microbatches one has no token that counts."""
RAGGED = [draw(2, 5), draw(1, 9, seed=1), draw(3, 2, seed=2), draw(2, 7, seed=3)]
PLACES = draw(3, SAMPLES, 6, seed=1) % 9


def language(args: Sequence[Any] = (TOKENS,), target: Any = NEXT, **options: Any) -> Case:
    """A language model on a batch; options that a case has are the case's."""
    of_case = {name: options.pop(name) for name in ("kwargs", "split") if name in options}
    loss_fn = options.pop("loss_fn", token_loss)
    torch.manual_seed(3)
    model = Language(**options).double()
    return Case(model, args, target, loss_fn, **of_case)


def ragged(**options: Any) -> Case:
    targets = [part.roll(-1, 1) for part in RAGGED]
    return language([Microbatches(RAGGED)], targets, **options)


def some_count() -> Case:
    """Ragged, and of the last microbatch nothing counts."""
    case = ragged(loss_fn=BY_TOKENS)
    targets = [part.masked_fill(part == 3, IGNORED) for part in case.target]
    return replace(case, target=[*targets[:-1], torch.full_like(targets[-1], IGNORED)])


def frozen() -> Case:
    case = language(tied=True)
    case.model.get_parameter("embed.weight").requires_grad_(False)
    return case


def sparse() -> Case:
    case = language(tied=True)
    case.model.get_submodule("embed").sparse = True  # type: ignore[assignment] # an Embedding
    return case


def columns(value: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    return list(value.split(list(sizes), 1))


def by_length(args: Any, kwargs: Any, target: Any, count: int) -> Microbatches:
    return Microbatches(args[0].split([3, 3, 1, 1]), targets=target.split([3, 3, 1, 1]))


def placed(places: Tensor, rule: Any) -> Case:
    kwargs = {"places": places, "scale": torch.tensor(2.0)}
    return language(kwargs=kwargs, split={"places": rule}, placed=True)


LANGUAGE: dict[str, Callable[[], Case]] = {
    "attention": language,
    "skip edges": partial(language, skips=True),
    "tied": partial(language, tied=True),
    "half frozen": partial(language, tied=True, detached=True),
    "frozen": frozen,
    "sparse": sparse,
    "looped": partial(language, looped=True),
    "dropout": partial(ragged, drop=0.3),
    "dropout, recomputed": partial(ragged, drop=0.3, recompute=True),
    "ragged": ragged,
    "tokens that count": partial(language, target=RAGGED_NEXT, loss_fn=BY_TOKENS),
    "a mean over tokens": partial(
        language, target=RAGGED_NEXT, loss_fn=Loss(token_loss, over="tokens")
    ),
    "a sum over tokens": partial(
        language, target=RAGGED_NEXT, loss_fn=Loss(token_sum, reduction="sum", over="tokens")
    ),
    "ragged, some count": some_count,
    "added losses": partial(ragged, adds="balance"),
    "added losses, recomputed": partial(ragged, adds="balance", recompute=True),
    "a rule for positions": partial(placed, PLACES, Split(1)),
    "a function for positions": partial(placed, PLACES, columns),
    "a table for all": partial(placed, PLACES[:, :1], REPLICATE),
    "a function for the call": partial(language, split=by_length),
}

# ---- an encoder and a decoder: what the encoder makes is used by every stage of the decoder


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.mix = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, source: Tensor) -> Any:
        hidden = self.embed(source)
        return hidden + self.mix(hidden, hidden, hidden, key_padding_mask=source == 0)[0]


class Begin(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.embed = nn.LayerNorm(WIDTH), nn.Embedding(WORDS, WIDTH)

    def forward(self, memory: Tensor, *, said: Tensor) -> dict[str, Tensor]:
        return {"normed": self.norm(memory), "hidden": self.embed(said)}


class Decoder(nn.Module):
    def __init__(self, out: int = WIDTH) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.lin = nn.Linear(WIDTH, out)

    def forward(self, normed: Tensor, hidden: Tensor) -> Any:
        attended = self.attend(hidden, normed, normed, need_weights=False)[0]
        return self.lin(hidden + torch.tanh(attended))


class Answer(Decoder):
    def forward(self, normed: Tensor, better: Tensor) -> Any:
        return super().forward(normed, better)


class Translator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode, self.begin = Encoder(), Begin()
        self.decode, self.answer = Decoder(), Answer(WORDS)

    def forward(self, source: Tensor, said: Tensor) -> Any:
        begun = self.begin(self.encode(source), said=said)
        return self.answer(begun["normed"], self.decode(**begun))


def translator() -> Case:
    """Both lengths are others in each microbatch."""
    torch.manual_seed(3)
    calls = [
        {"source": draw(2, 3 + i % 3, seed=i), "said": draw(2, 2 + i % 3, seed=50)}
        for i in range(4)
    ]
    targets = [call["said"].roll(-1, 1) for call in calls]
    return Case(Translator().double(), [Microbatches(calls)], targets, token_loss)


EDGES = (
    Edge("memory", 0, (1,)), Edge("normed", 1, (2, 3)), Edge("hidden", 1, (2,)), Edge("better", 2, (3,)),
)  # fmt: skip
"""How its children are four stages by hand."""

# ---- gradients that are missing, in some microbatches or in all

MARKED = X.abs() * torch.where(torch.arange(SAMPLES) // 2 == 2, -1, 1)[:, None]
"""Microbatch 2 of 4 alone has a negative sum."""
Fork = dict[str, Tensor]


class Forked(nn.Module):
    """Gives two values, each from a layer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any) -> Fork:
        both = x if isinstance(x, dict) else {"a": x, "b": x, "sign": x.sum(1)}
        return {"a": self.a(both["a"]).tanh(), "b": self.b(both["b"]).tanh(), "sign": both["sign"]}


class Join(nn.Module):
    def __init__(self, use: Callable[[Fork], Tensor]) -> None:
        super().__init__()
        self.use, self.lin = use, nn.Linear(WIDTH, WIDTH)

    def forward(self, value: Fork) -> Any:
        return self.lin(self.use(value))


def on_a_branch(value: Fork, bound: float = 0.0) -> Tensor:
    """Rows with a negative mark use b; a microbatch without any takes no look at it."""
    chosen = value["sign"] < bound
    return value["a"] + value["b"] * chosen[:, None] if bool(chosen.any()) else value["a"]


def in_a_checkpoint(value: Fork) -> Tensor:
    once: Tensor = checkpoint(lambda a, b: a.tanh(), value["a"], value["b"], use_reentrant=True)
    return once


class FirstOfTwo(torch.autograd.Function):
    """The other gets no gradient."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        return a.clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        return grad_outputs[0], None


def first_of_two(value: Fork) -> Tensor:
    first: Tensor = FirstOfTwo.apply(value["a"], value["b"])  # type: ignore[no-untyped-call]
    return first


USES: dict[str, tuple[Callable[[Fork], Tensor], Tensor]] = {
    "a branch of microbatch 2": (on_a_branch, MARKED),
    "a branch never taken": (on_a_branch, MARKED.abs()),
    "a branch taken for zeros alone": (lambda v: on_a_branch(v, 1e-9), X.abs() + 1),
    "never": (lambda value: value["a"], X),
    "detached": (lambda value: value["a"] + value["b"].detach(), X),
    "neither": (lambda value: value["a"].detach(), X),
    "a reentrant checkpoint that leaves it alone": (in_a_checkpoint, X),
    "a function without a gradient": (first_of_two, X),
}
"""How the end of a model uses two values, which may get no gradient, and its batch."""


def missing(use: str) -> Case:
    torch.manual_seed(0)
    function, x = USES[use]
    return Case(
        nn.Sequential(Forked(), Forked(), Forked(), Join(function)).double(), (x,), Y, mean_loss
    )


# ---- modules that do odd things


class Does(nn.Module):
    """A function of its argument, before a linear layer or without one."""

    def __init__(self, function: Callable[[Any], Any], *, learns: bool = True) -> None:
        super().__init__()
        self.function, self.lin = function, nn.Linear(WIDTH, WIDTH) if learns else nn.Identity()

    def forward(self, value: Any) -> Any:
        return self.function(self.lin(value)) if isinstance(value, Tensor) else self.function(value)


def changed(x: Tensor) -> Tensor:
    """Gives what it is given, with other numbers."""
    return x.mul_(2).add_(1)


def two(x: Any) -> tuple[Tensor, dict[str, Any]]:
    """Takes a tensor or a pair, gives a pair."""
    x = x[0] + x[1]["deep"][0] if isinstance(x, tuple) else x
    return x.sin(), {"deep": [x.cos(), None, "text"], "mask": x.detach() > 0}


def one(pair: tuple[Tensor, dict[str, Any]]) -> Tensor:
    product: Tensor = pair[0] * pair[1]["deep"][0] * pair[1]["mask"]
    return product


def doubles(module: nn.Module, inward: Any, _: Any) -> Any:
    return (inward[0] * 2,)


def hooked() -> nn.Module:
    """On modules and on parameters; all change gradients."""
    model = chain(4)
    for layer in list(model)[1:]:
        layer.register_full_backward_hook(doubles)
    for parameter in model.parameters():
        parameter.register_hook(lambda grad: grad * 3)
    return model


def partly_frozen() -> nn.Module:
    model = chain(4)
    model[0].requires_grad_(False)
    return model


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


class Picks(nn.Linear):
    """Looks at its data, and leaves the second of its arguments alone."""

    def forward(self, hidden: Tensor, first: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(hidden + first if bool((first > 1e9).any()) else hidden)


class Leaves(nn.Module):
    """Of two stages that use a value, one gives no gradient for it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = linear(), linear(), linear()
        self.last = Picks(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        first = self.first(x)
        picked: Tensor = self.last(self.third(self.second(first)), first)
        return picked


ODD: dict[str, Callable[[], nn.Module]] = {
    "frozen layers": partly_frozen,
    "a user without gradient": Leaves,
    "in place at the start of a stage": lambda: nn.Sequential(
        linear(), Does(changed, learns=False), linear(), Does(changed, learns=False)
    ),
    "nested values": lambda: nn.Sequential(linear(), Does(two), Does(two), Does(one), linear()),
    "sparse gradients": lambda: nn.Sequential(
        Does(lambda x: (x[:, 0] > 0).long(), learns=False),
        nn.Embedding(8, WIDTH, sparse=True),
        linear(),
        linear(),
    ),
    "hooks": hooked,
    "a result that nobody uses": lambda: Aside(),
    "no parameters at the end": lambda: nn.Sequential(linear(), nn.Tanh(), linear(), nn.Tanh()),
}


def odd(name: str) -> Case:
    torch.manual_seed(0)
    return Case(ODD[name]().double(), (X,), Y, mean_loss)


class Aside(nn.Module):
    """One of its layers only adds a loss: nobody uses what it gives."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.aside, self.more, self.last = (linear() for _ in range(4))
        self.aside.register_forward_hook(lambda *call: add_loss("size", call[2].square().mean()))

    def forward(self, x: Tensor) -> Tensor:
        self.aside(self.first(x))
        hidden: Tensor = self.last(self.more(x))
        return hidden


# ---- batches

MASK = (X > 0).double()


def arguments(*args: Any, split: Rules | None = None, **kwargs: Any) -> Case:
    return Case(named(), args, Y, mean_loss, kwargs=kwargs, split=split)


def uneven(samples: int, loss_fn: Any) -> Case:
    return Case(chain(4), (X[:samples],), Y[:samples], loss_fn)


BATCHES: dict[str, Callable[[], Case]] = {
    "seven samples": partial(uneven, 7, mean_loss),
    "five, a sum": partial(uneven, 5, Loss(sum_loss, reduction="sum")),
    "by name": partial(arguments, x=X),
    "a split mask": partial(arguments, X, mask=MASK, split={"mask": Split()}),
    "a whole mask": partial(arguments, X, mask=MASK[0], split={"mask": REPLICATE}),
    "a plain value": partial(arguments, X, scale=3.0),
    "nothing in its place": partial(arguments, X, mask=None),
    "another dimension": lambda: Case(
        nn.Sequential(Does(lambda x: x.t(), learns=False), *chain(3)).double(),
        (X.t(),),
        Y,
        mean_loss,
        split={0: Split(1)},
    ),
    "a nested target": lambda: Case(
        chain(4),
        (X,),
        {"values": (Y,), "scale": 2.0},
        lambda output, target: mean_loss(output, target["values"][0]) * target["scale"],
    ),
    "no target": lambda: Case(chain(4), (X,), None, lambda output, _: output.square().mean()),
}

# ---- all of them

CASES: dict[str, Callable[[], Case]] = {
    **LANGUAGE,
    **BATCHES,
    "encoder-decoder": translator,
    **{f"gradient: {name}": partial(missing, name) for name in USES},
    **{f"model: {name}": partial(odd, name) for name in ODD},
    **{f"draws: {name}": partial(noisy, name) for name in BETWEEN},
}


def pipeline(of: Case, stages: Any = 4, **options: Any) -> Pipeline:
    """A pipeline of a copy of a case's model; ``cut`` cuts it at once, by the arguments of the case."""
    cut = options.pop("cut", False)
    usual: dict[str, Any] = {"microbatches": 8, "loss_fn": of.loss_fn}
    pipe = Pipeline(copy.deepcopy(of.model), stages=stages, **(usual | options))
    if cut:
        pipe.cut(*of.args)
    return pipe
