"""Evaluation and prediction: right, on every rank, and without a trace."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from penstock import REPLICATE, Loss, Pipeline, PipelineModule, Split
from penstock.errors import MicrobatchError, PenstockError
from penstock.testing import Case, WorkerPool, compare, plain_loop
from tests.catalogue.making import Does
from tests.pipeline.models import X, Y, assert_same, chain, make, mean_loss, restless

CALLS: dict[str, Callable[[Pipeline], Any]] = {
    "eval": lambda pipe: pipe.evaluate(X, target=Y).loss,
    "eval with outputs": lambda pipe: pipe.evaluate(X, target=Y, outputs=True).outputs,
    "predict": lambda pipe: pipe.predict(X),
}


def expected(name: str) -> Any:
    with torch.no_grad():
        output = restless().eval()(X)
        return float(mean_loss(output, Y)) if name == "eval" else output


def state(pipe: Pipeline) -> dict[str, Any]:
    return {
        "tensors": {name: tensor.tolist() for name, tensor in pipe.weights.state_dict().items()},
        "modes": [m.training for stage in pipe.stages for m in stage.module.modules()],
        "grads": [p.grad for p in pipe.parameters()],
        "rng": torch.get_rng_state().tolist(),
        "in flight": [stage.in_flight for stage in pipe.stages],
        "grad mode": torch.is_grad_enabled(),
    }


def evaluate(group: Any = None) -> list[Any]:
    """What the calls give, and whether they leave a trace; also a worker's task."""
    pipe = make(restless(), mesh=group)
    pipe.stages[-1].module.eval()
    before = state(pipe)
    found = [call(pipe) for call in CALLS.values()]
    return [
        *(x.tolist() if isinstance(x, Tensor) else x for x in found),
        state(pipe) == before,
    ]


def test_every_rank_has_what_the_model_gives_without_a_trace(workers: WorkerPool) -> None:
    for *found, same in [evaluate(), *workers.run(f"{__name__}:evaluate", 2, 100.0)]:
        assert same
        for name, value in zip(CALLS, found, strict=True):
            actual = torch.tensor(value, dtype=torch.float64)
            torch.testing.assert_close(actual, torch.as_tensor(expected(name)).double())


def test_it_does_not_disturb_training() -> None:
    """Nor does a first step, which finds shapes, draw other numbers than a later one."""
    pipe, losses = make(restless(), seed="off"), []
    for calls in ([], [*CALLS.values()], [CALLS["predict"]]):
        torch.manual_seed(3)
        losses.append(pipe.step(X, target=Y).loss)
        for call in calls:
            call(pipe)
    assert len({*losses}) == 1


def test_batches_may_be_smaller_than_in_training() -> None:
    pipe = make(loss_fn=Loss(lambda output, target: output.sum(), reduction="sum"))
    for samples in (1, 2, 3, 8):
        whole = chain()(X[:samples]).detach()
        torch.testing.assert_close(pipe.predict(X[:samples]), whole)
        assert pipe.evaluate(X[:samples], target=Y[:samples]).loss == pytest.approx(
            float(whole.sum())
        )


def test_a_result_without_outputs_has_none_and_a_prediction_needs_no_loss_and_no_gradient() -> None:
    pipe = make()
    assert pipe.evaluate(X, target=Y).outputs is pipe.step(X, target=Y).outputs is None
    assert not make(loss_fn=None).predict(X).requires_grad


def test_nested_outputs_are_merged() -> None:
    nested = Does(lambda _, x: {"logits": (x, x.sum(1)), "name": "n", "no": None})
    found = make(nn.Sequential(chain(), nested)).predict(X)
    assert [part.shape for part in found["logits"]] == [X.shape, X.shape[:1]]
    assert (found["name"], found["no"]) == ("n", None)
    # Without arguments to split there is one microbatch.
    counts = nn.Sequential(Does(lambda _, upto: torch.arange(upto)), nn.Identity())
    assert make(counts).predict(5).tolist() == [0, 1, 2, 3, 4]


def mean(parts: Any, sizes: Any) -> Any:
    return sum(part * n for part, n in zip(parts, sizes, strict=True)) / sum(sizes)


