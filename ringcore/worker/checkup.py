"""A program that checks this machine's devices: `python -m ringcore.worker.checkup CHECK...`, of `DEVICE_CHECKS`.

It writes a line of JSON for each finding, and one after each check. Whoever starts it reads those, and knows by which
check it ended where a library ends the process. Every library is imported by the check that needs it, so that one
which is missing or broken fails no other check.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from ringcore.host.byte_sizes import format_bytes
from ringcore.host.resources import Host
from ringcore.kv_cache.spec import FullAttentionSpec, KVCacheSpec, MLASpec
from ringcore.protocol.finding import CheckDone, Finding, Level

if TYPE_CHECKING:
    from ringcore.attention.spec import AttentionSpec
    from ringcore.worker.platforms.platform import Platform

__all__ = ["gpu_findings", "main"]

_FULL_SPEED = (8, 0)  # compute capability
_TOLERANCE = 2**-7  # of a sum that is rounded to bfloat16, which has 8 bits


def _torch() -> Iterator[Finding]:
    import torch

    built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
    if Host().has_gpu() and not torch.version.cuda:
        mend = "pip install --force-reinstall torch, in the build for your CUDA driver"
        yield Finding("torch", "error", f"{torch.__version__}, {built}, and this machine has an NVIDIA driver", mend)
    else:
        yield Finding("torch", "ok", f"{torch.__version__}, {built}, {torch.get_num_threads()} threads")


def _gpu() -> Iterator[Finding]:
    import torch

    from ringcore.worker.memory.cuda_memory import CudaVirtualMemory

    return gpu_findings(torch.cuda, Host().has_gpu(), CudaVirtualMemory.refusal)


def gpu_findings(cuda: Any, has_driver: bool, arena_refusal: Callable[[int], str | None]) -> Iterator[Finding]:
    """cuda: torch.cuda. arena_refusal: why a GPU's memory cannot be in arenas, if it cannot."""
    count = cuda.device_count() if cuda.is_available() else 0
    if not count and has_driver:
        mend = "nvidia-smi, which should list the GPUs; look at CUDA_VISIBLE_DEVICES; in a container give it --gpus all"
        yield Finding("GPU", "error", "an NVIDIA driver is loaded, and torch sees no GPU", mend)
    elif not count:
        yield Finding("GPU", "ok", "none: models run on the CPU")
    for index in range(count):
        properties = cuda.get_device_properties(index)
        free, total = cuda.mem_get_info(index)
        capability = (properties.major, properties.minor)
        found = f"{index}: {properties.name}, compute capability {capability[0]}.{capability[1]}, "
        found += f"{format_bytes(free)} of {format_bytes(total)} free"
        if capability < _FULL_SPEED:
            yield Finding("GPU", "warning", f"{found}: bfloat16 is emulated, auto takes float16")
        else:
            yield Finding("GPU", "ok", found)
        if (refusal := arena_refusal(index)) is not None:
            yield Finding("GPU", "warning", f"{index}: no sleep mode: {refusal}", "pip install 'ringcore[cuda]'")
    yield from _peer_access(cuda, count)


def _peer_access(cuda: Any, count: int) -> Iterator[Finding]:
    if count < 2:
        return
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    lacking = [f"{a} to {b}" for a, b in pairs if not cuda.can_device_access_peer(a, b)]
    if lacking:
        found = f"no peer access from GPU {', '.join(lacking)}: collectives go through host memory"
        yield Finding("GPU", "warning", found, "nvidia-smi topo -p2p r, which says what keeps them apart")
    else:
        yield Finding("GPU", "ok", f"peer access among all {count}")


