"""Files of at most 300 lines, functions of at most 40 without their docstring. Larger ones are named, with the reason.

Triton kernels are exempt: one kernel is one function, and its arguments take a line each.
"""

from __future__ import annotations

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "ringcore"
FILE_LINES, FUNCTION_LINES = 300, 40

# The most lines that a file may have, and why it is one file.
FILES: dict[str, tuple[int, str]] = {
    "scheduler/scheduler.py": (
        440,
        "schedule, update and preemption share one state; the argument that it drains is a page",
    ),
    "engine_core/core.py": (406, "every public call of the engine, a few lines each"),
    "engine_core/loop.py": (370, "one event loop: each message and each wait of it"),
    "executor/multiproc.py": (386, "one executor: start, send, receive and close share the call table"),
    "worker/worker.py": (416, "every RPC method of the worker, a few lines each"),
    "executor/ring_buffer.py": (345, "the protocol's table and both ends of it are read together"),
    "front_end/llm.py": (355, "every public call of LLM, with its documentation"),
    "grammars/regular_expressions/parser.py": (325, "one recursive descent over one grammar"),
    "kv_cache/manager.py": (312, "allocation and hits share the books of one cache"),
    "front_end/client.py": (342, "every public call of the client, a few lines each"),
    "engine_core/transport/channel.py": (318, "both ends of one channel"),
    "model_executor/sampler.py": (312, "the reference of sampling: filters, the draw and log-probabilities"),
    "openai_api/answers.py": (320, "every kind of answer"),
}
FUNCTIONS: dict[str, tuple[int, str]] = {
    "kernels/attention/qk_norm_rope.py:qk_norm_rope": (
        66,
        "a launch: the checks of its tensors, and an argument a line",
    ),
    "kernels/attention/paged_attention_decode.py:_launch_by_tiles": (60, "a launch, as above"),
    "kernels/attention/paged_attention_decode.py:_launch_by_warps": (60, "a launch, as above"),
    "kernels/attention/paged_attention_prefill.py:paged_attention_prefill": (68, "a launch, as above"),
    "kernels/attention/latent_attention_decode.py:latent_attention_decode": (46, "a launch, as above"),
    "kernels/attention/latent_rows.py:latent_rows": (42, "a launch, as above"),
    "kernels/logits/sampling.py:sample_tokens": (50, "a launch, as above"),
    "kernels/linears/skinny_linear.py:skinny_linear": (49, "a launch, as above"),
    "kernels/linears/tma_linear.py:launch_tma_linear": (49, "a launch, as above"),
    "kernels/linears/skinny_linear.py:_launch_dot": (50, "a launch, as above"),
    "kernels/linears/round_rows.py:round_rows": (52, "a launch, as above"),
    "kernels/mixtures/router_fma.py:route_few_tokens": (43, "a launch, as above"),
    "kernels/mixtures/experts.py:product": (59, "a launch, as above"),
    "cli/batch.py:batch": (46, "a command's flags, a line each"),
    "cli/serve.py:serve": (84, "a command's flags, a line each"),
    "cli/simulate.py:simulate": (60, "a command's flags, a line each"),
    "testing/trace.py:poisson_trace": (50, "its parameters, a line each"),
    "engine_core/core.py:__init__": (45, "the engine's parts, a line each"),
    "engine_core/process.py:main": (52, "the phases of a process in order"),
}


def test_files():
    found = {path: len((PACKAGE / path).read_text().splitlines()) for path in _paths()}
    assert _over(found, FILE_LINES, FILES) == {}
    assert _needless(found, FILE_LINES, FILES) == []


def test_functions():
    found = {}
    for path in _paths():
        for function in ast.walk(ast.parse((PACKAGE / path).read_text())):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef) and not _is_kernel(function):
                found[f"{path}:{function.name}"] = _num_lines(function)
    assert _over(found, FUNCTION_LINES, FUNCTIONS) == {}
    assert _needless(found, FUNCTION_LINES, FUNCTIONS) == []


def _over(found: dict[str, int], limit: int, exceptions: dict[str, tuple[int, str]]) -> dict[str, int]:
    return {name: lines for name, lines in found.items() if lines > exceptions.get(name, (limit, ""))[0]}


def _needless(found: dict[str, int], limit: int, exceptions: dict[str, tuple[int, str]]) -> list[str]:
    """Exceptions of what is gone, or is no longer too large."""
    return [name for name in exceptions if found.get(name, 0) <= limit]


def _paths() -> list[str]:
    return sorted(str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py"))


def _is_kernel(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any("jit" in ast.unparse(decorator) for decorator in function.decorator_list)


def _num_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    assert function.end_lineno is not None
    lines = function.end_lineno - function.lineno + 1
    first = function.body[0]
    if ast.get_docstring(function) is not None:
        assert first.end_lineno is not None
        lines -= first.end_lineno - first.lineno + 1
    return lines
