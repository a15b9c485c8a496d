"""Framed messages over a socket, independent of their meaning."""
