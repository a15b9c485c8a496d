"""The metrics in Prometheus's form. The names are vLLM's where it has the metric too, so that its dashboards work."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

import psutil
from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from ringcore.metrics.draft_log import DraftStats
from ringcore.metrics.histogram import HistogramCounts
from ringcore.metrics.request_log import HISTOGRAMS, RequestLog
from ringcore.metrics.step_log import StepMetrics
from ringcore.protocol.expert_placement import ExpertBalanceStats
from ringcore.protocol.messages import EngineReady
from ringcore.protocol.requests import EngineStats
from ringcore.protocol.stored_kv import LevelCounts, StoredKVStats

__all__ = ["EngineSource", "ObservedEngine", "PromptQueue", "make_registry"]


class EngineSource(Protocol):
    """What the metrics of an engine are read from. No method raises."""

    @property
    def cache_config(self) -> Mapping[str, str]:
        """Options of its KV cache, under vLLM's names."""
        ...

    @property
    def stats(self) -> EngineStats: ...

    @property
    def ready(self) -> EngineReady | None:
        """None while the engine starts, and once it is dead."""
        ...

    @property
    def num_restarts(self) -> int:
        """Of the engine and of its workers."""
        ...

    def step_metrics(self) -> StepMetrics | None:
        """Asks the engine; None if it does not answer soon."""
        ...


class PromptQueue(Protocol):
    """Where prompts wait for the tokenizer."""

    @property
    def num_jobs(self) -> int: ...

    @property
    def num_refused(self) -> int: ...


class ObservedEngine(NamedTuple):
    source: EngineSource
    log: RequestLog


def make_registry(engines: Sequence[ObservedEngine], prompts: PromptQueue, model_name: str) -> CollectorRegistry:
    """A registry with all metrics of these engines, which it reads when it is scraped, and of this process. Samples of
    an engine have its number as the label "engine"."""
    registry = CollectorRegistry()
    for kind in (ProcessCollector, PlatformCollector, GCCollector):
        kind(registry=registry)
    registry.register(_Collector(engines, prompts, model_name))
    return registry


class _Collector(Collector):
    def __init__(self, engines: Sequence[ObservedEngine], prompts: PromptQueue, model_name: str) -> None:
        names = {"model_name": model_name}
        numbered = enumerate(engines)
        self._engines = [_EngineMetrics(one.source, one.log, names | {"engine": str(i)}) for i, one in numbered]
        self._prompts, self._families = prompts, _Families(names)

    def describe(self) -> Iterable[Metric]:
        """Nothing: a registry that asks need not scrape the engines for it."""
        return []

    def collect(self) -> Iterable[Metric]:
        """Each family once, with the samples of all engines."""
        families: dict[str, Metric] = {}
        for engine in self._engines:
            for family in engine.collect():
                known = families.setdefault(family.name, family)
                if known is not family:
                    known.samples += family.samples
        yield from families.values()
        yield from self._of_prompts()

    def _of_prompts(self) -> Iterable[Metric]:
        waiting = "Prompts that wait for the tokenizer, or are being encoded."
        yield self._families.gauge("ringcore:num_tokenizer_jobs", waiting, self._prompts.num_jobs)
        refused = "Prompts refused because too many waited for the tokenizer."
        yield self._families.counter("ringcore:num_tokenizer_refusals", refused, self._prompts.num_refused)


class _Families:
    """Makes metrics with these labels, and others beside them."""

    def __init__(self, labels: Mapping[str, str]) -> None:
        self._labels = labels

    def gauge(self, name: str, doc: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, doc, labels=self.names())
        family.add_metric(self.values(), value)
        return family

    def counter(self, name: str, doc: str, value: float) -> Metric:
        family = CounterMetricFamily(name, doc, labels=self.names())
        family.add_metric(self.values(), value)
        return family

    def histogram(self, name: str, doc: str, counts: HistogramCounts) -> Metric:
        family = HistogramMetricFamily(name, doc, labels=self.names())
        cumulative, buckets = 0, []
        for bound, count in zip([*counts.bounds, float("inf")], counts.counts, strict=True):
            cumulative += count
            buckets.append(("+Inf" if bound == float("inf") else str(bound), float(cumulative)))
        family.add_metric(self.values(), buckets, counts.sum)
        return family

    def names(self, *more: str) -> list[str]:
        return [*self._labels, *more]

    def values(self, *more: str) -> list[str]:
        return [*self._labels.values(), *more]


