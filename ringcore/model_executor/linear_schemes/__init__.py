"""Linear schemes: the tensors that a matrix has in a checkpoint, their slices over ranks, and the `Product` that
multiplies by them."""
