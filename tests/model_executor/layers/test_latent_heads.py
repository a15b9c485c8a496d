"""Latent heads whose matrix is quantized: what they compute is that of the expanded one."""

from __future__ import annotations

import pytest
import torch
from quantized_checkpoints import store

from ringcore.checkpoint.quantization import AwqFormat, CodesFormat, InputFormat, OnLoadFormat, Quantization, Rule
from ringcore.model_executor.layers.latent_heads import LatentHeads
from ringcore.model_executor.linear_schemes.dense import all_dense
from ringcore.model_executor.linear_schemes.on_load_scheme import EncodedRows, quantize_groups
from ringcore.model_executor.linear_schemes.schemes import schemes_of
from ringcore.model_executor.linear_schemes.shard import OutputSlice

HEADS, RANK, KEY, VALUE = 2, 64, 16, 24
BLOCKS = CodesFormat("fp8", "block", (32, 16), "weight_scale_inv", InputFormat("fp8", "group", 16))


def bound(scheme_of, tensors):
    outputs = [OutputSlice("kv_b_proj", HEADS * (KEY + VALUE), 0, HEADS * (KEY + VALUE))]
    heads = LatentHeads("heads", outputs, RANK, KEY, VALUE, torch.float32, scheme_of)
    own = {f"heads.{suffix}": tensor for suffix, tensor in tensors.items()}
    for weight in heads.weights():  # as the loader does
        if (arrangement := weight.arrangement_on(own[weight.name].device)) is not None:
            arrangement.arrange(own[weight.name])
    heads.bind(own, True)
    return heads


@pytest.mark.parametrize(("kind", "form"), [("awq", AwqFormat(32)), ("fp8 block", BLOCKS), ("on load", None)])
def test_a_quantized_matrix_is_expanded(kind, form):
    weight = torch.randn(HEADS * (KEY + VALUE), RANK, generator=torch.Generator().manual_seed(1))
    if form is None:
        form = OnLoadFormat("int4")
        tensors = {"weight": EncodedRows(form, RANK)(weight)}
        codes, scales = quantize_groups(weight[:, None], "int4")
        expanded = ((codes.float() - 8) * scales[..., None])[:, 0]
    else:
        stored = store(kind, weight)
        tensors, expanded = stored.tensors, stored.expanded
    scheme_of = schemes_of(Quantization("test", [Rule(["Linear"], form)]))
    ours, dense = bound(scheme_of, tensors), bound(all_dense, {"weight": expanded})
    query = torch.randn(3, HEADS, KEY, generator=torch.Generator().manual_seed(2))
    latents = torch.randn(3, HEADS, RANK, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(ours.absorbed(query), dense.absorbed(query), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ours.values(latents), dense.values(latents), rtol=1e-4, atol=1e-4)
    before = ours.absorbed(query)
    for tensor in tensors.values():
        tensor.zero_()
    ours.refresh()
    assert before.any()
    assert not ours.absorbed(query).any()
