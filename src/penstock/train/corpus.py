"""The text to train on: read, split into a training and a held-out part, and cut into batches.

Batches depend on the text and the seed alone, so every rank makes the same ones without any message.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.errors import InputFileError, UsageError

Bytes = npt.NDArray[np.uint8]
Batch = tuple[Tensor, Tensor]
HELD_OUT_SHARE = 20
"""One in this many files is held out; of a single file, one part in this many."""
LARGEST_FOLDER = 2 << 30
"""Bytes. A folder is read into memory; a larger text must be a single file, which is mapped."""
NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})


@dataclass(frozen=True)
class Corpus:
    """A text in two parts.

    Args:
        name: the source of the text, for messages.
        files: the number of files that were read.
        training: the bytes to learn from, one-dimensional.
        held_out: the bytes to measure on.
    """

    name: str
    files: int
    training: Bytes
    held_out: Bytes

    def training_batch(self, step: int, *, seed: int, batch: int, sequence: int) -> Batch:
        """The batch of one step, whose samples start anywhere in the training text.

        Returns:
            Bytes and the bytes that follow them, each ``(batch, sequence)`` int64.
        """
        random = np.random.default_rng((seed, step))
        starts = random.integers(0, len(self.training) - sequence, batch)
        return _windows(self.training, starts, sequence)

    def held_out_batches(self, count: int, *, batch: int, sequence: int) -> Iterator[Batch]:
        """At most ``count`` full batches of samples spread evenly over the held-out text.

        A text too short for that many samples gives fewer batches, but at least one, whose samples may
        overlap.
        """
        fitting = (len(self.held_out) - 1) // sequence
        batches = max(1, min(count, fitting // batch))
        starts = np.linspace(0, len(self.held_out) - sequence - 1, batches * batch).astype(np.int64)
        for part in np.split(starts, batches):
            yield _windows(self.held_out, part, sequence)


def _windows(text: Bytes, starts: npt.NDArray[np.int64], sequence: int) -> Batch:
    rows = text[starts[:, None] + np.arange(sequence + 1)].astype(np.int64)
    window = torch.from_numpy(rows)
    return window[:, :-1].contiguous(), window[:, 1:].contiguous()


def load(data: str | None, sequence: int) -> Corpus:
    """Read a text and split it.

    Args:
        data: a file, or a folder of text files; None means the sources of this machine's Python standard
            library.
        sequence: length of a sample in bytes; each part must hold at least one sample.

    Raises:
        UsageError: there is no such file or folder.
        InputFileError: the text is too short, or cannot be read.
    """
    path = Path(data or sysconfig.get_path("stdlib"))
    name = data or "Python standard library"
    try:
        if path.is_dir():
            corpus = _from_folder(name, path, library=data is None)
        elif path.is_file():
            text = np.memmap(path, np.uint8, "r") if path.stat().st_size else _bytes([])
            corpus = _split_by_position(name, 1, text)
        else:
            raise UsageError(
                f"data={data!r}: there is no such file or folder; give the path of a text"
            )
    except OSError as error:
        raise InputFileError(
            f"{path}: cannot be read: {error.strerror or error}; check its permissions"
        ) from error
    total = len(corpus.training) + len(corpus.held_out)
    if min(len(corpus.training), len(corpus.held_out)) <= sequence:
        raise InputFileError(
            f"{corpus.name}: {total} bytes are not enough text for sequence={sequence}: the training and "
            f"the held-out part need {sequence + 1} bytes each; give more text or a shorter sequence"
        )
    return corpus


def _from_folder(name: str, root: Path, *, library: bool) -> Corpus:
    """Read all text files of a folder; their names decide which are held out."""
    paths = list(_files(root, NOT_LIBRARY if library else frozenset()))
    paths = [path for path in paths if not library or path.suffix == ".py"]
    total = sum(path.stat().st_size for path in paths)
    if total > LARGEST_FOLDER:
        raise InputFileError(
            f"{name}: {total} bytes in {len(paths)} files, more than the {LARGEST_FOLDER} that are "
            f"read from a folder; name a smaller folder or one file"
        )
    training, held_out = list[bytes](), list[bytes]()
    for path in paths:
        if text := _text(path):
            digest = sha256(path.relative_to(root).as_posix().encode()).digest()
            is_held_out = int.from_bytes(digest[:8], "little") % HELD_OUT_SHARE == 0
            (held_out if is_held_out else training).append(text)
    files = len(training) + len(held_out)
    if not (training and held_out):
        return _split_by_position(name, files, _bytes(training + held_out))
    return Corpus(name, files, _bytes(training), _bytes(held_out))


def _files(folder: Path, skip: frozenset[str]) -> Iterator[Path]:
    """The regular files below a folder in the order of their names, without hidden ones."""
    for where, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in skip and name[0] != ".")
        paths = (Path(where, name) for name in sorted(files) if name[0] != ".")
        yield from (path for path in paths if path.is_file())


def _text(path: Path) -> bytes:
    """The contents of a file; empty if it is not UTF-8 text."""
    try:
        content = path.read_bytes()
        content.decode("utf-8")
    except (OSError, UnicodeDecodeError):
        return b""
    return b"" if b"\0" in content else content


def _bytes(texts: list[bytes]) -> Bytes:
    return np.frombuffer(b"".join(texts), np.uint8)


def _split_by_position(name: str, files: int, text: Bytes) -> Corpus:
    """Hold out the end of a text."""
    border = len(text) - len(text) // HELD_OUT_SHARE
    return Corpus(name, files, training=text[:border], held_out=text[border:])
