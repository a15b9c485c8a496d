"""Runs steps on one device; it does not know why a token was scheduled."""
