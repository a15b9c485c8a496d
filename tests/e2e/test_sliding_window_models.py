"""Tiny random models with sliding windows through the whole engine in float32: the tokens of transformers."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from engine import generate, make_core, tokens
from reference import Entry, differences

from ringcore import SamplingParams

NEW_TOKENS = 20
WINDOW = 12  # three blocks: prompts are longer, and completions leave it behind
BLOCK_SIZE = 4
SLIDING, FULL = "sliding_attention", "full_attention"

# Around the edges of blocks and window, and some that leave many windows behind.
PROMPTS = [
    [3 + (7 * i + j * j + j // 5) % 300 for j in range(n)]
    for i, n in enumerate([1, 4, 11, 12, 13, 24, 25, 40, 63, 64, 65, 150])
]
GREEDY = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
OPTIONS = {
    "device": "cpu",  # blocks of 4 tokens are too small for a GPU
    "dtype": "float32",
    "executor": "uniproc",
    "max_model_len": 256,
    "block_size": BLOCK_SIZE,
    "kv_cache_bytes": 1 << 24,
}

SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 319,
    "tie_word_embeddings": False,
    "sliding_window": WINDOW,
}
GEMMA3 = {
    "num_hidden_layers": 6,
    "head_dim": 32,
    "query_pre_attn_scalar": 24,
    "tie_word_embeddings": True,
    "rope_parameters": {
        FULL: {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0},
        SLIDING: {"rope_type": "default", "rope_theta": 300.0},
    },
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral": ("Mistral", {}),
    "mistral without a window": ("Mistral", {"sliding_window": None}),
    # Three groups of two layers each.
    "gemma3": ("Gemma3", GEMMA3 | {"layer_types": [SLIDING, SLIDING, FULL] * 2}),
    # Seven layers of one kind and four of the other: groups of four, and one of three.
    "gemma3 of eleven layers": (
        "Gemma3",
        GEMMA3
        | {"num_hidden_layers": 11, "layer_types": [*[SLIDING, FULL, SLIDING] * 3, FULL, SLIDING], "head_dim": 16},
    ),
    "gemma3 with heads of 256": (
        "Gemma3",
        GEMMA3 | {"num_hidden_layers": 2, "layer_types": [SLIDING, FULL], "head_dim": 256, "num_key_value_heads": 1},
    ),
    "qwen2 with a window in its later layers": (
        "Qwen2",
        {"use_sliding_window": True, "max_window_layers": 2},
    ),
}


def build(family: str, own: dict[str, Any]) -> Any:
    """A transformers model in float32 whose every tensor is random and matters."""
    import transformers

    config_class = getattr(transformers, "Gemma3TextConfig" if family == "Gemma3" else f"{family}Config")
    with torch.random.fork_rng():
        torch.manual_seed(11)
        model = getattr(transformers, f"{family}ForCausalLM")(config_class(**(SIZES | own))).float().eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.normal_(0, 0.05 if "embed" in name else 0.2 if "bias" in name or "norm" in name else 0.12)
                if "norm" in name and family != "Gemma3":  # Gemma's norms add 1 themselves
                    parameter.add_(1)
    return model


def judged(model: Any, prompt: list[int], draft: list[int]) -> Entry:
    """The likeliest token of transformers at each place of a draft, by one pass without a cache: as long as the draft
    has them, what transformers generates greedily."""
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + draft[:-1]]), use_cache=False).logits[0, len(prompt) - 1 :]
    best = logits.topk(2)
    gaps = (best.values[:, 0] - best.values[:, 1]).tolist()
    return Entry(prompt_token_ids=prompt, token_ids=best.indices[:, 0].tolist(), gaps=gaps)


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """reference(name) -> (the model's folder, what transformers generates from each of `PROMPTS`)."""

    @functools.cache
    def make(name: str) -> tuple[str, list[Entry]]:
        model = build(*MODELS[name])
        folder = tmp_path_factory.mktemp("model")
        model.save_pretrained(folder)
        with make_core(str(folder), max_num_seqs=1, steps_in_flight=1, enable_prefix_caching=False, **OPTIONS) as core:
            drafts = tokens(generate(core, PROMPTS, GREEDY))
        entries = [judged(model, prompt, draft) for prompt, draft in zip(PROMPTS, drafts, strict=True)]
        assert differences(entries, drafts) == []
        decisive = sum(entry.num_decisive for entry in entries)
        assert decisive > 0.7 * NEW_TOKENS * len(PROMPTS), "the reference must say enough to be compared with"
        return str(folder), entries

    return make


def check(core, entries: list[Entry], **kwargs):
    outputs = generate(core, [entry.prompt_token_ids for entry in entries], GREEDY, **kwargs)
    assert differences(entries, tokens(outputs)) == []
    return outputs


@pytest.mark.parametrize(
    ("name", "depth"),
    [
        *((name, 2) for name in MODELS),
        ("gemma3", 1),
        *(pytest.param(name, 1, marks=pytest.mark.long_form) for name in MODELS if name != "gemma3"),
    ],
)
def test_greedy_tokens_equal_transformers(reference, name, depth):
    """Together, then from a warm prefix cache, then alone."""
    folder, entries = reference(name)
    with make_core(folder, steps_in_flight=depth, **OPTIONS) as core:
        check(core, entries)
        for entry, one in zip(entries, check(core, entries), strict=True):
            num_full_blocks = (len(entry.prompt_token_ids) - 1) // BLOCK_SIZE
            assert one[-1].num_cached_tokens >= num_full_blocks * BLOCK_SIZE
        for entry in entries[-3:]:
            check(core, [entry], salt="alone")


@pytest.mark.parametrize(
    ("name", "budget"),
    [
        *(("gemma3", 3), ("mistral", 16), ("gemma3", 40)),
        *(pytest.param(*one, marks=pytest.mark.long_form) for one in (("mistral", 3), ("gemma3", 16), ("mistral", 40))),
    ],
)
def test_chunked_prefill(reference, name, budget):
    """Chunks shorter and longer than a block and the window, beside others that decode."""
    folder, entries = reference(name)
    with make_core(folder, max_num_batched_tokens=budget, **OPTIONS) as core:
        check(core, entries)
        check(core, entries)


@pytest.mark.parametrize(("name", "num_blocks"), [("mistral", 20), ("gemma3", 52), ("gemma3 of eleven layers", 52)])
def test_preemption_in_a_small_pool(reference, name, num_blocks):
    """A preempted request is computed again from what the cache still holds of it."""
    folder, entries = reference(name)
    short = [entry for entry in entries if len(entry.prompt_token_ids) <= 65]
    small = {"max_model_len": 96, "num_blocks_override": num_blocks, "max_num_batched_tokens": 16}
    with make_core(folder, **(OPTIONS | small)) as core:
        outputs = check(core, [*short, *short])
        check(core, short)
    assert sum(one[-1].num_preemptions for one in outputs) > 0


@pytest.mark.parametrize("name", ["mistral", "gemma3"])
def test_a_prompt_that_goes_on_where_another_ended(reference, name):
    """The next turn of a conversation finds prompt and completion in the cache, beyond what the window still needs."""
    folder, entries = reference(name)
    long = entries[-1]
    turn = long.num_decisive
    prompt = long.prompt_token_ids + long.token_ids[: turn - 5]
    rest = Entry(prompt_token_ids=prompt, token_ids=long.token_ids[turn - 5 : turn], gaps=long.gaps[turn - 5 : turn])
    with make_core(folder, **OPTIONS) as core:
        check(core, entries)
        outputs = check(core, [rest])
    assert outputs[0][-1].num_cached_tokens >= (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE


@pytest.mark.long_form  # tests/model_executor has two ranks by threads, of every family
@pytest.mark.parametrize("name", ["mistral", "gemma3"])
def test_two_ranks(reference, name):
    folder, entries = reference(name)
    with make_core(folder, **(OPTIONS | {"executor": "multiproc", "tensor_parallel_size": 2})) as core:
        check(core, entries)
