"""An attention backend and a device of one's own, of nothing but what the table of seams in ARCHITECTURE.md names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from step_driver import admit, decode, make_config, run, sampled, start

import ringcore
from ringcore.attention.backends import BACKENDS
from ringcore.attention.backends.torch_sdpa import TorchSdpaBackend
from ringcore.config import option_checks
from ringcore.errors import ConfigError
from ringcore.worker.platforms import PLATFORMS
from ringcore.worker.platforms.cpu import CpuPlatform
from ringcore.worker.worker import Worker

PROMPT = [11, 60, 23, 8, 90]


class Counting(TorchSdpaBackend):
    name = "counting"
    num_calls = 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        type(self).num_calls += 1
        return super().forward(*args, **kwargs)


class Abacus(CpuPlatform):
    attention_backends = ("counting",)


@pytest.fixture
def with_both(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line in each of the tables that the seams name."""
    monkeypatch.setitem(BACKENDS, Counting.name, Counting)
    monkeypatch.setitem(PLATFORMS, "abacus", Abacus)
    monkeypatch.setattr(Counting, "num_calls", 0)
    choices: Mapping[str, tuple[str, ...]] = {"attention_backend": ("counting",), "device": ("abacus",)}
    for option, names in choices.items():
        monkeypatch.setitem(option_checks._CHOICES, option, option_checks._CHOICES[option] + names)


def tokens(model: str, **options: Any) -> list[int]:
    worker = start(Worker(make_config(model, **options), 0, None))
    first = sampled(run(worker, {0: 5}, new=[admit(0, PROMPT, range(1, 9))]))
    found = [first[0], *decode(worker, [0], 6)[0]]
    worker.shutdown()
    return found


@pytest.mark.parametrize(
    "options",
    [{"device": "cpu", "attention_backend": "counting"}, {"device": "abacus"}],
    ids=["a backend by name", "a device that prefers it"],
)
def test_they_run_a_model(with_both: None, tiny_llama: tuple[str, Any], options: dict[str, Any]) -> None:
    expected = tokens(tiny_llama[0], device="cpu")
    assert Counting.num_calls == 0
    assert tokens(tiny_llama[0], **options) == expected
    assert Counting.num_calls == (1 + 7) * 3, "the warm-up and the steps, and layers of each"


def test_without_their_lines_they_are_refused(tiny_llama: tuple[str, Any]) -> None:
    for option, name in (("attention_backend", "counting"), ("device", "abacus")):
        with pytest.raises(ConfigError, match=f"{option}='{name}'"):
            make_config(tiny_llama[0], **{option: name})


@pytest.mark.parametrize(
    ("seam", "tables"),
    [
        ("an attention backend", ["attention/backends/__init__.py", "config/options.py"]),
        ("a device", ["worker/platforms/__init__.py", "config/options.py"]),
    ],
)
def test_the_seams_name_these_tables(seam: str, tables: list[str]) -> None:
    page = (Path(ringcore.__file__).parents[1] / "ARCHITECTURE.md").read_text()
    (row,) = (line for line in page.splitlines() if line.startswith(f"| {seam} |"))
    assert [f"`{table}`" in row for table in tables] == [True] * len(tables)
