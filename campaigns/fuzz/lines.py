"""What a random model is made of: the kinds of lines, written as the Python that they become.

Values have kinds, so that lines fit together. All but ``i`` and ``o`` begin with the dimension of the batch:

    V  [batch, 4] floats        K  [batch, 3] tokens below 4     t  a tuple of two S
    S  [batch, 3, 4] floats     Q  [batch, 3] bools              d  a dict of two S, "a" and "b"
    *  V or S, the same twice   i  a number                      o  an S or None

A row of the table reads ``family [arguments->results] ways to make a module :: ways to write the line``,
with `` | `` between the ways and `` ; `` for the end of a line. If nothing else is said, the line is
``{m}({0})``. Here ``{0}`` and ``{1}`` are the arguments, ``{m}`` is what was made, ``{n}`` the number of the
line, ``{out}`` (and ``{out}b``) what the line gives. The plainest way comes first: hypothesis shrinks
towards it. Rows ``in units`` do not stand between modules. A new kind of line is a new row.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import product
from typing import NamedTuple


class Form(NamedTuple):
    """One way to write one kind of line."""

    family: str
    takes: str
    gives: str
    make: str
    code: str
    only_in_units: bool


HEAVY = r"Linear|Keeps|Scales|Switch|Counts|Leaves|Caches|Conv|Embedding|LSTM|GRU|Attention|coder|Norm|PReLU"
"""What stands in ``make`` where a module has weights."""
TABLE = r"""
# layers
linear [*->*] nn.Linear(4, 4) | nn.Linear(4, 4, bias=False)
linear [*->*] nn.Sequential(nn.Linear(4, 3), nn.ReLU(inplace=True), nn.Linear(3, 4))
activation [*->*] nn.Tanh() | nn.ReLU(inplace=True) | nn.PReLU() | nn.Softmax(-1)
norm [*->*] nn.LayerNorm(4) | nn.RMSNorm(4) | nn.LayerNorm(4, bias=False)
batch norm [V->V] nn.BatchNorm1d(4) | nn.BatchNorm1d(4, momentum=None)
batch norm [S->S] nn.BatchNorm1d(3) | nn.BatchNorm1d(3, affine=False)
convolution [S->S] nn.Conv1d(3, 3, 3, padding=1) | nn.Conv1d(3, 3, 1, groups=3)
convolution [S->S] nn.Conv2d(1, 1, 3, padding=1) :: {m}({0}.unsqueeze(1)).squeeze(1)
recurrent [S->S] nn.LSTM(4, 4, batch_first=True) | nn.GRU(4, 2, bidirectional=True, batch_first=True) ::
    {out}, _ = {m}({0})
recurrent [S->SV] nn.LSTM(4, 4, batch_first=True) :: {out}, ({out}b, _) = {m}({0}) ; {out}b = {out}b[-1]
attention [SS->S] nn.MultiheadAttention(4, 2, batch_first=True) :: {out}, _ = {m}({0}, {1}, {1}) | {out} =
    {m}(query={0}, key={1}, value={1}, need_weights=False)[0]
attention [SQ->S] nn.MultiheadAttention(4, 2, batch_first=True) :: {out}, _ = {m}({0}, {0}, {0},
    key_padding_mask=~{1})
attention [S->S] nn.TransformerEncoderLayer(4, 1, 8, 0.0, batch_first=True)
attention [SS->S] nn.Parameter(torch.randn(4, 4) / 2) :: F.scaled_dot_product_attention({0} @ {m}, {1},
    {1}, is_causal=True)
embedding [K->S] nn.Embedding(4, 4) | nn.Embedding(4, 4, padding_idx=0) | nn.Embedding(4, 4, sparse=True) |
    nn.Embedding(4, 4, max_norm=1.0)
embedding [K->V] nn.EmbeddingBag(4, 4, mode='sum')
embedding [S->S] nn.Embedding(8, 4) :: {0} + {m}(torch.arange({0}.size(1)))
parametrised [*->*] nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)) |
    nn.utils.parametrizations.orthogonal(nn.Linear(4, 4))
