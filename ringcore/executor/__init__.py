"""Starts workers and calls their methods; it does not know what a model is."""
