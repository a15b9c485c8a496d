"""Frames of messages over a socket; it does not know what they say."""
