"""The quantized linears of a model that stay where transformers has them: our layers in their place."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import torch
from torch import nn
from transformers import PreTrainedModel

from ringcore.attention.context import NO_TOKEN_CONTEXT
from ringcore.checkpoint.quantization import Format, GgufFormat, Quantization
from ringcore.distributed.parallel import TensorParallel
from ringcore.model_executor.layers.linear import ColumnParallelLinear, RowParallelLinear
from ringcore.model_executor.linear_schemes.scheme import SchemeOf
from ringcore.model_executor.linear_schemes.shard import OutputSlice
from ringcore.model_executor.models.transformers.checkpoint_layout import TensorLayout
from ringcore.model_executor.models.transformers.linears import ParallelLinear
from ringcore.model_executor.models.transformers.refusal import Refused

__all__ = ["QuantizedLinear", "dense_names", "quantized_shapes", "replace_quantized"]


class QuantizedLinear(nn.Module):
    """A `ParallelLinear` by our layer: whole, or split by `dim`, which is gathered or chunked here where `whole`."""

    def __init__(
        self,
        path: str,
        linear: nn.Linear | ParallelLinear,
        shape: tuple[int, int],
        matrix: str,
        tp: TensorParallel,
        dtype: torch.dtype,
        scheme_of: SchemeOf,
    ) -> None:
        """shape: (outputs, inputs) of the whole matrix; matrix: its name in the checkpoint."""
        super().__init__()
        self.dim, self.whole = (linear.dim, linear.whole) if isinstance(linear, ParallelLinear) else (None, False)
        self.in_features, self.out_features, self.tp = linear.in_features, linear.out_features, tp
        (num_outputs, num_inputs), has_bias = shape, linear.bias is not None
        self.layer: ColumnParallelLinear | RowParallelLinear
        if self.dim == 1:
            self.layer = RowParallelLinear(
                path, matrix, num_inputs, num_outputs, bias=has_bias, dtype=dtype, tp=tp, scheme_of=scheme_of
            )
            return
        start = tp.rank * self.out_features if self.dim == 0 else 0
        outputs = [OutputSlice(matrix, num_outputs, start, self.out_features)]
        self.layer = ColumnParallelLinear(path, outputs, num_inputs, bias=has_bias, dtype=dtype, scheme_of=scheme_of)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., in], or this rank's share of it -> [..., out], or this rank's share of it."""
        if self.dim == 1 and self.whole:
            x = x.chunk(self.tp.size, -1)[self.tp.rank]
        out = self.layer(x.reshape(-1, x.shape[-1]).contiguous(), NO_TOKEN_CONTEXT).view(*x.shape[:-1], -1)
        return self.tp.all_gather_last_dim(out) if self.dim == 0 and self.whole else out


def dense_names(found: Iterable[str], quantization: Quantization | None) -> list[str]:
    """The names that a dense checkpoint of the same model would have."""
    if quantization is None:
        return list(found)
    names, of_experts = [], () if quantization.experts is None else quantization.experts.tensors
    for name in found:
        matrix, _, suffix = name.rpartition(".")
        stored = next((tensor for tensor in of_experts if name.endswith(tensor.suffix)), None)
        if stored is not None:
            names.append(name.removesuffix(stored.suffix))
            continue
        form = quantization.format_of(matrix)
        is_of_form = form is not None and any(tensor.suffix == suffix for tensor in form.tensors)
        names.append(f"{matrix}.weight" if is_of_form else name)
    return list(dict.fromkeys(names))


def quantized_shapes(
    model: PreTrainedModel, layouts: Mapping[str, TensorLayout], quantization: Quantization | None
) -> dict[str, tuple[int, ...]]:
    """The shapes of all tensors of the checkpoint, by their names."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, layout in layouts.items():
        path, _, leaf = name.rpartition(".")
        matrix = layout.pieces[0].checkpoint_name.removesuffix(".weight")
        form = None if quantization is None or leaf != "weight" else quantization.format_of(matrix)
        if form is None or not _is_quantizable(model.get_submodule(path), layout):
            shapes |= layout.tensors
            continue
        num_outputs, num_inputs = layout.shape
        shapes |= {f"{matrix}.{tensor.suffix}": tensor.shape(num_outputs, num_inputs) for tensor in form.tensors}
    return shapes


def replace_quantized(
    model: PreTrainedModel,
    layouts: Mapping[str, TensorLayout],
    replaced: Collection[str],
    quantization: Quantization | None,
    tp: TensorParallel,
    dtype: torch.dtype,
    scheme_of: SchemeOf,
) -> dict[str, QuantizedLinear]:
    """Puts ours in the place of every quantized linear but those of `replaced`; -> by path.

    Raises `Refused` for a quantized head. In blocks of a GGUF file it is the vocabulary's, or read as numbers.
    """
    linears: dict[str, QuantizedLinear] = {}
    for path, module in [] if quantization is None else list(model.named_modules()):
        layout = layouts.get(f"{path}.weight")
        if path in replaced or layout is None or not _is_quantizable(module, layout):
            continue
        assert isinstance(module, nn.Linear | ParallelLinear), path
        matrix = layout.pieces[0].checkpoint_name.removesuffix(".weight")
        form: Format | None = None if quantization is None else quantization.format_of(matrix)
        is_head = module is model.get_output_embeddings()
        if form is None or (is_head and isinstance(form, GgufFormat)):
            continue
        if is_head:
            raise Refused(f"its head {matrix!r} is quantized; quantize the model without it")
        shape = layout.shape[0], layout.shape[1]
        linears[path] = QuantizedLinear(path, module, shape, matrix, tp, dtype, scheme_of)
        model.set_submodule(path, linears[path])
    return linears


def _is_quantizable(module: nn.Module, layout: TensorLayout) -> bool:
    return layout.is_whole and (type(module) is nn.Linear or isinstance(module, ParallelLinear))
