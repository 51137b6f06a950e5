"""The text to train on: found, split into a training and a held-out part, and cut into batches.

Everything follows from the text and the seed alone, so every rank makes the same batches without any
message.
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
"""One in how many files is held out, or which fraction of a single file."""

LARGEST_FOLDER = 2 << 30
"""Bytes. A folder is read into memory; a larger text must be a single file, which is mapped."""

NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})


@dataclass(frozen=True)
class Corpus:
    """A text in two parts.

    Args:
        name: where it is from, for messages.
        files: how many files were read.
        training: the bytes to learn from, one-dimensional.
        held_out: the bytes to measure on.
    """

    name: str
    files: int
    training: Bytes
    held_out: Bytes

    def training_batch(self, step: int, *, seed: int, batch: int, sequence: int) -> Batch:
        """The batch of one step: its samples start anywhere in the training text.

        Args:
            step: which step; the same step always gives the same batch.
            seed: another seed gives other batches.
            batch: number of samples.
            sequence: length of a sample in bytes.

        Returns:
            Bytes and the bytes that follow them, each ``(batch, sequence)`` int64.
        """
        random = np.random.default_rng((seed, step))
        starts = random.integers(0, len(self.training) - sequence, batch)
        return _windows(self.training, starts, sequence)

    def held_out_batches(self, count: int, *, batch: int, sequence: int) -> Iterator[Batch]:
        """At most ``count`` full batches of samples spread evenly over the held-out text.

        A text too short for that many samples gives fewer batches, but one at least, in which samples
        may overlap.
        """
        fitting = (len(self.held_out) - 1) // sequence
        batches = max(1, min(count, fitting // batch))
        starts = np.linspace(0, len(self.held_out) - sequence - 1, batches * batch).astype(np.int64)
        for part in np.split(starts, batches):
            yield _windows(self.held_out, part, sequence)


def load(data: str | None, sequence: int) -> Corpus:
    """Read a text and split it.

    Args:
        data: a file, or a folder whose text files are taken; None takes the sources of the Python
            standard library of this machine.
        sequence: length of a sample in bytes; each part must hold at least one sample.

    Raises:
        UsageError: there is no such file or folder.
        InputFileError: the text is too short, or cannot be read.
    """
    corpus = _standard_library() if data is None else _given(Path(data))
    needed = sequence + 1
    shorter = min(len(corpus.training), len(corpus.held_out))
    if shorter < needed:
        total = len(corpus.training) + len(corpus.held_out)
        raise InputFileError(
            f"{corpus.name}: {total} bytes are not enough text for sequence={sequence}: the training and "
            f"the held-out part need {needed} bytes each; give more text or a shorter sequence"
        )
    return corpus


def _given(path: Path) -> Corpus:
    if path.is_dir():
        return _from_files(str(path), path, list(_files(path)))
    if path.is_file():
        return _from_file(path)
    raise UsageError(
        f"data={str(path)!r}: there is no such file or folder; give the path of a text"
    )


def _standard_library() -> Corpus:
    root = Path(sysconfig.get_path("stdlib"))
    sources = [path for path in _files(root, skip=NOT_LIBRARY) if path.suffix == ".py"]
    if not sources:
        raise UsageError(f"there are no Python sources in {root}; name a text with --data")
    return _from_files("Python standard library", root, sources)


def _files(folder: Path, skip: frozenset[str] = frozenset()) -> Iterator[Path]:
    """The regular files below ``folder`` in the order of their names, without hidden ones."""
    for where, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in skip and name[0] != ".")
        yield from (Path(where, name) for name in sorted(files) if name[0] != ".")


def _from_file(path: Path) -> Corpus:
    """Map one file; its end is held out."""
    try:
        size = path.stat().st_size
        text: Bytes = np.memmap(path, np.uint8, "r") if size else np.empty(0, np.uint8)
    except OSError as error:
        raise _unreadable(path, error) from error
    return _split_by_position(str(path), 1, text)


def _from_files(name: str, root: Path, paths: list[Path]) -> Corpus:
    """Read all text files; their names decide which are held out."""
    _check_size(name, paths)
    texts = {path: text for path in paths if (text := _text(path))}
    held_out = {path: _is_held_out(path.relative_to(root).as_posix()) for path in texts}
    if len(set(held_out.values())) < 2:
        return _split_by_position(name, len(texts), _join(list(texts.values())))
    return Corpus(
        name,
        len(texts),
        training=_join([text for path, text in texts.items() if not held_out[path]]),
        held_out=_join([text for path, text in texts.items() if held_out[path]]),
    )


def _check_size(name: str, paths: list[Path]) -> None:
    total = sum(path.stat().st_size for path in paths if path.is_file())
    if total > LARGEST_FOLDER:
        raise InputFileError(
            f"{name}: {total} bytes in {len(paths)} files, more than the {LARGEST_FOLDER} that are "
            f"read from a folder; name a smaller folder or one file"
        )


def _split_by_position(name: str, files: int, text: Bytes) -> Corpus:
    border = len(text) - len(text) // HELD_OUT_SHARE
    return Corpus(name, files, training=text[:border], held_out=text[border:])


def _text(path: Path) -> bytes | None:
    """The contents of a file, if that is UTF-8 text."""
    try:
        content = path.read_bytes() if path.is_file() else b""
        content.decode("utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    return None if b"\0" in content else content


def _join(texts: list[bytes]) -> Bytes:
    return np.frombuffer(b"".join(texts), np.uint8)


def _is_held_out(name: str) -> bool:
    return int.from_bytes(sha256(name.encode()).digest()[:8], "little") % HELD_OUT_SHARE == 0


def _unreadable(path: Path, error: OSError) -> InputFileError:
    return InputFileError(
        f"{path}: cannot be read: {error.strerror or error}; check its permissions"
    )


def _windows(text: Bytes, starts: npt.NDArray[np.int64], sequence: int) -> Batch:
    rows = text[starts[:, None] + np.arange(sequence + 1)].astype(np.int64)
    window = torch.from_numpy(rows)
    return window[:, :-1].contiguous(), window[:, 1:].contiguous()
