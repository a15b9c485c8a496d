"""The experts of a mixture on a GPU such that a token's sum does not depend on how many tokens there are.

One way for any number of tokens: grouped products by tiles that agree, rows of experts in float32, added up in the
order of a token's experts. Which tiles agree is asked of the grouped kernel, as `invariant_tiles` asks that of linears.
"""

from __future__ import annotations

import torch

from ringcore.kernels.linears.invariant_tiles import ROWS, agreeing, dense_tiles
from ringcore.kernels.linears.skinny_configs import many_packed
from ringcore.kernels.linears.skinny_tiles import DotConfig
from ringcore.kernels.linears.skinny_times import DENSE_NUMBERS, Numbers
from ringcore.kernels.mixtures.dense_experts import DenseExperts
from ringcore.kernels.mixtures.expert_matrices import ExpertMatrices, Routing
from ringcore.kernels.mixtures.experts import GroupedProducts, TokenLimits
from ringcore.kernels.mixtures.experts_configs import FLOAT32_TILE, MAX_FEW_TOKENS, MIN_ROWS, fitted, rows_of_item

__all__ = ["ANY_NUMBER", "InvariantExpertTiles"]

ANY_NUMBER = TokenLimits(fma=0, summed=0, wide=1 << 30)
_BLOCK_WEIGHTS, _NUM_WARPS = 128, 8  # of tiles of `ROWS` rows
_FLOAT32_ROWS = 32


class InvariantExpertTiles:
    """Of the experts of a layer on a device."""

    def __init__(self, matrices: ExpertMatrices) -> None:
        """Asks the device, once for each dtype."""
        dtype, device = matrices.up.dtype, matrices.up.device
        self._dense: tuple[DotConfig, ...] = ()
        if dtype != torch.float32:
            self._dense = agreeing(dtype, device, dense_tiles(_BLOCK_WEIGHTS, _NUM_WARPS), _multiply)

    def choose(
        self,
        num_experts: int,
        num_weights: int,
        num_inputs: int,
        num_tokens: int,
        k: int,
        dtype: torch.dtype,
        numbers: Numbers = DENSE_NUMBERS,
    ) -> DotConfig:
        """As `choose_grouped`."""
        if dtype == torch.float32:
            return fitted(FLOAT32_TILE, _FLOAT32_ROWS, num_inputs, numbers)
        if numbers != DENSE_NUMBERS:  # few rows of codes are multiplied before their scales, many after
            return fitted(many_packed(numbers), ROWS, num_inputs, numbers)
        wanted = max(rows_of_item(num_experts, num_tokens, k), 2 * MIN_ROWS if num_tokens > MAX_FEW_TOKENS else 0)
        tile = next((one for one in self._dense if one.block_rows >= wanted), self._dense[-1])
        return fitted(tile, tile.block_rows, num_inputs, numbers)


def _multiply(rows: torch.Tensor, weight: torch.Tensor, tile: DotConfig, out: torch.Tensor) -> None:
    """By one expert."""
    expert = DenseExperts(weight[None])
    routing = Routing(torch.zeros(len(rows), 1, dtype=torch.int32, device=rows.device), torch.ones_like(rows[:, :1]))
    GroupedProducts(routing, ExpertMatrices(expert, expert), tile).product(rows, expert, None, out.dtype, out=out)
