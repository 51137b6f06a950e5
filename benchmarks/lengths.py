"""The first step with a new sequence length, beside one more step with the same length."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.pairs import Ratios
from benchmarks.work import DEPTH, RANKS
from penstock import Pipeline, PipelineStage
from penstock.partition import partition
from penstock.testing import WorkerPool
from penstock.train.model import GPT, cut, next_byte_loss

MICROBATCHES = 8
WIDTH = 64
SHORTEST = 65
AIM = 1.5


def stages_by_hand(group: Any) -> Pipeline:
    """A small GPT in two parts, made by hand."""
    model = _gpt()
    parts = [
        nn.Sequential(*(model.get_submodule(path) for path in paths)) for paths in cut(DEPTH, RANKS)
    ]
    held = range(RANKS) if group is None else [group.rank()]
    stages = [PipelineStage(parts[index], index, RANKS) for index in held]
    return Pipeline.from_stages(
        stages,
        schedule="1F1B",
        microbatches=MICROBATCHES,
        loss_fn=next_byte_loss,
        group=group,
    )


def by_calls(group: Any) -> Pipeline:
    """The same GPT with its own forward, cut by the calls of its modules."""
    return _cut(_gpt(), group, next_byte_loss)


def _gpt() -> GPT:
    return GPT(layers=DEPTH, width=WIDTH, heads=4, sequence=256)


def llama(group: Any) -> Pipeline:
    """A small Llama of transformers, cut by the calls of its modules."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=DEPTH,
        num_attention_heads=4,
        use_cache=False,
    )
    return _cut(LlamaForCausalLM(config), group, lambda out, t: next_byte_loss(out.logits, t))


def _cut(model: nn.Module, group: Any, loss: Callable[[Any, Tensor], Tensor]) -> Pipeline:
    return Pipeline(
        model,
        schedule="1F1B",
        ranks=RANKS,
        stages=partition(model, RANKS, how="calls"),
        microbatches=MICROBATCHES,
        loss_fn=loss,
        group=group,
    )


CASES: dict[str, Callable[[Any], Pipeline]] = {
    "GPT by hand": stages_by_hand,
    "GPT by calls": by_calls,
    "Llama by calls": llama,
}


def measure(group: Any, case: str, rounds: int) -> dict[str, list[float]]:
    """A worker's task: seconds of the first step with each length, and of one more."""
    with CASES[case](group) as pipe:
        # What comes once for a model, and once for a kind of call, comes before.
        for length in (SHORTEST, SHORTEST + 1, SHORTEST + 2):
            _step(pipe, length)
        lengths = range(SHORTEST + 3, SHORTEST + 3 + rounds)
        pairs = [(_step(pipe, length), _step(pipe, length)) for length in lengths]
    return {"ours": [first for first, _ in pairs], "peer": [second for _, second in pairs]}


def _step(pipe: Pipeline, length: int) -> float:
    tokens = torch.randint(0, 256, (2 * MICROBATCHES, length + 1))
    start = perf_counter()
    pipe.step(tokens[:, :-1], target=tokens[:, 1:])
    return perf_counter() - start


def compare(rounds: int) -> dict[str, Any]:
    """All cases, printed, and as JSON data."""
    found: dict[str, Any] = {}
    with WorkerPool(RANKS) as workers:
        for case in CASES:
            inside = measure(None, case, rounds)
            task = "benchmarks.lengths:measure"
            apart = workers.run(task, RANKS, timeout=1200, case=case, rounds=rounds)[0]
            for where, times in (("in process", inside), ("on gloo", apart)):
                ratios = Ratios(times["ours"], times["peer"])
                print(f"a new length, {where}, {case}: {ratios.told('a known one')}; aim {AIM}")
                found[f"{case}, {where}"] = {"aim": AIM, **ratios.to_json()}
    return found