frozen [*->*] nn.Linear(4, 4) ; {m}.requires_grad_(False) | nn.Linear(4, 4) ;
    {m}.bias.requires_grad_(False)
unused [*->*] nn.Linear(4, 4) ; {m}.spare = nn.Parameter(torch.ones(2))
lone weight [*->*] nn.Parameter(torch.randn(4)) :: {m} * {0} | {0} + {m}.exp()
functional [*->*] nn.Parameter(torch.randn(4, 4) / 2) :: F.linear({0}, {m}) | F.linear({0}, {m}, {m}[0]) |
    {0} @ {m}.T | torch.matmul({0}, {m} * 1) | torch.einsum('...i,ij->...j', {0}, {m})
functional [V->V] nn.Parameter(torch.randn(4, 4) / 2) :: torch.addmm({m}[0], {0}, {m}, beta=0.5) |
    torch.stack([{m} @ row for row in {0}.unbind()]) | torch.vmap(lambda row: {m} @ row)({0})
functional [S->S] nn.Parameter(torch.randn(4, 4) / 2) :: torch.bmm({0}, {m}.expand(len({0}), -1, -1)) |
    torch.vmap(torch.mm, (0, None))({0}, {m})
functional [K->S] nn.Parameter(torch.randn(4, 4)) :: F.embedding({0}, {m}) | {m}[{0}]
functional [*->*] nn.Linear(4, 4) :: torch.func.functional_call({m}, dict(weight={m}.weight * 2), ({0},))
# code without weights
pointwise [*->*] :: torch.tanh({0}) | {0} * 0.5 + 1 | {0}.clone() | {0} - {0}.detach().mean() | {0} *
    {0}.shape[0] / {0}.numel() | {0}.to(torch.float32).to({0}.dtype) | {0}.sort(-1).values |
    checkpoint(torch.sin, {0}, use_reentrant=False) | {0} * 2 if self.training else {0} | {0} +
    torch.linspace(0, 1, {0}.size(-1)) | F.pad({0}, (1, 0))[..., 1:]
skips [**->*] :: {0} + {1} | {0} * torch.sigmoid({1}) | torch.where({0} > {1}, {0}, {1}) | sum([{0}, {1},
    {0}]) | torch.stack([{0}, {1}]).mean(0) | torch.cat([{0}, {1}], -1)[..., ::2]
skips [SV->S] :: {0} + {1}[:, None] | {0} * {1}.unsqueeze(1).expand_as({0})
views [S->V] :: {0}.mean(1) | {0}[:, -1] | {0}.unbind(1)[0]
views [V->S] :: {0}.unsqueeze(1).expand(-1, 3, -1) | torch.stack([{0}] * 3, 1)
views [*->*] :: {0}.view({0}.shape) | {0}[:] | {0}.flatten(1).view_as({0}) | {0}.chunk(1)[0] |
    {0}.transpose(0, -1).transpose(0, -1) | {0}[..., :1].expand_as({0})
views [*->**] :: {out}, {out}b = torch.cat([{0}, {0} * 2], -1).chunk(2, -1) | {out}, {out}b = {0},
    {0}.view_as({0})
in place [*->*] :: {out} = {0}.clone() ; {out}[..., 0] = 0 | {out} = {0}.mul_(0.5) | {out} = F.relu({0},
    inplace=True) | {0}[..., 0] = 0 ; {out} = {0} | {0}.view(-1)[0] = 1 ; {out} = {0} | {out} = {0} ;
    {out} *= 0.5 | with torch.no_grad(): {0}.mul_(0.9) ; {out} = {0} | {out} = {0} + 0 ;
    {out}.detach().add_(0.1) | {out} = {0} * 1 ; {out}[{out} > 0] = 0.5
in place [**->*] :: {out} = {0}.clone() ; {out} += {1} | {out} = {0}.add_({1}) | {0}[..., 1] = {1}[..., 1]
    ; {out} = {0} | {out} = torch.empty_like({0}).copy_({0}) ; {out}[..., 0] = {1}[..., 0]
