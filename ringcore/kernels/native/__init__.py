"""Kernels of a CPU in C, compiled by the system's compiler when a worker first needs them."""
