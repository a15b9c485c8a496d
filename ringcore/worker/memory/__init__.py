"""Device memory in arenas that can be unmapped, and the host stores that keep their content."""
