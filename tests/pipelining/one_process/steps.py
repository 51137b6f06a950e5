"""Steps on one rank in a group of one."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from tests.pipelining.one_process.common import (
    Layers,
    Mlp,
    Names,
    alone,
    check_gradients,
    refused,
)


def run_alone(p: Names, name: str) -> None:
    """Steps of one stage on one rank, against the plain module."""
    with alone():
        torch.manual_seed(0)
        model, x, target = Mlp(), torch.randn(8, 8), torch.randn(8, 8)
        plain = copy.deepcopy(model)
        stages: Any = [p.PipelineStage(model, 0, 1, torch.device("cpu"))]
        chosen = p.schedules.get_schedule_class(name)
        if issubclass(chosen, p.schedules.PipelineScheduleSingle):
            stages = stages[0]
        schedule = chosen(stages, 2, loss_fn=nn.functional.cross_entropy)
        for _ in range(2):
            model.zero_grad()
            plain.zero_grad()
            losses: list[Tensor] = []
            output = schedule.step(x, target=target, losses=losses)
            loss = nn.functional.cross_entropy(plain(x), target)
            loss.backward()
        torch.testing.assert_close(output, plain(x))
        torch.testing.assert_close(torch.stack(losses).mean(), loss)
        check_gradients(model, plain)


BY_HAND = {
    "full": "0F0,0F1,1F0,1F1,1B0,1B1,0B0,0B1",
    "halves": "0F0,0F1,1F0,1F1,1I0,1I1,0I0,0I1,1W0,1W1,0W0,0W1",
}


def run_by_hand(p: Names, text: str) -> None:
    """A row of actions over two stages of one rank."""
    with alone():
        torch.manual_seed(0)
        model, x, target = Layers(2), torch.randn(8, 8), torch.randn(8, 8)
        plain, loss_fn = copy.deepcopy(model), nn.MSELoss(reduction="sum")
        stages = [p.PipelineStage(model.layers[i], i, 2, torch.device("cpu")) for i in range(2)]
        schedule = p.schedules._PipelineScheduleRuntime(
            stages, 2, loss_fn=loss_fn, scale_grads=False
        )
        schedule._prepare_schedule_with_comms({0: p.row(text)}, format="compute_comms")
        for _ in range(2):
            model.zero_grad()
            plain.zero_grad()
            losses: list[Tensor] = []
            output = schedule.step(x, target=target, losses=losses)
            loss = loss_fn(plain(x), target)
            loss.backward()
        torch.testing.assert_close(output, plain(x))
        torch.testing.assert_close(sum(losses), loss)
        check_gradients(model, plain)


def run_own_schedule(p: Names) -> list[Any]:
    """A class of one's own that writes its rows as torch's classes do."""
    s = p.schedules

    class Own(s._PipelineScheduleRuntime):  # type: ignore[name-defined,misc]
        def __init__(self, stages: Any, n_microbatches: int, loss_fn: Any = None) -> None:
            self.pp_group_size = stages[0].group_size
            super().__init__(stages=stages, n_microbatches=n_microbatches, loss_fn=loss_fn)
            self.n_local_stages, self.rank = len(stages), stages[0].group_rank
            self.pipeline_order: dict[int, list[Any]] = {}
            for rank in range(self.pp_group_size):
                self.pipeline_order[rank] = self._calculate_single_rank_operations(rank)
            self._prepare_schedule_with_comms(self.pipeline_order)

        def _calculate_single_rank_operations(self, rank: int) -> list[Any]:
            count = self._n_microbatches
            ahead = [s._Action(i, s.F, m) for i in range(2) for m in range(count)]
            behind = [s._Action(i, s.B, m) for i in (1, 0) for m in range(count)]
            return [*ahead, None, *behind]

    with alone(), torch.random.fork_rng():
        torch.manual_seed(0)
        model, x = Layers(2), torch.randn(8, 8)
        stages = [p.PipelineStage(model.layers[i], i, 2, torch.device("cpu")) for i in range(2)]
        schedule = Own(stages, 4, loss_fn=nn.MSELoss())
        seen: list[str] = []
        for kind in (s.UNSHARD, s.RESHARD):
            schedule.register_custom_function(kind, lambda action, _: seen.append(str(action)))
        found = schedule.step(x, target=x)
        total = [p.grad.sum().item() for p in model.parameters() if p.grad is not None]
        assert schedule.pipeline_order[0][8] is None
        assert len(schedule.pipeline_order[0]) == 17
        return [*seen, found.sum().item(), *total]


def run_parts(p: Names) -> list[Any]:
    """A subclass that replaces what a step does besides running stages."""
    with alone():
        torch.manual_seed(0)

        class Own(p.ScheduleGPipe):  # type: ignore[name-defined,misc]
            def _split_inputs(self, args: Any, kwargs: Any = None) -> Any:
                return super()._split_inputs((args[0] * 2,), kwargs)

            def _compute_loss(self, output: Any, target: Any, *rest: Any, **more: Any) -> Any:
                return 3 * super()._compute_loss(output, target, *rest, **more)

            def _merge_outputs(self, output_chunks: Any) -> Any:
                return [len(output_chunks), super()._merge_outputs(output_chunks)]

        model, x = Mlp(), torch.randn(4, 8)
        stage = p.PipelineStage(model, 0, 1, torch.device("cpu"))
        made = Own(stage, 2, loss_fn=nn.MSELoss())
        assert made._check_inputs() == ([(), ()], [{}, {}])
        refused(TypeError, lambda: made._check_inputs(arg_mbs=()))
        refused(ValueError, lambda: made._check_inputs(target_mbs=[x]))
        losses: list[Tensor] = []
        found = made.step(x, target=x, losses=losses)
        gradients = [p.grad.sum().item() for p in model.parameters() if p.grad is not None]
        return [found[0], found[1].sum().item(), *[loss.item() for loss in losses], *gradients]
