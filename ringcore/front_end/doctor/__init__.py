"""Checks of this machine: `ringcore doctor`."""
