"""Log-likelihoods of prompts equal transformers' on a tiny model; and lm-eval's types, where it is installed."""

from __future__ import annotations

import pytest
from fake_engine import make_model_folder

from ringcore import LLM
from ringcore.errors import InvalidRequestError
from ringcore.lm_eval.likelihoods import log_likelihoods

MAX_MODEL_LEN = 48
OPTIONS = {"dtype": "float32", "max_model_len": MAX_MODEL_LEN, "block_size": 8, "num_blocks_override": 64}


@pytest.fixture(scope="module")
def options(tmp_path_factory) -> dict:
    return OPTIONS | {"device": "cpu", "tokenizer": make_model_folder(tmp_path_factory.mktemp("tokenizer"))}


def expected(folder: str, pairs) -> list[tuple[float, bool]]:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found = []
    for context, continuation in pairs:
        token_ids = [*context, *continuation][-(MAX_MODEL_LEN - 1) :]
        with torch.no_grad():
            logprobs = model(torch.tensor([token_ids])).logits[0].log_softmax(-1)
        at = range(len(token_ids) - len(continuation) - 1, len(token_ids) - 1)
        total = sum(logprobs[i, token_ids[i + 1]].item() for i in at)
        found.append((total, all(logprobs[i].argmax().item() == token_ids[i + 1] for i in at)))
    return found


@pytest.mark.long_form
def test_as_transformers(tiny_qwen2, options):
    with LLM(tiny_qwen2, **options) as llm:
        (answer,) = llm.generate([[5, 6, 7]], use_tqdm=False)
        pairs = [
            ([5, 6, 7], [8, 9]),
            ([5], [8]),
            (list(range(40, 80)), list(range(80, 92))),  # whose context loses its beginning
            ([5, 6, 7], []),
        ]
        pairs += [(context, [expected_greedy(llm, context)]) for context in ([5, 6, 7], [11, 12])]
        found = log_likelihoods(llm, pairs)
        assert answer.outputs[0].token_ids
        assert [is_greedy for _, is_greedy in found[-2:]] == [True, True]
        wanted = expected(tiny_qwen2, pairs)
        assert [total for total, _ in found] == pytest.approx([total for total, _ in wanted], abs=1e-3)
        assert [one for _, one in found] == [one for _, one in wanted]
        for wrong, says in ((([], [1]), "empty"), (([1], [2] * MAX_MODEL_LEN), "raise max_model_len")):
            with pytest.raises(InvalidRequestError, match=says):
                log_likelihoods(llm, [wrong])


def expected_greedy(llm: LLM, context: list[int]) -> int:
    from ringcore import SamplingParams

    (output,) = llm.generate([context], SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
    return output.outputs[0].token_ids[0]


@pytest.mark.long_form
def test_lm_evals_types(tiny_qwen2, options):
    pytest.importorskip("lm_eval.api.model")
    from lm_eval.api.instance import Instance
    from lm_eval.api.registry import get_model

    import ringcore.lm_eval.model

    def ask(kind: str, *args):
        return [Instance(request_type=kind, doc={}, arguments=one, idx=i) for i, one in enumerate(args)]

    named = ",".join(f"{name}={value}" for name, value in options.items())
    lm = get_model("ringcore").create_from_arg_string(
        f"path={tiny_qwen2},{named}", {"batch_size": 1, "max_batch_size": None}
    )
    assert type(lm) is ringcore.lm_eval.model.RingcoreLM
    with lm.llm:
        pairs = [("the sky", " is blue"), ("", "a word")]
        found = lm.loglikelihood(ask("loglikelihood", *pairs), disable_tqdm=True)
        contexts = [list(b"the sky"), [lm.prefix_token_id]]
        token_pairs = [(context, list(said.encode())) for context, (_, said) in zip(contexts, pairs, strict=True)]
        assert [total for total, _ in found] == pytest.approx(
            [total for total, _ in expected(tiny_qwen2, token_pairs)], abs=1e-3
        )
        text = "a text that is longer than a window of the model, whose tokens are each predicted once"
        (rolled,) = lm.loglikelihood_rolling(ask("loglikelihood_rolling", (text,)), disable_tqdm=True)
        windows = list(lm._windows(text))
        assert bytes(token for _, said in windows for token in said).decode() == text
        assert rolled == pytest.approx(sum(total for total, _ in expected(tiny_qwen2, windows)), abs=1e-3)
        asked = {"until": ["\n"], "max_gen_toks": 8, "do_sample": False}
        texts = lm.generate_until(ask("generate_until", ("abc", asked), ("x" * 100, asked)), disable_tqdm=True)
        assert len(texts) == 2
