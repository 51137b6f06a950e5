"""What units cost, measured and predicted, and what stages cost by them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from penstock import Pipeline
from penstock.errors import InputFileError, UsageError
from penstock.plan import (
    DEVICES,
    Order,
    Profile,
    UnitCost,
    UnitCosts,
    ValueCost,
    correct,
    cut_of,
    device_called,
    device_named,
    measure,
    predict,
)
from penstock.schedule import build, costs_of, looped, v_shaped
from tests.catalogue.making import Does
from tests.plan.models import SLOW, Skips, Spins, Tower, profile

mse = nn.functional.mse_loss


def batch(samples: int = 4, width: int = 16, out: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(samples, width), torch.randn(samples, out)


def predicted(model: nn.Module, out: int = 64) -> UnitCosts:
    x, y = batch(out=out)
    return predict(model, x, target=y, loss_fn=mse, device=SLOW).at(4)


def measured(model: nn.Module, out: int = 64) -> UnitCosts:
    x, y = batch(out=out)
    return measure(model, x, target=y, loss_fn=mse, repeats=1).at(4)


def test_predicted_times_are_the_operations_over_the_rate() -> None:
    block, *_, head = (costs := predicted(Tower())).units
    products = 2 * 4 * 16 * 64 * 2  # two products of 4 x 16 x 64
    assert (block.flops, head.flops) == (products, 2 * 4 * 16 * 64)
    for kind, times in {"forward": 1, "input": 1, "weight": 1, "backward": 2}.items():
        assert getattr(block, kind) == pytest.approx(times * products / 1e9, rel=0.01)
    assert [unit.path for unit in costs.units] == [f"blocks.{i}" for i in range(4)] + ["head"]


def test_measured_and_predicted_memory_agree() -> None:
    """Of every unit and value, byte by byte: one with data, the other without."""
    kinds = ("held", "around", "stash", "parameters", "trained", "numbers")
    with_data, without = measured(Tower()), predicted(Tower())
    assert with_data.values == without.values
    for one, other in zip(with_data.units, without.units, strict=True):
        assert [getattr(one, k) for k in kinds] == [getattr(other, k) for k in kinds], one.path


def test_what_forward_holds_is_what_backward_needs() -> None:
    """A linear layer keeps its input; so does the layer norm, and GELU, and nothing else is kept."""
    costs = predicted(Tower())
    block, first = costs.units[1], costs.values[0]
    wide, narrow = 4 * 64 * 4, 4 * 16 * 4
    statistics = 2 * 4 * 4
    # Inside: what the norm gives, what the first product gives, what GELU gives.
    assert block.held == narrow + wide + wide + statistics
    # Between the halves: both products' inputs and gradients.
    assert block.stash == narrow + wide + wide + narrow
    assert (first.source, first.targets, first.bytes, first.kept) == (0, (1,), narrow, (1,))


def test_measured_times_are_those_of_the_thread() -> None:
    model = nn.Sequential(nn.Linear(16, 16), Spins(0.02, 16), nn.Linear(16, 64))
    first, busy, last = measured(model).units
    assert 0.02 <= busy.forward < 0.03
    assert max(first.forward, last.forward, busy.backward) < 0.01


def test_a_large_model_takes_no_memory() -> None:
    with torch.device("meta"):
        model = Tower(blocks=40, width=4096, head=100_000)
    x = torch.empty(8, 4096, device="meta")
    costs = predict(
        model, x, target=x[:, :1].long()[:, 0], loss_fn=nn.functional.cross_entropy, device="h100"
    ).at(2)
    assert sum(unit.numbers for unit in costs.units) > 5e9
    assert len({round(unit.forward, 12) for unit in costs.units[:39]}) == 1


def test_stages_add_up_their_units() -> None:
    costs = profile([1.0, 2.0, 3.0]).at(1)
    stages = costs.stages((0, 2), looped(2), latency=0.5, bandwidth=10.0)
    assert stages.costs.forward == (3.0, 3.0)
    assert stages.costs.backward == (6.0, 6.0)
    # The end of what travels holds it; its maker does only until it is sent, as no graph there keeps it.
    assert stages.costs.activation == (10 + 10, 10 + 1)
    assert stages.given == (1, 0)
    assert [(e.value, e.source, e.targets) for e in stages.edges] == [("unit1", 0, (1,))]
    assert stages.static == (2 * 8 * 4, 8 * 4)
    again = costs.stages((0, 2), looped(2), recompute=[0])
    assert again.costs.input == (4.0, 3.0)
    assert again.costs.activation == (10, 10 + 1)


def test_between_stages_of_a_rank_a_value_is_held_once() -> None:
    costs = profile([1.0] * 4).at(1)
    stages = costs.stages((0, 1, 2, 3), v_shaped(2))
    # Stages 1 and 2 are on one rank: what goes from one to the other lies there once.
    assert stages.costs.activation == (10.0, 12.0, 10.0, 11.0)


def skipping(gradient: float = 100.0) -> UnitCosts:
    """Four units; what the first gives is used by all that follow."""
    units = tuple(UnitCost(f"unit{n}", 1.0, 1.0, 1.0, 2.0, held=10.0) for n in range(4))
    return UnitCosts(1, units, (ValueCost("skip", 0, (1, 2, 3), gradient),))


def test_messages_and_gradients_that_wait_are_held() -> None:
    apart = skipping().stages((0, 1, 2, 3), looped(2, 2))
    # Stages 1 and 3 share a rank: the value comes once, and one gradient goes back, at the first of them.
    assert apart.taken == (0, 100, 0, 0)
    assert apart.returned == (100, 0, 0, 0)
    assert apart.sent == (0, 100, 0, 0)
    # Stage 3's gradient waits for stage 1; that of stage 2 for stage 0, on their own rank.
    assert apart.left == (-100, -100, 100, 100)
    assert apart.messages(0) == apart.messages(1) / 2 == 2 * 100


def test_a_step_holds_messages_only_while_there_are_more() -> None:
    stages = skipping().stages((0, 1), looped(2), states=0.0)
    schedule = build("GPipe", ranks=2, microbatches=4).with_edges(stages.edges)
    first, second = Order(schedule).held(stages)
    # F: what it keeps, and two values on their way. B: also the gradient of its value, and two more on
    # their way while there are more.
    assert first.tolist() == [110, 220, 230, 240, *(240 + 300, 230 + 300, 120 + 200, 10 + 100)]
    # F: values of the next ones. B: gradients that its units give each other, and what is not sent yet.
    f, b = second.tolist()[:4], second.tolist()[4:]
    assert f == [130 + 200, 260 + 200, 390 + 100, 520]
    assert b == [520 + 100 - 10, *(390 + 190, 260 + 190, 130 + 190)]


def test_while_a_stage_works_gradients_of_its_later_units_are_there() -> None:
    """In B they take the place of what those units held; in I that may be there still."""
    stages = skipping(gradient=25.0).stages((0,), looped(1), states=0.0)
    assert stages.extra["B"] == (25 - 10,)
    assert stages.extra["I"] == (25,)
    assert stages.extra["F"] == stages.extra["W"] == (0,)


def test_a_rank_is_busy_around_actions_with_messages() -> None:
    """Once for each action; and what the halves of backward spend in any case counts once for each stage."""
    of = skipping()
    units = tuple(replace(unit, once={"input": 0.5, "weight": 0.25}) for unit in of.units)
    costs = replace(of, units=units).stages((0, 2), looped(2), handling=0.25).costs
    assert (costs.forward, costs.input) == ((2.25, 2.25), (1.75, 1.75))
    assert (costs.weight, costs.backward) == ((1.75, 1.75), (4.25, 4.25))
    # What skips stages goes to three ranks.
    apart = of.stages((0, 1, 2, 3), looped(4), handling=0.25).costs.forward
    assert apart == (1.75, 1.25, 1.25, 1.25)


def test_what_lies_around_a_module_is_not_computed_again() -> None:
    """Such as where the maxima of a pooling between units were."""
    pooled = Does(
        lambda m, x: m.second(nn.functional.max_pool1d(m.first(x), 2)),
        first=Skips(8), second=nn.Linear(4, 4),
    )  # fmt: skip
    first = measure(pooled, torch.randn(4, 2, 8), repeats=1).at(4).units[0]
    indices = 4 * 2 * 4 * 8
    assert indices <= first.around < first.held
    stages = UnitCosts(4, (first,), ()).stages((0,), looped(1), recompute=[0])
    assert stages.costs.activation == (first.around,)


def test_a_recorded_step_corrects_costs() -> None:
    model = Tower(blocks=3)
    x, y = batch(8)
    before = predict(model, x, target=y, loss_fn=mse, device=SLOW)
    stages = [["blocks.0", "blocks.1"], ["blocks.2", "head"]]
    pipe = Pipeline(model, stages=stages, ranks=2, microbatches=2, loss_fn=mse)
    step = pipe.step(x, target=y, record=True)
    after, _ = correct(before, step.timeline, pipe.schedule, stages, samples=4)
    assert step.timeline is not None
    took, costs = costs_of(2, step.timeline), after.at(4).stages((0, 2), looped(2)).costs
    for kind in ("forward", "backward"):
        assert costs.per_stage(kind, 2) == pytest.approx(took.per_stage(kind, 2))
    with pytest.raises(UsageError, match="do not hold the units of the costs"):
        correct(before, step.timeline, pipe.schedule, stages[::-1], samples=4)
    with pytest.raises(UsageError, match="record=True"):
        correct(before, pipe.step(x, target=y).timeline, pipe.schedule, stages, samples=4)


def test_costs_travel_as_json() -> None:
    known = profile([1.0, 2.0])
    again = Profile.from_json(known.to_json())
    assert again == known
    for wrong in ('{"format": "penstock-costs", "version": 1}', "[]"):
        with pytest.raises(InputFileError, match="not costs"):
            Profile.from_json(wrong)
    with pytest.raises(UsageError, match=r"microbatches of \[1, 2, 4\] samples, not of 3"):
        again.at(3)


def test_refusals() -> None:
    x, y = batch()
    with torch.device("meta"):
        model = Tower()
    with pytest.raises(UsageError, match="predict its costs for a device"):
        measure(model, x, target=y, loss_fn=mse)
    with pytest.raises(UsageError, match="repeats=0: must be"):
        measure(Tower(), x, repeats=0)
    with pytest.raises(UsageError, match="did you mean 'h100'"):
        predict(model, x, device="h10")
    with pytest.raises(UsageError, match="no part of 3"):
        predict(model, x, target=y, loss_fn=mse, device="h100").at(3)
    with pytest.raises(UsageError, match="compute_efficiency"):
        device_named("h100", compute_efficiency=2)
    with pytest.raises(UsageError, match="do not hold the units"):
        cut_of(["a", "b"], [["b"], ["a"]])


def test_every_number_of_the_table_has_a_source() -> None:
    for device in DEVICES.values():
        assert device.sources is not None
        numbers = {"flops", "memory", "bandwidth", "link_bandwidth", "link_latency", "launch"}
        assert numbers | {"network_bandwidth", "network_latency"} == set(device.sources)
        assert device.wire(8)[1] > 0
        assert device.wire(9)[0] >= device.wire(8)[0]
        costs = predict(Tower(), *batch()[:1], device=device)
        assert [costs.wire(count) for count in (8, 9)] == [device.wire(8), device.wire(9)]


def test_attention_counts_as_a_fused_kernel() -> None:
    """Two products, and five in backward, which computes the scores again; the scores are not held."""
    attends = Does(lambda _, x: nn.functional.scaled_dot_product_attention(x, x, x))
    model = nn.Sequential(nn.Linear(16, 16), attends, nn.Linear(16, 16))
    x = torch.empty(2, 4, 8, 16)
    attention = predict(model, x, device=SLOW).at(2).units[1]
    product = 2 * 2 * 4 * 8 * 8 * 16
    assert attention.flops == 2 * product
    assert attention.forward == pytest.approx(2 * product / 1e9, rel=0.01)
    assert attention.backward == pytest.approx(5 * product / 1e9, rel=0.01)
    statistics = 2 * 4 * 8 * 4
    assert attention.held == statistics


def test_what_is_there_only_while_a_unit_runs_is_extra() -> None:
    """Such as something large that a unit makes and nobody keeps."""
    widens = Does(
        lambda m, x: m.layer(x.repeat(8, 1).view(8, *x.shape).sum(0)), layer=nn.Linear(16, 16)
    )
    model = nn.Sequential(nn.Linear(16, 16), widens, nn.Linear(16, 64))
    plain, wide, _ = predicted(model).units
    size = 4 * 16 * 4
    assert wide.held == size
    # What it makes has gone before its output is there.
    assert plain.extra["forward"] == 0
    assert wide.extra["forward"] == measured(model).units[1].extra["forward"] == 8 * size - size


@pytest.mark.parametrize(
    ("product", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA L40S", "l40s"),
        ("Tesla V100-SXM2-16GB", "v100"),
        ("a GPU of the future", None),
    ],
)
def test_a_device_is_found_by_the_name_its_driver_gives(product: str, name: str | None) -> None:
    device = device_called(product)
    assert (device.name if device else None) == name
