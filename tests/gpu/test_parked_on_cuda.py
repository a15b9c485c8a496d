"""A parked engine on a GPU: adopted in no time, with the tokens of a new one; asleep it leaves the card to others."""

from __future__ import annotations

import time

import pytest
from device_sleep import used_bytes

from ringcore import EngineConfig, ParkedEngines, SamplingParams
from ringcore.front_end.client_start import start_client
from ringcore.protocol.requests import EngineCoreRequest
from ringcore.testing.models import write_model_config

WAIT_S = 300.0
MIB = 1 << 20
DEVICE = "cuda"


@pytest.fixture(scope="module")
def options(tmp_path_factory):
    sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8}
    folder = write_model_config(tmp_path_factory.mktemp("model") / "wide", num_hidden_layers=8, **sizes)
    same = {"device": DEVICE, "load_format": "dummy", "max_model_len": 256, "kv_cache_bytes": 512 * MIB}
    return same | {"model": folder, "enable_sleep_mode": True}


def tokens(client) -> list[int]:
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    client.add_requests([EngineCoreRequest("a", [5, 6, 7], params, arrival_s=time.monotonic())])
    found = []
    while not found or not found[-1].finish_reason:
        found += client.get_outputs(timeout=WAIT_S).outputs
    return [token for output in found for token in output.new_token_ids]


@pytest.fixture(scope="module")
def expected(options):
    with start_client(EngineConfig.from_options(**options)) as client:
        client.wait_ready()
        return tokens(client)


@pytest.mark.parametrize("level", [0, 1])
def test_it_is_adopted_on_the_device(options, expected, level):
    with ParkedEngines(**options, level=level) as parked:
        parked.wait(WAIT_S)
        parked_bytes = used_bytes()
        with start_client(EngineConfig.from_options(**options, start_from="parked_only")) as client:
            ready = client.wait_ready()
            assert list(ready.phase_seconds) == ["adopt_parked"]
            print(f"level {level}: awake {ready.phase_seconds['adopt_parked']:.3f} s after it was asked for")
            awake_bytes = used_bytes()
            parked.close()
            assert tokens(client) == expected
    if level:
        weights_and_cache = ready.memory_bytes[0]["weights_bytes"] + 512 * MIB
        assert awake_bytes - parked_bytes > 0.9 * weights_and_cache
