"""Kernels on logits: adjustments, filters, and the draw."""
