"""The bookkeeping of the paged KV cache; it does not know what device it describes."""