detach [*->*] :: {0}.detach() + {0} | {0}.detach() | {0} * {0}.detach().sigmoid() | with torch.no_grad():
    {out} = {0} * 2
detach [*->*] nn.Linear(4, 4) :: {m}({0}.detach()) | {m}({0}) ; {out} = {0} | with torch.no_grad(): {out}
    = {m}({0})
custom function [*->*] :: Scale.apply({0}, 0.5)
custom function [**->**] :: {out}, {out}b = Swap.apply({0}, {1})
transforms in units [*->*] :: torch.func.grad(lambda x: x.sin().sum())({0}) | torch.func.jvp(torch.sin,
    ({0},), (torch.ones_like({0}),))[1]
tensor hooks [*->*] :: {out} = {0} * 1 ; {out}.requires_grad and {out}.register_hook(lambda grad: grad *
    0.5) | {out} = {0}.tanh() ; {out}.requires_grad and {out}.register_hook(lambda grad: note('h{n}',
    grad))
losses inside [*->*] :: penstock.add_loss('a', {0}.square().mean(), weight=0.1) ; {out} = {0} |
    penstock.add_loss('b', {0}.abs().sum()) ; {out} = {0} * 1
buffers [*->*] self.register_buffer('m{n}', torch.ones(4)) | self.register_buffer('m{n}', torch.ones(4),
    persistent=False) :: {0} * {m} | {m}.mul_(0.9).add_({0}.detach().mean()) ; {out} = {0} * {m}
state [*->*] self.m{n} = 0 :: {m} += 1 ; {out} = {0} * (1 + {m} % 2)
state [*->*] self.m{n} = [] :: {m}.append(1) ; {out} = {0} * len({m})
state [*->*] self.m{n} = itertools.cycle((1.0, 0.5)) :: {0} * next({m})
state [*->*] self.m{n} = None :: {m} = torch.ones_like({0}) ; {out} = {0} * {m} ; {m} = None | {m} = {0} ;
    {out} = {0} * 1 | {out} = {0} if {m} is None else {0} + {m}.mean() ; {m} = {0}.detach()
kept values [*->*] Keeps(4, 4) :: {m}({0}) + {m}.kept | {m}({0}) * {m}.calls
given buffers [*->**] Scales(4, 4) :: {out}, {out}b = {m}({0})
given buffers [*->*] nn.ModuleList([Scales(4, 4), nn.Linear(4, 4)]) :: {out} = {m}[1]({m}[0]({0})[0]) *
    {m}[0].scale | {out} = {m}[1]({m}[0]({0})[0]) * {m}[0].codes | {out}, _, c = {m}[0]({0}, own=True) ;
    {out} = {m}[1]({out}) * c
given buffers [*->*] Scales(4, 4) :: {out}, _ = {m}({0}) ; {out} = {out} * {m}.scale | {out}, _ = {m}({0}) ;
    {out} = {out} + {m}.codes
switches [*->*] Switch(4, 4, 'freezes') | Switch(4, 4, 'skips') | Switch(4, 4, 'writes')
switches [*->*] Switch(4, 4, 'views') :: {out} = {m}({0}) ; {out}.mul_(0.5) ; {out} = {out} + {0} | {out} =
    {m}({0}) ; {0}.mul_(0.5) ; {out} = {out} + {0}
switches [*->**] Switch(4, 4, 'stops') :: {out}, {out}b = {m}({0})
switches [*->*] nn.ModuleList([Switch(4, 4, 'stops'), Switch(4, 4, 'freezes')]) :: {out}, c = {m}[0]({0}) ;
    {out} = {m}[1]({out} + c) * c
switches [*->*] Switch(4, 4, 'pairs') :: {m}({0})[0]
switches [*->*] nn.Linear(4, 4) :: {m}({0}) if {m}.training else {0} * 2
switches [*i->*] nn.Linear(4, 4) :: {out} = {0} ; for _ in range({1}): {out} = {m}({out})
switches [*i->*] nn.Linear(4, 4) :: {m}({0}) if {1} > 1 else {0}
switches [*->*] self.on = False :: {out} = {0} * 2 if self.on else {0} | {out} = {0} if self.on else
    {0}.tanh()
