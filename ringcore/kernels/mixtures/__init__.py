"""Kernels of mixtures of experts: the router, the sort by expert, grouped products, and replicas' places."""
