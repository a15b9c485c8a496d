"""Tensor-parallel ranks and their collectives: gloo, NCCL, and peer GPU memory on one host."""