OUTPUTS: dict[str, tuple[Callable[[Any], Any], Any]] = {
    "a mean of each feature": (lambda x: x.mean(0), mean),
    "a scalar": (lambda x: {"y": x, "sum": x.sum()}, {"sum": lambda parts, sizes: sum(parts)}),
    "blocks of all samples": (lambda x: torch.cat([x, 1 - x]), Split(0, chunks=2)),
    "several rows for each sample": (lambda x: x.reshape(-1), Split(0)),
    "time first": (lambda x: {"y": x, "mems": x.expand(3, *x.shape)}, {"mems": Split(1)}),
    "the same everywhere": (lambda x: (x, torch.ones(3)), {1: REPLICATE}),
}


@pytest.mark.parametrize("name", sorted(OUTPUTS))
def test_outputs_that_do_not_count_samples_need_a_rule(name: str) -> None:
    """Then they are those of the plain model, and gradients flow through them; else they are refused."""
    function, rule = OUTPUTS[name]
    rows, plain = X[:7], nn.Sequential(chain(), Does(lambda _, x: function(x)))
    expected = plain(rows)
    alone = make(copy.deepcopy(plain), loss_fn=None)
    for call in (alone.predict, PipelineModule(alone).train(), PipelineModule(alone).eval()):
        with pytest.raises(MicrobatchError, match=r"does not count samples .* split={'output'"):
            call(rows)
    pipe = make(copy.deepcopy(plain), loss_fn=None, split={"output": rule})
    torch.testing.assert_close(pipe.predict(rows), pytree.tree_map(torch.detach, expected))
    found = PipelineModule(pipe).train()(rows)
    for output in (found, expected):
        sum(value.square().sum() for value in pytree.tree_leaves(output)).backward()
    torch.testing.assert_close(found, expected)
    for mine, theirs in zip(pipe.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
    # One microbatch gives what the model gives.
    once = make(copy.deepcopy(plain), loss_fn=None, microbatches=1)
    torch.testing.assert_close(once.predict(rows), pipe.predict(rows))


def preference(output: Any, target: Any) -> Any:
    chosen, rejected = output.chunk(2)
    return -nn.functional.logsigmoid(chosen - rejected).mean()


def test_outputs_of_arguments_along_another_dimension_need_a_rule() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    x = torch.linspace(-1, 1, 24).reshape(2, 3, 4)
    split: Any
    for split, refuses in (({0: 1}, True), ({0: 1, "output": 1}, False)):
        pipe = Pipeline(model, ranks=2, microbatches=3, split=split)
        if refuses:
            with pytest.raises(MicrobatchError, match="along which dimension to merge outputs"):
                pipe.predict(x)
        else:
            torch.testing.assert_close(pipe.predict(x), model(x).detach())


@pytest.mark.parametrize("over", ["samples", "batch"])
def test_a_loss_of_blocks_of_all_samples_needs_a_rule(over: str) -> None:
    """As in DPO, where the model runs chosen and rejected answers as one batch inside."""
    plain = nn.Sequential(chain(), Does(lambda _, x: torch.cat([x, x.flip(1)])))
    loss_fn = Loss(preference, over=over)  # type: ignore[arg-type]
    case = Case(plain, (X[:7],), None, loss_fn, evaluates=False)
    with pytest.raises(PenstockError, match=r"Split\(0, chunks=2\)"):
        compare(case, schedule="GPipe", ranks=2, microbatches=4)
    ruled = replace(case, split={"output": Split(0, chunks=2)})
    verdict = compare(ruled, schedule="GPipe", ranks=2, microbatches=4)
    loss, grads = plain_loop(case)
    assert verdict.loss == pytest.approx(loss)
    assert_same(verdict.gradients, grads)


def test_a_model_may_give_other_values_in_evaluation() -> None:
    """Another structure and another type, as auxiliary heads do."""
    other = Does(lambda m, x: (x, x * 2) if m.training else x.float())
    takes = Does(lambda _, x: x[0] + x[1] if isinstance(x, tuple) else x.double())
    pipe = make(nn.Sequential(chain(), other, takes, nn.Identity()))
    for _ in range(2):
        assert pipe.step(X, target=Y).loss > 0
        torch.testing.assert_close(pipe.predict(X), chain()(X).detach(), atol=1e-6, rtol=0)


def test_a_model_made_in_inference_mode_predicts() -> None:
    with torch.inference_mode():
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        whole = model(torch.ones(4, 4))
    for _ in range(2):
        pipe = Pipeline(model, ranks=2, microbatches=2)
        torch.testing.assert_close(pipe.predict(torch.ones(4, 4)), whole)
