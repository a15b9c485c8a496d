"""Logit adjustments before sampling, log-probabilities, and the results of a step."""
