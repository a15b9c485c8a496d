"""One grouped product of a mixture alone on a device, by each tile: a child process of the harness.

Calls go over several layers' weights and routings in a CUDA graph, so that weights come from memory. What a tile gives
is compared with the product of another one before it is timed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from triton.errors import TritonError

from benchmarks.peers.protocol import serve
from benchmarks.peers.rows import facts
from ringcore.kernels.launch.device_timer import timer

if TYPE_CHECKING:
    from ringcore.kernels.mixtures.expert_matrices import ExpertWeight
    from ringcore.kernels.mixtures.experts import GroupedProducts

PACKAGES = ("ringcore", "torch", "triton")
LAYERS = 3
FP8_BLOCK = 128
TOLERANCE = 1e-2  # of the norm


class Experts:
    """Commands: what the device is, and the seconds of one product with one tile. A case stays until another is
    wanted."""

    def __init__(self) -> None:
        self._case: Any = None

    def load(self, device: str, dtype: str) -> dict[str, Any]:
        self._device, self._dtype = torch.device(device), getattr(torch, dtype)
        name = torch.cuda.get_device_name(0) if device == "cuda" else device
        return {**facts(PACKAGES), "device": name}

    def measure(self, case: dict[str, Any], config: dict[str, Any] | None, is_timed: bool) -> dict[str, Any]:
        """case: of an `ExpertsCase`. config: of a `DotConfig`; None as the engine chooses. is_timed: else it is only
        compiled.

        Seconds of a call, and the mean number of active experts; or why it cannot be launched.
        """
        from ringcore.kernels.linears.skinny_tiles import DotConfig

        tile = None if config is None else DotConfig(**config)
        try:
            if not is_timed:
                _Layers(case, 1, self._device, self._dtype).product(0, tile)
                return {}
            if self._case != case:
                self._layers = None  # free before the next ones are made
                self._layers = _Layers(case, LAYERS, self._device, self._dtype)
                self._case = case
            return self._timed(self._layers, tile)
        except TritonError as error:  # a compiler that refuses it, or shared memory that is too small
            return {"error": f"{type(error).__name__}: {error}".splitlines()[0]}

    def _timed(self, layers: _Layers, tile: Any) -> dict[str, Any]:
        right = layers.right()
        error = float((layers.product(0, tile).float() - right).norm() / right.norm())
        if not error <= TOLERANCE:
            return {"error": f"its norm differs by {error:.2%} from the reference's"}

        def calls() -> None:
            for layer in range(LAYERS):
                layers.product(layer, tile)

        return {"seconds": timer(calls, LAYERS, self._device, in_graph=True)(), "num_active": layers.num_active}


class _Layers:
    """Weights and routings of some layers, for one of their products."""

    def __init__(self, case: dict[str, Any], num_layers: int, device: torch.device, dtype: torch.dtype) -> None:
        from ringcore.kernels.mixtures.expert_matrices import ExpertGate, ExpertMatrices, Routing
        from ringcore.kernels.mixtures.experts import GroupedProducts

        torch.manual_seed(0)
        n, k, num_experts = case["num_tokens"], case["k"], case["num_experts"]
        self._is_gated, self._num_inputs = case["is_gated"], case["num_inputs"]
        self._gate = ExpertGate() if self._is_gated else None
        rows = n if self._is_gated else n * k
        self._x = torch.randn(rows, self._num_inputs, device=device, dtype=dtype)
        self._parts = []
        self.num_active = 0.0
        for _ in range(num_layers):
            shape = (num_experts, case["num_weights"], self._num_inputs)
            chosen = torch.rand(n, num_experts, device=device).topk(k).indices.int()
            routing = Routing(chosen, torch.rand(n, k, device=device, dtype=dtype))
            weight = _fp8_experts(shape, device, dtype) if case["is_fp8"] else _dense_experts(shape, device, dtype)
            self._parts.append((weight, routing, ExpertMatrices(weight, weight)))
            self.num_active += len(chosen.unique()) / num_layers
        self._grouped = GroupedProducts
        self._of_tile: tuple[Any, list[GroupedProducts]] = (
            None,
            [],
        )  # whose pairs are sorted once, before they are timed

    def product(self, layer: int, tile: Any) -> torch.Tensor:
        if not self._of_tile[1] or self._of_tile[0] != tile:
            self._of_tile = tile, [self._grouped(routing, matrices, tile) for _, routing, matrices in self._parts]
        weight, grouped = self._parts[layer][0], self._of_tile[1][layer]
        return grouped.product(self._x, weight, None, self._x.dtype, gate=self._gate, reads_pairs=not self._is_gated)

    def right(self) -> torch.Tensor:
        """In float32, a row a pair."""
        weight, routing, _ = self._parts[0]
        chosen = routing.experts.flatten().long()
        x = weight.rounded(self._x.repeat_interleave(routing.k, 0) if self._is_gated else self._x)
        found = torch.empty(len(chosen), weight.shape[1], device=x.device)
        for expert in chosen.unique().tolist():
            rows = chosen == expert
            found[rows] = x[rows].float() @ weight.numbers(torch.tensor([expert], device=x.device))[0].t()
        return found if self._gate is None else self._gate(found)


def _dense_experts(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> ExpertWeight:
    from ringcore.kernels.mixtures.dense_experts import DenseExperts

    return DenseExperts(torch.empty(shape, device=device, dtype=dtype).uniform_(-1, 1) / shape[2] ** 0.5)


def _fp8_experts(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> ExpertWeight:
    from ringcore.checkpoint.quantization import InputFormat
    from ringcore.model_executor.expert_schemes.quantized_experts import QuantizedExperts
    from ringcore.model_executor.linear_schemes.codes import ByteCodes
    from ringcore.model_executor.linear_schemes.quantized import Groups, QuantizedMatrix
    from ringcore.model_executor.linear_schemes.rounded_inputs import InputRounding

    num_outputs, num_inputs = shape[0] * shape[1], shape[2]
    codes = torch.empty(num_outputs, num_inputs, device=device, dtype=torch.float16).uniform_(-1, 1)
    blocks = torch.rand(num_outputs // FP8_BLOCK, num_inputs // FP8_BLOCK, device=device) / num_inputs**0.5
    scales = blocks.repeat_interleave(FP8_BLOCK, 0)
    matrix = QuantizedMatrix(ByteCodes(codes.to(torch.float8_e4m3fn)), scales, Groups(FP8_BLOCK), block_scales=blocks)
    return QuantizedExperts([matrix], shape[0], dtype, InputRounding(InputFormat("fp8", "group", FP8_BLOCK)))


if __name__ == "__main__":
    experts = Experts()
    serve({"load": experts.load, "measure": experts.measure})
