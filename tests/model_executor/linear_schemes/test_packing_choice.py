"""The packing of a float32 matrix is the fastest as measured; two only where that gains enough."""

from __future__ import annotations

import pytest
import torch

from ringcore.model_executor.linear_schemes import cpu_packing, packing_choice
from ringcore.model_executor.linear_schemes.packing_choice import ROWS, Choice, choose, measured_seconds

XEON = {"mkl": (21.4, 27.1, 38.2, 68.1), "onednn": (22.0, 33.0, 45.0, 80.0), "half": (14.7, 18.8, 37.8, 84.9)}
EPYC = {"mkl": (59.0, 54.0, 46.0, 37.0), "onednn": (39.0, 26.0, 24.0, 22.0), "half": (22.0, 18.0, 20.0, 22.4)}


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (XEON, Choice("half", "mkl", 32)),
        (EPYC, Choice("half", "half", 0)),
        ({name: XEON[name] for name in ("mkl", "onednn")}, Choice("mkl", "mkl", 0)),
        ({name: EPYC[name] for name in ("mkl", "onednn")}, Choice("onednn", "onednn", 0)),
        # Each of two is the faster for some rows: a second copy of float32 would cost more memory than it is worth.
        ({"mkl": (1, 1, 9, 9), "onednn": (9, 9, 1, 1)}, Choice("mkl", "mkl", 0)),
        ({"mkl": (1.05, 1, 1, 1), "half": (1, 1, 1, 1.1)}, Choice("mkl", "mkl", 0)),
    ],
)
def test_choice(seconds, expected):
    assert choose(seconds, "half") == expected


def counted(calls, name, by=1.0):
    """A packing that multiplies `by` times."""

    def pack(weight, bias):
        calls.append(name)
        return lambda x: [x @ weight.T for _ in range(int(by))][-1]

    return pack


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(packing_choice, "_EVICTING", 1 << 10)


def test_the_faster_one_is_found_and_remembered(tmp_path, quick):
    calls, threads = [], torch.get_num_threads()
    packings = {"slow": counted(calls, "slow", by=8), "fast": counted(calls, "fast")}
    seconds = measured_seconds(512, 512, packings, tmp_path)
    assert choose(seconds, None) == Choice("fast", "fast", 0)
    assert all(len(times) == len(ROWS) for times in seconds.values())
    assert measured_seconds(512, 512, packings, tmp_path) == {name: [*times] for name, times in seconds.items()}
    assert calls == ["slow", "fast"]
    assert torch.get_num_threads() == threads
    measured_seconds(512, 520, packings, tmp_path)  # another shape
    measured_seconds(512, 512, {"fast": packings["fast"]}, tmp_path)  # other packings
    assert calls == ["slow", "fast", "slow", "fast", "fast"]


def test_small_matrices_are_not_measured(tmp_path):
    assert measured_seconds(8, 16, {}, tmp_path) is None
    assert list(tmp_path.iterdir()) == []


def test_a_large_matrix_is_measured_by_some_outputs(tmp_path, quick):
    shapes = []

    def pack(weight, bias):
        shapes.append(tuple(weight.shape))
        return lambda x: x[:, :1]

    measured_seconds(1 << 20, 1 << 16, {"one": pack}, tmp_path)
    assert shapes == [(64, 1 << 16)]


@pytest.mark.parametrize("few", ["half", "mkl", "onednn"])
@pytest.mark.parametrize("many", ["half", "mkl", "onednn"])
def test_every_choice_multiplies(monkeypatch, few, many):
    monkeypatch.setattr(cpu_packing, "_choice", lambda *shape: Choice(few, many, 0 if few == many else 8))
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(40, 24, generator=generator).bfloat16().float()
    bias = torch.randn(40, generator=generator)
    linear = cpu_packing.pack(weight, bias)
    for rows in (0, 1, 8, 9, 70):
        x = torch.randn(rows, 24, generator=generator)
        torch.testing.assert_close(linear(x), torch.nn.functional.linear(x, weight, bias), atol=1e-4, rtol=1e-4)


def test_which_dtype_is_faster(monkeypatch):
    found = {}
    monkeypatch.setattr(cpu_packing, "measured_seconds", lambda *given: found)
    monkeypatch.setattr(cpu_packing, "_agrees", lambda *given: True)
    found |= EPYC | {"bfloat16": (19, 16, 12, 11)}
    assert cpu_packing.is_bfloat16_faster()
    found |= {"bfloat16": (60, 60, 60, 60)}
    assert not cpu_packing.is_bfloat16_faster()
    monkeypatch.setattr(cpu_packing, "_agrees", lambda *given: False)  # no such operator
    assert not cpu_packing.is_bfloat16_faster()
    monkeypatch.setattr(cpu_packing, "_agrees", lambda *given: True)
    monkeypatch.setattr(cpu_packing, "measured_seconds", lambda *given: None)  # unknown: the processor's word
    assert cpu_packing.is_bfloat16_faster()
