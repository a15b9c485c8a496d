"""Runs a step: rows to tensors, the model eagerly or in CUDA graphs, logits to tokens."""
