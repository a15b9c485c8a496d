"""Sleep, wake-up and weight updates of a running engine."""