own counts [*->*] Switch(4, 4, 'freezes', 3) | Switch(4, 4, 'skips', 4)
own counts [*->**] Switch(4, 4, 'stops', 3) :: {out}, {out}b = {m}({0})
objects [*->*] nn.ModuleList([Counts(4, 4), Counts(4, 4)]) :: {out}, c = {0}, [] ; for layer in {m}: {out} =
    layer({out}, c) | {out}, c = {0}, dict(n=0) ; for layer in {m}: {out} = layer({out}, c) | {out}, c = {0},
    itertools.count(1) ; for layer in {m}: {out} = layer({out}, c) | {out}, c = {0}, dict(h=0.0) ; for layer
    in {m}: {out} = layer({out}, c) | {out}, c = {0}, Bag() ; for layer in {m}: {out} = layer({out}, c)
objects [*->*] nn.ModuleList([Counts(4, 4), Counts(4, 4)]) :: {out}, c = {0}, [] ; for layer in {m}: {out} =
    layer({out}, c) ; {out} = {out} * len(c) | {out}, c = {0}, dict(h=0.0) ; for layer in {m}: {out} =
    layer({out}, c) ; {out} = {out} + c['h'] | {out}, c = {0}, dict(x={0}, n=0) ; for layer in {m}: {out} =
    layer({out}, c) + c['x']
objects [*->*] nn.ModuleList([Counts(4, 4), Counts(4, 4)]) :: {out}, c = {0}, iter((1.0, 0.5)) ; for layer
    in {m}: {out} = layer({out}, c) | {out}, c = {0}, (x for x in (1.0, 0.5)) ; for layer in {m}: {out} =
    layer({out}, c) | {out}, c = {0}, collections.deque((1.0, 0.5)) ; for layer in {m}: {out} =
    layer({out}, c) | {out}, c = {0}, Bag() ; c.h = 0.0 ; for layer in {m}: {out} = layer({out}, c) | {out},
    c = {0}, Bag() ; for layer in {m}: {out} = layer({out}, c) ; {out} = {out} * c.n
global numbers [*->*] Leaves(4, 4)
global numbers [*->*] nn.ModuleList([Leaves(4, 4), nn.Linear(4, 4)]) :: {m}[1]({m}[0]({0}))
scripted [*->*] :: doubled({0})
scripted in units [*->*] :: doubled({0})
caches [*->*] self.m{n} = None :: {m} = torch.linspace(0, 1, 4) if {m} is None else {m} ; {out} = {0} * {m}
caches [*->*] self.m{n} = dict() :: {m}.setdefault({0}.size(0), torch.ones(4)) ; {out} = {0} *
    {m}[{0}.size(0)]
caches [*->*] Caches(4, 4)
written [*->*] :: self.w{n} = {0}.mean() ; {out} = {0} * 1
strides [*->*] :: {0}.transpose(0, -1).contiguous().mul_(2).transpose(0, -1) | {0}[...,
    1:].contiguous().add_(1).sum(-1, keepdim=True) + {0} | {0}.reshape(-1).mul_(0.5).view_as({0})
control flow [*->*] :: {0} * 2 if {0}.size(0) > 1 else {0} + 1 | {out} = {0} ; while {out} is {0}: {out} =
    {0} * 1.5
control flow in units [*->*] :: {out} = {0} * 2 if {0}.sum() > 0 else {0} | for _ in
    range(int({0}.detach().sum().abs().item()) % 3): {0} = {0} * 0.5 ; {out} = {0} * 1
decisions [*->*] :: {out} = {0} * 2 if {0}.sum() > 0 else {0}
autocast [*->*] nn.Linear(4, 4) :: with torch.autocast('cpu', torch.bfloat16): {out} = {m}({0}) ; {out} =
    {out}.to({0}.dtype)
