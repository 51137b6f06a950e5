"""Loops of one's own, with ``Pipeline`` and ``PipelineModule``."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn

from campaigns.loops.setting import STEPS, Outcome, Setting, program
from penstock import Loss, Microbatches, Pipeline, PipelineModule


def mlp() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)]
    return nn.Sequential(*layers, nn.Linear(8, 5))


def batches(width: int = 8, classes: int = 5) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    return [
        (torch.randn(8, width, generator=draw), torch.randint(classes, (8,), generator=draw))
        for _ in range(STEPS)
    ]


def whole_state(net: nn.Module, pipe: Pipeline | None) -> Any:
    """The state dict of all weights, on rank 0."""
    return net.state_dict() if pipe is None else pipe.weights.state_dict(full=True)


Step = Callable[[Any, Any, Any], None]
WEIGHT = torch.tensor([0.1, 1.0, 2.0, 5.0, 1.0], dtype=torch.float64)


def loop(
    setting: Setting,
    loss_fn: Any,
    *,
    model: Any = mlp,
    optimizer: Any = lambda params: torch.optim.AdamW(params, lr=0.01),
    clips: float = 0.0,
    after: Step | None = None,
    options: dict[str, Any] | None = None,
    said: dict[str, Any] | None = None,
    data: Any = None,
    by_module: bool = False,
    foreach: bool | None = None,
) -> Outcome:
    """The loop that everybody writes, unmodified or with ``pipe.step``."""
    net = model()
    made = optimizer(net.parameters())
    says = Loss(loss_fn, **(said or {}))
    pipe = setting.pipeline(net, loss_fn=says, **(options or {})) if setting.cut else None
    module = PipelineModule(pipe) if pipe is not None and by_module else None
    losses, norms = [], []
    for x, y in data or batches():
        if module is not None:
            loss = module(setting.part(x), target=setting.part(y))
            loss.backward()
        elif pipe is not None:
            loss = pipe.step(setting.part(x), target=setting.part(y)).loss
        else:
            loss = loss_fn(net(x), y)
            loss.backward()
        losses.append(float(loss))
        if clips:
            norms.append(float(nn.utils.clip_grad_norm_(net.parameters(), clips, foreach=foreach)))
        made.step()
        made.zero_grad()
        if after is not None:
            after(net, made, pipe)
    state = whole_state(net, pipe)
    metrics = {f"norm {place}": norm for place, norm in enumerate(norms)}
    return Outcome(losses, metrics, state)


def entropy(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output, target)


@program("own loop", "pipe.step, AdamW")
def _(setting: Setting) -> Outcome:
    return loop(setting, entropy)


@program("own loop", "PipelineModule, AdamW")
def _(setting: Setting) -> Outcome:
    return loop(setting, entropy, by_module=True)


@program("own loop", "torch's clip_grad_norm_")
def _(setting: Setting) -> Outcome:
    return loop(setting, entropy, clips=0.1)


@program("own loop", "torch's clip_grad_norm_, PipelineModule")
def _(setting: Setting) -> Outcome:
    return loop(setting, entropy, clips=0.1, by_module=True)


@program("own loop", "clip_grad_value_, SGD with momentum")
def _(setting: Setting) -> Outcome:
    class Clipped(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            nn.utils.clip_grad_value_([p for g in self.param_groups for p in g["params"]], 0.01)
            return super().step(closure)

    return loop(setting, entropy, optimizer=lambda params: Clipped(params, 0.1, momentum=0.9))


@program("own loop", "param groups without decay")
def _(setting: Setting) -> Outcome:
    def groups(params: Any) -> Any:
        params = list(params)
        return torch.optim.AdamW(
            [
                {"params": [p for p in params if p.dim() > 1], "weight_decay": 0.5},
                {"params": [p for p in params if p.dim() == 1], "weight_decay": 0.0, "lr": 0.05},
            ],
            lr=0.01,
        )

    return loop(setting, entropy, optimizer=groups)


@program("own loop", "class weights, weight=")
def _(setting: Setting) -> Outcome:
    return loop(
        setting,
        lambda output, target: functional.cross_entropy(output, target, WEIGHT),
        said={"weight": lambda target: WEIGHT[target].sum()},
    )


@program("own loop", "class weights, nothing said")
def _(setting: Setting) -> Outcome:
    return loop(setting, lambda output, target: functional.cross_entropy(output, target, WEIGHT))


@program("own loop", "ignore_index, nothing said")
def _(setting: Setting) -> Outcome:
    return loop(
        setting,
        lambda output, target: functional.cross_entropy(output, target, ignore_index=3),
    )


@program("own loop", "a sum")
def _(setting: Setting) -> Outcome:
    return loop(
        setting,
        lambda output, target: functional.cross_entropy(output, target, reduction="sum"),
        said={"reduction": "sum"},
    )


def contrastive(output: Tensor, target: Tensor) -> Tensor:
    logits = functional.normalize(output) @ functional.normalize(output.detach().roll(1, 1)).T
    return functional.cross_entropy(logits * 5, torch.arange(len(logits)))


@program("own loop", "contrastive, over='batch'")
def _(setting: Setting) -> Outcome:
    """The batch is that of one replica."""

    def of_replicas(output: Tensor, target: Tensor) -> Tensor:
        parts = output.chunk(1 if setting.cut else setting.replicas)
        return torch.stack([contrastive(part, target) for part in parts]).mean()

    return loop(setting, of_replicas, said={"over": "batch"}, options={"schedule": "GPipe"})


@program("own loop", "contrastive, nothing said")
def _(setting: Setting) -> Outcome:
    return loop(setting, contrastive)


@program("own loop", "a sum, nothing said")
def _(setting: Setting) -> Outcome:
    return loop(setting, lambda o, t: functional.cross_entropy(o, t, reduction="sum"))


def supervised(output: Tensor, target: Tensor) -> Tensor:
    """Supervised contrastive learning: rows of one class attract each other."""
    rows = functional.normalize(output)
    apart = (rows @ rows.T / 0.5).masked_fill(torch.eye(len(rows), dtype=torch.bool), -1e9)
    same = (target[:, None] == target) & ~torch.eye(len(rows), dtype=torch.bool)
    shares = (apart.log_softmax(-1) * same).sum(1) / same.sum(1).clamp(min=1)
    return -shares.mean()


@program("own loop", "SupCon, nothing said")
def _(setting: Setting) -> Outcome:
    return loop(setting, supervised)


class Clip(nn.Module):
    """Two towers and a temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = mlp(), mlp()
        self.logit_scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Any:
        return functional.normalize(self.left(x)), functional.normalize(self.right(x.flip(1)))


