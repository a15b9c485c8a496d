"""The attention backends, in the order of preference, and the choice among them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ringcore.attention.backend import PagedBackend
from ringcore.attention.backends.cpu_attn import CpuAttnBackend
from ringcore.attention.backends.flash_attn import FlashAttnBackend
from ringcore.attention.backends.torch_mla import TorchMLABackend
from ringcore.attention.backends.torch_sdpa import TorchSdpaBackend
from ringcore.attention.backends.triton import TritonBackend
from ringcore.attention.backends.triton_mla import TritonMLABackend
from ringcore.attention.backends.triton_rows import TritonRowsBackend
from ringcore.attention.spec import AttentionSpec
from ringcore.errors import ConfigError
from ringcore.kv_cache.spec import KVCacheSpec

__all__ = ["BACKENDS", "choose_backend"]

# name: class; "auto" takes the first that does not refuse
BACKENDS: dict[str, type[PagedBackend]] = {
    TritonBackend.name: TritonBackend,
    FlashAttnBackend.name: FlashAttnBackend,
    TritonMLABackend.name: TritonMLABackend,
    CpuAttnBackend.name: CpuAttnBackend,
    TorchSdpaBackend.name: TorchSdpaBackend,
    TorchMLABackend.name: TorchMLABackend,
    TritonRowsBackend.name: TritonRowsBackend,
}


def choose_backend(
    name: str,
    spec: KVCacheSpec,
    layers: Sequence[AttentionSpec],
    device: torch.device,
    order: Sequence[str] | None = None,
    sharing_specs: Sequence[KVCacheSpec] = (),
) -> PagedBackend:
    """The backend `name`, or for "auto" the first of `order` (None: of `BACKENDS`) that can serve the `layers` of a KV
    cache group of `spec` on `device`. `layers` and `sharing_specs` as for `PagedBackend`. Raises `ConfigError` with
    the reason of every backend that refused.
    """
    if name != "auto" and name not in BACKENDS:
        raise _refused(name, f"no such backend; give auto or one of {', '.join(BACKENDS)}")
    layers = list(dict.fromkeys(layers))
    num_heads, *others = dict.fromkeys(layer.num_heads for layer in layers)
    if others:
        raise _refused(name, f"layers that share a block table have {num_heads} and {others[0]} query heads")
    if num_heads % spec.num_kv_heads:
        raise _refused(name, f"{num_heads} query heads are no multiple of {spec.num_kv_heads} KV heads")
    candidates = (order if order is not None else list(BACKENDS)) if name == "auto" else [name]
    reasons = []
    for candidate in candidates:
        reason = BACKENDS[candidate].refusal(spec, layers, device, sharing_specs)
        if reason is None:
            return BACKENDS[candidate](spec, layers, sharing_specs)
        reasons.append(f"{candidate}: {reason}")
    remedy = "give attention_backend='auto' or another dtype" + (", or kv_cache_dtype='auto'" if spec.is_fp8 else "")
    raise _refused(name, f"no backend is left ({'; '.join(reasons)}); {remedy}")


def _refused(name: str, reason: str) -> ConfigError:
    return ConfigError(f"attention_backend={name!r}: {reason}", option="attention_backend", value=name)
