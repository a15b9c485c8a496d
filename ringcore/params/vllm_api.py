"""Methods of vLLM's `LLM` and endpoints of its service: what ringcore lacks under these names, and what differs."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["DIFFERENT_ENDPOINTS", "DIFFERENT_METHODS", "ENDPOINTS", "LLM_METHODS"]

LLM_METHODS: Mapping[str, str] = {
    "encode": "it is LLM.embed here, with pooling='last' or 'mean'",
    "score": "it is the product of two rows of LLM.embed here; 'ringcore serve' has /v1/score and /v1/rerank",
    "classify": "heads that classify are not served; LLM.embed has the hidden states",
    "reward": "heads that rate are not served; LLM.embed has the hidden states",
    "beam_search": "beam search is not served; n draws several answers",
    "enqueue": "LLM.stream yields outputs as they come",
    "enqueue_chat": "LLM.stream yields outputs as they come",
    "wait_for_completion": "LLM.stream yields outputs as they come",
    "start_profile": "'ringcore trace' records a running engine here",
    "stop_profile": "'ringcore trace' records a running engine here",
    "get_metrics": "it is LLM.metrics here, a registry of prometheus_client",
    "get_world_size": "it is llm.config.parallel.layout.world_size here",
    "apply_model": "LLM.collective_rpc calls a method of the workers, or with allow_callables a function",
    "reset_mm_cache": "prompts are text or token ids here, and no images are cached",
    "reset_encoder_cache": "prompts are text or token ids here, and no images are cached",
    "init_weight_transfer_engine": "nothing is set up before an update; a trainer uses ringcore.weights.WeightGroup",
    "preprocess_chat": "LLM.get_tokenizer renders and encodes messages here",
    "render_chat": "LLM.get_tokenizer renders and encodes messages here",
    "llm_engine": "LLM.config has the options, LLM.ready the report of the start; EngineCore is stepped by its caller",
}

_ADAPTERS = "adapters are not served; merge the adapter into the weights"
_AUDIO = "audio is not served"
_HIDDEN_STATES = "heads that classify or rate are not served; POST /v1/embeddings has the hidden states"
_NO_IMAGES = "prompts are text or token ids here, and no images are cached"
_PARALLEL = "a service has as many engines as it was started with; SIGUSR1 replaces them"
_VERSIONS = "weights have no version here; GET /server_info has each engine's state"

ENDPOINTS: Mapping[str, str] = {
    "GET /ping": "it is GET /health/live here",
    "POST /ping": "it is GET /health/live here",
    "POST /invocations": "POST to the endpoint itself",
    "GET /load": "GET /health has the numbers of running and waiting requests",
    "GET /tokenizer_info": "POST /tokenize and /detokenize use the model's tokenizer",
    "POST /v1/responses/{response_id}/cancel": "a response is not computed in the background; its client disconnects",
    "POST /v1/completions/render": "POST /tokenize renders and encodes a prompt",
    "POST /v1/chat/completions/render": "POST /tokenize renders and encodes messages",
    "POST /inference/v1/generate": "POST /v1/completions takes token ids, and return_token_ids returns them",
    "POST /pooling": _HIDDEN_STATES,
    "POST /classify": _HIDDEN_STATES,
    "POST /v1/audio/transcriptions": _AUDIO,
    "POST /v1/audio/translations": _AUDIO,
    "POST /v1/load_lora_adapter": _ADAPTERS,
    "POST /v1/unload_lora_adapter": _ADAPTERS,
    "POST /reset_mm_cache": _NO_IMAGES,
    "POST /reset_encoder_cache": _NO_IMAGES,
    "POST /init_weight_transfer_engine": "nothing is set up before an update; a trainer that broadcasts uses "
    "ringcore.weights.WeightGroup and an AdminClient",
    "POST /update_weight_version": _VERSIONS,
    "GET /weight_info": _VERSIONS,
    "POST /weight_checker": "tensors are checked by name, dtype and shape when they are loaded",
    "POST /scale_elastic_ep": _PARALLEL,
    "POST /is_scaling_elastic_ep": _PARALLEL,
}

DIFFERENT_METHODS: Mapping[str, str] = {
    "embed": "returns an array [hidden_size] for each prompt, pooled as the argument pooling says",
    "sleep": "returns a report; level 0 needs no enable_sleep_mode",
    "wake_up": "returns a report",
    "start_weight_update": "mode says what becomes of requests",
    "update_weights": "takes a folder, a safetensors file, or tensors by name",
    "get_tokenizer": "returns a Tokenizer of ringcore",
}

DIFFERENT_ENDPOINTS: Mapping[str, str] = {
    "POST /pause": 'mode "wait" lets running requests end, and keeps waiting ones in the queue',
    "POST /sleep": "the answer has a report of each replica",
    "POST /wake_up": "the answer has a report of each replica",
    "POST /start_weight_update": "timeout is its only parameter; requests are kept",
    "POST /update_weights": 'the body is {"path"}: a safetensors folder or file on the server\'s disk',
    "POST /start_profile": "a trace of every process, for at most `seconds`",
    "POST /stop_profile": "the answer is the trace's file",
    "GET /server_info": "options under their names here",
    "POST /v1/embeddings": "pooling is a field; dimensions are the model's own",
}
