"""Sequences split over processes and experts spread over them, beside a pipeline: equal to one process."""

from __future__ import annotations

import copy
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.functional import cross_entropy

from penstock import Loss, Pipeline, overlap_collectives
from penstock.errors import PenstockError, UsageError
from penstock.plan import predict
from penstock.schedule import build
from tests.processes import in_processes

PAIRED = build("DualPipeV", ranks=1, microbatches=6)
VOCABULARY, WIDTH, HIDDEN, EXPERTS, SAMPLES, LENGTH = 40, 8, 12, 4, 8, 12


class Gathered(torch.autograd.Function):
    """The parts of all members of a group, along the sequence."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Any, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        parts = [torch.empty_like(part.contiguous()) for _ in range(group.size())]
        dist.all_gather(parts, part.contiguous(), group=group)
        return torch.cat(parts, dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        whole = gradients[0].clone()
        dist.all_reduce(whole, group=ctx.group)
        return whole.chunk(ctx.group.size(), ctx.dim)[ctx.group.rank()], None, None


class Exchanged(torch.autograd.Function):
    """Rows that members of a group send each other."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: Any, received: Any, group: Any) -> Tensor:
        ctx.back = received, sent, group
        result = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(result, rows.contiguous(), received, sent, group=group)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return Exchanged.apply(gradients[0], *ctx.back), None, None, None  # type: ignore[no-untyped-call]


class Attention(nn.Module):
    """Causal attention; with a group, over the keys and values of all its members."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        self.group, self.norm = group, nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor, places: Tensor) -> Any:
        query, key, value = self.qkv(self.norm(hidden)).chunk(3, -1)
        seen = places
        if self.group is not None:
            key, value = (Gathered.apply(x, self.group, 1) for x in (key, value))  # type: ignore[no-untyped-call]
            seen = Gathered.apply(places, self.group, 1)  # type: ignore[no-untyped-call]
        scores = query @ key.mT / WIDTH**0.5
        scores = scores.masked_fill(places[:, :, None] < seen[:, None, :], -torch.inf)
        return hidden + self.out(scores.softmax(-1) @ value)


class Experts(nn.Module):
    """Sends each token to one expert; where that lies on another process, over the mesh of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) / 3)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) / 3)

    def forward(self, hidden: Tensor) -> Any:
        tokens = hidden.flatten(0, -2)
        gate, chosen = self.router(tokens).softmax(-1).max(-1)
        order = chosen.argsort(stable=True)
        rows, counts = tokens[order], chosen.bincount(minlength=EXPERTS)
        up: Any = self.up
        down: Any = self.down
        group: Any = None
        sizes: Any = ()
        if isinstance(up, DTensor):
            group, up, down = up.device_mesh.get_group(), up.to_local(), down.to_local()
            arriving = torch.empty_like(counts)
            dist.all_to_all_single(arriving, counts, group=group)
            sent, received = (n.view(group.size(), -1) for n in (counts, arriving))
            sizes = sent.sum(1).tolist(), received.sum(1).tolist()
            rows = Exchanged.apply(rows, *sizes, group)  # type: ignore[no-untyped-call]
            counts = received
        expert = torch.arange(len(up)).repeat(counts.numel() // len(up))
        expert = expert.repeat_interleave(counts.flatten())
        inner = torch.tanh(torch.einsum("nd,ndh->nh", rows, up[expert]))
        rows = torch.einsum("nh,nhd->nd", inner, down[expert])
        if group is not None:
            rows = Exchanged.apply(rows, *sizes[::-1], group)  # type: ignore[no-untyped-call]
        return hidden + (gate[:, None] * rows[order.argsort()]).view_as(hidden)


class Block(nn.Module):
    def __init__(self, group: Any) -> None:
        super().__init__()
        self.attention, self.experts = Attention(group), Experts()

    def forward(self, hidden: Tensor, places: Tensor) -> Any:
        return self.experts(self.attention(hidden, places))


class Language(nn.Module):
    def __init__(self, group: Any = None) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block(group) for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor, places: Tensor) -> Any:
        hidden = self.tokens(ids) + self.places(places)
        for block in self.blocks:
            hidden = block(hidden, places)
        return self.head(hidden)


