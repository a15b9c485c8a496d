"""Kernels of attention: decodes, prompts, latents, the KV write and the rotation before it."""
