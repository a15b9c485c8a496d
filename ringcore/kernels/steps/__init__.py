"""The first and last kernels of a step: its inputs from the row state, and the update of that state."""
