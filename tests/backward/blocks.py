"""Modules that the zoo is built from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


class Lambda(nn.Module):
    """Modules, and a function of them and the inputs as forward."""

    def __init__(self, function: Callable[..., Any], **members: nn.Module | Tensor) -> None:
        super().__init__()
        self.function = function
        for name, member in members.items():
            value = nn.Parameter(member) if isinstance(member, Tensor) else member
            setattr(self, name, value)

    def forward(self, *inputs: Any) -> Any:
        return self.function(self, *inputs)


class TransformerBlock(nn.Module):
    """Pre-norm attention and SwiGLU."""

    def __init__(self, width: int, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.RMSNorm(width)])
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.gate_up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norms[0](x))
        gate, up = self.gate_up(self.norms[1](x)).chunk(2, dim=-1)
        hidden: Tensor = x + self.down(functional.silu(gate) * up)
        return hidden

    def attend(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: Tensor = self.out(attended.transpose(1, 2).reshape(x.shape))
        return out


class Experts(nn.Module):
    """A mixture of four experts; expert 3 gets no tokens, the others unequal numbers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, 4)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        weights = self.router(tokens).softmax(dim=-1)
        choice = torch.arange(len(tokens)).remainder(6).clamp(max=2)
        out = torch.zeros_like(tokens)
        for index, expert in enumerate(self.experts):
            mine = (choice == index).nonzero().squeeze(-1)
            out = out.index_add(0, mine, expert(tokens[mine]) * weights[mine, index, None])
        return out.view_as(x)


class LoRA(nn.Module):
    """A frozen Linear and a trained low-rank update."""

    def __init__(self, width: int, rank: int = 2) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, width))
        self.b = nn.Parameter(torch.randn(width, rank))

    def forward(self, x: Tensor) -> Tensor:
        base: Tensor = self.base(x)
        return base + functional.linear(functional.linear(x, self.a), self.b)


class CountedLinear(torch.autograd.Function):
    """A linear layer in Python that counts its backward calls and leaves the bias unreduced."""

    calls = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.scale = scale
        return x @ weight.t() * scale + bias

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        CountedLinear.calls += 1
        x, weight = ctx.saved_tensors
        grad = grad_outputs[0]
        return grad @ weight * ctx.scale, None, grad.t() @ x * ctx.scale, grad


class Standardise(torch.autograd.Function):
    """A function of a weight alone, in Python, that saves its result."""

    calls = 0

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        result = weight.exp()
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        Standardise.calls += 1
        return grad_outputs[0] * ctx.saved_tensors[0]


def counted_linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    result: Tensor = CountedLinear.apply(x, 0.5, weight, bias)  # type: ignore[no-untyped-call]
    return result


def standardise(weight: Tensor) -> Tensor:
    result: Tensor = Standardise.apply(weight)  # type: ignore[no-untyped-call]
    return result
