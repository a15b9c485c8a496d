"""Admin calls over HTTP, under vLLM's names: sleep, pause, weights, calls of the workers, profiles."""
