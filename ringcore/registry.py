"""The registry of model classes, by the `architectures` name of config.json.

Pure data, so that an unknown name is refused before any process starts and without importing torch.
"""

from __future__ import annotations

__all__ = ["MODELS"]

# architecture: (module, class)
MODELS: dict[str, tuple[str, str]] = {
    "LlamaForCausalLM": ("ringcore.model_executor.models.llama", "LlamaForCausalLM"),
    "Qwen2ForCausalLM": ("ringcore.model_executor.models.qwen2", "Qwen2ForCausalLM"),
    "Qwen3ForCausalLM": ("ringcore.model_executor.models.qwen3", "Qwen3ForCausalLM"),
    "MistralForCausalLM": ("ringcore.model_executor.models.mistral", "MistralForCausalLM"),
    "Gemma3ForCausalLM": ("ringcore.model_executor.models.gemma3", "Gemma3ForCausalLM"),
}
