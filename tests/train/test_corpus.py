"""The text: read, split by file or position, cut into the same batches everywhere."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from penstock.errors import InputFileError, UsageError
from penstock.train import corpus as corpus_module
from penstock.train.corpus import Corpus, load

TEXT = bytes(range(32, 127)) * 20


def counting(training: int = 500, held_out: int = 100) -> Corpus:
    """Byte after byte counts on."""
    parts = [(np.arange(length) % 256).astype(np.uint8) for length in (training, held_out)]
    return Corpus("test", 1, *parts)


def test_the_standard_library_is_the_default() -> None:
    library = load(None, 128)
    assert library.name == "Python standard library"
    assert library.files > 100
    assert len(library.training) > 10 * len(library.held_out) > 10_000


def test_a_file_and_a_small_folder_are_split_by_position(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(TEXT)
    for path in (tmp_path / "text", tmp_path):
        corpus = load(str(path), 8)
        assert bytes(corpus.training) + bytes(corpus.held_out) == TEXT
        assert len(corpus.held_out) == len(TEXT) // 20


def test_a_folder_is_split_by_file_and_what_is_no_text_is_left_out(tmp_path: Path) -> None:
    corpora = []
    for root in (tmp_path / "there", tmp_path / "here"):
        (root / "below").mkdir(parents=True)
        (root / ".git").mkdir()
        for index in range(60):
            folder = root / "below" if index < 10 else root
            (folder / f"text{index:02}.txt").write_bytes(f"file {index:02} ".encode() * 10)
        for name, content in {"picture": b"\xff\xfe\0", "zeros": b"\0", ".git/text": TEXT}.items():
            (root / name).write_bytes(content)
        corpora.append(load(str(root), 8))
    held_out = bytes(corpora[0].held_out)
    names = {held_out[i : i + 7] for i in range(0, len(held_out), 80)}
    assert corpora[0].files == 60
    assert 0 < len(names) < 20
    assert not any(name in bytes(corpora[0].training) for name in names)
    assert bytes(corpora[1].held_out) == held_out


def test_what_cannot_be_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"data='.*nothing': there is no such file"):
        load(str(tmp_path / "nothing"), 8)
    with pytest.raises(InputFileError, match="0 bytes are not enough text for sequence=8"):
        load(str(tmp_path), 8)
    (tmp_path / "text").write_bytes(b"")
    with pytest.raises(InputFileError, match="0 bytes are not enough text"):
        load(str(tmp_path / "text"), 8)
    (tmp_path / "text").write_bytes(TEXT)
    with pytest.raises(InputFileError, match=r"sequence=1024.*a shorter sequence"):
        load(str(tmp_path / "text"), 1024)
    monkeypatch.setattr(corpus_module, "LARGEST_FOLDER", 10)
    with pytest.raises(InputFileError, match="more than the 10 that are read"):
        load(str(tmp_path), 8)

    def refuse(*_: object) -> None:
        raise PermissionError(13, "denied")

    monkeypatch.setattr(np, "memmap", refuse)
    with pytest.raises(InputFileError, match="cannot be read: denied; check its permissions"):
        load(str(tmp_path / "text"), 8)


def test_a_batch_follows_from_seed_and_step_and_its_target_is_what_comes_next() -> None:
    def batch(step: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        return counting().training_batch(step, seed=seed, batch=3, sequence=8)

    x, y = batch(1, 0)
    assert x.shape == y.shape == (3, 8)
    assert x.dtype == y.dtype == torch.int64
    assert torch.equal((x + 1) % 256, y)
    assert torch.equal(batch(1, 0)[0], x)
    assert not torch.equal(batch(2, 0)[0], x)
    assert not torch.equal(batch(1, 1)[0], x)
    # Every position can be trained on.
    x, y = counting(training=9).training_batch(1, seed=0, batch=2, sequence=8)
    assert [*x[0].tolist(), int(y[0, -1])] == list(range(9))


@pytest.mark.parametrize(("held_out", "batches"), [(1000, 20), (100, 3), (40, 1), (9, 1)])
def test_held_out_batches_span_the_text_and_are_fewer_where_it_is_short(
    held_out: int, batches: int
) -> None:
    parts = list(counting(held_out=held_out).held_out_batches(20, batch=4, sequence=8))
    assert len(parts) == batches
    assert all(x.shape == (4, 8) for x, _ in parts)
    assert parts[0][0][0, 0] == 0
    assert batches == 1 or parts[-1][1][-1, -1] == (held_out - 1) % 256
