"""Sources of a weight update: checkpoint files, shared memory (IPC handles), or a trainer's broadcasts."""
