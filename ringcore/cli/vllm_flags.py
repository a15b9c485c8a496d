"""Flags of vLLM's command line that ringcore's has not: what to write instead."""

from __future__ import annotations

from collections.abc import Mapping

from ringcore.params.vllm_names import ENGINE_OPTIONS, SAMPLING_PARAMETERS

__all__ = ["SERVICE_FLAGS", "what_it_is_here"]

_PROXY = "TLS, paths and headers are those of a reverse proxy before the service; leave it out"
_OF_SERVE = {
    "ssl_keyfile ssl_certfile ssl_ca_certs ssl_cert_reqs ssl_ciphers enable_ssl_refresh root_path": _PROXY,
    "allow_credentials allowed_methods allowed_headers middleware": _PROXY,
    "uds": "the service listens at --host and --port",
    "allowed_origins": "it is --allowed-origin here, once for each",
    "h11_max_incomplete_event_size h11_max_header_count": "--max-header-bytes bounds the head of a request",
    "uvicorn_log_level": "it is --log-level here, and --log-format json writes JSON lines",
    "disable_uvicorn_access_log disable_access_log_for_endpoints": "it is --no-access-log here",
    "enable_log_outputs enable_log_deltas max_log_len log_error_stack": "no text of a request is logged; leave it out",
    "enable_auto_tool_choice": "calls are parsed wherever a request has tools; leave it out",
    "exclude_tools_when_tool_choice_none": "with tool_choice 'none' the template sees no tools; leave it out",
    "tool_parser_plugin": "--tool-call-parser names one of the formats here",
    "tool_server": "tools are run by the client; leave it out",
    "response_role": "the role of an answer is assistant; leave it out",
    "chat_template_content_format": "messages are texts for every template; leave it out",
    "default_chat_template_kwargs": "a request gives chat_template_kwargs",
    "enable_request_id_headers": "a request gives request_id, which ends the id of its answer; leave it out",
    "enable_prompt_tokens_details": "usage always has prompt_tokens_details; leave it out",
    "enable_force_include_usage": "a stream has its usage where stream_options ask for it; leave it out",
    "return_tokens_as_token_ids": "return_token_ids of a request returns the ids; leave it out",
    "enable_server_load_tracking": "GET /health has the numbers of running and waiting requests; leave it out",
    "enable_tokenizer_info_endpoint": "POST /tokenize and /detokenize use the model's tokenizer; leave it out",
    "disable_fastapi_docs enable_offline_docs": "/openapi.json describes the API, without a page; leave it out",
    "api_server_count disable_frontend_multiprocessing headless": (
        "one process serves, and --data-parallel-size makes engines; leave it out"
    ),
    "lora_modules": ENGINE_OPTIONS["enable_lora"].here,
    "config": "options are flags; write them into a shell script",
}
SERVICE_FLAGS: Mapping[str, str] = {name: here for names, here in _OF_SERVE.items() for name in names.split()}


def what_it_is_here(flag: str) -> str | None:
    """Of a flag with its dashes; None: vLLM has none of this name either."""
    name = flag.lstrip("-").replace("-", "_")
    for one in (name, name.removeprefix("no_")):
        for table in (ENGINE_OPTIONS, SAMPLING_PARAMETERS):
            if one in table:
                return table[one].here
        if one in SERVICE_FLAGS:
            return SERVICE_FLAGS[one]
    return None