@program("own loop", "loss_fn reads a weight of the model (logit_scale)")
def _(setting: Setting) -> Outcome:
    net = Clip()

    def loss_fn(output: Any, target: Tensor) -> Tensor:
        left, right = output
        each = net.logit_scale.exp() * (left * right).sum(1)
        return functional.softplus(-each).mean()

    return loop(setting, loss_fn, model=lambda: net)


@program("own loop", "loss_fn reads a tied table")
def _(setting: Setting) -> Outcome:
    net: Any = nn.Sequential(nn.Embedding(12, 8), *[nn.Linear(8, 8) for _ in range(3)])

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(functional.linear(output, net[0].weight), target)

    data = [(target + 1, target) for _, target in batches()]
    return loop(setting, loss_fn, model=lambda: net, data=data)


@program("own loop", "bfloat16, ignore_index, nothing said")
def _(setting: Setting) -> Outcome:
    data = [(x.bfloat16(), y) for x, y in batches()]
    return loop(
        setting, lambda o, t: functional.cross_entropy(o.float(), t, ignore_index=3),
        model=lambda: mlp().bfloat16(), data=data,
    )  # fmt: skip


@program("own loop", "root of a mean, nothing said")
def _(setting: Setting) -> Outcome:
    return loop(setting, lambda output, target: entropy(output, target).sqrt())


@program("own loop", "an L2 term in loss_fn")
def _(setting: Setting) -> Outcome:
    net = mlp()

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return entropy(output, target) + 0.01 * sum(p.square().sum() for p in net.parameters())

    return loop(setting, loss_fn, model=lambda: net)


