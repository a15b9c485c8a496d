"""Reads what a model's files say without loading a weight; it does not know what a tensor library is."""