# masks, integers, containers, None
integers [SQ->S] :: {0} * {1}[..., None] | {0}.masked_fill(~{1}[..., None], 0)
integers [S->Q] :: {0}.sum(-1) > 0 | torch.ones({0}.shape[:2], dtype=torch.bool)
integers [K->Q] :: {0} > 0
integers [S->K] :: {0}.argmax(-1) % 4
integers [K->K] :: ({0} + 1) % 4 | {0}.flip(1)
integers [S->i] :: {0}.size(1) | len({0}[0])
integers [*i->*] :: {0} * {1} | {0}.roll({1}, -1)
containers [So->S] :: {0} if {1} is None else {0} + {1}
containers [SS->t] :: ({0}, {1}) | ({0}, {0})
containers [t->SS] :: {out}, {out}b = {0}
containers [SS->d] :: dict(a={0}, b={1})
containers [d->S] :: {0}['a'] + {0}['b'] | sum({0}.values()) | {0}.get('b')
# random numbers
draws [*->*] nn.Dropout(0.5) | nn.Dropout(0.3, inplace=True) | nn.Sequential(nn.Linear(4, 4),
    nn.Dropout(0.5), nn.Linear(4, 4))
draws [SS->S] nn.MultiheadAttention(4, 2, dropout=0.5, batch_first=True) :: {out}, _ = {m}({0}, {1}, {1})
draws [S->S] nn.TransformerEncoderLayer(4, 2, 8, 0.3, batch_first=True)
draws [*->*] :: F.dropout({0}, 0.5, self.training) | {0} + torch.randn_like({0}) * 0.1 | {0} *
    torch.empty_like({0}).bernoulli_(0.5) | checkpoint(F.dropout, {0}, use_reentrant=False)
"""


def forms_of(table: str) -> Iterator[Form]:
    """Every way to make a module together with every way to use it."""
    for text in re.sub(r"#.*|\n +", " ", table).splitlines():
        head, _, ways = text.replace(" ; ", "\n").strip().partition("] ")
        if not head:
            continue
        family, _, kinds = head.partition(" [")
        takes, gives = kinds.split("->")
        make, _, code = ways.partition(":: ")
        for way, line in product(make.split(" | "), (code or "{m}({0})").split(" | ")):
            name, in_units = family.removesuffix(" in units"), "in units" in family
            yield Form(name, takes, gives, way.strip(), line, in_units)


FORMS = list(forms_of(TABLE))
FAMILIES = tuple(dict.fromkeys(form.family for form in FORMS))

# ---- how a unit is called; {args} are its arguments, {named} the same by name

CALLS = (
    "{out} = {m}({args})",
    "{out} = {m}({named})",
    "{out} = checkpoint({m}, {args}, use_reentrant=False)",
    "{out} = checkpoint({m}, {args}, use_reentrant=True)",
    "{out} = checkpoint({m}.forward, {args}, use_reentrant=False)",
    "with torch.no_grad(): {out} = {m}({args})",
)

# ---- hooks on a module {p}, and what happens to it before a step

HOOKS = (
    "{p}.register_forward_hook(notes_of('{p}'))",
    "{p}.register_forward_hook(lambda module, args, output: output * 0.9)",
    "{p}.register_forward_pre_hook(lambda module, args: (args[0] * 0.9, *args[1:]))",
    "{p}.register_full_backward_hook(lambda module, grads, outputs: note('{p}', grads, outputs))",
    "{p}.register_full_backward_pre_hook(lambda module, grads: (grads[0] * 0.5, *grads[1:]))",
    "{p}.weight.register_hook(lambda grad: grad * 0.5)",
    "{p}.weight.register_hook(lambda grad: grad.clamp(-0.01, 0.01))",
    "{p}.weight.register_post_accumulate_grad_hook(lambda weight: note('{p}', weight))",
)
EVENTS = (
    "{p}.weight.requires_grad_(False)",
    "model.requires_grad_(True)",
    "with torch.no_grad():\n    {p}.weight.mul_(0.5)",
    "{p}.requires_grad_(step % 2 == 0)",
    "next(iter(model.children())).requires_grad_(step % 2 == 0)",
    "{p}.eval()",
    "{p}.train(step % 2 == 0)",
    "{p}.register_forward_hook(lambda module, args, output: output * 0.9)",
    "{p}.weight = nn.Parameter({p}.weight.detach() * 0.5)",
    "for part in model.modules():\n"
    "    for name, buffer in list(part.named_buffers(recurse=False)):\n"
    "        setattr(part, name, buffer * 2)",
    "model.load_state_dict(model.state_dict(), assign=True)",
    "for part in model.modules():\n    part.on = True",
    "for part in model.modules():\n    part.on = step % 2 == 1",
)

# ---- what stands above the model where it is used

ABOVE = {
    "collections": "import collections",
    "itertools": "import itertools",
    "checkpoint": "from torch.utils.checkpoint import checkpoint",
    "note": """
