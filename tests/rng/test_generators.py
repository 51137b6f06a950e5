"""The default generators: those of the CPU, and those of the devices that are named."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from penstock.rng import Generators, devices_of


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Stands for torch.cuda with two devices, of which the second is the current one."""
    module = SimpleNamespace(begun=False, current_device=lambda: 1)
    module.default_generators = [torch.Generator(), torch.Generator()]

    def begin() -> None:
        module.begun = True

    module.init = begin
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    return module


def seeds(accelerator: Any) -> list[int]:
    return [generator.initial_seed() for generator in accelerator.default_generators]


def test_the_cpu_alone_asks_for_no_backend(accelerator: SimpleNamespace) -> None:
    with Generators([torch.device("cpu"), torch.device("meta")]).kept():
        Generators([torch.device("cpu")]).seed(5)
        assert torch.initial_seed() == 5
    assert not accelerator.begun


def test_a_device_is_seeded_as_the_cpu_is_and_others_are_not(accelerator: SimpleNamespace) -> None:
    other = seeds(accelerator)[1]
    generators = Generators([torch.device("cuda:0"), torch.device("cpu")])
    with generators.kept():
        generators.seed(7)
        assert torch.initial_seed() == generators.started_at == 7
        assert seeds(accelerator) == [7, other]
    assert accelerator.begun


def test_without_an_index_it_is_the_current_one(accelerator: SimpleNamespace) -> None:
    other = seeds(accelerator)[0]
    with (generators := Generators([torch.device("cuda")])).kept():
        generators.seed(7)
        assert seeds(accelerator) == [other, 7]


def test_all_are_put_back_also_after_a_failure(accelerator: SimpleNamespace) -> None:
    def next_numbers() -> list[float]:
        found = [torch.rand(1, generator=g) for g in (None, *accelerator.default_generators)]
        return [float(number) for number in found]

    generators = Generators([torch.device("cuda:0")])
    with generators.kept():
        expected = next_numbers()
    accelerator.default_generators[1].manual_seed(0)
    with generators.kept():
        again = next_numbers()
    with pytest.raises(KeyError):
        fail_after_seeding(generators)
    assert again[:2] == expected[:2] == next_numbers()[:2]


def fail_after_seeding(generators: Generators) -> None:
    with generators.kept():
        generators.seed(1)
        raise KeyError


def test_where_a_module_is() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, device="meta"), nn.Dropout())
    assert devices_of(module) == {torch.device("cpu"), torch.device("meta")}
