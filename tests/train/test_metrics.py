"""How well a device is used, where its peak is known."""

from __future__ import annotations

import pytest
import torch

from penstock.train.display import peak_flops


def test_the_peak_of_a_cpu_is_not_known() -> None:
    assert peak_flops(torch.device("cpu")) is None


@pytest.mark.parametrize(
    ("name", "precision", "peak"),
    [
        ("NVIDIA H200", "highest", 67e12),
        ("NVIDIA H100 80GB HBM3", "high", 494e12),
        ("NVIDIA H100 PCIe", "highest", 51e12),
        ("NVIDIA A100-SXM4-80GB", "high", 156e12),
        ("Tesla V100-SXM2-16GB", "high", 15.7e12),
        ("NVIDIA L40S", "highest", None),
        ("a GPU of the future", "highest", None),
    ],
)
def test_the_peak_is_known_by_the_name(
    name: str, precision: str, peak: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: precision)
    assert peak_flops(torch.device("cuda")) == peak
