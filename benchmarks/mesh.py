"""Two pipelines of two ranks, their stages sharded by FSDP2 over the two: Penstock and the peer in one run.

Beside the time it counts what each needs of the network for its weights, and how much each holds gathered.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.pairs import Ratios, take_turns
from benchmarks.work import RANKS, SCHEDULES, WORKS, Peer, Work, placement
from penstock import Pipeline, PipelineStage
from penstock.schedule import Schedule, build, prefetch
from penstock.testing import WorkerPool

REPLICAS = 2
CASES = (
    ("tiny", "1F1B"),
    ("tiny", "ZB-V"),
    ("gpt", "1F1B"),
    ("gpt", "Interleaved1F1B"),
    ("gpt", "ZB-V"),
)
KINDS = {"allgather_base": "gathers", "reduce_scatter": "reductions"}


class Collectives(TorchDispatchMode):
    """Counts gathers and reductions of weights."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch's
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts.update(said for part, said in KINDS.items() if part in str(func))
        return func(*args, **(kwargs or {}))


class Held:
    """How many bytes of weights are gathered, looked at after each forward."""

    def __init__(self, modules: list[nn.Module]) -> None:
        self._modules = modules
        self.most = 0

    def look(self, *_: object) -> None:
        """Keep the most that is seen."""
        weights = (p for module in self._modules for p in module.parameters())
        self.most = max(self.most, sum(p.nbytes for p in weights if not isinstance(p, DTensor)))


def _sharded(work: Work, mesh: DeviceMesh, rank: int, home: tuple[int, ...]) -> list[nn.Module]:
    """This rank's stages, each block by itself, and the rest of a stage with its first."""
    held = [work.stages[index] for index in work.held(home, rank)]
    for module in held:
        for block in module.children():
            if any(True for _ in block.children()):
                fully_shard(block, mesh=mesh)
        fully_shard(module, mesh=mesh)
    return held


def measure(group: Any, case: str, schedule: str, rounds: int) -> dict[str, Any]:
    """A worker's task: times, collectives of a step, and bytes held, of this process."""
    mesh = init_device_mesh("cpu", (REPLICAS, RANKS), mesh_dim_names=("dp", "pp"))
    rank, home = mesh.get_local_rank("pp"), placement(schedule)
    works: dict[str, Work] = {}
    held: dict[str, Held] = {}
    for name in ("ours", "bounded", "peer"):
        works[name] = WORKS[case](SCHEDULES[schedule])
        held[name] = Held(_sharded(works[name], mesh["dp"], rank, home))
        for module in held[name]._modules:
            module.register_forward_hook(held[name].look)
    plain = build(schedule, ranks=RANKS, microbatches=works["ours"].microbatches)
    pipe = _pipeline(works["ours"], plain, mesh)
    bounded = _pipeline(works["bounded"], prefetch(plain, unsharded=1), mesh)
    peer = Peer(works["peer"], schedule, mesh["pp"].get_group())
    steps: dict[str, Callable[[], object]] = {
        "ours": lambda: pipe.step(works["ours"].batch, target=works["ours"].target),
        "bounded": lambda: bounded.step(works["bounded"].batch, target=works["bounded"].target),
        "peer": peer.step,
    }
    ways = {name: works[name].cleared(step) for name, step in steps.items()}
    counts: dict[str, dict[str, int]] = {}
    for name, way in ways.items():
        way()
        with Collectives() as told:
            way()
        counts[name] = dict(told.counts)
    times = take_turns(ways, rounds, 1)
    for one in (pipe, bounded):
        one.close()
    return {
        name: {
            "elapsed": times[name].elapsed,
            "cpu": times[name].cpu,
            "counts": counts[name],
            "bytes": held[name].most,
        }
        for name in ways
    }


def _pipeline(work: Work, schedule: Schedule, mesh: DeviceMesh) -> Pipeline:
    home = schedule.placement.rank_of
    return Pipeline.from_stages(
        [
            PipelineStage(work.stages[index], index, len(home))
            for index in work.held(home, mesh.get_local_rank("pp"))
        ],
        schedule=schedule,
        microbatches=work.microbatches,
        loss_fn=work.loss,
        mesh=mesh,
        replicas=mesh["dp"],
    )


def compare(rounds: int) -> dict[str, Any]:
    """All cases, printed, and as JSON data."""
    found: dict[str, Any] = {}
    with WorkerPool(REPLICAS * RANKS) as workers:
        for case, schedule in CASES:
            answers = workers.run(
                "benchmarks.mesh:measure",
                REPLICAS * RANKS,
                timeout=1200,
                case=case,
                schedule=schedule,
                rounds=rounds,
            )
            found[f"{case}, {schedule}"] = {
                name: _told(f"mesh 2 x 2, {schedule}, {case}", name, answers)
                for name in ("ours", "bounded")
            }
            told = _needs("peer", answers)
            print(f"mesh 2 x 2, {schedule}, {case}: the peer: {_words(told)}")
            found[f"{case}, {schedule}"]["peer"] = told
    return found


def _told(where: str, name: str, answers: list[Any]) -> dict[str, Any]:
    cpu = Ratios(*(_sums(answers, one) for one in (name, "peer")))
    clock = Ratios(*(answers[0][one]["elapsed"] for one in (name, "peer")))
    how = {"ours": "gathered once a step", "bounded": "one stage at a time"}[name]
    needs = _needs(name, answers)
    print(f"{where}: {how}: CPU {cpu.told('the peer')}")
    print(f"{where}: {how}: time {clock.told('the peer')}")
    print(f"{where}: {how}: {_words(needs)}")
    return {"cpu": cpu.to_json(), "time": clock.to_json(), **needs}


def _sums(answers: list[Any], name: str) -> list[float]:
    """The CPU time of all processes, round by round."""
    return [sum(times) for times in zip(*(a[name]["cpu"] for a in answers), strict=True)]


def _needs(name: str, answers: list[Any]) -> dict[str, Any]:
    """Of the process that needs most."""
    return {
        **{
            kind: max(answer[name]["counts"].get(kind, 0) for answer in answers)
            for kind in KINDS.values()
        },
        "bytes": max(answer[name]["bytes"] for answer in answers),
    }


def _words(needs: Mapping[str, int]) -> str:
    return (
        f"{needs['gathers']} gathers and {needs['reductions']} reductions per step, at most "
        f"{needs['bytes'] / 1e6:.3g} MB of weights gathered"
    )
