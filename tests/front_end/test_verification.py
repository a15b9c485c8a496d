"""`ringcore verify`: what it takes for equal, and what it does not."""

from __future__ import annotations

import math
import random
import sys
from collections import Counter
from types import SimpleNamespace

import pytest

from ringcore.cli import main
from ringcore.errors import ConfigError, ModelLoadError
from ringcore.front_end import verification
from ringcore.front_end.verification import Reference, chi_squared_z, compare_logprobs, compare_tokens
from ringcore.params.outputs import CompletionOutput, Logprob, RequestOutput
from ringcore.protocol.finding import Finding

RIGHT = Reference([5, 6, 7, 8], [-0.1, -0.2, -0.3, -0.4], [3.0, 2.0, 0.0001, 1.0])
PROBABILITIES = {token: 2.0 ** -(token + 1) for token in range(12)}


def output(token_ids: list[int], logprobs: list[float]) -> RequestOutput:
    positions = [{token: Logprob(one, 1, "x")} for token, one in zip(token_ids, logprobs, strict=True)]
    completion = CompletionOutput(index=0, text="", token_ids=token_ids, logprobs=positions)
    return RequestOutput(request_id="a", prompt=None, prompt_token_ids=[1], outputs=[completion])


def test_tokens_are_compared_up_to_a_near_tie():
    decided = [RIGHT.num_decided(0.001)]
    assert decided == [2]
    assert RIGHT.num_decided(1e-9) == 4
    good = compare_tokens("tokens", [RIGHT], decided, [[5, 6, 9, 9]], "transformers'")
    assert (good.level, good.found) == (
        "ok",
        "2 greedy tokens of 1 prompts are transformers'; 2 came after a near tie",
    )
    for got in ([5, 9, 7, 8], [5]):
        wrong = compare_tokens("tokens", [RIGHT], decided, [got], "transformers'")
        assert wrong.level == "error"
        assert wrong.found.startswith(f"prompt 0, token 1: {got[1:2]} is not 6; the best logits are 2 apart")


def test_logprobs_are_compared():
    decided = [2]
    near = output([5, 6, 9, 9], [-0.1, -0.2005, -9.0, -9.0])
    assert compare_logprobs([RIGHT], decided, [near], 0.002).level == "ok"
    far = compare_logprobs([RIGHT], decided, [output([5, 6, 7, 8], [-0.1, -0.25, 0, 0])], 0.002)
    assert (far.level, "by 0.05 at most, and 0.002 is allowed" in far.found) == ("error", True)


def draws(probabilities: dict[int, float], seed: int) -> Counter[int]:
    rng = random.Random(seed)
    rest = max(0.0, 1 - sum(probabilities.values()))
    return Counter(rng.choices([*probabilities, 99], [*probabilities.values(), rest], k=1024))


def test_right_draws_pass_and_wrong_ones_do_not():
    zs = [chi_squared_z(draws(PROBABILITIES, seed), PROBABILITIES) for seed in range(200)]
    assert max(zs) < 4
    assert abs(sum(zs) / len(zs)) < 0.3
    assert 0.8 < math.sqrt(sum(z * z for z in zs) / len(zs)) < 1.2
    sharper = {token: p**1.3 for token, p in PROBABILITIES.items()}
    total = sum(sharper.values())
    assert chi_squared_z(draws({token: p / total for token, p in sharper.items()}, 0), PROBABILITIES) > 4
    assert chi_squared_z(Counter({0: 1024}), PROBABILITIES) > 4
    assert chi_squared_z(Counter({0: 1024}), {0: 1.0}) == -math.inf


@pytest.mark.parametrize("level", ["ok", "error"])
def test_the_command_says_what_was_found(capsys, monkeypatch, level):
    def verify(model, options, timeout_s):
        assert (model, options, timeout_s) == ("m", {"dtype": "bfloat16"}, 9.0)
        yield Finding("tokens", level, "what was found")

    monkeypatch.setattr(verification, "verify", verify)
    with pytest.raises(SystemExit) as caught:
        main(["verify", "m", "--dtype", "bfloat16", "--reference-timeout-s", "9"])
    assert (caught.value.code or 0) == (level == "error")
    assert capsys.readouterr().out == f"{level:<8} tokens              what was found\n"


@pytest.mark.long_form
@pytest.mark.real_model
def test_a_real_model(smollm2):
    findings = list(verification.verify(smollm2, {"max_num_seqs": 64}, 600.0))
    assert [one.check for one in findings] == ["tokens", "log-probabilities", "batch", "sampling", "chunks"]
    assert {one.level for one in findings} == {"ok"}, findings


def references(program: str, timeout_s: float = 60.0) -> list[Reference]:
    config = SimpleNamespace(model=SimpleNamespace(files=SimpleNamespace(path="/folder"), model="m"))
    verification._PROGRAM, before = (sys.executable, "-c", program), verification._PROGRAM
    try:
        return verification._references(config, "float32", [[1]], timeout_s)
    finally:
        verification._PROGRAM = before


def test_the_program_of_the_reference():
    row = {"token_ids": [5], "logprobs": [-1.0], "gaps": [2.0]}
    echo = f"import json, sys; assert json.load(sys.stdin)['prompts'] == [[1]]; print(json.dumps({row}))"
    assert references(echo) == [Reference(**row)]
    with pytest.raises(ModelLoadError, match="/folder: transformers cannot run it: ValueError: no such type"):
        references("raise ValueError('no such type')")
    with pytest.raises(ConfigError, match=r"reference_timeout_s=0\.2: transformers has not finished"):
        references("import time; time.sleep(60)", 0.2)
    with pytest.raises(ModelLoadError, match="exit code -9"):
        references("import os; os.kill(os.getpid(), 9)")
