"""Steps on one rank in a group of one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.pipelining.either import Names, Seat, X, alone, refused


def body_one_stage(p: Names) -> None:
    """Schedules of several stages take one, too."""
    for name in ("1F1B", "GPipe", "Interleaved1F1B", "InterleavedZeroBubble", "LoopedBFS"):
        with alone():
            seat = Seat(p.package, None, {0: [0]})
            made = seat.schedule(name)
            for _ in range(2):
                seat.zero()
                seat.check(*seat.step(made))


def body_a_schedule_of_ones_own(p: Names) -> list[str]:
    """A class that writes its rows as torch's classes do, with custom functions."""
    s = p.schedules

    class Own(s._PipelineScheduleRuntime):  # type: ignore[name-defined,misc]
        def __init__(self, stages: Any, n_microbatches: int, **options: Any) -> None:
            self.pp_group_size = stages[0].group_size
            super().__init__(stages=stages, n_microbatches=n_microbatches, **options)
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

    with alone():
        seat = Seat(p.package, None, {0: [0, 1]})
        schedule = seat.schedule(Own)
        seen: list[str] = []
        for kind in (s.UNSHARD, s.RESHARD):
            schedule.register_custom_function(kind, lambda action, _: seen.append(str(action)))
        seat.check(*seat.step(schedule))
        assert schedule.pipeline_order[0][8] is None
        return seen


def body_parts_of_a_step(p: Names) -> list[Any]:
    """A subclass that replaces what a step does besides running stages."""

    class Own(p.ScheduleGPipe):  # type: ignore[name-defined,misc]
        def _split_inputs(self, args: Any, kwargs: Any = None) -> Any:
            return super()._split_inputs((args[0] * 2,), kwargs)

        def _compute_loss(self, output: Any, target: Any, *rest: Any, **more: Any) -> Any:
            return 3 * super()._compute_loss(output, target, *rest, **more)

        def _merge_outputs(self, output_chunks: Any) -> Any:
            return [len(output_chunks), super()._merge_outputs(output_chunks)]

    with alone():
        seat = Seat(p.package, None, {0: [0]})
        made = seat.schedule(Own, 2, loss_fn=nn.MSELoss(), scale_grads=True)
        assert made._check_inputs() == ([(), ()], [{}, {}])
        refused(TypeError, lambda: made._check_inputs(arg_mbs=()))
        refused(ValueError, lambda: made._check_inputs(target_mbs=[X]))
        found, losses = seat.step(made)
        torch.testing.assert_close(found[1], seat.reference(2 * X))
        numbers: list[Tensor] = [*losses, *(g for g in seat.gradients() if g is not None)]
        return [found[0], *(round(float(number.detach().sum()), 4) for number in numbers)]