class _EngineMetrics:
    """The families of one engine, each with its own samples alone."""

    def __init__(self, source: EngineSource, log: RequestLog, labels: Mapping[str, str]) -> None:
        self._source, self._log, self._families = source, log, _Families(labels)

    def collect(self) -> Iterable[Metric]:
        ready, stats = self._source.ready, self._source.stats
        yield from self._of_scheduler(stats, ready)
        yield from self._of_requests()
        steps = self._source.step_metrics()
        if steps is not None:
            yield from self._of_steps(steps)
            if steps.stored_kv is not None:
                yield from self._of_store(steps.stored_kv)
            if steps.experts is not None:
                yield from self._of_experts(steps.experts)
            if steps.drafts is not None:
                yield from self._of_drafts(steps.drafts)
        if ready is not None:
            yield from self._of_workers(ready)

    def _of_scheduler(self, stats: EngineStats, ready: EngineReady | None) -> Iterable[Metric]:
        yield self._families.gauge("vllm:num_requests_running", "Requests that are computed.", stats.num_running)
        yield self._families.gauge("vllm:num_requests_waiting", "Requests that wait for a place.", stats.num_waiting)
        used = 0.0 if ready is None else 1 - stats.num_free_blocks / ready.num_blocks
        for name in ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"):  # the second one in older dashboards
            yield self._families.gauge(name, "The share of the KV cache that is in use, 1 for all.", used)
        yield self._families.counter("vllm:num_preemptions", "Requests that lost their place.", stats.num_preemptions)
        yield self._families.counter(
            "vllm:prefix_cache_queries", "Prompt tokens looked up.", stats.num_prefix_query_tokens
        )
        yield self._families.counter("vllm:prefix_cache_hits", "Prompt tokens found.", stats.num_prefix_hit_tokens)
        sleeping = GaugeMetricFamily(
            "vllm:engine_sleep_state", "1 for the state.", labels=self._families.names("sleep_state")
        )
        for state, is_so in (("awake", not stats.is_sleeping), ("asleep", stats.is_sleeping)):
            sleeping.add_metric(self._families.values(state), float(is_so))
        yield sleeping
        yield self._families.counter("ringcore:num_steps", "Steps of the engine.", stats.step)
        restarts = "Restarts of the engine and of its workers."
        yield self._families.counter("ringcore:num_restarts", restarts, self._source.num_restarts)

    def _of_requests(self) -> Iterable[Metric]:
        totals = self._log.totals()
        for name, counts in totals.histograms.items():
            yield self._families.histogram(f"vllm:{name}", HISTOGRAMS[name][0], counts)
        of_older_dashboards, gaps = "vllm:time_per_output_token_seconds", "inter_token_latency_seconds"
        yield self._families.histogram(of_older_dashboards, f"vllm:{gaps}, as it was called.", totals.histograms[gaps])
        prompts = "Tokens of prompts, of requests that got a token."
        yield self._families.counter("vllm:prompt_tokens", prompts, totals.prompt_tokens)
        yield self._families.counter("vllm:generation_tokens", "Tokens generated.", totals.generation_tokens)
        ended = "Completions that ended, by how they did."
        success = CounterMetricFamily("vllm:request_success", ended, labels=self._families.names("finished_reason"))
        for reason, count in totals.ended.items():
            success.add_metric(self._families.values(reason), count)
        yield success

    def _of_steps(self, steps: StepMetrics) -> Iterable[Metric]:
        yield self._families.histogram("vllm:iteration_tokens_total", "Tokens computed in a step.", steps.tokens)
        yield self._families.histogram("ringcore:step_seconds", "The time of a step.", steps.seconds)
        yield self._families.histogram("ringcore:step_requests", "Requests in a step.", steps.requests)

    def _of_experts(self, experts: ExpertBalanceStats) -> Iterable[Metric]:
        counter, gauge = self._families.counter, self._families.gauge
        mean = (
            "The largest load of a rank in terms of the mean, 1 for even ones; the mean over the layers of a mixture."
        )
        yield gauge("ringcore:expert_imbalance", mean, experts.mean_imbalance)
        yield gauge(
            "ringcore:expert_imbalance_max", "As ringcore:expert_imbalance, of the worst.", experts.max_imbalance
        )
        hottest = "The largest share of one expert of all pairs of a token and an expert of a layer."
        yield gauge("ringcore:expert_hottest_share", hottest, experts.hottest_share)
        yield counter("ringcore:expert_placements", "Layers whose experts were placed anew.", experts.num_placements)
        moved = "Bytes of weights of experts moved between ranks, all ranks."
        yield counter("ringcore:expert_moved_bytes", moved, experts.moved_bytes)

    def _of_drafts(self, drafts: DraftStats) -> Iterable[Metric]:
        counter = self._families.counter
        yield counter("vllm:spec_decode_num_drafts", "Rows of steps with drafts.", drafts.num_drafts)
        yield counter("vllm:spec_decode_num_draft_tokens", "Drafts verified.", drafts.num_draft_tokens)
        yield counter("vllm:spec_decode_num_accepted_tokens", "Drafts accepted.", drafts.num_accepted_tokens)
        by_place = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Drafts accepted, by their place after the last token, 0 for the first.",
            labels=self._families.names("position"),
        )
        for place, count in enumerate(drafts.accepted_at):
            by_place.add_metric(self._families.values(str(place)), count)
        yield by_place

    def _of_store(self, stored: StoredKVStats) -> Iterable[Metric]:
        counter, gauge = self._families.counter, self._families.gauge
        hits = "Prompt tokens found beyond the device; vllm:prefix_cache_hits has them too."
        yield counter("vllm:external_prefix_cache_hits", hits, stored.num_hit_tokens)
        yield gauge("ringcore:stored_kv_blocks", "Blocks kept beyond the device.", stored.num_blocks)
        failed = "Blocks that could not be loaded, and were computed again."
        yield counter("ringcore:stored_kv_failed_blocks", failed, stored.num_failed_blocks)
        yield counter("ringcore:stored_kv_saved_bytes", "Bytes copied out, all ranks.", stored.saved_bytes)
        yield counter("ringcore:stored_kv_loaded_bytes", "Bytes copied back, all ranks.", stored.loaded_bytes)
        yield counter("ringcore:stored_kv_load_seconds", "Seconds that loads took, summed.", stored.load_s)
        yield from self._of_levels(stored.levels)

    def _of_levels(self, levels: LevelCounts) -> Iterable[Metric]:
        """As of the last report of a load."""
        counter, gauge = self._families.counter, self._families.gauge
        read = CounterMetricFamily(
            "ringcore:stored_kv_level_loaded_bytes",
            "Bytes found in host memory and in the directory behind it, all ranks.",
            labels=self._families.names("level"),
        )
        for level, num_bytes in (("memory", levels.memory_loaded_bytes), ("directory", levels.directory_loaded_bytes)):
            read.add_metric(self._families.values(level), num_bytes)
        yield read
        unwritten = "Blocks that are in no file, as the disk was too slow or failed, all ranks."
        yield counter("ringcore:stored_kv_unwritten_blocks", unwritten, levels.num_unwritten_blocks)
        broken = "Files that were short, changed or another's, all ranks."
        yield counter("ringcore:stored_kv_broken_files", broken, levels.num_broken_files)
        lost = "Ranks whose directory does not answer, and is out of use."
        yield gauge("ringcore:stored_kv_lost_directories", lost, levels.num_lost_directories)

    def _of_workers(self, ready: EngineReady) -> Iterable[Metric]:
        sizes = {"block_size": ready.block_size, "num_gpu_blocks": ready.num_blocks}
        told = sizes | {"kv_cache_size_tokens": ready.token_capacity} | dict(self._source.cache_config)
        cache = GaugeMetricFamily("vllm:cache_config_info", "The KV cache.", labels=self._families.names(*told))
        cache.add_metric(self._families.values(*map(str, told.values())), 1)
        yield cache
        planned = GaugeMetricFamily(
            "ringcore:worker_memory_bytes",
            "Memory of a rank's device as planned at the start: weights, activations, KV cache and others.",
            labels=self._families.names("rank", "category"),
        )
        for rank, table in enumerate(ready.memory_bytes):
            for category, num_bytes in table.items():
                planned.add_metric(self._families.values(str(rank), category), num_bytes)
        yield planned
        resident = GaugeMetricFamily(
            "ringcore:process_resident_bytes",
            "Host memory of the engine's process and of each worker's.",
            labels=self._families.names("process"),
        )
        for name, num_bytes in _resident_bytes(ready.pids).items():
            resident.add_metric(self._families.values(name), num_bytes)
        yield resident


def _resident_bytes(pids: Mapping[str, int]) -> dict[str, int]:
    """Of the processes that are still there."""
    found = {}
    for name, pid in pids.items():
        try:
            found[name] = psutil.Process(pid).memory_info().rss
        except psutil.Error:
            continue
    return found
