"""How the ranks find a board, when a pipeline is made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.faults.board import Board, BoardLostError, FolderBoard, StoreBoard
from penstock.faults.processes import Process, this_process

_TOPIC = "meeting"


class Meeting:
    """One rank's part in it: every rank makes an offer, then answers all ranks' offers, then has a board.

    Args:
        rank: this one.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._folder = FolderBoard.new() if rank == 0 else None
        self.processes: dict[int, Process] = {}

    def offer(self) -> dict[str, Any]:
        """Who this rank is, and a folder where it is the first."""
        if self._folder is not None:
            self._folder.post(_TOPIC, 0, self._token)
        folder = None if self._folder is None else str(self._folder.path)
        return {"process": this_process().as_json(), "folder": folder}

    @property
    def _token(self) -> str:
        return str(this_process())

    def answer(self, offers: Sequence[Mapping[str, Any]]) -> bool:
        """Whether this rank can use the folder: it is on that machine, and sees what stands there."""
        self.processes = {rank: Process(**offer["process"]) for rank, offer in enumerate(offers)}
        self._folder = self._folder or FolderBoard(Path(offers[0]["folder"]))
        try:
            seen = self._folder.read(_TOPIC, 0)
        except BoardLostError:
            return False
        return self.processes[0].is_here and seen == str(self.processes[0])

    def board(self, answers: Sequence[bool], store: Any) -> Board | None:
        """The folder if all can use it; else a board in the store, where there is one."""
        if all(answers) and self._folder is not None:
            return self._folder
        if self._rank == 0 and self._folder is not None:
            self._folder.remove()
        return None if store is None else StoreBoard(store)
