"""The checks of the device column: on this machine, and of GPUs that it does not have."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from ringcore.attention.backends.cpu_attn import CpuAttnBackend
from ringcore.attention.backends.torch_sdpa import TorchSdpaBackend
from ringcore.protocol.finding import DEVICE_CHECKS, CheckDone, Finding
from ringcore.worker import checkup
from ringcore.worker.checkup import gpu_findings


class FakeCuda:
    def __init__(self, capability=(9, 0), num=1, peers=True) -> None:
        self.capability, self.num, self.peers = capability, num, peers

    def is_available(self) -> bool:
        return self.num > 0

    def device_count(self) -> int:
        return self.num

    def get_device_properties(self, index):
        return SimpleNamespace(name="GPU X", major=self.capability[0], minor=self.capability[1])

    def mem_get_info(self, index):
        return 60 << 30, 80 << 30

    def can_device_access_peer(self, one, other) -> bool:
        return self.peers or (one, other) != (1, 0)


def found(cuda, has_driver=True, refusal=None) -> list[tuple[str, str]]:
    return [(one.level, one.found) for one in gpu_findings(cuda, has_driver, lambda index: refusal)]


def test_gpus():
    card = "0: GPU X, compute capability 9.0, 60.00 GiB of 80.00 GiB free"
    assert found(FakeCuda()) == [("ok", card)]
    assert found(FakeCuda(num=2))[1:] == [("ok", card.replace("0: ", "1: ", 1)), ("ok", "peer access among all 2")]
    (_, _, peers) = found(FakeCuda(num=2, peers=False))
    assert peers == ("warning", "no peer access from GPU 1 to 0: collectives go through host memory")
    assert found(FakeCuda(capability=(7, 5)))[0][0] == "warning"
    assert found(FakeCuda(), refusal="no package")[1] == ("warning", "0: no sleep mode: no package")


def test_no_gpu():
    assert found(FakeCuda(num=0), has_driver=False) == [("ok", "none: models run on the CPU")]
    assert found(FakeCuda(num=0)) == [("error", "an NVIDIA driver is loaded, and torch sees no GPU")]


@pytest.fixture
def lines(monkeypatch):
    written = []
    monkeypatch.setattr(checkup, "_write", written.append)
    return written


def test_every_check_says_that_it_is_done(lines, monkeypatch):
    checkup.main(DEVICE_CHECKS)
    assert [line.check for line in lines if isinstance(line, CheckDone)] == list(DEVICE_CHECKS)
    findings = [line for line in lines if isinstance(line, Finding)]
    assert {finding.check for finding in findings} == set(DEVICE_CHECKS)
    assert [finding for finding in findings if finding.level != "ok"] == []


def test_the_backends_that_refuse_say_why(lines, monkeypatch):
    checkup.main(["attention backends"])
    by_name = {line.found.partition(":")[0]: line for line in lines[:-1]}
    assert by_name["torch_sdpa"].found.startswith("torch_sdpa: usable")
    assert by_name["torch_mla"].found == "torch_mla: usable; auto takes it"
    assert "it runs on a CUDA device, not on cpu" in by_name["triton"].found
    for backend in (CpuAttnBackend, TorchSdpaBackend):
        monkeypatch.setattr(backend, "refusal", classmethod(lambda *args: "the package x is not installed"))
    lines.clear()
    checkup.main(["attention backends"])
    assert [line.level for line in lines[:-1]] == ["error"] * 5 + ["ok"] * 2
    assert lines[3].mend == "pip install torch_sdpa"


def test_a_wrong_product_is_an_error(lines, monkeypatch):
    import ringcore.model_executor.linear_schemes.dense as dense

    made = dense.dense_product
    monkeypatch.setattr(dense, "dense_product", lambda weight, bias: made(weight * 1.02, bias))
    checkup.main(["linear schemes"])
    assert [line.level for line in lines[:-1]] == ["error"] * 3


def test_a_check_whose_library_is_missing_or_broken(lines, monkeypatch):
    def missing():
        raise ModuleNotFoundError("No module named 'triton'", name="triton")
        yield

    def broken():
        raise OSError("libcuda.so.1: undefined symbol")
        yield

    monkeypatch.setattr(checkup, "_CHECKS", {"a": missing, "b": broken})
    checkup.main(["a", "b"])
    assert lines == [
        Finding("a", "error", "the package triton is not installed", "pip install triton"),
        CheckDone("a"),
        Finding("b", "error", "the check failed: OSError: libcuda.so.1: undefined symbol"),
        CheckDone("b"),
    ]
