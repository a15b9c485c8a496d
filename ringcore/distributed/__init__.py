"""Ranks and the collectives between them: gloo, NCCL, and peer memory on one host."""
