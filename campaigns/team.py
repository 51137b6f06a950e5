"""What saving and loading cost a team of up to 1,024 ranks, simulated in one process.

The planning, the tables and the checks are Penstock's own; only the messages between processes are calls
of functions, whose arguments are counted as JSON. docs/saving-and-resuming.md has figures of it.
"""

from __future__ import annotations

import json
import tempfile
import time
from argparse import Namespace
from collections.abc import Generator, Iterator, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from campaigns.run import Campaign, Rows
from campaigns.table import Row
from penstock._engine.weights import telling
from penstock._engine.weights.states import Offer, judged
from penstock.checkpoint.contents import OPTIMIZER, STATE, WEIGHTS, Targets
from penstock.checkpoint.loading import Loading
from penstock.checkpoint.planning import file_of, grouped
from penstock.checkpoint.saving import Planner
from penstock.checkpoint.table import TABLE, CheckpointTable, table_text

TEAMS = ((16, 4), (32, 8), (64, 16))
"""Ranks of a pipeline, and replicas over which each weight is sharded."""
SAVE, LOAD = 6, 12
"""The messages that a rank sends and gets; tests/checkpoint/test_meshes.py counts them."""
ROW = 128
"""The bytes that each process tells all before its messages."""
Shapes = list[tuple[str, tuple[int, ...]]]


def llama() -> list[Shapes]:
    """The weights of each layer of a dense model of 70 billion numbers; the first and last stand alone."""
    wide, inner, keys, words = 8192, 28672, 1024, 128256
    attention = {"q": (wide, wide), "k": (keys, wide), "v": (keys, wide), "o": (wide, wide)}
    inside = {"gate": (inner, wide), "up": (inner, wide), "down": (wide, inner)}
    layers = []
    for layer in range(80):
        name = f"model.layers.{layer}"
        of_layer: Shapes = [
            (f"{name}.self_attn.{one}_proj.weight", of) for one, of in attention.items()
        ]
        of_layer += [(f"{name}.mlp.{one}_proj.weight", of) for one, of in inside.items()]
        norms = "input_layernorm", "post_attention_layernorm"
        layers.append(of_layer + [(f"{name}.{one}.weight", (wide,)) for one in norms])
    layers[0].insert(0, ("model.embed_tokens.weight", (words, wide)))
    layers[-1] += [("model.norm.weight", (wide,)), ("lm_head.weight", (words, wide))]
    return layers


def experts() -> list[Shapes]:
    """A mixture of experts of 45,000 weights, by layer."""
    wide, inner, latent = 7168, 2048, 1536
    layers = []
    for layer in range(58):
        name = f"model.layers.{layer}"
        of_layer: Shapes = [
            (f"{name}.self_attn.{one}.weight", (latent, wide))
            for one in ("q_a_proj", "q_b_proj", "kv_a_proj", "kv_b_proj", "o_proj")
        ]
        of_layer += [(f"{name}.mlp.gate.weight", (256, wide)), (f"{name}.norm.weight", (wide,))]
        for expert in range(256):
            for one in ("gate_proj", "up_proj", "down_proj"):
                of_layer.append((f"{name}.mlp.experts.{expert}.{one}.weight", (inner, wide)))
        layers.append(of_layer)
    return layers


MODELS = {"llama 70B": llama, "45k tensors": experts}


class Costs(NamedTuple):
    """Bytes and messages of a rank that is not the first, and what that needs."""

    sent: int
    received: int
    messages: int
    seconds: float
    memory: int

    def told(self) -> tuple[str, ...]:
        """As cells of the table."""
        return (
            f"{self.sent / 1e3:,.1f} kB",
            f"{self.received / 1e3:,.1f} kB",
            str(self.messages),
            f"{self.seconds:.1f} s",
            f"{self.memory / 1e6:,.0f} MB",
        )


# ---- what each rank has


