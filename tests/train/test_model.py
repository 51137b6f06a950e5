"""The model: its size, its weights, its cut, and that it sees no future."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from penstock.errors import ConfigError
from penstock.train.model import GPT, Shape, cut, next_byte_loss, rotations

SMALL = Shape(layers=2, width=16, heads=2, sequence=12)


def tokens(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(1))


def busy_model() -> GPT:
    """A model whose head is not zero, so that logits differ."""
    model = GPT(SMALL)
    nn.init.normal_(model.head.weight, generator=torch.Generator().manual_seed(2))
    return model


def test_shape_counts_the_operations_that_torch_counts() -> None:
    model, sample = GPT(SMALL), tokens(3, 12)
    with FlopCounterMode(display=False) as counter:
        next_byte_loss(model(sample), sample).backward()
    assert counter.get_total_flops() == pytest.approx(SMALL.flops * sample.numel(), rel=0.15)


def test_shape_counts_the_parameters() -> None:
    assert SMALL.parameters == sum(p.numel() for p in GPT(SMALL).parameters())


def test_gives_a_logit_for_each_byte() -> None:
    assert GPT(SMALL)(tokens(3, 12)).shape == (3, 12, 256)


def test_takes_shorter_sequences() -> None:
    assert GPT(SMALL)(tokens(3, 5)).shape == (3, 5, 256)


def test_first_loss_is_that_of_a_uniform_guess() -> None:
    loss = next_byte_loss(GPT(SMALL)(tokens(3, 12)), tokens(3, 12))
    assert loss.item() == pytest.approx(math.log(256))


def test_a_position_does_not_see_what_follows() -> None:
    model, before = busy_model(), tokens(1, 12)
    after = before.clone()
    after[0, 7:] = 0
    torch.testing.assert_close(model(before)[0, :7], model(after)[0, :7])
    assert not torch.equal(model(before)[0, 7:], model(after)[0, 7:])


def test_positions_matter() -> None:
    model, text = busy_model(), tokens(1, 12)
    swapped = text.clone()
    swapped[0, 0], swapped[0, 1] = text[0, 1], text[0, 0]
    assert not torch.allclose(model(text)[0, -1], model(swapped)[0, -1])


def test_rotation_depends_on_the_distance_alone() -> None:
    cosine, sine = rotations(10, 4)
    angle = torch.atan2(sine, cosine)
    steps = torch.remainder(angle[1:] - angle[:-1], 2 * math.pi)
    torch.testing.assert_close(steps, steps[:1].expand_as(steps))


def test_weights_follow_from_the_seed() -> None:
    first, same, other = GPT(SMALL, 1), GPT(SMALL, 1), GPT(SMALL, 2)
    assert torch.equal(first.embed.weight, same.embed.weight)
    assert not torch.equal(first.embed.weight, other.embed.weight)


def test_weights_do_not_depend_on_what_was_drawn_before() -> None:
    alone = GPT(SMALL).get_parameter("blocks.1.attention.inputs.weight")
    torch.rand(7)
    deeper = GPT(Shape(layers=3, width=16, heads=2, sequence=12))
    assert torch.equal(alone, deeper.get_parameter("blocks.1.attention.inputs.weight"))


def test_chain_is_the_forward_pass() -> None:
    model = busy_model()
    value = tokens(2, 12)
    for path in model.chain():
        value = model.get_submodule(path)(value)
    assert torch.equal(value, model(tokens(2, 12)))


def test_cut_names_every_module_once_in_order() -> None:
    paths = [path for stage in cut(2, 2) for path in stage]
    assert paths == GPT(SMALL).chain()


@pytest.mark.parametrize(
    ("layers", "stages", "blocks"),
    [(4, 4, [1, 1, 1, 1]), (5, 2, [3, 2]), (7, 3, [3, 2, 2]), (3, 1, [3])],
)
def test_cut_deals_the_blocks_evenly(layers: int, stages: int, blocks: list[int]) -> None:
    dealt = [sum(path.startswith("blocks") for path in stage) for stage in cut(layers, stages)]
    assert dealt == blocks


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"5 stages for layers=4.*at least 5 layers"):
        cut(4, 5)


def test_heads_that_do_not_divide_the_width_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"width=10 with heads=4.*that 8 divides"):
        Shape(layers=1, width=10, heads=4, sequence=8)
