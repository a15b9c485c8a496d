"""One file a kind of device."""
