"""Files: exact round trips, and clear refusals of what others wrote."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from penstock.errors import InputFileError, ScheduleError, UsageError
from penstock.schedule import (
    Edge,
    Schedule,
    add_communication,
    build,
    compute_only,
    from_csv,
    from_json,
    load,
    names,
    offload,
    prefetch,
    reduce_gradients,
    save,
    to_csv,
    to_json,
    wait_for_sends,
)


def forms(name: str) -> list[Schedule]:
    plain = build(name, ranks=3, microbatches=6)
    lowered = add_communication(plain)
    sharded = reduce_gradients(prefetch(lowered))
    return [plain, lowered, wait_for_sends(lowered), sharded, offload(lowered)]


@pytest.mark.parametrize("name", names())
def test_round_trips_are_exact(name: str) -> None:
    for made in forms(name):
        again = from_json(to_json(made))
        assert (again, again.name) == (made, made.name)
        assert from_csv(to_csv(made)) == made


def test_json_holds_edges_and_csv_refuses_them() -> None:
    edges = (Edge("x", 0, (1, 2)), Edge("mask", 0, (2,), gradient=False), Edge("y", 1, (2,)))
    made = add_communication(build("1F1B", ranks=3, microbatches=2).with_edges(edges))
    assert from_json(to_json(made)) == made
    with pytest.raises(ScheduleError, match="edges other than the chain: write it as JSON"):
        to_csv(made)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "no rows"),
        ("0F0,0B0\n1F0,=cmd()", r"row 2, column 2: '=cmd\(\)' is not an action"),
        ("0F0,0X0", "row 1, column 2: '0X0' is not an action"),
        ("0F0,٣F0", "row 1, column 2"),
        ("0F0,9999999999F0", "row 1, column 2"),
        ("0F0\n0B0", "row 2: stage 0 computes in row 1 already"),
        ("0F0\n\n1F0", "row 2: computes nothing"),
        ("0F0\n2F0", "no row computes stage 1, but stage 2 is there"),
        (
            "0F0,0SEND_F0\n1F0,1SEND_F0",
            "rank 1, position 1, 1SEND_F0: its peer, stage 2, does not exist",
        ),
        ('0F0,"0B0', "row 1: not CSV"),
        ("0F999999999", "1000000000 microbatches of 1 stages: more than 10000000"),
        ("0F0," + "x" * 1000, "'x{60}' is not"),
    ],
)
def test_wrong_csv_names_row_column_and_text(text: str, expected: str) -> None:
    with pytest.raises(InputFileError, match=expected):
        from_csv(text)


GOOD = json.loads(to_json(build("1F1B", ranks=2, microbatches=1)))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"version": 2}, "version: .* 1, not 2"),
        ({"extra": 1}, "extra: Extra inputs"),
        ({"microbatches": "1"}, "microbatches: .* valid integer, not '1'"),
        ({"microbatches": 10**7}, "more than 10000000 forwards"),
        ({"microbatches": 0}, "microbatches=0: must be at least 1"),
        ({"microbatches": 10**12}, "microbatches: .* less than"),
        ({"placement": [0, 10**9]}, r"placement: 1000000000 is not a rank"),
        ({"programs": [["0F0"], [None]]}, r"programs\[1\]\[0\]: .* valid string, not None"),
        ({"programs": [["0F0"], ["1F0", "x"]]}, r"programs\[1\]\[1\]: 'x' is not an action"),
        ({"programs": [["0F0"]]}, "1 programs for 2 ranks"),
        ({"programs": [["0F0"], ["1F5"]]}, "there is no microbatch 5"),
        ({"\x1b[2J": 1}, r"^\\x1b\[2J: Extra inputs"),
        (
            {"edges": [{"value": "\x1b[2J", "source": 0, "targets": [1], "gradient": True}]},
            r"'\\x1b\[2J' cannot be printed",
        ),
        (
            {"edges": [{"value": "a"}]},
            r"edges\[0\].source: Field required",
        ),
        (
            {"edges": [{"value": "a", "source": 1, "targets": [0], "gradient": True}]},
            "a value goes to later stages only",
        ),
    ],
)
def test_wrong_json_names_the_place(change: dict[str, object], expected: str) -> None:
    with pytest.raises(InputFileError, match=expected) as refused:
        from_json(json.dumps(GOOD | change))
    assert len(str(refused.value)) < 200
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ('{"name": "a", "name": "b"}', "a key occurs twice"),
        ('{"version": NaN}', "format: Field required"),
        ('{"version": ' + "9" * 5000 + "}", "not JSON: .* 5000 digits"),
    ],
)
def test_what_is_no_json_object_is_refused(text: str, expected: str) -> None:
    with pytest.raises(InputFileError, match=expected):
        from_json(text)


def test_limits_hold_before_anything_is_built() -> None:
    with pytest.raises(InputFileError, match=r"4097 ranks: more than 4096"):
        from_csv("\n".join(f"{stage}F0" for stage in range(4097)))
    with pytest.raises(InputFileError, match=r"10000001 actions: more than 10000000"):
        from_csv("0F0" + "," * 10_000_000)


def test_files_are_saved_and_loaded_by_their_ending(tmp_path: Path) -> None:
    made = build("ZB-H1", ranks=2, microbatches=3)
    for ending in (".csv", ".json", ".JSON"):
        save(made, tmp_path / f"mine{ending}")
        assert load(tmp_path / f"mine{ending}") == made
    assert load(tmp_path / "mine.csv").name == "mine"
    with pytest.raises(UsageError, match=r"ends in \.csv or \.json"):
        save(made, tmp_path / "mine.txt")


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with (tmp_path / "big.csv").open("wb") as big:
        big.truncate(2**28 + 1)  # it takes no space
    (tmp_path / "bytes.csv").write_bytes(b"0F0,\xff")
    (tmp_path / "bad.csv").write_text("0F0,?")
    for name, expected in {
        "none.csv": r"none\.csv: cannot be read: No such file",
        "big.csv": r"big\.csv: larger than 268435456 bytes",
        "bytes.csv": r"bytes\.csv: byte 4 is not UTF-8",
        "bad.csv": r"bad\.csv: row 1, column 2: '\?'",
    }.items():
        with pytest.raises(InputFileError, match=expected):
            load(tmp_path / name)


def test_a_name_cannot_steer_a_terminal(tmp_path: Path) -> None:
    shown = r"\x1b[2J\nmine\ud800\u202e"
    text = json.dumps(GOOD | {"name": "\x1b[2J\nmine\ud800\u202e"})
    assert from_json(text).name == shown
    assert str(from_json(text)).isprintable() is False, "it has lines"
    assert "\x1b" not in str(from_json(text))
    assert len(from_json(json.dumps(GOOD | {"name": "x" * 10_000})).name) == 200
    (tmp_path / "\x1b[2Jmine.csv").write_text("0F0,0B0")
    assert load(tmp_path / "\x1b[2Jmine.csv").name == r"\x1b[2Jmine"


@pytest.mark.timeout(60)  # it would hang
def test_a_pipe_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "endless.json")
    (tmp_path / "zeros.csv").symlink_to("/dev/zero")
    for name in ("endless.json", "zeros.csv"):
        with pytest.raises(
            InputFileError, match=f"{name}: is not a regular file, but a pipe, a device"
        ):
            load(tmp_path / name)
    with pytest.raises(InputFileError, match="cannot be read: embedded null"):
        load("a\0b.csv")


def test_compute_only_undoes_the_other_passes() -> None:
    plain, *others = forms("DualPipeV")
    for made in others:
        assert compute_only(made) == plain
