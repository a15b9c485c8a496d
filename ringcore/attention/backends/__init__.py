"""One file an attention backend."""
