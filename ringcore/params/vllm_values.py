"""Values that options have in vLLM and not in ringcore, by option: what to give here."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["ENGINE_VALUES", "what_to_give"]

ENGINE_VALUES: Mapping[str, Mapping[str, str]] = {
    "generation_config": {"vllm": "'ringcore'"},
    "dtype": {"half": "'float16'", "float": "'float32'"},
    "attention_backend": {
        "FLASH_ATTN": "'flash_attn'",
        "TRITON_ATTN": "'triton'",
        "TRITON_MLA": "'triton_mla'",
        "CPU_ATTN": "'cpu_attn'",
        "TORCH_SDPA": "'torch_sdpa'",
        **dict.fromkeys(("FLASHINFER", "FLEX_ATTENTION", "FLASHMLA", "CUTLASS_MLA", "FLASH_ATTN_MLA"), "'auto'"),
    },
    "structured_outputs_backend": dict.fromkeys(("guidance", "outlines", "lm-format-enforcer"), "'auto'"),
    "load_format": dict.fromkeys(("hf", "fastsafetensors", "instanttensor", "mistral"), "'auto'"),
}


def what_to_give(option: str, value: object) -> str | None:
    """The remedy for a value of vLLM's; None for any other."""
    here = ENGINE_VALUES.get(option, {}).get(str(value))
    return None if here is None else f"vLLM's {value!r} is {here} here"