def describe_rank(
    shapes: Shapes, shard: int, shards: int, step: int | None, rate: float
) -> dict[str, Any]:
    """The parts of a rank that has one shard of each weight and of what AdamW keeps for it.

    Args:
        shapes: the weights of its stage.
        shard: which shard.
        shards: how many there are.
        step: the optimizer's count as a Python number; None for a tensor.
        rate: the learning rate.
    """
    tensor = {"$": "tensor"}
    kept = {"exp_avg": tensor, "exp_avg_sq": tensor, "step": tensor if step is None else step}
    names = {
        "kinds": {"model": WEIGHTS, "optimizer": "AdamW", "scheduler": "a state"},
        "tied": {},
        "groups": {"optimizer": [[name for name, _ in shapes]]},
    }
    held = grouped(_tensors(shapes, shard, shards, scalars=step is None))
    return {
        "parts": [part for part, _ in held],
        "keys": [keys for _, keys in held],
        "names": names,
        "values": [[kept, [f"optimizer/{name}" for name, _ in shapes]]],
        "settings": {"optimizer": [{"lr": rate, "betas": [0.9, 0.95], "weight_decay": 0.1}]},
        "state scheduler": [{"last_epoch": rate}, {}],
        "shared": {},
    }


def offer_of(shapes: Shapes, table: CheckpointTable) -> Offer:
    """What a rank has when it loads what such ranks have saved, and what it is given."""
    names = [name for name, _ in shapes]
    here = [f"{label}/{name}" for label in ("model", "optimizer") for name in names]
    about = [["model", WEIGHTS], ["optimizer", OPTIMIZER], ["scheduler", STATE]]
    problems: dict[str, list[str]] = {"hard": [], "missing": [], "loose": []}
    return Offer(sorted(here), sorted(table.names), problems, about)


