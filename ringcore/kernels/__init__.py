"""The GPU kernels, each beside its torch reference; they do not know what a model is."""
