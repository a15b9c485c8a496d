"""What happens once: the device context, kernels compiled ahead, the profile run and the memory budget."""
