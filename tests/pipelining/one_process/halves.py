"""Microbatches, and a backward pass in halves."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask

from tests.pipelining.one_process.common import Mlp, Names, check_gradients, refused


def body_parts_of_a_leaf_keep_gradients(p: Names) -> None:
    x = torch.ones(4, 2, requires_grad=True)
    parts = p.microbatch._split_tensor(x, p.microbatch.TensorChunkSpec(0), 2)
    (parts[0] * 3).sum().backward()
    assert torch.equal(parts[0].grad, torch.full((2, 2), 3.0))


def body_split_by_hand(p: Names) -> None:
    m = p.microbatch
    x = torch.arange(24.0).reshape(6, 4)
    found = m._shard_dict_of_args(
        {"a": x, "b": 3}, {"a": m.TensorChunkSpec(1), "b": m._Replicate}, 2
    )
    assert [part["a"].shape for part in found] == [torch.Size([6, 2])] * 2
    assert [part["b"] for part in found] == [3, 3]
    assert m._shard_dict_of_args({}, {}, 3) == [{}, {}, {}]
    assert isinstance(m.sum_reducer, m._LossReducer)
    assert issubclass(m._LossReducer, m._CustomReducer)
    largest = m._CustomReducer(torch.tensor(0.0), torch.maximum)
    assert m.merge_chunks([torch.tensor(2.0), torch.tensor(5.0)], largest) == 5
    assert m.merge_chunks([(torch.tensor(2.0),), (torch.tensor(5.0),)], (m.sum_reducer,)) == (7,)
    refused(AssertionError, lambda: m._shard_dict_of_args({"a": x, "b": x}, {"a": 0}, 2))
    assert str(m.TensorChunkSpec(2)) == "TensorChunkSpec(2)"


def body_block_masks(p: Names) -> None:
    m = p.microbatch

    def after(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (q >= kv) & (kv >= b)

    mask = create_block_mask(after, 5, None, 8, 8, device="cpu", BLOCK_SIZE=4)
    parts = m._split_block_mask(mask, 2)
    assert [part.kv_num_blocks.size(0) for part in parts] == [3, 2]
    assert torch.equal(torch.cat([part.to_dense() for part in parts]), mask.to_dense())
    one = create_block_mask(after, None, None, 8, 8, device="cpu", BLOCK_SIZE=4)
    assert len(m._split_block_mask(one, 3)) == 3
    refused(AssertionError, lambda: m._split_block_mask(mask, 6))


class Compared:
    """A module and its plain twin, after its forward and backward."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.module, self.loss_fn = Mlp(), nn.MSELoss(reduction="sum")
        self.plain = copy.deepcopy(self.module)
        self.x, self.target = torch.randn(4, 8, requires_grad=True), torch.randn(4, 8)
        self.loss = self.loss_fn(self.module(self.x), self.target)
        self.plain_x = self.x.detach().clone().requires_grad_()
        self.loss_fn(self.plain(self.plain_x), self.target).backward()

    def check(self) -> None:
        found = [parameter.grad for parameter in self.module.parameters()]
        torch.testing.assert_close(found, [parameter.grad for parameter in self.plain.parameters()])


def body_full_backward(p: Names) -> None:
    made = Compared()
    found = p._backward.stage_backward(
        stage_output=made.loss, output_grads=None, input_values=(made.x,)
    )
    torch.testing.assert_close(found[0], made.plain_x.grad)
    made.check()


def body_backward_in_halves(p: Names) -> None:
    made = Compared()
    inputs, groups = p._backward.stage_backward_input(
        stage_outputs_or_loss=[made.loss],
        output_grads=None,
        input_values=[made.x],
        weights=made.module.parameters(),
    )
    torch.testing.assert_close(inputs[0], made.plain_x.grad)
    assert all(parameter.grad is None for parameter in made.module.parameters())
    p._backward.stage_backward_weight(made.module.parameters(), groups, retain_graph=True)
    made.check()


def body_halves_of_several_microbatches(p: Names) -> None:
    """Inputs' halves that add up, as a stage between two others runs them."""
    torch.manual_seed(0)
    module, plain = Mlp(), Mlp()
    plain.load_state_dict(module.state_dict())
    for _ in range(3):
        x, gradient = torch.randn(4, 8, requires_grad=True), torch.randn(4, 8)
        twin = x.detach().clone().requires_grad_()
        inputs, groups = p._backward.stage_backward_input(
            [module(x)], [gradient], [x], module.parameters()
        )
        p._backward.stage_backward_weight(module.parameters(), groups)
        plain(twin).backward(gradient)
        torch.testing.assert_close((inputs[0], x.grad), (twin.grad, twin.grad))
    check_gradients(module, plain)
    x = torch.randn(4, 8, requires_grad=True)
    twin = x.detach().clone().requires_grad_()
    plain(twin).sum().backward()
    found = p._backward.stage_backward((module(x),), (torch.ones(4, 8),), (x,))
    torch.testing.assert_close(found[0], twin.grad)
    assert x.grad is None


def body_groups_of_weights(p: Names) -> None:
    b, made = p._backward, Compared()
    nodes = [b._get_grad_fn_or_grad_acc(w) for w in made.module.parameters()]
    start = b._get_grad_fn_or_grad_acc(made.x)
    reverse = b.construct_reverse_graph([made.loss.grad_fn])
    assert set(nodes) <= set(reverse)
    above, met = b.reverse_closure([start], set(), reverse)
    assert made.loss.grad_fn in above
    assert not met
    groups = b.get_param_groups([start], nodes, reverse)
    assert {node for group in groups for node in group["params"]} == set(nodes)
    assert all(group["intermediates"] for group in groups)
