"""What processes have, told to the first of them: what several have alike is told once."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from typing import Any

from penstock._engine.transport import Group, Job


class Known:
    """What the first process knows of all: JSON data by digest, told by the first that has it."""

    def __init__(self) -> None:
        self._data: dict[str, Any] = {}

    def asked(self, digests: Sequence[Mapping[str, str]]) -> list[list[str]]:
        """For each process, of whose parts the digests are given by name, the digests of those to tell."""
        seen, asked = {*self._data}, []
        for of_process in digests:
            asked.append([one for one in dict.fromkeys(of_process.values()) if one not in seen])
            seen.update(asked[-1])
        return asked

    def learn(
        self, digests: Sequence[Mapping[str, str]], texts: Sequence[Mapping[str, str]]
    ) -> list[dict[str, Any]]:
        """Take what was asked for, and forget what nobody has; return each process's parts by name."""
        for of_process in texts:
            self._data.update((digest, json.loads(text)) for digest, text in of_process.items())
        kept = {one for of_process in digests for one in of_process.values()}
        self._data = {digest: part for digest, part in self._data.items() if digest in kept}
        return [
            {name: self._data[digest] for name, digest in of_process.items()}
            for of_process in digests
        ]


def parts_of(data: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, str]]:
    """The digest of each part of JSON data, by name, and the parts' texts by digest."""
    texts = {name: json.dumps(part) for name, part in data.items()}
    digests = {name: sha256(text.encode()).hexdigest()[:32] for name, text in texts.items()}
    return digests, {digests[name]: text for name, text in texts.items()}


def distinct(parts: Sequence[Mapping[str, Any]], *names: str) -> list[Any]:
    """Return what processes brought under names, each once: rows of values; values alone for one name."""
    rows = {tuple(id(of[name]) for name in names): [of[name] for name in names] for of in parts}
    return [row[0] if len(names) == 1 else row for row in rows.values()]


def tell(
    job: Job,
    among: Group,
    doing: str,
    bring: Callable[[], tuple[Any, Mapping[str, Any]]],
    answer: Callable[[list[dict[str, Any]]], Sequence[Any]],
    *,
    known: Known | None = None,
    begin: Callable[[list[Any]], Any] = lambda heads: None,
    look: Callable[[Any], Any] = lambda begun: None,
) -> Any:
    """Tell the first process what each has, and let it answer each; as two meetings.

    Args:
        job: this process among the others.
        among: the processes.
        doing: what they do, for messages.
        bring: returns a JSON value, and parts of JSON data by name, of which those that are alike in several
            processes are told once.
        answer: called in the first process with the parts of all; returns a JSON value for each.
        known: what the first process knows from earlier calls.
        begin: called in the first process with the first values of all; returns a JSON value for all.
        look: called in each process with that value.
    """
    known = known or Known()
    digests: list[dict[str, str]] = []
    texts: dict[str, str] = {}

    def show() -> list[Any]:
        head, data = bring()
        names, mine = parts_of(data)
        texts.update(mine)
        return [head, names]

    def ask(shown: list[Any]) -> list[Any]:
        digests.extend(names for _, names in shown)
        begun = begin([head for head, _ in shown])
        return [[begun, asked] for asked in known.asked(digests)]

    begun, asked = job.meet(show, ask, doing, each=True, among=among)

    def rest() -> dict[str, str]:
        look(begun)
        return {digest: texts[digest] for digest in asked}

    def answers(of_all: list[Any]) -> Sequence[Any]:
        return answer(known.learn(digests, of_all))

    return job.meet(rest, answers, doing, each=True, among=among)
