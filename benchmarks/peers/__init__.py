"""One file an engine: a child process that loads it once and then does what one line at a time asks of it."""
