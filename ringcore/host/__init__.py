"""Facts about this machine and this process."""
