"""Paged attention over sequences of tokens; it does not know what a request is."""
