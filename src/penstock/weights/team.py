"""The processes that save and load together, and the one of them that leads.

What they tell each other goes to the leader and back: the traffic of a process does not depend on how many
there are.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from hashlib import sha256
from typing import Any, NamedTuple

from penstock.errors import (
    AgreementError,
    CheckpointError,
    PenstockError,
    StorageError,
    error_named,
    public_name,
)


class Level(NamedTuple):
    """Processes of which the first one collects values: a pipeline's ranks, or its replicas.

    Attributes:
        rank: this process's place among them.
        size: how many there are.
        to_first: sends a JSON value to the first one, which gets the list of all.
        from_first: gets a JSON value from the first one, which passes those of all.
    """

    rank: int
    size: int
    to_first: Callable[[Any], list[Any] | None]
    from_first: Callable[[Sequence[Any] | None], Any]


def exchanging(rank: int, size: int, exchange: Callable[[Any], list[Any]]) -> Level:
    """A level of replicas whose values are exchanged by a function of the user's."""
    return Level(
        rank,
        size,
        lambda value: exchange(value) if rank == 0 else exchange(value) and None,
        lambda values: exchange(values)[0][rank],
    )


class Known:
    """What the leader knows of all processes: JSON data by digest, told by the first that has it."""

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
    """What processes brought under names, each once: rows of values; values alone for one name."""
    rows = {tuple(id(of[name]) for name in names): [of[name] for name in names] for of in parts}
    return [row[0] if len(names) == 1 else row for row in rows.values()]


class Team:
    """All processes of a run, ordered by replica and then by rank.

    Args:
        levels: the ranks of a pipeline and its replicas in each dimension, or one level of all processes.
        layout: the number of replicas, and of processes in each.
        calling: a context for a call of a name, which may take this process so many seconds before it counts
            as silent.

    Attributes:
        rank: this process's place.
        size: the number of processes.
        leads: whether this process is the leader, which makes visible what all have written.
    """

    def __init__(
        self,
        levels: Sequence[Level],
        layout: tuple[int, int],
        calling: Callable[[str, float], AbstractContextManager[None]] = lambda *_: nullcontext(),
    ) -> None:
        self._levels = levels
        self.layout = layout
        self.calling = calling
        self.rank, self.size = 0, 1
        for level in levels:
            self.rank, self.size = self.rank + self.size * level.rank, self.size * level.size
        self.leads = self.rank == 0

    def name(self, process: int) -> str:
        """The name of a process, for messages."""
        if self.layout[0] == 1:
            return f"rank {process}"
        return f"rank {process % self.layout[1]} of replica {process // self.layout[1]}"

    def meet(
        self,
        doing: str,
        task: Callable[[], Any],
        answer: Callable[[list[Any]], Sequence[Any]] | None = None,
    ) -> Any:
        """Run a task on every process, and let the leader answer each; if one fails, all raise its error.

        Args:
            doing: the verb for the messages of the others: ``cannot <doing>``.
            task: the task, which returns a JSON value for the leader.
            answer: called in the leader with the values of all; returns a JSON value for each.

        Returns:
            The leader's answer to this process; None without ``answer``.

        Raises:
            AgreementError: some process called something else.
        """
        value: Any = None
        error: BaseException | None = None
        try:
            value = task()
        except Exception as raised:
            error = raised
        mine = None if error is None else [*_described(error), self.rank]
        if self.size == 1:
            if error is not None:
                raise error
            return None if answer is None else answer([value])[0]
        reports = self._to_leader([mine, value])
        replies = None
        if reports is not None:
            problem = next((one for one, _ in reports if one is not None), None)
            try:
                values = [value for _, value in reports]
                answers = answer(values) if answer and problem is None else [None] * self.size
                replies = [[problem, one] for one in answers]
            except Exception as raised:
                error = raised
                replies = [[[*_described(raised), None], None]] * self.size
        problem, reply = self._from_leader(replies)
        if error is not None:
            raise error
        if problem is not None:
            raise self._error(doing, *problem)
        return reply

    def tell(
        self,
        doing: str,
        bring: Callable[[], tuple[Any, Mapping[str, Any]]],
        answer: Callable[[list[dict[str, Any]]], Sequence[Any]],
        *,
        known: Known | None = None,
        begin: Callable[[list[Any]], Any] = lambda heads: None,
        look: Callable[[Any], Any] = lambda begun: None,
    ) -> Any:
        """Tell the leader what each process has, and let it answer each; as two calls of :meth:`meet`.

        Args:
            doing: as for :meth:`meet`.
            bring: returns a JSON value, and parts of JSON data by name, of which those that are alike in
                several processes are told once.
            answer: called in the leader with the parts of all processes; returns a JSON value for each.
            known: what the leader knows from earlier calls.
            begin: called in the leader with the first values of all; returns a JSON value for all.
            look: called in each process with that value.
        """
        known = known or Known()
        digests: list[dict[str, str]] = []
        texts: dict[str, str] = {}

        def show() -> list[Any]:
            nonlocal texts
            head, data = bring()
            names, texts = parts_of(data)
            return [head, names]

        def ask(shown: list[Any]) -> list[Any]:
            nonlocal digests
            digests = [names for _, names in shown]
            begun = begin([head for head, _ in shown])
            return [[begun, asked] for asked in known.asked(digests)]

        begun, asked = self.meet(doing, show, ask)

        def rest() -> dict[str, str]:
            look(begun)
            return {digest: texts[digest] for digest in asked}

        return self.meet(doing, rest, lambda of_all: answer(known.learn(digests, of_all)))

    def _error(
        self, doing: str, kind: str, text: str, number: int | None, process: int | None
    ) -> PenstockError:
        """The error of another process; of what the leader found out about all, as the leader raises it."""
        theirs = "" if process is None else f"{self.name(process)} cannot {doing}: "
        error = error_named(kind)(f"{theirs}{text}")
        error.rank = process
        if isinstance(error, StorageError):
            error.errno = number
        return error

    def _to_leader(self, value: Any) -> list[Any] | None:
        """The values of all processes in the leader; None in the others."""
        values = [value]
        for level in self._levels:
            rows = _agreed(level.to_first, values)
            if rows is None:
                return None
            values = [one for row in rows for one in row]
        return values

    def _from_leader(self, values: Sequence[Any] | None) -> Any:
        """This process's value, of those that the leader passes."""
        # Beyond the first level in which this process is not the first, others speak for it.
        follows = [number for number, level in enumerate(self._levels) if level.rank]
        for level in reversed(self._levels[: follows[0] + 1] if follows else self._levels):
            rows = None
            if values is not None:
                count = len(values) // level.size
                rows = [values[i * count : (i + 1) * count] for i in range(level.size)]
            values = _agreed(level.from_first, rows)
        assert values is not None
        return values[0]


def _described(error: BaseException) -> list[Any]:
    kind = type(error) if isinstance(error, PenstockError) else CheckpointError
    return [public_name(kind), str(error), getattr(error, "errno", None)]


def _agreed(move: Callable[[Any], Any], value: Any) -> Any:
    try:
        return move(value)
    except (RuntimeError, TypeError, ValueError, KeyError) as error:
        if isinstance(error, PenstockError) and not isinstance(error, AgreementError):
            raise
        raise AgreementError(
            "all ranks must save and load together, and some of them called something else: was this "
            f"called on one rank only, as under `if pipe.is_main_process:`? ({error})"
        ) from error
