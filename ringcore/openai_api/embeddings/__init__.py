"""Embeddings in OpenAI's form, and scores and rankings by them in vLLM's."""
