"""Intercepting what launches would compile, and compiling it: in a separate process, where Triton does not
interpret."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
import torch
from triton import JITFunction, knobs

from ringcore.kernels.launch import precompile
from ringcore.kernels.launch.precompile import KernelCompiler, Variant, compile_variants, intercept_launches
from ringcore.kernels.rms_norm import rms_norm, rms_norm_reference

HERE = Path(__file__).parent


def run(script: str, cache: Path) -> str:
    """What a script prints that has the helpers of this folder."""
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    env |= {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])}
    command = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_launches_are_intercepted_once_and_compiled_for_the_next_process(tmp_path):
    script = """
        import torch, triton_for_sm90
        from ringcore.kernels.activation import silu_and_mul
        from ringcore.kernels.launch.precompile import intercept_launches, compile_variants
        from ringcore.kernels.partials import Partials, RowNorm
        from ringcore.kernels.rms_norm import add_normed, rms_norm

        with intercept_launches() as intercepted:
            for n in (1, 2, 3, 1):
                x = torch.ones(n, 64)
                assert not rms_norm(x, torch.ones(64), 1e-6, out=torch.zeros(n, 64)).any(), "it ran"
                assert add_normed(torch.ones(n, 64), Partials(x[None], norm=RowNorm(torch.ones(64), 1e-6))).all()
                silu_and_mul(x)
        variants = list(intercepted.values())
        print(*sorted(variant.kernel.__name__ for variant in variants))
        compile_variants(variants, torch.device("cpu"), 2)
    """
    names = ["_activate_and_multiply_kernel", "_rms_norm_kernel", "_rms_norm_kernel"]
    assert run(script, tmp_path).split() == names
    kept = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.cubin")}
    assert len(kept) == len(names)
    assert run(script, tmp_path).split() == names
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.cubin")} == kept


@pytest.mark.long_form
def test_what_is_compiled_is_left_out_too(tmp_path):
    """Of two kernels the second alone would read what the first should have written."""
    script = """
        import torch, triton_for_sm90
        from ringcore.kernels.launch.precompile import intercept_launches, compile_variants
        from ringcore.kernels.rms_norm import rms_norm

        def launch():
            return rms_norm(torch.ones(1, 64), torch.ones(64), 1e-6, out=torch.zeros(1, 64))

        with intercept_launches() as intercepted:
            launch()
        compile_variants(list(intercepted.values()), torch.device("cpu"), 1)
        with intercept_launches() as again:
            print(launch().any().item(), len(again))
        try:
            launch()
        except Exception:
            print("no device")
    """
    assert run(script, tmp_path).split() == ["False", "0", "no", "device"]


FAILING = """
    import torch, triton_for_sm90
    from ringcore.kernels import activation, rms_norm
    from ringcore.kernels.attention import paged_decode_kernel
    from ringcore.kernels.launch import precompile
    from ringcore.kernels.logits import sampling
    from ringcore.kernels.launch.precompile import Variant, intercept_launches, compile_variants

    with intercept_launches() as intercepted:
        activation.silu_and_mul(torch.ones(1, 64))
    (good,) = intercepted.values()
    bad = Variant(good.kernel, good.specialization.replace("_activate", "_no_such"))
    try:
        compile_variants([bad, good], torch.device("cpu"), 1)
    except RuntimeError as error:
        print("raised", "_no_such" in str(error))

    names = []

    def compile(variant, *, load):
        names.append(variant.kernel.__name__)
        if variant.specialization in names:
            return
        names.append(variant.specialization)
        raise SystemError("AST constructor recursion depth mismatch")

    Variant.compile = compile
    kernels = {
        "one": activation._activate_and_multiply_kernel,
        "two": sampling._row_kernel,
        "three": rms_norm._rms_norm_kernel,
        "four": paged_decode_kernel.paged_decode_kernel,
    }
    compile_variants([Variant(kernel, name) for name, kernel in kernels.items()], torch.device("cpu"), 1)
    print(*names)
"""


@pytest.fixture(scope="module")
def failing(tmp_path_factory) -> tuple[list[str], int]:
    """What a process prints in which compiling fails, and how many kernels it has compiled."""
    cache = tmp_path_factory.mktemp("cache")
    return run(FAILING, cache).splitlines(), len(list(cache.rglob("*.cubin")))


def test_what_fails_to_compile_is_raised_when_the_others_are_compiled(failing):
    (raised, _), num_compiled = failing
    assert raised.split() == ["raised", "True"]
    assert num_compiled == 1


def test_the_longest_come_first_and_what_the_parser_lost_comes_again(failing):
    (_, told), _ = failing
    kernels = {"paged_decode_kernel", "_row_kernel", "_activate_and_multiply_kernel", "_rms_norm_kernel"}
    names = told.split()
    assert {*names[0:4:2]} == {"paged_decode_kernel", "_row_kernel"}
    assert {*names[0:8:2]} == {*names[8:]} == kernels
    assert len(names) == 12


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_what_was_compiled_ahead_is_what_is_launched(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    device, size = torch.device("cuda", 0), 160  # a size of no other test, so that nothing is compiled yet
    x, weight = torch.randn(5, size, device=device), torch.randn(size, device=device)
    with intercept_launches() as intercepted:
        assert not rms_norm(x, weight, 1e-6, out=torch.zeros_like(x)).any()
    compile_variants(list(intercepted.values()), device, 2)
    with intercept_launches() as again:
        assert not rms_norm(x, weight, 1e-6, out=torch.zeros_like(x)).any()
    assert len(intercepted) == 1
    assert not again
    torch.testing.assert_close(rms_norm(x, weight, 1e-6), rms_norm_reference(x, weight, 1e-6))


def test_each_rank_begins_with_kernels_of_its_own(monkeypatch):
    """And then compiles those of the others, which it finds on disk if they were as fast."""
    compiled: list[str] = []
    monkeypatch.setattr(precompile, "_source_length", lambda kernel: kernel)
    monkeypatch.setattr(precompile, "hash_compiler", lambda: None)
    monkeypatch.setattr(Variant, "compile", lambda variant, *, load: compiled.append(variant.specialization))
    variants = [Variant(length, str(length)) for length in range(20)]
    orders = []
    for rank in range(2):
        compiled.clear()
        with KernelCompiler(torch.device("cpu"), 1, (rank, 2)) as compiler:
            compiler.add(*variants)
        orders.append([*map(int, compiled)])
    assert [sorted(order) for order in orders] == [[*range(20)]] * 2
    num_own = [next(i for i in range(20) if order[i] < order[i + 1]) + 1 for order in orders]
    assert sum(num_own) == 20, "each begins with its own, the longest first"
    assert set(orders[0][: num_own[0]]) == set(orders[1][num_own[1] :])


def test_launches_of_other_threads_go_on(monkeypatch):
    outcomes = []
    monkeypatch.setattr(JITFunction, "run", lambda self, warmup: warmup)

    def look() -> None:
        outcomes.append(knobs.runtime.jit_cache_hook(key="", repr="", fn=None, compile={}))
        outcomes.append(JITFunction.run(None, warmup=False))

    with intercept_launches() as intercepted:
        assert JITFunction.run(None, warmup=False) is None
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
    assert outcomes == [False, False]
    assert not intercepted
    assert knobs.runtime.jit_cache_hook is None
