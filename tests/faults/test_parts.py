"""The parts of the watch, each alone."""

from __future__ import annotations

import json
import os
import socket
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined] # public, but not marked so
from torch.distributed.distributed_c10d import PrefixStore

from penstock import Timeouts
from penstock._engine.faults import (
    Activity,
    Failure,
    Meeting,
    Members,
    Patience,
    Place,
    Search,
    noticing_gone_machines,
    ranges,
)
from penstock._engine.faults.desk import Desk
from penstock._engine.faults.failure import FILE, at_place, of_exception, write_report
from penstock._engine.faults.places import in_ranges, read_record
from penstock.errors import (
    NonFiniteError,
    PeerFailed,
    StageError,
    UsageError,
    printable,
    status_of,
)
from penstock.schedule import parse_action


def waits(process: int, awaited: str, age: float = 9.0, **more: Any) -> Place:
    return Place(process, process, waits="a message", awaited=awaited, age=age, **more)


def works(process: int, age: float = 9.0, **more: Any) -> Place:
    return Place(process, process, action="1F2", age=age, **more)


def comes(process: int, to: int, age: float = 9.0) -> Place:
    """Waits for the others in a collective."""
    return waits(process, "0-2/1", age, collective=to, arrived=f"0-2/1={to}")


def culprit_of(
    places: list[Place], *, broken: bool = False, moves: bool = True
) -> tuple[int, str] | None:
    """Who is the culprit, and of what kind, by two looks that are three seconds apart."""
    search, failure = Search([place.process for place in places]), None
    for clock in (0.0, 3.0):
        number = int(clock) if moves else 0
        table = {place.process: replace(place, number=number) for place in places}
        seen = search.look(
            places[0],
            lambda keys, t=table: {k: t[k] for k in keys},  # type: ignore[misc]
            clock,
        )
        failure = search.judge(seen, 2.0, broken=broken)
    return None if failure is None else (failure.process, failure.kind)


LEFT = works(1, status="left", calls=1)


@pytest.mark.parametrize(
    ("places", "culprit"),
    [
        pytest.param([waits(0, "1"), waits(1, "2"), works(2)], (2, "silent"), id="the end"),
        pytest.param([waits(0, "1"), waits(1, "2"), works(2, 0.5)], None, id="who makes progress"),
        pytest.param(
            [comes(0, 4), comes(1, 4), works(2, arrived="0-2/1=3")], (2, "silent"), id="who is late"
        ),
        pytest.param(
            [comes(0, 4), comes(1, 3), works(2)], (2, "silent"), id="and who it waits for"
        ),
        pytest.param([comes(0, 4), waits(1, "2"), works(2)], (2, "silent"), id="a message before"),
        pytest.param(
            [comes(0, 4), works(1, 20.0, arrived="0-2/1=4"), works(2, arrived="0-2/1=3")],
            (2, "silent"),
            id="not who has come and works on",
        ),
        pytest.param([waits(0, "0-2/1"), waits(1, "0-2/1"), works(2)], (2, "silent"), id="device"),
        pytest.param([waits(0, "1"), waits(1, "0")], (0, "lost"), id="a circle"),
        pytest.param([comes(0, 4), comes(1, 4), comes(2, 4)], (0, "lost"), id="all have come"),
        pytest.param([waits(0, "1"), waits(1, "0", age=0.1)], None, id="no circle yet"),
        pytest.param([waits(0, "1"), works(1, slack=60.0)], None, id="who asked for more time"),
        pytest.param([waits(0, "1", calls=2), LEFT], (1, "left"), id="who has left"),
    ],
)
def test_the_culprit_is_where_the_waits_end(
    places: list[Place], culprit: tuple[int, str] | None
) -> None:
    assert culprit_of(places) == culprit


def test_who_writes_nothing_is_dead_if_a_connection_broke_and_silent_at_the_limit() -> None:
    places = [waits(0, "1"), waits(1, "2", age=0.1), works(2)]
    assert culprit_of(places, broken=True, moves=False) == (1, "died")
    assert culprit_of(places, moves=False) == (1, "silent")
    assert culprit_of([waits(0, "1", age=0.5), *places[1:]], moves=False) is None
    assert culprit_of([works(0), works(1, 0.1)], broken=True, moves=False) == (1, "died"), (
        "not noted"
    )


