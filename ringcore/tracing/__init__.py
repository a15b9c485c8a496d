"""What each process does, and when: a tracer in each, which costs nothing while it is off, and one timeline of all."""

from ringcore.tracing.tracer import MAX_TRACE_S, Chain, Kind, ProcessTrace, Tracer, check_seconds, now_ns

__all__ = ["MAX_TRACE_S", "Chain", "Kind", "ProcessTrace", "Tracer", "check_seconds", "now_ns"]
