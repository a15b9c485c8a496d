"""How the matrices of experts are stored and multiplied: one file a scheme."""
