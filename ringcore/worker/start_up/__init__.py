"""One-time start-up work: the device context, kernel warm-up, the profile run and the memory budget."""
