"""The scheduler decides what each step computes; it does not know what a tensor is."""