def _tensors(shapes: Shapes, shard: int, shards: int, *, scalars: bool) -> Iterator[Any]:
    for name, shape in shapes:
        rows = -(-shape[0] // shards)
        begin = min(shard * rows, shape[0])
        box = (begin, *[0] * (len(shape) - 1)), (min(rows, shape[0] - begin), *shape[1:])
        yield ["BF16", shape, *box], [f"model/{name}"]
        yield ["F32", shape, *box], [f"optimizer/{name}/{of}" for of in ("exp_avg", "exp_avg_sq")]
        if scalars:
            yield ["F32", (), (), ()], [f"optimizer/{name}/step"]


# ---- a save, and a load


class Team:
    """A simulated team: pipelines of some ranks, each weight sharded over the replicas."""

    def __init__(self, model: str, ranks: int, replicas: int) -> None:
        layers = MODELS[model]()
        bounds = [round(i * len(layers) / ranks) for i in range(ranks + 1)]
        self.stages = [sum(layers[a:b], Shapes()) for a, b in pairwise(bounds)]
        if not all(self.stages):  # fewer layers than ranks: a stage is a part of one
            every = sum(layers, Shapes())
            bounds = [round(i * len(every) / ranks) for i in range(ranks + 1)]
            self.stages = [every[a:b] for a, b in pairwise(bounds)]
        self.ranks, self.replicas = ranks, replicas
        self.size = ranks * replicas
        self.names = [f"process {process}" for process in range(self.size)]
        self.known, self.leader = telling.Known(), Planner()
        self.before = 0

    def _tell(
        self, parts: Sequence[dict[str, Any]], known: telling.Known, begun: Any, plan: Any
    ) -> Any:
        """As the team's ``tell``: what each sends and gets, the seconds of the leader, and its answers."""
        shown, texts = zip(*(telling.parts_of(of) for of in parts), strict=True)
        heads = [json.dumps([7, digests]) for digests in shown]
        # What the ranks hold themselves is none of the leader's memory.
        self.before = _clear_peak()
        started = time.process_time()
        digests = [json.loads(head)[1] for head in heads]
        asked = known.asked(digests)
        replies = [json.dumps([begun, of]) for of in asked]
        seconds = time.process_time() - started
        told = [
            json.dumps({one: of[one] for one in ask}) for of, ask in zip(texts, asked, strict=True)
        ]
        started = time.process_time()
        answers = [
            json.dumps(one) for one in plan(known.learn(digests, list(map(json.loads, told))))
        ]
        seconds += time.process_time() - started
        sent = [len(a) + len(b) for a, b in zip(heads, told, strict=True)]
        # Before its messages, each gets a row of numbers from all.
        rows = 2 * ROW * self.size
        got = [len(a) + len(b) + rows for a, b in zip(replies, answers, strict=True)]
        return sent, got, seconds, answers

    def save(self, step: int | None, rate: float) -> tuple[Costs, bytes]:
        """Save; return what it costs, and the table."""
        parts = [
            describe_rank(self.stages[i % self.ranks], i // self.ranks, self.replicas, step, rate)
            for i in range(self.size)
        ]
        sent, got, seconds, _ = self._tell(
            parts, self.known, ["/a/folder", "0" * 12], lambda of: self.leader.plan(of, self.names)
        )
        started = time.process_time()
        files = [{"name": file_of(p), "bytes": 1, "crc32": 1} for p in self.leader.writers]
        layout = {"replicas": self.replicas, "processes": self.ranks}
        about = {"layout": layout, "extra": None, "files": files}
        table = table_text({**self.leader.contents, **about}, "0" * 12, 7)
        seconds += time.process_time() - started
        memory = _memory("VmHWM") - self.before
        note = len(json.dumps([file_of(0), 10**12, 2**32]))
        return Costs(max(sent[1:]) + note, max(got[1:]), SAVE, seconds, memory), table

    def load(self, content: bytes) -> tuple[Costs, float]:
        """Load: each rank reads the table and compares it; return the seconds of a rank for that, too."""
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / TABLE).write_bytes(content)
            started = time.process_time()
            table = CheckpointTable(Path(folder))
            offers = [offer_of(self.stages[0], table)._asdict()]
            rank_seconds = time.process_time() - started
        offers += [offer_of(shapes, table)._asdict() for shapes in self.stages[1:]]
        parts = [offers[process % self.ranks] for process in range(self.size)]
        judge = partial(judged, partial(Loading(table, Targets({})).check, True), ())
        sent, got, seconds, left = self._tell(parts, telling.Known(), None, judge)
        assert json.loads(left[0]) == [[], []]
        memory = _memory("VmHWM") - self.before
        # Before that, the leader tells which checkpoints there are, and all what they found of one.
        name = len(json.dumps([["step-00000007", 7]]))
        look = len(json.dumps(["0" * 12, ""]))
        return Costs(max(sent[1:]) + look, max(got[1:]) + name, LOAD, seconds, memory), rank_seconds


def _clear_peak() -> int:
    """Forget the peak of this process's memory; return what it holds now."""
    Path("/proc/self/clear_refs").write_text("5")
    return _memory("VmRSS")


def _memory(what: str) -> int:
    """Bytes of this process: held now (VmRSS), or the most since the peak was cleared (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(what)).split()[1]) * 1024


def rows_of(name: str, model: str, ranks: int, replicas: int) -> Iterator[Row]:
    team = Team(model, ranks, replicas)
    first, table = team.save(None, 0.1)
    size = f"the table has {len(table) / 1e6:.1f} MB"
    yield Row(name, "measured", ("first save", *first.told(), size))
    yield Row(name, "measured", ("later save", *team.save(None, 0.2)[0].told(), ""))
    costs, seconds = team.load(table)
    read = f"a rank reads the table in {seconds:.2f} s"
    yield Row(name, "measured", ("load", *costs.told(), read))
    team.save(1, 0.1)
    later = team.save(2, 0.2)[0]
    yield Row(name, "measured", ("later save, the step a number", *later.told(), ""))


def cases(options: Namespace) -> Generator[tuple[str, Rows]]:
    for model in MODELS:
        for ranks, replicas in TEAMS:
            name = f"{model}, {ranks} x {replicas}"
            yield name, partial(rows_of, name, model, ranks, replicas)


CAMPAIGN = Campaign(
    cases,
    columns=(
        "what", "a rank sends", "it gets", "messages", "CPU of rank 0", "its memory at the peak", "",
    ),
    bad=(),
    limit=1800.0,
)  # fmt: skip
