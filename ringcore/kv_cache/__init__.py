"""Paged KV cache management: block pool, block tables, prefix cache, planning; does not know the device."""
