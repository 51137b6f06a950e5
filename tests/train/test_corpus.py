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


def small_corpus(training: int = 500, held_out: int = 100) -> Corpus:
    return Corpus("test", 1, _count(training), _count(held_out))


def _count(length: int) -> corpus_module.Bytes:
    return (np.arange(length) % 256).astype(np.uint8)


def make_folder(root: Path, files: int = 60) -> Path:
    for index in range(files):
        (root / f"text{index:02}.txt").write_bytes(f"file {index:02} ".encode() * 10)
    return root


@pytest.fixture(scope="module")
def library() -> Corpus:
    return load(None, 128)


def test_standard_library_is_the_default(library: Corpus) -> None:
    assert library.name == "Python standard library"
    assert library.files > 100
    assert len(library.training) > 10 * len(library.held_out) > 10_000


def test_standard_library_leaves_tests_and_packages_out() -> None:
    assert {"site-packages", "test"} <= corpus_module.NOT_LIBRARY


def test_a_file_is_split_by_position(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(TEXT)
    corpus = load(str(path), 8)
    assert bytes(corpus.training) + bytes(corpus.held_out) == TEXT
    assert len(corpus.held_out) == len(TEXT) // 20


def test_a_folder_is_split_by_file(tmp_path: Path) -> None:
    corpus = load(str(make_folder(tmp_path)), 8)
    names = {bytes(part)[:7] for part in np.split(corpus.held_out, len(corpus.held_out) // 80)}
    assert corpus.files == 60
    assert names
    assert not any(name in bytes(corpus.training) for name in names)


def test_the_split_does_not_depend_on_the_folder_s_place(tmp_path: Path) -> None:
    for place in ("here", "there"):
        (tmp_path / place).mkdir()
    one, other = (load(str(make_folder(tmp_path / place)), 8) for place in ("here", "there"))
    assert np.array_equal(one.held_out, other.held_out)


def test_a_folder_too_small_to_split_by_file_is_split_by_position(tmp_path: Path) -> None:
    (tmp_path / "only").write_bytes(TEXT)
    assert bytes(load(str(tmp_path), 8).held_out) == TEXT[-len(TEXT) // 20 :]


def test_what_is_no_text_is_left_out(tmp_path: Path) -> None:
    make_folder(tmp_path)
    (tmp_path / "picture").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "zeros").write_bytes(b"\0\0\0")
    (tmp_path / ".hidden").write_bytes(TEXT)
    assert load(str(tmp_path), 8).files == 60


def test_folders_below_are_read_but_hidden_ones(tmp_path: Path) -> None:
    for name in ("below", ".git"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "text").write_bytes(TEXT)
    assert load(str(tmp_path), 8).files == 1


def test_missing_file_is_a_wrong_call(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"data='.*nothing': there is no such file"):
        load(str(tmp_path / "nothing"), 8)


def test_empty_file_is_a_wrong_file(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    with pytest.raises(InputFileError, match=r"empty: 0 bytes are not enough text for sequence=8"):
        load(str(tmp_path / "empty"), 8)


def test_empty_folder_is_a_wrong_file(tmp_path: Path) -> None:
    with pytest.raises(InputFileError, match="0 bytes are not enough"):
        load(str(tmp_path), 8)


def test_held_out_part_must_hold_a_sample(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(TEXT)
    with pytest.raises(InputFileError, match=r"sequence=1024.*a shorter sequence"):
        load(str(tmp_path / "text"), 1024)


def test_too_large_a_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus_module, "LARGEST_FOLDER", 10)
    with pytest.raises(InputFileError, match="more than the 10 that are read"):
        load(str(make_folder(tmp_path)), 8)


def test_unreadable_file_is_a_wrong_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "text").write_bytes(TEXT)
    monkeypatch.setattr(np, "memmap", _refuse)
    with pytest.raises(InputFileError, match="cannot be read: denied; check its permissions"):
        load(str(tmp_path / "text"), 8)


def _refuse(*_: object) -> None:
    raise PermissionError(13, "denied")


def test_a_batch_and_what_follows_it() -> None:
    x, y = small_corpus().training_batch(1, seed=0, batch=3, sequence=8)
    assert x.shape == y.shape == (3, 8)
    assert x.dtype == y.dtype == torch.int64
    assert torch.equal((x + 1) % 256, y)


def test_a_batch_follows_from_seed_and_step() -> None:
    def batch(step: int, seed: int) -> list[int]:
        return (
            small_corpus()
            .training_batch(step, seed=seed, batch=3, sequence=8)[0]
            .flatten()
            .tolist()
        )

    assert batch(1, 0) == batch(1, 0)
    assert batch(1, 0) != batch(2, 0)
    assert batch(1, 0) != batch(1, 1)


def test_every_position_can_be_trained_on() -> None:
    corpus = small_corpus(training=9)
    x, y = corpus.training_batch(1, seed=0, batch=2, sequence=8)
    assert x[0].tolist() == list(range(8))
    assert y[0, -1] == 8


def test_held_out_batches_span_the_text() -> None:
    batches = list(small_corpus(held_out=1000).held_out_batches(3, batch=4, sequence=8))
    assert len(batches) == 3
    assert batches[0][0][0, 0] == 0
    assert batches[-1][1][-1, -1] == 999 % 256


@pytest.mark.parametrize(("held_out", "batches"), [(1000, 20), (100, 3), (40, 1), (9, 1)])
def test_short_text_gives_fewer_held_out_batches(held_out: int, batches: int) -> None:
    corpus = small_corpus(held_out=held_out)
    parts = list(corpus.held_out_batches(20, batch=4, sequence=8))
    assert len(parts) == batches
    assert all(x.shape == (4, 8) for x, _ in parts)
