"""Reads a `ModelSpec` from the metadata and the tensor names of a GGUF file."""

from __future__ import annotations

import math

import numpy as np

from ringcore.checkpoint.family import Families, GGUFFormat
from ringcore.checkpoint.gguf_header import GGUFHeader, read_gguf_header
from ringcore.checkpoint.metadata import Metadata
from ringcore.checkpoint.model_file import open_model_file
from ringcore.checkpoint.model_spec import MAX_SIZES, ModelSpec, RopeSpec
from ringcore.errors import ModelLoadError

__all__ = ["read_gguf_spec", "shortest"]

# A quantized weight is exact only in float32, to which it is expanded.
_FILE_DTYPES = {0: "float32", 1: "float16", 30: "bfloat16"}
# The parameters of llama3 scaling in all published models.
_LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_POSITIONS = 1.0, 4.0, 8192
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


def read_gguf_spec(path: str, families: Families) -> ModelSpec:
    """The facts of the model in a GGUF file. Raises `ModelLoadError` as `read_model_spec` does."""
    header = read_gguf_header(path)
    meta = Metadata(header.metadata, path)
    stored, family = families.of_gguf(meta)
    name = stored.name
    _refuse_unsupported(meta, stored)
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelLoadError(f"{path}: tensor 'token_embd.weight' is missing", path=path, tensor="token_embd.weight")
    if len(embedding.shape) != 2:
        raise meta.error("token_embd.weight", f"has the shape {list(embedding.shape)}, a matrix is needed")

    def size(key: str, field: str, default: int | None = None) -> int:
        return meta.integer(f"{name}.{key}", default, high=MAX_SIZES[field])

    hidden_size = size("embedding_length", "hidden_size")
    num_heads = size("attention.head_count", "num_heads")
    head_dim = _head_dim(meta, name, hidden_size, num_heads)
    num_layers = size("block_count", "num_layers")
    attention = {} if stored.attention is None else stored.attention(meta, num_layers, hidden_size // num_heads)
    return ModelSpec(
        architecture=family.architectures[0],
        vocab_size=embedding.shape[0],
        hidden_size=hidden_size,
        intermediate_size=size("feed_forward_length", "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=size("attention.head_count_kv", "num_kv_heads", num_heads),
        head_dim=head_dim,
        rms_norm_eps=shortest(meta.number(f"{name}.attention.layer_norm_rms_epsilon")),
        max_position_embeddings=size("context_length", "max_position_embeddings"),
        rope=_rope(header, meta, name, head_dim),
        tie_word_embeddings="output.weight" not in header.tensors,
        attention_bias="blk.0.attn_q.bias" in header.tensors,
        attention_out_bias="blk.0.attn_output.bias" in header.tensors,
        mlp_bias="blk.0.ffn_up.bias" in header.tensors,
        dtype=_FILE_DTYPES.get(_commonest_type(header), "float32"),
        bos_token_id=_token_id(meta, "bos_token_id"),
        eos_token_ids=list(dict.fromkeys(i for key in _END_KEYS if (i := _token_id(meta, key)) is not None)),
        **attention,
    )


def shortest(value: float) -> float:
    """A float32 of the file as the decimal number it was made from: 1e-6, not 9.999999974752427e-07."""
    return float(str(np.float32(value)))


def _refuse_unsupported(meta: Metadata, stored: GGUFFormat) -> None:
    name = stored.name
    if meta.get(f"{name}.expert_count"):
        raise meta.error(f"{name}.expert_count", f"is {meta.get(f'{name}.expert_count')}; experts are not computed")
    if stored.attention is None and meta.get(f"{name}.attention.sliding_window"):
        raise meta.error(f"{name}.attention.sliding_window", f"is present; the models of {name} have no sliding window")
    for key in (f"{name}.attn_logit_softcapping", f"{name}.final_logit_softcapping"):
        if meta.get(key):
            raise meta.error(key, f"is {meta.get(key)}; capped logits are not computed")


def _head_dim(meta: Metadata, name: str, hidden_size: int, num_heads: int) -> int:
    if f"{name}.attention.key_length" not in meta and hidden_size % num_heads:
        raise meta.error(f"{name}.attention.head_count", f"is {num_heads}, which does not divide {hidden_size}")
    head_dim = meta.integer(f"{name}.attention.key_length", hidden_size // num_heads, high=MAX_SIZES["head_dim"])
    for key in ("attention.value_length", "rope.dimension_count"):
        if meta.integer(f"{name}.{key}", head_dim) != head_dim:
            raise meta.error(f"{name}.{key}", f"is {meta.get(f'{name}.{key}')}; only the head size {head_dim} is known")
    return head_dim


def _token_id(meta: Metadata, key: str) -> int | None:
    key = f"tokenizer.ggml.{key}"
    return meta.integer(key, low=0) if key in meta else None


def _commonest_type(header: GGUFHeader) -> int:
    """The type that most bytes of the matrices have."""
    sizes: dict[int, int] = {}
    for info in header.tensors.values():
        if len(info.shape) == 2:
            sizes[info.ggml_type] = sizes.get(info.ggml_type, 0) + info.nbytes
    return max(sizes, key=lambda kind: sizes[kind]) if sizes else 0


def _rope(header: GGUFHeader, meta: Metadata, name: str, head_dim: int) -> RopeSpec:
    theta = shortest(meta.number(f"{name}.rope.freq_base", 10_000.0))
    if theta <= 1:
        raise meta.error(f"{name}.rope.freq_base", f"is {theta}, it must be above 1: frequencies fall")
    if "rope_freqs.weight" in header.tensors:
        return _llama3_rope(header, theta, head_dim)
    prefix = f"{name}.rope.scaling."
    kind = meta.text(prefix + "type", "none")
    if kind == "none":
        old_scale = shortest(meta.number(f"{name}.rope.scale_linear", 1.0))  # before rope.scaling.*
        return RopeSpec(theta, "linear", old_scale) if old_scale != 1.0 else RopeSpec(theta)
    factor = shortest(meta.number(prefix + "factor"))
    if kind == "linear":
        return RopeSpec(theta, "linear", factor)
    if kind != "yarn" or prefix + "yarn_log_multiplier" in meta:
        raise meta.error(prefix + "type", f"is {kind!r}; known: none, linear, yarn without yarn_log_multiplier")
    scale = shortest(meta.number(prefix + "attn_factor", 1.0))
    return RopeSpec(
        theta=theta,
        kind="yarn",
        factor=factor,
        original_max_position_embeddings=meta.integer(prefix + "original_context_length"),
        beta_fast=shortest(meta.number(prefix + "yarn_beta_fast", 32.0)),
        beta_slow=shortest(meta.number(prefix + "yarn_beta_slow", 1.0)),
        # GGML multiplies the paper's scale by its factor; config.json gives the product.
        attention_factor=None if scale == 1.0 else scale * (0.1 * math.log(factor) + 1.0),
    )


def _llama3_divisors(theta: float, factor: float, head_dim: int) -> np.ndarray:
    """What llama3 scaling, with the published parameters, divides each frequency by: [head_dim / 2] float64."""
    wavelength = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    turns = _LLAMA3_POSITIONS / wavelength
    smooth = np.clip((turns - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW), 0.0, 1.0)
    return np.asarray(1.0 / ((1.0 - smooth) / factor + smooth))


def _llama3_rope(header: GGUFHeader, theta: float, head_dim: int) -> RopeSpec:
    """Llama 3.1's RoPE scaling: a GGUF file holds only the resulting frequency divisors.

    All published models share the parameters except the factor, which is the largest divisor; these are used if they
    reproduce the file's divisors, else the file is refused.
    """
    info = header.tensors["rope_freqs.weight"]
    if info.shape == (head_dim // 2,) and info.ggml_type == 0:
        with open_model_file(header.path) as file:
            divisors = np.fromfile(file, "<f4", head_dim // 2, offset=info.offset)
        factor = float(divisors.max(initial=0)) if len(divisors) == head_dim // 2 else 0.0
        if factor >= 1 and np.allclose(divisors, _llama3_divisors(theta, factor, head_dim), rtol=1e-4, atol=0):
            return RopeSpec(theta, "llama3", factor, _LLAMA3_POSITIONS, _LLAMA3_LOW, _LLAMA3_HIGH)
    raise ModelLoadError(
        f"{header.path}: tensor 'rope_freqs.weight' holds no llama3 scaling with the published parameters "
        "(low_freq_factor 1, high_freq_factor 4, 8192 positions); load the model from safetensors",
        path=header.path,
        tensor="rope_freqs.weight",
    )