@pytest.mark.parametrize("ranks", [(0,), (5,), (0, 4, 8), (3, 4), (2, 0), (0, 1, 5)])
def test_groups_are_short_texts(ranks: tuple[int, ...]) -> None:
    assert in_ranges(ranges(ranks), range(10)) == sorted(ranks)
    assert ranges(range(0, 1024, 8)) == "0-1016/8"
    for text in ("", "0-9/0", "x", "9" * 5000, "0-999999999999/1,"):
        assert in_ranges(text, range(3)) == []
    # A count of collectives that is no number is none.
    for count in ("x", "-1", "9" * 5000):
        assert not works(1, arrived=f"0-2/1={count}").has_come_to("0-2/1", 1)


def test_calls_without_training_count_until_there_is_a_step() -> None:
    """The limit is then that of later steps; a first training step has its own again."""
    activity, patience, limits = Activity(0), Patience(Timeouts(step=7, first_step=70)), []
    activity.setup = None
    assert "before its first step" in activity.place().doing
    for step in (0, 0, 1, 1, 2):
        activity.begin(step)
        limits.append(patience.limit(activity.durations))
        activity.rest()
    assert limits == [70.0, 7.0, 70.0, 7.0, 7.0]
    assert "between steps, after step 2" in activity.place().doing
    forwards = Activity(0)
    forwards.setup = None
    forwards.begin(0)
    forwards.rest()
    assert "between steps, after call 1, in its own code" in forwards.place().doing


def test_limits_are_in_minutes_or_as_given(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Patience().limit([]) == Patience().limit([1.0, 5.0, 6.0]) == 600.0
    assert Patience().rendezvous == 300.0
    assert (Patience().slow([0.1]), Patience().slow([4.0, 5.0, 6.0])) == (30.0, 50.0)
    first = Patience(Timeouts(first_step=7))
    assert (first.limit([]), first.limit([1.0])) == (7.0, 600.0)
    assert Patience(8).limit([1.0]) == Patience(Timeouts(step=8)).limit([]) == 8.0
    for wrong in (0, -1.0, "1", (1, 2, 3)):
        with pytest.raises(UsageError, match="timeout="):
            Patience(wrong)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="rendezvous=0"):
        Timeouts(rendezvous=0)
    monkeypatch.setenv("PENSTOCK_TIMEOUT", "40")
    monkeypatch.setenv("PENSTOCK_RENDEZVOUS_TIMEOUT", "50")
    assert (Patience().limit([]), Patience().rendezvous) == (40.0, 50.0)
    assert (Patience(8).limit([]), Patience(Timeouts(rendezvous=9)).rendezvous) == (8.0, 9.0)
    monkeypatch.setenv("PENSTOCK_TIMEOUT", "soon")
    with pytest.raises(UsageError, match="PENSTOCK_TIMEOUT='soon'; it must be more than 0"):
        Patience()


# ---- what travels, and what is written down


PLACE = Place(1, step=3, stage=1, microbatch=2, action="1F2")
GOOD = asdict(at_place(PLACE, "raised", "boom", error="ValueError", trace="trace\nlines", by=0))


def data_of(change: dict[str, Any]) -> bytes:
    return json.dumps(GOOD | change).encode()


@pytest.mark.parametrize(
    "data",
    [
        *(b"", b"\xff", b"[" * 90_000, b" " * 10**6, b'{"rank": ' + b"9" * 9999, b"null", b"{}"),
        *(data_of({"rank": "0"}), data_of({"step": 1e99}), data_of({"trace": 1})),
        *(data_of({"status": status}) for status in (0, -1, 256, 2**40)),
        data_of({"step": 2**53}),
    ],
)
def test_what_is_no_record_is_none(data: bytes) -> None:
    assert read_record(Failure, data) is None
    assert read_record(Place, data) is None


def test_texts_cannot_steer_a_terminal() -> None:
    assert asdict(read_record(Failure, data_of({})) or Place(0)) == GOOD
    failure = of_exception(ValueError("\x1b[2Jgone\nsecond line"), Activity(1).place())
    assert failure.what == "\\x1b[2Jgone"
    assert "\x1b" not in failure.trace
    foreign = read_record(Failure, data_of({"what": "\x1b[2J" * 1000}))
    assert foreign is not None
    assert "\x1b" not in foreign.what
    assert len(foreign.what) <= 1000
    long = of_exception(ValueError("\U0001f525" * 30_000), Activity(1).place())
    assert read_record(Failure, json.dumps(asdict(long)).encode()) == long, "cut, and not dropped"
    assert printable("déjà vu\t…") == "déjà vu\t…"