seen = []


def note(name, *values):
    seen.append((name, [value.detach().sum() for value in tensors(values)]))
""",
    "notes_of": """
def notes_of(name):
    def record(module, args, output):  # returns nothing, so the run without data leaves it out
        note(name, output)

    return record
""",
    "weight_of": """
def weight_of(target):
    return 2.0 if target is None else target.abs().sum() + 1.0
""",
    "Keeps": """
class Keeps(nn.Linear):
    calls = 0

    def forward(self, x):
        self.calls, self.kept = self.calls % 2 + 1, x.mean()
        return super().forward(x)
""",
    "Scales": """
class Scales(nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.register_buffer('scale', torch.ones(4))
        self.codes = torch.ones(4)

    def forward(self, x, own=False):
        h = super().forward(x)
        self.scale.mul_(0.9).add_(h.detach().mean() * 0.1)
        self.codes.add_(0.1)
        return (h, self.scale.expand_as(h), *[self.scale] * own)
""",
    "Switch": """
class Switch(nn.Linear):
    def __init__(self, ins, outs, how, after=None):
        super().__init__(ins, outs)
        self.how, self.after, self.on, self.calls = how, after, False, 0

    def forward(self, x):
        self.calls += 1
        on = self.on if self.after is None else self.calls > self.after
        if self.how == 'writes':
            return super().forward(x.mul_(0.5) if on else x * 0.5)
        if self.how == 'skips' and not on:
            return x
        if self.how == 'views':
            return x[:] if on else super().forward(x)
        if self.how == 'stops':
            h = super().forward(x)
            return h, h.detach() if on else h * 2
        if self.how == 'pairs':
            h = super().forward(x)
            return (h, h, on) if on else (h, h * 2)
        with torch.set_grad_enabled(torch.is_grad_enabled() and (on or self.how != 'freezes')):
            return super().forward(x)
""",
    "Counts": """
class Bag:
    n = 1


class Counts(nn.Linear):
    def forward(self, x, c):
        h = super().forward(x)
        if isinstance(c, list):
            c.append(1)
            return h * len(c)
        if isinstance(c, dict) and 'h' in c:
            h = h + c['h']
            c['h'] = h * 0.5
            return h
        if isinstance(c, dict):
            c['n'] += 1
            return h * c['n']
        if type(c).__name__ == 'deque':
            return h * c.pop()
        if isinstance(c, Bag) and hasattr(c, 'h'):
            h = h + c.h
            c.h = h * 0.5
            return h
        if isinstance(c, Bag):
            c.n += 1
            return h * c.n
        return h * next(c)
""",
    "Leaves": """
SHARED = {}


class Leaves(nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        SHARED.clear()

    def forward(self, x):
        SHARED['n'] = SHARED.get('n', 0) + 1
        return super().forward(x) * (1 + SHARED['n'] % 2)
""",
    "doubled": """
@torch.jit.script
def doubled(x):
    return x * 2
""",
    "Caches": """
class Caches(nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.tables, self.calls = {}, 0

    def forward(self, x):
        self.calls += 1
        if len(x) not in self.tables:
            self.tables[len(x)] = torch.linspace(0, 1, 4)
        return super().forward(x) * self.tables[len(x)]
""",
    "Scale": """
class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x * factor

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.factor * 0.5, None
""",
    "Swap": """
class Swap(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        return y.clone(), x.clone()

    @staticmethod
    def backward(ctx, first, second):
        return second, first
""",
}
"""By a word that is in it, if it is needed."""
