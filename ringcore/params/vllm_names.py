"""Names that vLLM has and ringcore has not: what each is here, and the values with which it asks for nothing.

Code that was written for vLLM then runs where it can, and where it cannot the error says what to write instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ringcore.errors import UnknownOptionError, unknown_option

__all__ = ["ENGINE_OPTIONS", "IMPORTS", "SAMPLING_PARAMETERS", "VllmName", "known_options"]


@dataclass(frozen=True, slots=True)
class VllmName:
    """here: a sentence about what it is here. neutral: its values, besides None, that are accepted and left out."""

    here: str
    neutral: tuple[Any, ...] = ()

    def accepts(self, value: Any) -> bool:
        return value is None or any(type(value) is type(one) and value == one for one in self.neutral)


def known_options(
    given: Mapping[str, Any], known: Iterable[str], names: Mapping[str, VllmName], what: str
) -> dict[str, Any]:
    """`given` without vLLM's names that have a neutral value. Raises `UnknownOptionError` for other names that are not
    `known`; `what` is e.g. "engine option"."""
    known = set(known)
    kept = {}
    for name, value in given.items():
        if name in known:
            kept[name] = value
        elif name not in names:
            raise unknown_option(name, known, what)
        elif not names[name].accepts(value):
            message = f"unknown {what} {name!r}, which is vLLM's: {names[name].here}"
            raise UnknownOptionError(message, option=name, nearest=None)
    return kept


def _all(names: str, here: str, *neutral: Any) -> dict[str, VllmName]:
    return dict.fromkeys(names.split(), VllmName(here, neutral))


_OWN_DESIGN = "there is no such choice here; leave it out"

ENGINE_OPTIONS: Mapping[str, VllmName] = {
    # The same under another name.
    **_all("kv_cache_memory_bytes", "it is kv_cache_bytes here"),
    **_all("num_gpu_blocks_override", "it is num_blocks_override here"),
    **_all("worker_extension_cls", "it is worker_extension here"),
    **_all("distributed_executor_backend", "it is executor here: 'multiproc' for 'mp', 'uniproc' for 'uni'", "mp"),
    **_all("async_scheduling", "steps_in_flight=2 (the default on a GPU) is on here, steps_in_flight=1 off", True),
    **_all("kv_offloading_size", "it is host_kv_cache_bytes here, in bytes for each rank"),
    **_all(
        "structured_outputs_config guided_decoding_backend",
        "structured_outputs_backend names the library here",
        "auto",
    ),
    **_all(
        "nnodes node_rank master_addr master_port", "hosts, join_endpoint and join_keys say which hosts there are", 1
    ),
    **_all("data_parallel_size", "replicas are made by 'ringcore serve' and 'ringcore batch --data-parallel'", 1),
    **_all(
        "data_parallel_rank data_parallel_start_rank data_parallel_size_local data_parallel_address "
        "data_parallel_rpc_port data_parallel_hybrid_lb data_parallel_external_lb "
        "data_parallel_multi_port_external_lb data_parallel_backend",
        "replicas are whole engines here, made by 'ringcore serve --data-parallel-size'; leave it out",
        False,
        "mp",
    ),
    **_all("worker_cls", "it is a worker_extension here, which adds methods to the worker", "auto"),
    **_all("scheduler_cls", "there is one scheduler here; scheduling_policy names its order"),
    **_all("max_num_scheduled_tokens", "it is max_num_batched_tokens here"),
    # Decided elsewhere.
    **_all("enable_chunked_prefill", "prompts are always chunked here; leave it out", True),
    **_all("trust_remote_code", "code of a model folder is never run here; leave it out", False),
    **_all(
        "revision code_revision tokenizer_revision download_dir hf_token",
        "a hub id is the snapshot in the local cache here; give the folder of the revision as model",
    ),
    **_all("served_model_name", "it is an option of 'ringcore serve' here"),
    **_all("chat_template", "it is the model folder's own here; edit it in a copy of the folder"),
    **_all("reasoning_parser reasoning_parser_plugin reasoning_config", "it is an option of 'ringcore serve' here", ""),
    **_all(
        "swap_space cpu_offload_gb", "blocks beyond the device are host_kv_cache_bytes; weights stay on it", 0, 0.0, 4
    ),
    **_all(
        "offload_backend cpu_offload_params offload_group_size offload_num_in_group offload_prefetch_step "
        "offload_params kv_offloading_backend",
        "weights stay on the device here, and the KV cache goes to host memory by host_kv_cache_bytes; leave it out",
        0,
        1,
        "auto",
        "native",
    ),
    **_all(
        "kv_transfer_config kv_events_config ec_transfer_config ec_manager_config",
        "the KV cache leaves the device by host_kv_cache_bytes and host_kv_cache_dir here",
    ),
    **_all(
        "disable_log_stats aggregate_engine_logging enable_log_requests enable_logging_iteration_details "
        "disable_log_requests use_tqdm_on_load",
        "the engine logs by Python's logging module and counts in llm.metrics(); leave it out",
        True,
        False,
    ),
    **_all(
        "otlp_traces_endpoint collect_detailed_traces",
        "'ringcore serve --otlp-traces-endpoint' sends spans here, and 'ringcore trace' records an engine",
    ),
    **_all(
        "show_hidden_metrics_for_version kv_cache_metrics kv_cache_metrics_sample custom_histogram_buckets "
        "cudagraph_metrics enable_mfu_metrics enable_layerwise_nvtx_tracing per_request_spec_decode_metrics "
        "enable_mm_processor_stats jit_monitor_mode jit_monitor_verbose",
        "the metrics of an engine are all on here; leave it out",
        False,
    ),
    **_all("profiler_config", "'ringcore trace' records engine, workers and GPU kernels here"),
    **_all("log_level log_config_file logging_config", "set up Python's logging module, where ringcore logs"),
    **_all(
        "override_generation_config",
        "generation_config='ringcore' leaves the model's defaults out, and SamplingParams gives others",
    ),
    **_all(
        "hf_overrides hf_config_path config_format", "the model is what its config.json says; edit a copy of it", "auto"
    ),
    **_all("model_weights", "give the folder or the .gguf file as model"),
    **_all("tokenizer_mode", "the tokenizer is the model's fast one here; tokenizer names another folder", "auto"),
    **_all("skip_tokenizer_init", "EngineCore has no tokenizer; LLM has one", False),
    **_all("max_parallel_loading_workers", "each rank reads its own slices at once; leave it out"),
    **_all(
        "safetensors_load_strategy safetensors_prefetch_num_threads safetensors_prefetch_block_size "
        "model_loader_extra_config ignore_patterns pt_load_map_location",
        "safetensors and GGUF files are read by one loader here; leave it out",
    ),
    **_all("kv_cache_dtype_skip_layers", "kv_cache_dtype is of all layers here; leave it out"),
    **_all("calculate_kv_scales", "with kv_cache_dtype='fp8' each token has its own; leave it out", False),
    **_all(
        "prefix_caching_hash_algo", "blocks are named by SHA-256 and compared by their tokens; leave it out", "sha256"
    ),
    **_all(
        "cudagraph_capture_sizes",
        "graphs are captured for every batch up to max_num_seqs, and of steps with prompts up to "
        "max_cudagraph_capture_size tokens",
    ),
    **_all(
        "compilation_config optimization_level performance_mode kernel_config ir_op_priority",
        "enforce_eager and attention_backend are what can be chosen here; kernels are precompiled",
        0,
        1,
        2,
    ),
    **_all("disable_custom_all_reduce", "small all-reduces take peer GPU memory wherever there is some", False),
    **_all(
        "runner task convert pooler_config io_processor_plugin",
        "any model generates text, and LLM.embed pools its hidden states",
        "auto",
        "generate",
        "none",
    ),
    **_all("logprobs_mode", "log-probabilities are of the raw logits here; leave it out", "raw_logprobs"),
    **_all("disable_cascade_attn disable_sliding_window disable_hybrid_kv_cache_manager", _OWN_DESIGN, False, True),
    **_all("stream_interval", "each step's tokens are streamed here; leave it out", 1),
    **_all("shutdown_timeout", "LLM.close() and the service's drain have deadlines of their own", 0),
    **_all("num_scheduler_steps max_seq_len_to_capture use_v2_block_manager", "of older vLLM; leave it out", 1, True),
    **_all("max_num_active_seqs", "it is max_num_seqs here"),
    **_all(
        "max_num_queued_reqs max_num_queued_tokens", "'ringcore serve --max-concurrent-requests' bounds what waits here"
    ),
    **_all(
        "speculative_config spec_method spec_model spec_tokens",
        'it is speculative={"method": "suffix"} here, for ngram too, {"method": "eagle3", "model": FOLDER} or '
        '{"method": "mtp"}; a draft model is not served',
    ),
    **_all("enable_expert_parallel", "it is expert_parallel here", False),
    **_all("enable_eplb", "give redundant_experts=N here: experts are placed by their tokens, also with 0", False),
    **_all("num_redundant_experts", "it is redundant_experts here", 0),
    **_all("eplb_config", "give redundant_experts and expert_balance_steps, between which tokens are counted"),
    **_all(
        "enable_ep_weight_filter moe_backend all2all_backend expert_placement_strategy "
        "enable_elastic_ep elastic_ep_max_dp_size enable_return_routed_experts",
        _OWN_DESIGN,
        False,
        "auto",
    ),
    **_all(
        "quantization_config allow_deprecated_quantization",
        "the checkpoint says how it is quantized; leave it out",
        False,
    ),
    **_all(
        "prefill_context_parallel_size decode_context_parallel_size dcp_comm_backend dcp_q_replicate "
        "dcp_kv_cache_interleave_size cp_kv_cache_interleave_size",
        "a sequence is not divided over ranks here; use tensor_parallel_size",
        1,
    ),
    **_all(
        "mamba_config mamba_cache_dtype mamba_ssm_cache_dtype mamba_block_size mamba_cache_mode mamba_backend "
        "mamba_ssu_algorithm enable_mamba_shared_prefix_checkpoint enable_mamba_cache_stochastic_rounding "
        "mamba_cache_philox_rounds replayssm_buffer_len use_replayssm gdn_prefill_backend kda_prefill_backend "
        "kda_decode_backend",
        "models with state layers are not served",
        "auto",
        False,
    ),
    **_all(
        "distributed_timeout_seconds cpu_distributed_timeout_seconds fault_tolerance_config enable_fault_tolerance",
        "deadlines here are step_timeout_s and engine_timeout_s, and workers are replaced by max_worker_restarts",
        False,
    ),
    **_all(
        "sleep_mode_offload_cudagraph sleep_preserve_parameter_names enable_cumem_allocator enable_nccl_comm_suspend",
        "enable_sleep_mode keeps graphs and weights; leave it out",
        False,
    ),
    **_all("weight_transfer_config", "new weights come by LLM.update_weights; nothing is set up before"),
    **_all("ray_workers_use_nsight", "'ringcore trace' records GPU kernels here; leave it out", False),
    **_all("numa_bind numa_bind_nodes numa_bind_cpus", "start ringcore under numactl", False),
    **_all(
        "additional_config attention_config aux_output_config diffusion_config dbo_decode_token_threshold "
        "dbo_prefill_token_threshold disable_nccl_for_dp_synchronization dp_sync_interval "
        "enable_batch_sharded_sampling enable_dbo enable_flashinfer_autotune enable_hc_sp enable_shm_tensor_arena "
        "enable_trace_replay engram_config "
        "fail_on_environ_validation kv_sharing_fast_prefill linear_backend long_prefill_token_threshold_adaptive "
        "model_class_overrides prefill_schedule_interval prefix_cache_retention_interval prefix_match_unit "
        "return_sampling_mask scheduler_reserve_full_isl sparse_indexer_topk_backend swa_bounded_replay tokens_only "
        "ubatch_size use_fp64_gumbel watermark watermark_config",
        _OWN_DESIGN,
        False,
        True,
        0,
        1,
        "auto",
    ),
    **_all(
        "enable_lora max_loras max_lora_rank fully_sharded_loras max_cpu_loras lora_dtype lora_target_modules "
        "default_mm_loras enable_tower_connector_lora specialize_active_lora enable_mixed_moe_lora_format "
        "enable_moe_shared_loras max_lora_cls_labels qlora_adapter_name_or_path enable_lora_bias lora_extra_vocab_size",
        "adapters are not served; merge the adapter into the weights",
        False,
    ),
    **_all(
        "enable_prompt_embeds enable_mm_embeds limit_mm_per_prompt interleave_mm_strings media_io_kwargs "
        "mm_processor_kwargs mm_processor_cache_gb mm_processor_cache_type mm_hasher_algorithm "
        "mm_shm_cache_max_object_size_mb mm_encoder_only mm_encoder_tp_mode mm_encoder_attn_backend "
        "mm_encoder_attn_dtype mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_path "
        "mm_encoder_fp8_scale_save_margin skip_mm_profiling video_pruning_rate video_pruning_method mm_tensor_ipc "
        "mm_processor_device mm_ipc_gpu_memory_gb mm_device_do_normalize renderer_num_workers "
        "disable_chunked_mm_input allowed_local_media_path allowed_media_domains",
        "prompts are text or token ids here; leave it out",
        False,
        "",
    ),
    **_all("language_model_only", "checkpoints that see images are served as text here; leave it out", True, False),
}

# What is imported from vllm by name.
IMPORTS: Mapping[str, str] = {
    "LLMEngine": "LLM.stream yields outputs as they come, and EngineCore is stepped by its caller",
    "GuidedDecodingParams": "it is StructuredOutputsParams here",
    "BeamSearchParams": "beam search is not served",
    "LoRARequest": "adapters are not served; merge the adapter into the weights",
    "PromptType": "it is a str, a list of token ids, a TextPrompt or a TokensPrompt here",
    "PoolingParams": "LLM.embed has an argument pooling",
    "AdapterLogitsProcessor": "a LogitsProcessor has admit and apply, and is an engine option",
    "BatchUpdate": "a LogitsProcessor has admit for each new request and remove for its end",
    "ModelRegistry": "models are those of transformers and ringcore's own; model_impl chooses",
}

SAMPLING_PARAMETERS: Mapping[str, VllmName] = {
    **_all("guided_decoding", "it is structured_outputs here, a StructuredOutputsParams"),
    **_all("logits_processors", "they are an engine option here, and extra_args their arguments"),
    **_all("best_of", "it is n here, and the choice is the caller's", 1),
    **_all("use_beam_search length_penalty beam_width early_stopping", "beam search is not served", False, 1, 1.0),
    **_all("spaces_between_special_tokens", "special tokens are shown as the tokenizer decodes them", True),
    **_all("truncate_prompt_tokens", "cut the token ids of the prompt before they are sent", -1),
    **_all("logprob_token_ids prompt_logprob_token_ids", "logprobs=-1 reports every token of the vocabulary"),
    **_all("prompt_logprob_start", "prompt_logprobs reports the whole prompt", 0),
    **_all("flat_logprobs skip_clone", _OWN_DESIGN, False, True),
    **_all("stream_interval", "each step's tokens are streamed here; leave it out", 1),
    **_all("output_text_buffer_length", "the text holds back what a stop string may begin with", 0),
    **_all(
        "skip_reading_prefix_cache",
        "prompt_logprobs and a mean (pooling) alone read none of it",
        False,
    ),
    **_all("thinking_token_budget", "it is not served; bound the answer by max_tokens"),
    **_all("repetition_detection", "it is not served; repetition_penalty and stop end repetitions"),
    **_all("watermarking", "it is not served; a LogitsProcessor can do it", False),
    **_all("routed_experts_prompt_start trace_decode_token_ids", _OWN_DESIGN, 0),
}
