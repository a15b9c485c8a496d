"""Every kind of span: what it is called, and its arguments. The documents list them in this order."""

from __future__ import annotations

from ringcore.tracing.chain import Chain, Kind

__all__ = [
    "ADMITTED",
    "APPLIED",
    "APPLY",
    "ARRIVED",
    "AWAIT_CALL",
    "BROADCAST",
    "CALL_METHOD",
    "CALL_RECEIVED",
    "CHAINS",
    "COMPUTED",
    "ENDED",
    "ENQUEUE",
    "ENQUEUED",
    "FIRST_TOKEN",
    "FORWARD",
    "IDLE",
    "IDLED",
    "LAUNCH",
    "LAUNCHED",
    "PREPARE",
    "PROCESSED",
    "PROCESS_OUTPUTS",
    "READ",
    "READ_OUTPUTS",
    "RECEIVE",
    "RECEIVED",
    "RECEIVE_CALL",
    "REPLAY",
    "REPLAYED",
    "REPLIED",
    "REPLY",
    "RESULT",
    "RESULT_READ",
    "SAMPLE",
    "SCHEDULE",
    "SEND",
    "SENT",
    "STEP",
    "SUBMIT",
    "TOKENIZE",
    "UPDATE",
    "WAIT",
    "WAITED",
    "WAKE_READERS",
    "WOKEN",
]

_COMPOSITION = (
    "step",
    "num_steps",
    "rows",
    "decoding_rows",
    "tokens",
    "new_requests",
)  # as `SchedulerOutput.composition`

# The front end. `sent`: the step of the message's stats, which the engine's `UPDATE` has too.
TOKENIZE = Kind("tokenize", ("bytes",))
SUBMIT = Kind("submit", ("requests", "ids"))
READ_OUTPUTS = Kind("read outputs", ("sent",))
PROCESS_OUTPUTS = Kind("process outputs", ("sent", "requests", "tokens"))
WAKE_READERS = Kind("wake readers", ("requests",))

# The engine.
RECEIVE = Kind("receive")
SCHEDULE = Kind("schedule", ("step", "tokens"))
BROADCAST = Kind("broadcast", ("step",))
ENQUEUE = Kind("enqueue", ("step", "bytes", "unread_bytes"))  # the last: by the slowest worker
UPDATE = Kind("update", ("step", "sent"))
SEND = Kind("send")
WAIT = Kind("wait for workers", ("steps_in_flight",))
IDLE = Kind("idle")

# A request, as the engine sees it.
ARRIVED = Kind("arrived", ("id", "prompt_tokens"), "request")
ADMITTED = Kind("admitted", ("id", "row", "cached_tokens", "preemptions"), "request")
FIRST_TOKEN = Kind("first token", ("id", "sent"), "request")
ENDED = Kind("ended", ("id", "reason"), "request")

# A worker.
AWAIT_CALL = Kind("wait for a call")
RECEIVE_CALL = Kind("receive call")
LAUNCH = Kind("launch", _COMPOSITION)
APPLY = Kind("apply", ("step",))
PREPARE = Kind("prepare inputs")
FORWARD = Kind("forward", ("tokens",))
REPLAY = Kind("replay", ("rows",))
SAMPLE = Kind("sample", ("rows",))
RESULT = Kind("result")
REPLY = Kind("reply")
CALL_METHOD = Kind("call", ("method",))

# What is recorded at once. The numbers are those of the list.
READ = Chain(0, "messages", READ_OUTPUTS)
PROCESSED = Chain(1, "outputs", PROCESS_OUTPUTS)
WOKEN = Chain(2, "outputs", WAKE_READERS)
RECEIVED = Chain(3, "loop", RECEIVE)
STEP = Chain(4, "loop", SCHEDULE, BROADCAST, None, UPDATE)  # None: in flight
ENQUEUED = Chain(5, "loop", ENQUEUE)
SENT = Chain(6, "loop", SEND)
WAITED = Chain(7, "loop", WAIT)
IDLED = Chain(8, "loop", IDLE)
CALL_RECEIVED = Chain(9, "steps", AWAIT_CALL, RECEIVE_CALL)
LAUNCHED = Chain(10, "steps", LAUNCH)
APPLIED = Chain(11, "steps", APPLY)
COMPUTED = Chain(12, "steps", PREPARE, FORWARD, SAMPLE)
REPLAYED = Chain(13, "steps", REPLAY, SAMPLE)
RESULT_READ = Chain(14, "steps", RESULT)
REPLIED = Chain(15, "steps", RESULT, REPLY)

CHAINS = (
    READ,
    PROCESSED,
    WOKEN,
    RECEIVED,
    STEP,
    ENQUEUED,
    SENT,
    WAITED,
    IDLED,
    CALL_RECEIVED,
    LAUNCHED,
    APPLIED,
    COMPUTED,
    REPLAYED,
    RESULT_READ,
    REPLIED,
)
