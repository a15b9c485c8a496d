"""gpt-oss with MXFP4 experts as it is published, packed by hand from a model of transformers.

Nothing here is of the package.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

NUMBERS = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
GROUP = 32
CONFIG = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        *("model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head")
    ],
}


def pack(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[..., inputs] -> blocks [..., inputs / 32, 16] and scales [..., inputs / 32] uint8, and what they mean."""
    groups = weight.unflatten(-1, (-1, GROUP))
    exponents = groups.abs().amax(-1).clamp(min=1e-9).log2().floor() - 2
    scaled = groups / exponents.exp2()[..., None]
    codes = (scaled[..., None] - NUMBERS).abs().argmin(-1)
    blocks = (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8)
    return blocks, (exponents + 127).to(torch.uint8), (NUMBERS[codes] * exponents.exp2()[..., None]).flatten(-2)


@torch.no_grad()
def save_mxfp4(folder: Path, model: Any, **config: Any) -> Any:
    """Writes the folder; the model becomes what it means."""
    tensors = {}
    for name, parameter in model.state_dict().items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            tensors[name] = parameter.clone()
            continue
        blocks, scales, expanded = pack(parameter.transpose(1, 2))  # there the inputs are before the outputs
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        parameter.copy_(expanded.transpose(1, 2))
    folder.mkdir(exist_ok=True)
    saved = model.config.to_dict() | {"architectures": [type(model).__name__], "dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(saved | {"quantization_config": CONFIG} | config))
    save_file(tensors, folder / "model.safetensors")
    return model
