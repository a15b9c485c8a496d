"""Measures ringcore beside its peers, on one machine, in one run; it does not know how an engine works inside.

`python -m benchmarks` lists the benchmarks. A new one is a file with a `Benchmark` class and a line below.
"""

BENCHMARKS = {
    "throughput": "benchmarks.throughput:Throughput",
    "startup": "benchmarks.startup:Startup",
    "footprint": "benchmarks.footprint:Footprint",
    "accuracy": "benchmarks.accuracy:Accuracy",
    "deterministic": "benchmarks.deterministic:Deterministic",
    "speculation": "benchmarks.speculation:Speculation",
    "gguf_decode": "benchmarks.gguf_decode:GgufDecode",
    "message_queue": "benchmarks.message_queue:MessageQueue",
    "ray_executor": "benchmarks.ray_executor:RayExecutorCost",
    "scheduler": "benchmarks.scheduler:Scheduler",
    "prefix_cache": "benchmarks.prefix_cache:PrefixCache",
    "null_engine": "benchmarks.null_engine:NullEngine",
    "bench_client": "benchmarks.bench_client:BenchClientCeiling",
    "metrics_cost": "benchmarks.metrics_cost:MetricsCost",
    "stored_kv": "benchmarks.stored_kv:StoredKV",
    "introspection": "benchmarks.introspection:Introspection",
    "tracing": "benchmarks.tracing:Tracing",
    "simulator": "benchmarks.simulator:Simulator",
    "batch": "benchmarks.batch:BatchRunner",
    "batch_commands": "benchmarks.batch_commands:BatchCommands",
    "replicas": "benchmarks.replicas:Replicas",
    "service_load": "benchmarks.service_load:ServiceLoad",
    "hostile_load": "benchmarks.hostile_load:HostileLoad",
    "front_end": "benchmarks.front_end:FrontEnd",
    "gpu": "benchmarks.gpu:Gpu",
    "gpu_startup": "benchmarks.gpu_startup:GpuStartup",
    "gpu_attention": "benchmarks.gpu_attention:GpuAttention",
    "gpu_experts": "benchmarks.gpu_experts:GpuExperts",
    "gpu_linears": "benchmarks.gpu_linears:GpuLinears",
    "gpu_profile": "benchmarks.gpu_profile:GpuProfile",
    "gpu_service": "benchmarks.gpu_service:GpuService",
    "gpu_sleep": "benchmarks.gpu_sleep:GpuSleep",
}