def made_late(make: Callable[[Any, Any], Any], use: Callable[[Any, Any], None]) -> tuple[Any, Step]:
    """What is made after the first step, of a model and its optimizer, and used after each; and the hook."""
    late: list[Any] = []

    def after(net: Any, optimizer: Any, pipe: Any) -> None:
        if not late:
            late.append(make(net, optimizer))
        use(late[0], net)

    return late, after


@program("own loop", "OneCycleLR")
def _(setting: Setting) -> Outcome:
    kind = torch.optim.lr_scheduler.OneCycleLR
    _, after = made_late(lambda _, made: kind(made, 0.1, STEPS + 1), lambda one, _: one.step())
    return loop(setting, entropy, after=after)


@program("own loop", "EMA by AveragedModel")
def _(setting: Setting) -> Outcome:
    late, after = made_late(
        lambda net, _: AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9)),
        lambda average, net: average.update_parameters(net),
    )
    outcome = loop(setting, entropy, after=after)
    here = {n: p for n, p in late[0].module.named_parameters() if not p.is_meta}
    outcome.metrics["first weight"] = float(next(iter(here.values())).detach().sum())
    return outcome


@program("own loop", "SWALR")
def _(setting: Setting) -> Outcome:
    _, after = made_late(
        lambda _, made: SWALR(made, swa_lr=0.05, anneal_epochs=5), lambda one, _: one.step()
    )
    return loop(setting, entropy, after=after)


@program("own loop", "the best weights kept and loaded again")
def _(setting: Setting) -> Outcome:
    kept: list[Any] = []

    def after(net: Any, made: Any, pipe: Any) -> None:
        if len(kept) == 10:
            net.load_state_dict(kept[4])
        kept.append(copy.deepcopy(net.state_dict()))

    return loop(setting, entropy, after=after)


@program("own loop", "frozen after ten steps")
def _(setting: Setting) -> Outcome:
    steps: list[int] = []

    def after(net: Any, made: Any, pipe: Any) -> None:
        steps.append(1)
        if len(steps) == 10:
            net[0].requires_grad_(False)

    return loop(setting, entropy, after=after)


@program("own loop", "torch.save(model.state_dict()) on rank 0")
def _(setting: Setting) -> Outcome:
    def after(net: Any, made: Any, pipe: Any) -> None:
        if pipe is None or pipe.is_main_process:
            torch.save(net.state_dict(), io.BytesIO())

    return loop(setting, entropy, after=after)


@program("own loop", "torch.save(PipelineModule.state_dict())")
def _(setting: Setting) -> Outcome:
    def after(net: Any, made: Any, pipe: Any) -> None:
        state = net.state_dict() if pipe is None else PipelineModule(pipe).state_dict()
        torch.save(state, io.BytesIO())

    return loop(setting, entropy, after=after)


@program("own loop", "norms of weights logged by p.norm()")
def _(setting: Setting) -> Outcome:
    logged: list[float] = []

    def after(net: Any, made: Any, pipe: Any) -> None:
        logged.append(float(sum(p.detach().norm() for p in net.parameters())))

    outcome = loop(setting, entropy, after=after)
    return Outcome(outcome.losses + logged, {}, outcome.weights)


@program("own loop", "LBFGS with a closure")
def _(setting: Setting) -> Outcome:
    net = mlp()
    pipe = setting.pipeline(net, loss_fn=entropy) if setting.cut else None
    made = torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=1)
    losses = []
    for x, y in batches():

        def closure(x: Tensor = x, y: Tensor = y) -> Any:
            made.zero_grad()
            if pipe is not None:
                return pipe.step(setting.part(x), target=setting.part(y)).loss
            loss = entropy(net(x), y)
            loss.backward()
            return loss

        losses.append(float(made.step(closure)))
    return Outcome(losses, {}, whole_state(net, pipe))