def by_tokens(logits: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(logits.flatten(0, -2), labels.flatten())


def count(labels: Tensor) -> Tensor:
    return labels.ne(-100).sum()


def batch_of(mesh: Any) -> tuple[Any, Any]:
    """A whole batch, with labels of some tokens only, and this process's part of it."""
    torch.manual_seed(1)
    ids, labels = torch.randint(VOCABULARY, (2, SAMPLES, LENGTH))
    labels[0, :7], labels[3, 2:] = -100, -100
    places = torch.arange(LENGTH).expand(SAMPLES, -1)
    mine: Any = (ids, places, labels)
    for name in mesh.mesh_dim_names:
        if name != "pp":
            dim, at = (1 if name == "cp" else 0), mesh.get_local_rank(name)
            mine = tuple(x.chunk(mesh[name].size(), dim)[at].contiguous() for x in mine)
    return (ids, places, labels), mine


@pytest.mark.parametrize(
    ("dims", "schedule"),
    [
        ({"pp": 2, "cp": 2}, "1F1B"),
        ({"pp": 2, "ep": 2}, "ZB-V"),
        ({"pp": 2, "ep": 2}, "1F1B"),
        ({"pp": 1, "cp": 2, "ep": 2}, "1F1B"),
        ({"pp": 2, "ep": 2}, "DualPipeV"),
    ],
)
@in_processes(4)
def test_a_mesh_of_context_and_experts_equals_one_process(
    group: Any, dims: dict[str, int], schedule: str
) -> None:
    mesh = init_device_mesh("cpu", tuple(dims.values()), mesh_dim_names=tuple(dims))
    torch.manual_seed(0)
    model = Language(mesh.get_group("cp") if "cp" in dims else None).double()
    plain = Language().double()
    plain.load_state_dict(model.state_dict())
    (ids, places, labels), (my_ids, my_places, my_labels) = batch_of(mesh)

    def spread(module: nn.Module, stage: int) -> None:
        for part in module.modules():
            if isinstance(part, Experts) and "ep" in dims:
                for name in ("up", "down"):
                    whole = getattr(part, name).detach()
                    setattr(
                        part, name, nn.Parameter(distribute_tensor(whole, mesh["ep"], [Shard(0)]))
                    )

    beside = tuple(name for name in dims if name != "pp")
    pipe = Pipeline(
        model, schedule=schedule, mesh=mesh, replicas=beside, wrap=spread,
        microbatches=4 if schedule == "DualPipeV" else 2, loss_fn=Loss(by_tokens, weight=count),
    )  # fmt: skip
    pipe.on_overlap(overlap_collectives)
    optimizers = []
    with pipe:
        pipe.cut(my_ids, my_places, target=my_labels)
        for trained in (pipe, plain):
            optimizers.append(torch.optim.SGD(trained.parameters(), lr=0.1, momentum=0.9))
        for _ in range(3):
            result = pipe.step(my_ids, my_places, target=my_labels)
            loss = by_tokens(plain(ids, places), labels)
            loss.backward()
            assert result.loss == pytest.approx(loss.item(), rel=1e-12)
            norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
            assert pipe.clip_grad_norm_(0.1) == pytest.approx(norm.item(), rel=1e-9)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        state = pipe.weights.state_dict(full=True)
        streamed = dict(pipe.weights.stream(to="all", bucket_bytes=100))
    assert bool(state) == (not pipe.rank)
    for whole in (state, streamed):
        for name, tensor in whole.items():
            torch.testing.assert_close(tensor, plain.state_dict()[name])
    assert streamed.keys() == plain.state_dict().keys()


RAN: list[str] = []
"""Which exchanges were started, F in a forward and B in a backward."""


class Noted(torch.autograd.Function):
    """An exchange of rows in equal parts, which is noted."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, functional: bool) -> Tensor:
        ctx.functional = functional
        RAN.append("F")
        return exchanged(rows, functional)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        RAN.append("B")
        return exchanged(gradients[0], ctx.functional), None


def exchanged(rows: Tensor, functional: bool) -> Tensor:
    if functional:
        sent: Any = all_to_all_single(rows.contiguous(), None, None, cast("Any", dist.group.WORLD))
        return cast("Tensor", sent * 1.0)
    result = torch.empty_like(rows)
    dist.all_to_all_single(result, rows.contiguous())
    return result


class Expert(nn.Module):
    """Sends rows to experts on all processes and back; drops some on the way."""

    def __init__(self, functional: bool) -> None:
        super().__init__()
        self.expert, self.functional = nn.Linear(WIDTH, WIDTH), functional

    def forward(self, rows: Tensor) -> Tensor:
        there: Any = Noted.apply(rows, self.functional)  # type: ignore[no-untyped-call]
        made = torch.tanh(self.expert(nn.functional.dropout(there, 0.3)))
        back: Any = Noted.apply(made, self.functional)  # type: ignore[no-untyped-call]
        return rows + nn.functional.dropout(back, 0.3)


@pytest.mark.parametrize("functional", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
@in_processes(4)
def test_a_half_of_a_pair_computes_while_the_other_communicates(
    group: Any, functional: bool, recompute: bool
) -> None:
    def trained(**options: Any) -> tuple[list[Any], str]:
        torch.manual_seed(0)
        model = nn.Sequential(*[Expert(functional) for _ in range(4)])
        alone = init_device_mesh("cpu", (1, 4), mesh_dim_names=("pp", "ep"))["pp"]
        pipe = Pipeline(
            model, schedule=PAIRED, microbatches=6, mesh=alone, loss_fn=nn.functional.mse_loss,
            recompute=recompute,
        )  # fmt: skip
        if options.get("overlaps"):
            pipe.on_overlap(overlap_collectives)
        rows = torch.linspace(-1, 1, 24 * WIDTH).sin().view(24, WIDTH) + group.rank()
        with pipe:
            pipe.step(rows, target=rows)
            RAN.clear()
            loss = pipe.step(rows, target=rows).loss
            return [loss, *[p.grad.tolist() for p in pipe.parameters()]], "".join(RAN)  # type: ignore[union-attr]

    (plain, one_by_one), (overlapped, in_turns) = trained(), trained(overlaps=True)
    assert overlapped == plain
    assert sorted(in_turns) == sorted(one_by_one)
    # A stage has four exchanges, of which the first needs no gradient in the first stage.
    assert recompute or one_by_one.count("FB") <= len(PAIRED.pairs) + 1
    assert recompute or in_turns.count("FB") >= 3 * len(PAIRED.pairs)
    assert in_turns != one_by_one


@in_processes(4)
def test_experts_over_some_of_the_replicas_need_the_names_of_their_dimensions(group: Any) -> None:
    """The experts of other replicas are others, and would be averaged with them."""
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("pp", "dp", "ep"))

    def spread(module: nn.Module, stage: int) -> None:
        for part in module.modules():
            if isinstance(part, nn.Linear):
                whole = part.weight.detach()
                part.weight = nn.Parameter(distribute_tensor(whole, mesh["ep"], [Shard(0)]))

    with pytest.raises(UsageError, match=r"some of the replicas.*replicas=\(.dp., .ep.\)"):
        Pipeline(
            nn.Sequential(nn.Linear(4, 4)), mesh=mesh, replicas=mesh["dp", "ep"]._flatten(),
            wrap=spread, loss_fn=nn.functional.mse_loss,
        )  # fmt: skip


class Between(nn.Module):
    """Communicates between its layers, where no stage would."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        self.group, self.layers = group, nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, hidden: Tensor) -> Any:
        hidden = self.layers[0](hidden)
        seen = [torch.empty_like(hidden) for _ in range(self.group.size())]
        dist.all_gather(seen, hidden.detach(), group=self.group)
        return self.layers[1](hidden + sum(seen))


@in_processes(2)
def test_a_collective_between_layers_is_refused(group: Any) -> None:
    pipe = Pipeline(
        Between(group), ranks=2, microbatches=2, mesh=group, loss_fn=nn.functional.mse_loss
    )
    x = torch.ones(4, 4)
    with (
        pipe,
        pytest.raises(PenstockError, match="a collective of torch"),
    ):
        pipe.step(x, target=x)


@in_processes(2)
def test_what_layers_that_communicate_cost_is_predicted_but_not_measured_in_one_process(
    group: Any,
) -> None:
    torch.manual_seed(0)
    model = Language(group)
    model.blocks = nn.ModuleList(Attention(group) for _ in range(4))
    ids, places = torch.zeros(2, LENGTH).long(), torch.arange(LENGTH).expand(2, LENGTH)
    profile = predict(model, ids, places, target=ids, loss_fn=by_tokens, device="h100")
    assert sum(unit.forward for unit in profile.at(1).units) > 0
    options = {"ranks": 2, "loss_fn": by_tokens, "mesh": group}
    pipe = Pipeline(model, schedule="auto", microbatches=2, **options)
    with pipe, pytest.raises(UsageError, match=r"communicates .*name a schedule"):
        pipe.step(ids, places, target=ids)


@in_processes(4)
def test_a_llama_whose_sequences_are_split_over_processes(group: Any) -> None:
    """An unedited model: its attention is a function that the user registers."""
    from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "cp"))
    among = mesh.get_group("cp")

    def gathered(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any
    ) -> tuple[Tensor, None]:
        key, value = (Gathered.apply(x, among, 2) for x in (key, value))  # type: ignore[no-untyped-call]
        places = torch.arange(query.shape[2]) + among.rank() * query.shape[2]
        causal = places[:, None] >= torch.arange(key.shape[2])
        result = nn.functional.scaled_dot_product_attention(
            query, key, value, causal, scale=options["scaling"], enable_gqa=True
        )
        return result.transpose(1, 2).contiguous(), None

    AttentionInterface.register("gathered", gathered)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    plain = LlamaForCausalLM(config).double()
    model = LlamaForCausalLM(copy.deepcopy(config))
    model.config._attn_implementation = "gathered"
    model.double().load_state_dict(plain.state_dict())
    (ids, places, labels), (my_ids, my_places, my_labels) = batch_of(mesh)
    loss_fn = Loss(lambda output, target: by_tokens(output.logits, target), weight=count)
    pipe = Pipeline(model, mesh=mesh, replicas="cp", microbatches=2, loss_fn=loss_fn)
    with pipe:
        result = pipe.step(input_ids=my_ids, position_ids=my_places, target=my_labels)
        loss = by_tokens(plain(input_ids=ids, position_ids=places).logits, labels)
        loss.backward()
        assert result.loss == pytest.approx(loss.item(), rel=1e-9)
        own = dict(plain.named_parameters())
        for name, parameter in pipe.weights.here.named_parameters():
            torch.testing.assert_close(parameter.grad, own[name].grad)
