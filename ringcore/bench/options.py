"""The options of the benchmarks; each field is a flag of the same name."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["LatencyOptions", "LoadOptions", "PromptOptions", "ReportOptions", "TargetOptions"]


def _option(default: Any, doc: str) -> Any:
    return field(default=default, metadata={"option": doc})


@dataclass(frozen=True, kw_only=True)
class TargetOptions:
    """What is asked, beside the engine options of a model in this process."""

    model: str | None = _option(None, "a model folder, a .gguf file or a hub id; with --url the service's name for it")
    url: str | None = _option(None, "a service with OpenAI's interface, as http://127.0.0.1:8000")
    api_key: str | None = _option(None, "the key for --url; visible to other users of this machine")
    chat: bool = _option(False, "ask /v1/chat/completions, or the model's chat template, instead of completions")
    ignore_eos: bool = _option(True, "ask for answers of the given length, past any end of text")
    extra_body: dict[str, Any] | None = _option(None, "further fields of each request, as a JSON object")
    request_timeout_s: float | None = _option(None, "seconds after which an answer counts as failed")


@dataclass(frozen=True, kw_only=True)
class PromptOptions:
    num_prompts: int | None = _option(None, "how many requests; default: 1000, or the lines of --dataset")
    prompt_tokens: str = _option("1024", "the length of each prompt in tokens, or a range: 128-1024")
    output_tokens: str = _option("128", "the length of each answer in tokens, or a range")
    prefix_tokens: int = _option(0, "tokens at each prompt's beginning that it shares with others")
    num_prefixes: int = _option(1, "how many such beginnings there are")
    dataset: Path | None = _option(None, 'a .jsonl file of requests: {"prompt": ...} or {"messages": [...]}')
    tokenizer_path: str | None = _option(
        None, "with --url: a folder with the model's tokenizer, for prompts of exact lengths"
    )
    prompt_seed: int = _option(0, "the seed of prompts, lengths and arrivals")


@dataclass(frozen=True, kw_only=True)
class LatencyOptions:
    batch_size: int = _option(8, "requests that are sent at once")
    num_iters: int = _option(30, "how often they are sent")
    num_warmups: int = _option(10, "how often they are sent before that, uncounted")


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    request_rate: float | None = _option(None, "requests a second, at random times; default: all at once")
    burstiness: float = _option(
        1.0, "how requests are spread at --request-rate: 1 is a Poisson process, less is more bursty"
    )
    max_concurrency: int | None = _option(
        None, "requests under way at once, at most; without --request-rate always so many"
    )
    num_warmups: int = _option(0, "requests that are sent before, uncounted")
    goodput: list[str] | None = _option(None, "a limit in ms, as ttft:200, tpot:50 or e2el:5000; repeat it for more")


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    percentiles: str = _option("90,95,99", "the percentiles of latencies to print, beside mean and median")
    json: Path | None = _option(None, "write figures and every request's times to this file")
    chart: Path | None = _option(None, "draw them as a .png; needs matplotlib")
