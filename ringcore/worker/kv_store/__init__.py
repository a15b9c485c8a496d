"""KV beyond the device: what a rank keeps of blocks that left the prefix cache."""
