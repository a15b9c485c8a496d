"""One linear alone on a device, by each kernel that can compute it: a child process of the harness. A kernel that takes
no norm is timed with the norm's kernel before it.

Calls go over copies of the weight that together do not fit the L2, in a CUDA graph, as those of a step do. What a
kernel gives is compared with the product in float32 before it is timed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from triton.errors import TritonError

from benchmarks.peers.protocol import serve
from benchmarks.peers.rows import facts
from ringcore.kernels.launch.device_timer import PAST_L2_BYTES, timer
from ringcore.kernels.linears.skinny_tiles import Config
from ringcore.kernels.linears.tma_configs import has_wgmma

PACKAGES = ("ringcore", "torch", "triton")
EPS = 1e-6
TOLERANCE = 1e-2  # of the norm: the inputs of a product are rounded to 16 bits


Call = Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]  # weight, float32 rows to add to -> the result


class _Wrong(Exception):
    """A kernel's result is not the product's."""


@dataclass
class Tensors:
    """Of one case: copies of the weight, and what they are multiplied with."""

    weights: list[torch.Tensor]
    stream: torch.Tensor  # [num_rows, num_inputs] float32, which a norm reads
    rows: torch.Tensor  # [num_rows, num_inputs], its norm where there is one
    gain: torch.Tensor | None
    adds: bool
    is_gated: bool

    @classmethod
    def of(cls, case: dict[str, Any], dtype: torch.dtype, device: torch.device) -> Tensors:
        num_rows, num_inputs = case["num_rows"], case["num_inputs"]
        num_weights = case["num_outputs"] * (2 if case["is_gated"] else 1)
        weight = torch.randn(num_weights, num_inputs, device=device, dtype=dtype) / num_inputs**0.5
        copies = -(-PAST_L2_BYTES // weight.nbytes) if device.type == "cuda" else 1
        stream, gain = torch.randn(num_rows, num_inputs, device=device), None
        rows = stream.to(dtype)
        if case["role"] == "after norm":
            gain = 1 + torch.randn(num_inputs, device=device, dtype=dtype) / 8
            normed = stream * torch.rsqrt(stream.square().mean(-1, keepdim=True) + EPS) * gain.float()
            rows = normed.to(dtype)
        weights = [weight, *(weight.clone() for _ in range(copies - 1))]
        return cls(weights, stream, rows, gain, case["role"] == "added", case["is_gated"])

    def normed(self) -> torch.Tensor:
        """What a kernel without a norm multiplies: by the norm's own kernel, where there is one."""
        if self.gain is None:
            return self.rows
        from ringcore.kernels.rms_norm import rms_norm

        return rms_norm(self.stream, self.gain, EPS, dtype=self.rows.dtype)

    def expected(self) -> torch.Tensor:
        product = self.rows.float() @ self.weights[0].float().t()
        if self.is_gated:
            gate, up = product.chunk(2, -1)
            product = torch.nn.functional.silu(gate) * up
        return product


class Linears:
    """Commands: what the device is, and the seconds of one kernel at one case. A case stays until another is wanted."""

    def __init__(self) -> None:
        self._case: Any = None
        self._tensors: Tensors

    def load(self, device: str, dtype: str) -> dict[str, Any]:
        self._device, self._dtype = torch.device(device), getattr(torch, dtype)
        if device == "cuda":
            properties = torch.cuda.get_device_properties(0)
            of_device = {"device": properties.name, "num_sms": properties.multi_processor_count}
            return {**facts(PACKAGES), **of_device, "has_wgmma": has_wgmma(torch.device("cuda", 0))}
        return {**facts(PACKAGES), "device": "cpu", "num_sms": 1, "has_wgmma": False}

    def measure(self, case: dict[str, Any], kernel: str, config: dict[str, Any]) -> dict[str, Any]:
        """Seconds of a call, or why it cannot be launched."""
        if self._case != case:
            self._case = None  # the tensors of the case before are free before these are made
            torch.manual_seed(0)
            self._tensors = Tensors.of(case, self._dtype, self._device)
            self._case = case
        try:
            return {"seconds": self._timed(_product(self._tensors, kernel, config), self._tensors.weights)}
        except (_Wrong, TritonError) as error:  # a compiler that refuses it, or shared memory that is too small
            return {"error": f"{type(error).__name__}: {error}".splitlines()[0]}

    def _timed(self, call: Call, weights: list[torch.Tensor]) -> float:
        right = self._tensors.expected()
        total = torch.zeros_like(right) if self._tensors.adds else None
        error = float((call(weights[0], total).float() - right).norm() / right.norm())
        if not error <= TOLERANCE:
            raise _Wrong(f"its norm differs by {error:.2%} from the reference's")

        def calls() -> None:
            for weight in weights:
                call(weight, total)

        return timer(calls, len(weights), self._device, in_graph=True)()


def _product(tensors: Tensors, kernel: str, config: dict[str, Any]) -> Call:
    if kernel == "cublas":
        return lambda weight, total: _by_cublas(tensors, weight, total)
    from ringcore.kernels.linears.skinny_linear import new_split_k_counters, skinny_linear
    from ringcore.kernels.linears.skinny_tiles import DotConfig, FmaConfig, TmaConfig
    from ringcore.kernels.partials import RowNorm

    kinds: dict[str, type[Config]] = {"fma": FmaConfig, "dot": DotConfig, "tma": TmaConfig}
    chosen = kinds[kernel](**config)
    normalises = kernel == "fma" and tensors.gain is not None
    norm = RowNorm(tensors.gain, EPS) if normalises and tensors.gain is not None else None
    activation = "silu" if tensors.is_gated else None
    counters = new_split_k_counters(tensors.weights[0])

    def call(weight: torch.Tensor, total: torch.Tensor | None) -> torch.Tensor:
        return skinny_linear(
            tensors.stream if normalises else tensors.normed(),
            weight,
            chosen,
            norm=norm,
            activation=activation,
            add_to=total,
            counters=counters,  # type: ignore[arg-type]
        )

    return call


def _by_cublas(tensors: Tensors, weight: torch.Tensor, total: torch.Tensor | None) -> torch.Tensor:
    from ringcore.model_executor.linear_schemes.kernel_product import sums_in_float32

    if total is None:
        product = torch.nn.functional.linear(tensors.normed(), weight)
        if not tensors.is_gated:
            return product
        from ringcore.model_executor.layers.activation import bind_activation

        return bind_activation("silu", product.device)(product)
    if sums_in_float32(weight.dtype, weight.device):
        return torch.addmm(total, tensors.rows, weight.t(), out_dtype=torch.float32, out=total)
    return total.add_(torch.nn.functional.linear(tensors.rows, weight))


if __name__ == "__main__":
    linears = Linears()
    serve({"load": linears.load, "measure": linears.measure})
