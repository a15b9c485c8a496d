"""Where a rank's weights come from: a checkpoint, shared memory, or a broadcast from another process."""
