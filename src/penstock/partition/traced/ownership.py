"""Which stage holds which parameter and buffer, and under which of its names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, takewhile

from torch import Tensor, fx, nn

from penstock.partition.traced.export import ROOT
from penstock.partition.traced.trace import Trace


@dataclass(frozen=True)
class Ownership:
    """What each stage holds.

    Args:
        tensors: per stage, what it holds under which name.
        names: per stage, for each name of what it holds the one it is read by there.
    """

    tensors: tuple[dict[str, Tensor], ...]
    names: tuple[dict[str, str], ...]


def share_out(model: nn.Module, trace: Trace, stages: int) -> Ownership:
    """Give each parameter and buffer to the stages that use it, and those that none uses to a neighbour."""
    tensors: list[dict[str, Tensor]] = [{} for _ in range(stages)]
    names: list[dict[str, str]] = [{} for _ in range(stages)]
    groups = _groups(model)
    users = {group: _users(trace, group) for group in groups}
    used = {name: min(users[group]) for group in groups if users[group] for name in group}
    for group, tensor in groups.items():
        given = _given(group, users[group] or {_neighbour(group[0], used): []})
        for stage, own in given.items():
            tensors[stage].update(dict.fromkeys(own, tensor))
            names[stage].update(dict.fromkeys(group, own[0]))
    return Ownership(tuple(tensors), tuple(names))


def _groups(model: nn.Module) -> dict[tuple[str, ...], Tensor]:
    """Each parameter and buffer by all its names."""
    found: dict[int, tuple[list[str], Tensor]] = {}
    named = chain(
        model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)
    )
    for name, tensor in named:
        found.setdefault(id(tensor), ([], tensor))[0].append(name)
    return {tuple(names): tensor for names, tensor in found.values()}


def _users(trace: Trace, group: Iterable[str]) -> dict[int, list[fx.Node]]:
    found: dict[int, list[fx.Node]] = {}
    for name in group:
        for stage, nodes in trace.users(name).items():
            found.setdefault(stage, []).extend(nodes)
    return dict(sorted(found.items()))


def _given(group: Sequence[str], users: Mapping[int, list[fx.Node]]) -> dict[int, list[str]]:
    """The names that each user gets: those of the modules that use it there; the rest goes to the first."""
    given = {stage: [n for n in group if _used_as(n, nodes)] for stage, nodes in users.items()}
    taken = set(chain.from_iterable(given.values()))
    first = min(given)
    given[first] = [name for name in group if name in given[first] or name not in taken]
    return {stage: own or [group[0]] for stage, own in given.items()}


def _used_as(name: str, nodes: Iterable[fx.Node]) -> bool:
    owner = ROOT + name.rpartition(".")[0]
    return any(owner.rstrip(".") in _modules_around(node) for node in nodes)


def _modules_around(node: fx.Node) -> set[str]:
    return {path for path, _ in (node.meta.get("nn_module_stack") or {}).values()}


def _neighbour(name: str, used: Mapping[str, int]) -> int:
    """The stage of what stands nearest by name."""
    nearest = max(used, key=lambda other: _common(name, other), default=None)
    return 0 if nearest is None else used[nearest]


def _common(one: str, other: str) -> int:
    pairs = zip(one.split("."), other.split("."), strict=False)
    return len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
