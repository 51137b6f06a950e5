"""What the doctor finds out about ranks and links, what it points out, and its files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock import Pipeline
from penstock.cli.main import main
from penstock.doctor import Check, Examination, Facts, LinkReport, RankReport, examine
from penstock.doctor.links import LARGE, SMALL, Handling, per_message
from penstock.doctor.rates import facts_of
from penstock.plan import Cluster, Link
from penstock.testing import WorkerPool

QUICK: dict[str, Any] = {"window": 0.002, "dtypes": ["float32"]}


def examined(group: Any, folder: str) -> tuple[str, str]:
    """On each rank."""
    examination = examine(folder=folder, group=group, **QUICK)
    return examination.to_json(), str(examination)


def test_ranks_are_examined_with_the_links_between_neighbours(
    workers: WorkerPool, tmp_path: Path
) -> None:
    (first, text), *others = workers.run(f"{__name__}:examined", 3, 100.0, folder=str(tmp_path))
    assert others == 2 * [[first, text]]
    cluster = Cluster.from_json(first)
    assert len(cluster) == 3
    for device in cluster.devices:
        numbers = device.flops["float32"], device.bandwidth, device.pace, device.alone
        assert min(numbers) > 0
        # Measured again, while the others rest.
        assert device.alone != device.pace
    assert {(link.source, link.target) for link in cluster.links} == {(0, 1), (1, 2), (2, 0)}
    for link in cluster.links:
        assert 0 <= link.latency < 1 < link.both
        assert cluster.wire(link.target, link.source) == (link.latency, link.bandwidth)
    facts = json.loads(first)["facts"]
    assert [check["problem"] for check in facts["checks"]] == ["", "", ""]
    assert "yes a checkpoint is saved and loaded" in text
    assert list(tmp_path.iterdir()) == []


def test_one_process_checks_its_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "cluster.json"
    asked = ["doctor", "--window", "0.002", "--dtype", "float32", "--folder", str(tmp_path)]
    assert main([*asked, "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "yes a pipeline of 2 ranks computes what one process computes" in shown
    assert "no anomalies" in shown
    assert len(Cluster.from_json(out.read_text())) == 1
    (tmp_path / "file").touch()
    assert main([*asked[:-1], str(tmp_path / "file")]) == 1
    assert f"all ranks see {tmp_path / 'file'}: no: " in capsys.readouterr().out
    assert main(["doctor", "--device", "cpus"]) == 2
    assert "device='cpus'" in capsys.readouterr().err


def rank(
    host: str = "a", scale: float = 1.0, device: str = "some GPU", **versions: str
) -> RankReport:
    facts = Facts(host, device, 8e9, 0, {"torch": "2.13.0", **versions})
    return RankReport(facts, {"float32": 1e12 * scale}, 1e11 * scale, 1e-6, 1 / scale, 1 / scale)


def link(source: int, scale: float = 1.0) -> LinkReport:
    way = Link(source, source + 1, 50e-6 / scale, 1e9 * scale, 1e9)
    return LinkReport(way, 50e-6 / scale, 1e9 * scale)


HEALTHY = Examination(
    tuple(rank("a" if n < 2 else "b") for n in range(4)),
    tuple(map(link, range(3))),
    (1e-4, 0.0),
    (Check("numbers are right"),),
)


def with_rank(number: int, report: RankReport) -> Examination:
    ranks = list(HEALTHY.ranks)
    ranks[number] = report
    return replace(HEALTHY, ranks=tuple(ranks))


def with_link(number: int, report: LinkReport) -> Examination:
    links = list(HEALTHY.links)
    links[number] = report
    return replace(HEALTHY, links=tuple(links))


@pytest.mark.parametrize(
    ("examination", "gist"),
    [
        (with_rank(2, rank("b", 0.75)), "2 (b) is slower than comparable ranks: products in float32 at 75%"),
        (with_rank(1, rank(torch="2.12.0")), "torch differs: 2.13.0 on ranks 0, 2, 3; 2.12.0 on rank 1"),
        (with_rank(3, replace(rank("b"), pace=2.0)), "3 (b) is slower than comparable ranks: a block at 50%"),
        (with_link(0, link(0, 0.01)), "the link between ranks 0 and 1 carries 9.54 MiB/s, 2% of the median"),
        (with_link(0, link(0, 0.01)), "the link between ranks 0 and 1 delays a message by 5 ms"),
        (with_link(0, replace(link(0), back=1e7)), "carries 9.54 MiB/s, 1% of the median"),
        (with_link(0, replace(link(0), tiny=0.005)), "delays a message by 5 ms; comparable links take 50 us"),
        (replace(HEALTHY, links=(link(0, 0.01),)), "between ranks 0 and 1 delays a message by 5 ms"),
        (with_rank(2, rank("b", device="NVIDIA H100")), "rank 2 (b) reaches 1% of its peak in"),
        (replace(HEALTHY, checks=(Check("all is well", "it is not"),)), "all is well: no: it is not"),
    ],
)  # fmt: skip
def test_what_is_odd_is_pointed_out(examination: Examination, gist: str) -> None:
    assert HEALTHY.odd() == []
    assert gist in "\n".join(examination.odd())
    assert gist in str(examination)


def test_a_wrong_number_is_pointed_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    predict = Pipeline.predict
    monkeypatch.setattr(Pipeline, "predict", lambda pipe, x: predict(pipe, x) + 1.0)
    odd = examine(folder=tmp_path, **QUICK).odd()
    assert "no: a number differs by 1.0e+00 from that of one process" in odd[0]
    assert "no: after a save and a load, a number differs by 1.0e+00" in odd[1]


def test_small_differences_are_not_odd() -> None:
    assert with_rank(2, rank("b", 0.85)).odd() == []
    assert with_link(1, link(1, 0.2)).odd() == []
    # Between two machines, where no other link says what is usual.
    assert with_link(1, replace(link(1), tiny=0.005)).odd() == []


def test_what_a_message_costs_is_told_apart_from_what_its_bytes_cost() -> None:
    small, byte = 1e-4, 1e-9
    of_both = Handling(small + SMALL * byte, small + LARGE * byte)
    slow = Handling(1.0, 2.0)
    assert per_message(iter([of_both, of_both, slow])) == pytest.approx((small, byte))
    assert per_message(iter([Handling(small, small / 2)])) == (small, 0.0), "never below nothing"
    assert per_message(iter([])) == (0.0, 0.0)


def test_the_processes_of_a_machine_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = facts_of(torch.device("cpu")).memory
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert facts_of(torch.device("cpu")).memory == whole / 4
