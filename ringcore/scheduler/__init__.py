"""Schedules each step (continuous batching, chunked prefill, preemption); does not know what a tensor is."""