@program("own loop", "a loss of the outputs, by PipelineModule without loss_fn")
def _(setting: Setting) -> Outcome:
    net = mlp()
    made = torch.optim.AdamW(net.parameters(), lr=0.01)
    model: Any = PipelineModule(setting.pipeline(net)) if setting.cut else net
    losses = []
    for x, y in batches():
        loss = functional.cross_entropy(model(setting.part(x)), setting.part(y))
        loss.backward()
        total = loss.detach()
        if setting.cut and setting.replicas > 1:
            total = model.pipe.replicas.added(total[None])[0] / setting.replicas
        losses.append(float(total))
        made.step()
        made.zero_grad()
    return Outcome(losses, {}, whole_state(net, model.pipe if setting.cut else None))


@program("own loop", "two optimizers, one for the head")
def _(setting: Setting) -> Outcome:
    class Both:
        def __init__(self, params: Any) -> None:
            params = list(params)
            self.all = [
                torch.optim.SGD(params[:-2], lr=0.1),
                torch.optim.AdamW(params[-2:], lr=0.01, foreach=True),
            ]

        def step(self) -> None:
            for one in self.all:
                one.step()

        def zero_grad(self) -> None:
            for one in self.all:
                one.zero_grad()

    return loop(setting, entropy, optimizer=Both)


@program("own loop", "optimizers fused=True")
def _(setting: Setting) -> Outcome:
    return loop(
        setting, entropy, optimizer=lambda params: torch.optim.Adam(params, 0.01, fused=True)
    )


@program("own loop", "clip_grad_norm_(foreach=True)")
def _(setting: Setting) -> Outcome:
    return loop(setting, entropy, clips=0.05, foreach=True)


class Graphs(nn.Module):
    """One output for each graph."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 5)

    def forward(self, nodes: Tensor, graph: Tensor) -> Tensor:
        hidden = self.second(self.first(nodes).tanh()).tanh()
        pooled = torch.zeros(4, 8, dtype=hidden.dtype).index_add(0, graph, hidden)
        return cast("Tensor", self.head(pooled))


@program("own loop", "Microbatches of graphs")
def _(setting: Setting) -> Outcome:
    net = Graphs()
    made = torch.optim.AdamW(net.parameters(), lr=0.01)
    pipe = setting.pipeline(net, loss_fn=entropy) if setting.cut else None
    draw, losses = torch.Generator().manual_seed(3), []
    for _ in range(STEPS):
        calls, targets = [], []
        for _ in range(4):
            sizes = torch.randint(1, 5, (4,), generator=draw)
            nodes = torch.randn(int(sizes.sum()), 8, generator=draw)
            calls.append((nodes, torch.repeat_interleave(torch.arange(4), sizes)))
            targets.append(torch.randint(5, (4,), generator=draw))
        if pipe is None:
            each = [entropy(net(*c), t) for c, t in zip(calls, targets, strict=True)]
            loss = torch.stack(each).mean()
            loss.backward()
        else:
            mine = slice(setting.index, None, setting.replicas)
            loss = torch.as_tensor(pipe.step(Microbatches(calls[mine]), target=targets[mine]).loss)
        losses.append(float(loss))
        made.step()
        made.zero_grad()
    return Outcome(losses, {}, whole_state(net, pipe))


class Bounded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return cast("Tensor", x[:, :5] * self.net(x)), x


@program("own loop", "a derivative of the model in loss_fn")
def _(setting: Setting) -> Outcome:
    def residual(output: Any, target: Tensor) -> Tensor:
        u, x = output
        (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        return cast("Tensor", slope.square().mean())

    data = [(x.requires_grad_(), y) for x, y in batches()]
    return loop(setting, residual, model=Bounded, data=data)


@program("own loop", "GradScaler, float16 autocast")
def _(setting: Setting) -> Outcome:
    net = mlp().float()
    made = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    model: Any = net
    if setting.cut:
        model = PipelineModule(setting.pipeline(net, loss_fn=entropy))
    losses = []
    for x, y in batches():
        x, y = setting.part(x).float(), setting.part(y)
        with torch.autocast("cpu", torch.float16):
            loss = model(x, target=y) if setting.cut else entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(made)
        scaler.update()
        made.zero_grad()
        losses.append(float(loss.detach()))
    return Outcome(losses, {}, whole_state(net, model.pipe if setting.cut else None))
