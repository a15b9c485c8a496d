"""Calls by name from outside: which methods there are, who may call them, and the endpoint on the network."""
