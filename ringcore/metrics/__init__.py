"""What an engine counts of itself, as Prometheus metrics: steps, requests, KV cache, workers.

Hot paths append to logs (`StepLog`, `RequestLog`); histograms are made of them later, many values at once. Only
`exposition.py` needs prometheus_client.
"""

from ringcore.metrics.histogram import BucketHistogram, HistogramCounts
from ringcore.metrics.request_log import EndedRequest, RequestLog
from ringcore.metrics.step_log import StepLog, StepMetrics

__all__ = ["BucketHistogram", "EndedRequest", "HistogramCounts", "RequestLog", "StepLog", "StepMetrics"]
