"""Programs in the form of vLLM's examples, with the import changed: each runs, or an error names what to use."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from fake_engine import make_model_folder
from safetensors.numpy import save_file

from ringcore import LLM, EngineArgs, LogitsProcessor, SamplingParams, StructuredOutputsParams, TokensPrompt
from ringcore.errors import UnknownOptionError

PROMPTS = ["Hello, my name is", "The capital of France is"]
CONVERSATION = [{"role": "system", "content": "You are brief."}, {"role": "user", "content": "Hello"}]


class OneToken(LogitsProcessor):
    """Requests with `target_token` in their `extra_args` get that token alone."""

    def __init__(self, context):
        super().__init__(context)
        self.targets = {}

    def admit(self, row, params, prompt_token_ids):
        self.targets[row] = (params.extra_args or {}).get("target_token")
        return self.targets[row] is not None

    def apply(self, logits, rows, token_ids):
        for logit, row in zip(logits, rows.tolist(), strict=True):
            target = self.targets[row]
            kept = logit[target].clone()
            logit.fill_(float("-inf"))
            logit[target] = kept


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    engine_args = EngineArgs(
        model=make_model_folder(tmp_path_factory.mktemp("model")),
        load_format="dummy",
        max_model_len=128,
        enforce_eager=True,
        trust_remote_code=False,
        enable_prefix_caching=True,
        enable_sleep_mode=True,
        logits_processors=["test_vllm_snippets:OneToken"],
    )
    with LLM.from_engine_args(engine_args) as made:
        yield made


def test_offline_basics(llm):
    outputs = llm.generate(PROMPTS, SamplingParams(temperature=0.8, top_p=0.95, max_tokens=5, ignore_eos=True))
    assert [output.prompt for output in outputs] == PROMPTS
    assert [len(output.outputs[0].token_ids) for output in outputs] == [5, 5]
    tokens = TokensPrompt(prompt_token_ids=llm.get_tokenizer().encode(PROMPTS[0]))
    assert llm.generate([tokens], sampling_params=SamplingParams(max_tokens=1))[0].finished


def test_chat(llm):
    sampling_params = replace(llm.get_default_sampling_params(), max_tokens=3)
    (one,) = llm.chat(CONVERSATION, sampling_params, use_tqdm=False)
    assert one.outputs[0].text is not None
    assert len(llm.chat([CONVERSATION for _ in range(3)], sampling_params=sampling_params, use_tqdm=False)) == 3


def test_structured_outputs(llm):
    choice = StructuredOutputsParams(choice=["Positive", "Negative"])
    (output,) = llm.generate(prompts="vLLM is wonderful!", sampling_params=SamplingParams(structured_outputs=choice))
    assert output.outputs[0].text in ("Positive", "Negative")


def test_prefix_caching(llm):
    prefix = "a shared prefix of several blocks, " * 2
    params = SamplingParams(temperature=0.0, max_tokens=2)
    first = llm.generate([prefix + "x"], params)[0]
    again = llm.generate([prefix + "x"], params)[0]
    assert first.outputs[0].token_ids == again.outputs[0].token_ids
    assert again.num_cached_tokens >= 64 > first.num_cached_tokens
    assert llm.reset_prefix_cache()
    assert llm.generate([prefix + "x"], params)[0].num_cached_tokens == 0


def test_logits_processors(llm):
    targeted = SamplingParams(temperature=0.0, max_tokens=3, extra_args={"target_token": 65})
    outputs = llm.generate(PROMPTS, [targeted, SamplingParams(temperature=0.0, max_tokens=3)])
    assert outputs[0].outputs[0].text == "AAA" != outputs[1].outputs[0].text


def test_sleep(llm):
    params = SamplingParams(temperature=0.0, max_tokens=4)
    before = llm.generate(PROMPTS, params)
    llm.sleep(level=1)
    llm.wake_up(tags=["weights"])
    llm.wake_up(tags=["kv_cache"])
    after = llm.generate(PROMPTS, params)
    assert [one.outputs[0].token_ids for one in before] == [one.outputs[0].token_ids for one in after]


def test_embeddings(llm):
    embeds = llm.embed(PROMPTS)
    assert [one.shape for one in embeds] == [(16,), (16,)]
    assert float(embeds[0] @ embeds[0]) == pytest.approx(1, abs=1e-5)  # the score of a text and itself
    for method, instead in (("encode", "LLM.embed"), ("score", "/v1/score"), ("classify", "LLM.embed")):
        with pytest.raises(AttributeError, match=f"LLM has no '{method}': .*{instead}"):
            getattr(llm, method)
    with pytest.raises(UnknownOptionError, match=r"'runner', which is vLLM's: .* LLM\.embed pools"):
        LLM(model=llm.config.model.model, runner="pooling")


def test_a_weight_update(llm, tmp_path):
    params = SamplingParams(temperature=0.0, max_tokens=4)
    before = llm.generate(PROMPTS, params)[0].outputs[0].token_ids
    norm = np.linspace(-1, 1, 16, dtype=np.float32)
    save_file({"model.norm.weight": norm}, tmp_path / "some.safetensors")
    llm.start_weight_update()
    llm.update_weights(tmp_path / "some.safetensors")
    llm.finish_weight_update()
    assert llm.generate(PROMPTS, params)[0].outputs[0].token_ids != before
