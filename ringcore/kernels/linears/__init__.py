"""Kernels of linear layers for few rows, dense and quantized, and which tiles they take."""
