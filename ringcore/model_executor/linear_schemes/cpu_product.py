"""The product of quantized weights on a CPU: by C kernels on a copy of the codes, else expanded by blocks.

One linear of 6,144 x 1,024 in microseconds by numbers of rows, one thread of an EPYC (Zen 4), weights from memory.
Dense and by the kernels:

    |                              | 1     | 4     | 16    | 64     |
    | float32, dense               | 1,861 | 1,379 | 2,567 | 8,109  |
    | 4 bits in groups             | 350   | 768   | 2,421 | 7,884  |
    | 8 bits                       | 347   | 966   | 2,677 | 8,168  |
    | FP8                          | 427   | 1,114 | 2,732 | 8,274  |
    | bfloat16, dense              | 670   | 783   | 1,412 | 4,136  |
    | 4 bits in groups             | 256   | 537   | 1,329 | 4,732  |
    | 8 bits                       | 344   | 738   | 1,587 | 5,044  |
    | FP8                          | 438   | 808   | 1,707 | 5,085  |
    | 8 bits by 8 bits             | 236   | 239   | 828   | 2,386  |

and by what they replace, expansion and torch's operators for bfloat16 (`_weight_int4pack_mm`, `_weight_int8pack_mm`,
`_int_mm`), which have no other dtype:

    | 4 bits, expanded to float32  | 3,445 | 4,867 | 6,747 | 12,994 |
    | FP8, expanded to float32     | 3,720 | 5,184 | 6,664 | 13,387 |
    | 4 bits, operator             | 339   | 608   | 2,359 | 9,350  |
    | 8 bits, operator             | 841   | 1,181 | 3,400 | 11,105 |
    | 8 bits by 8 bits, operator   | 598   | 993   | 1,332 | 3,060  |
"""

from __future__ import annotations

import torch

from ringcore.model_executor.linear_schemes.block_arrangements import BlockCodes
from ringcore.model_executor.linear_schemes.block_kernels import block_kernels
from ringcore.model_executor.linear_schemes.block_product import BlockProduct
from ringcore.model_executor.linear_schemes.codes import ByteCodes
from ringcore.model_executor.linear_schemes.dense import PlainProduct
from ringcore.model_executor.linear_schemes.expanding_product import ExpandingProduct, sorted_by_group
from ringcore.model_executor.linear_schemes.padded_product import padded_product
from ringcore.model_executor.linear_schemes.product import Product
from ringcore.model_executor.linear_schemes.quantized import QuantizedMatrix
from ringcore.model_executor.linear_schemes.rounded_inputs import InputRounding, RoundedInputs
from ringcore.model_executor.linear_schemes.scaled_blocks import padded_order, scaled_blocks

__all__ = ["cpu_product", "is_in_blocks", "is_of_rounded_rows"]


def cpu_product(
    matrix: QuantizedMatrix,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    updatable: bool,
    rounding: InputRounding | None,
) -> Product:
    """dtype: of the inputs. rounding: of the inputs, before the product."""
    if rounding is None:
        return _of_inputs_as_they_are(matrix, bias, dtype, updatable)
    if not _is_of_integers(matrix, rounding):
        return RoundedInputs(_of_inputs_as_they_are(matrix, None, dtype, updatable), rounding, bias)
    if is_of_rounded_rows(matrix, rounding) and (not updatable or is_in_blocks(matrix)):
        product = _by_kernels(matrix, bias, dtype, updatable, by_integers=True)
        if product is not None:
            return product
    return RoundedInputs(_integer_product(matrix), rounding, bias)


def _of_inputs_as_they_are(
    matrix: QuantizedMatrix, bias: torch.Tensor | None, dtype: torch.dtype, updatable: bool
) -> Product:
    if is_in_blocks(matrix):
        product = _by_kernels(matrix, bias, dtype, updatable)
        assert product is not None, "arranged for the kernels"
        return product
    if updatable:
        return ExpandingProduct(matrix, bias)
    return _by_kernels(matrix, bias, dtype, updatable) or ExpandingProduct(*sorted_by_group(matrix, bias))


def is_in_blocks(matrix: QuantizedMatrix) -> bool:
    """Whether the codes lie as the kernels take them, so that nothing is copied."""
    return isinstance(matrix.codes, BlockCodes)


def _by_kernels(
    matrix: QuantizedMatrix, bias: torch.Tensor | None, dtype: torch.dtype, updatable: bool, by_integers: bool = False
) -> Product | None:
    kernels, index = block_kernels(), matrix.groups.index
    if kernels is None:
        return None
    order = None if index is None else index.argsort(stable=True)
    of_codes, padding = padded_order(matrix) if index is None else (order, (0, 0))
    derived = matrix.derived if updatable else None
    blocks = scaled_blocks(kernels, [matrix], [of_codes], bias, dtype, by_integers=by_integers, derived=derived)
    return None if blocks is None else padded_product(BlockProduct(blocks, dtype, derived, order), padding)


def _is_of_integers(matrix: QuantizedMatrix, rounding: InputRounding) -> bool:
    """Whether inputs and weights are INT8 numbers, with one scale for each row and each output: sums are exact."""
    codes, form = matrix.codes, rounding.format
    if form.number != "int8" or form.scale == "group" or matrix.scales.shape[1] > 1:
        return False
    if isinstance(codes, BlockCodes):
        return codes.number == "int8"
    return isinstance(codes, ByteCodes) and not codes.is_fp8


def is_of_rounded_rows(matrix: QuantizedMatrix, rounding: InputRounding) -> bool:
    """Whether the kernels round the inputs: to INT8 by row, for sums of integers."""
    return _is_of_integers(matrix, rounding) and rounding.format.scale == "token" and rounding.over_ranks is None


def _integer_product(matrix: QuantizedMatrix) -> Product:
    """Of inputs that are INT8 numbers, in float32."""
    assert isinstance(matrix.codes, ByteCodes)
    numbers, scales = matrix.codes.tensor.t(), matrix.scales[:, 0]
    return PlainProduct(lambda x: torch._int_mm(x.to(torch.int8), numbers).float().mul_(scales))