def _triton() -> Iterator[Finding]:
    import importlib.util

    import torch

    has_gpu = torch.cuda.is_available()
    if importlib.util.find_spec("triton") is None:
        if has_gpu:
            yield Finding("triton", "error", "not installed", "pip install triton")
        else:
            yield Finding("triton", "ok", "not installed; a CPU needs none")
        return
    import triton

    if not has_gpu:
        yield Finding("triton", "ok", f"{triton.__version__}; a CPU needs none")
        return
    from ringcore.kernels.rms_norm import rms_norm, rms_norm_reference

    x = torch.randn(4, 64, device="cuda")
    weight = torch.ones(64, device="cuda")
    error = float((rms_norm(x, weight, 1e-6) - rms_norm_reference(x, weight, 1e-6)).abs().max())
    if error > 1e-4:
        mend = "pip install --force-reinstall triton, in the version that torch asks for"
        yield Finding("triton", "error", f"{triton.__version__} compiles a kernel that is wrong by {error:.1e}", mend)
    else:
        yield Finding("triton", "ok", f"{triton.__version__} compiles, and a kernel's result is torch's")


def _attention() -> Iterator[Finding]:
    from ringcore.attention.spec import AttentionSpec

    dtype = _platform().resolve_dtype("auto", "bfloat16")
    of_heads = FullAttentionSpec(16, num_kv_heads=8, head_size=128, dtype=dtype)
    yield from _backends(False, of_heads, AttentionSpec(num_heads=32, scale=128**-0.5))
    of_latents = AttentionSpec(num_heads=32, scale=192**-0.5, expanded_sizes=(192, 128))
    yield from _backends(True, MLASpec(16, 512, 64, dtype), of_latents)


def _backends(has_latents: bool, spec: KVCacheSpec, layer: AttentionSpec) -> Iterator[Finding]:
    """Those that attend over pages of heads, or of latents."""
    from ringcore.attention.backend import LatentBackend
    from ringcore.attention.backends import BACKENDS

    platform = _platform()
    backends = {name: one for name, one in BACKENDS.items() if issubclass(one, LatentBackend) == has_latents}
    reasons = {name: backend.refusal(spec, [layer], platform.device) for name, backend in backends.items()}
    usable = [name for name in platform.attention_backends if name in reasons and reasons[name] is None]
    for name, reason in reasons.items():
        if reason is None:
            chosen = "; auto takes it" if usable[:1] == [name] else ""
            yield Finding("attention backends", "ok", f"{name}: usable{chosen}")
            continue
        mend = f"pip install {name}" if "not installed" in reason and name in platform.attention_backends else None
        level: Level = "ok" if usable else "error"
        yield Finding("attention backends", level, f"{name}: not usable, {reason}", mend)


def _linear_schemes() -> Iterator[Finding]:
    """The product that each dtype gets on this device, beside float32."""
    import torch

    from ringcore.attention.context import NO_TOKEN_CONTEXT
    from ringcore.model_executor.linear_schemes.dense import dense_product

    device, check = _platform().device, "linear schemes"
    weight = torch.linspace(-1, 1, 64 * 64).reshape(64, 64)
    x = weight.roll(7, 0)[:3]
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        product = dense_product(weight.to(device, dtype), None)
        got = product(x.to(device, dtype), NO_TOKEN_CONTEXT).float().cpu()
        expected = x.to(dtype).float() @ weight.to(dtype).float().T
        error = float((got - expected).abs().max() / expected.abs().max())
        found = f"dense, {str(dtype).removeprefix('torch.')}: {type(product).__name__} on {device.type}"
        if error > _TOLERANCE:
            mend = "pip install --force-reinstall torch"
            yield Finding(check, "error", f"{found} is wrong by {error:.0e} of the largest number", mend)
        else:
            yield Finding(check, "ok", f"{found}, usable")


def _platform() -> Platform:
    from ringcore.worker.platforms import choose_platform

    return choose_platform("auto")


_CHECKS: Mapping[str, Callable[[], Iterator[Finding]]] = {
    "torch": _torch,
    "GPU": _gpu,
    "triton": _triton,
    "attention backends": _attention,
    "linear schemes": _linear_schemes,
}


def main(names: Sequence[str]) -> None:
    for name in names:
        try:
            for finding in _CHECKS[name]():
                _write(finding)
        except ModuleNotFoundError as error:
            _write(Finding(name, "error", f"the package {error.name} is not installed", f"pip install {error.name}"))
        except Exception as error:
            _write(Finding(name, "error", f"the check failed: {type(error).__name__}: {error}"))
        _write(CheckDone(name))


def _write(line: Finding | CheckDone) -> None:
    sys.stdout.write(msgspec.json.encode(line).decode() + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