class Untold(Exception):
    status = 512
    """HTTP clients and others have such an attribute, which is no exit status."""

    def __str__(self) -> str:
        raise RuntimeError("no words")


def test_errors_of_users_are_named() -> None:
    error = StageError("rank 1, stage 1: boom")
    error.__cause__ = KeyError("boom")
    activity = Activity(1)
    assert of_exception(error, activity.place()).error == "StageError", "which alone says where"
    activity.act(parse_action("1F0"))
    assert of_exception(error, activity.place()).error == "KeyError"
    # Also one without words.
    for untold in (Untold(), AssertionError()):
        failure = of_exception(untold, Activity(1).place())
        assert (failure.status, str(failure)) == (70, f"rank 1: {type(untold).__name__}")


def test_exit_statuses() -> None:
    errors = [KeyboardInterrupt(), NonFiniteError(), UsageError(), ValueError(), SystemExit(143)]
    assert [status_of(error) for error in errors] == [130, 76, 2, 70, 143]
    ends = [SystemExit(code) for code in (None, 0, 1, "text", -1, 256, 2**40)]
    assert [status_of(end) for end in ends] == [0, 0, 1, 1, 255, 70, 70], "0 means success alone"
    assert status_of(PeerFailed("rank 1 failed", status=76)) == 76


def test_a_report_shows_nothing_of_the_environment_and_stays(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "s3cret")
    for kind in ("died", "silent"):
        write_report(tmp_path / "new", Failure(1, kind=kind), [works(0)])
    text = (tmp_path / "new" / FILE).read_text()
    assert "s3cret" not in text
    assert json.loads(text)["failures"][0]["kind"] == "died", "the first report stays"
    (tmp_path / "file").touch()
    write_report(tmp_path / "file" / "gone", Failure(1, kind="died"), [])
    assert "the report of the failure could not be written: " in caplog.text


def test_who_reports_a_failure_learns_how_many_have_read_of_it() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    desks = []
    for rank in (0, 1):
        job = Members((0, 1), (0, 1), (rank,))
        meeting = Meeting(job, None, PrefixStore("room", store), created=False, hosts=False)
        desks.append(Desk(meeting, Activity(rank, (0, 1)).place, lambda: None))
    failure = at_place(Place(1, 1), "raised", "boom", by=1)
    desks[1].report(failure, 30.0)
    desks[1].wait_for(lambda: desks[1].heard == 2, 30.0)
    assert desks[1].heard == 2
    assert [desk.failure for desk in desks] == [failure, failure]
    for desk in desks:
        desk.close(30.0)


def test_whatever_ends_the_thread_at_the_store_is_known() -> None:
    """The monitor then takes the store for lost: if nobody knew, a rank that hangs would stay."""

    def fails() -> None:
        raise OverflowError("too large")

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    job = Members((0,), (0,), (0,))
    desk = Desk(Meeting(job, None, store, created=False, hosts=True), Activity(0).place, fails)
    desk.wait_for(lambda: desk.lost, 30.0)
    assert desk.lost == "too large"


# ---- machines that are gone


def address_of_this_machine() -> str:
    """One that other machines could use; sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 1))
        except OSError:
            pytest.skip("this machine has only the loopback interface")
        return str(probe.getsockname()[0])


@pytest.mark.skipif(
    not Path("/proc/self/fd").exists(), reason="only Linux lists a process's sockets"
)
def test_every_connection_to_another_machine_of_the_job_is_watched(tmp_path: Path) -> None:
    """Also one that takes the number of a file that was open a moment before; no copies stay open."""
    with ExitStack() as stack:
        server = stack.enter_context(socket.create_server((address_of_this_machine(), 0)))
        local = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        before, other = (
            stack.enter_context(socket.create_connection(to.getsockname()))
            for to in (server, local)
        )
        with noticing_gone_machines():
            end = stack.enter_context(socket.create_connection(server.getsockname()))
            stack.enter_context((tmp_path / "file").open("w"))
            count = len(os.listdir("/proc/self/fd"))
        watched = [
            one.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) for one in (before, end, other)
        ]
        assert watched == [1, 1, 0]
        patience = end.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
        assert patience >= 60_000, "networks fail over in less"
        assert len(os.listdir("/proc/self/fd")) == count
