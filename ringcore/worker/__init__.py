"""Runs steps on one device; it does not know why a token was scheduled."""

from ringcore.worker.rpc import rpc

__all__ = ["rpc"]
