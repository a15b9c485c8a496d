"""Device memory in arenas that can be unmapped, and the host stores of their contents during sleep."""
