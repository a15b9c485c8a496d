"""Collectives over peer GPU memory."""
