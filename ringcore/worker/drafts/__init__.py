"""Speculative decoding without a second model: drafts, which the model verifies in the same step."""
