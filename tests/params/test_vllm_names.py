"""vLLM's names: each is one of ours, or says what it is here."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, fields
from functools import cache
from pathlib import Path

import pytest
from fake_engine import make_model_folder

import ringcore
from ringcore import AsyncEngineArgs, EngineArgs, EngineConfig, SamplingParams
from ringcore.errors import UnknownOptionError
from ringcore.params.vllm_api import DIFFERENT_METHODS, LLM_METHODS
from ringcore.params.vllm_names import ENGINE_OPTIONS, IMPORTS, SAMPLING_PARAMETERS, known_options

NAMES = json.loads((Path(__file__).parents[1] / "data" / "vllm_names.json").read_text())
ENGINE = set(EngineConfig.options())
SAMPLING = {one.name for one in fields(SamplingParams)}


@pytest.mark.parametrize(
    ("theirs", "ours", "table"),
    [("EngineArgs", ENGINE, ENGINE_OPTIONS), ("SamplingParams", SAMPLING, SAMPLING_PARAMETERS)],
)
def test_every_name_is_ours_or_explained(theirs, ours, table):
    names = set(NAMES[theirs])
    assert names - ours - set(table) == set()
    assert set(table) & ours == set(), "a name of ours needs no explanation"


def test_explanations_name_what_there_is():
    for one in {**ENGINE_OPTIONS, **SAMPLING_PARAMETERS}.values():
        words = set(re.findall(r"(?<![-.])\b[a-z]+(?:_[a-z0-9]+)+\b", one.here))
        assert words <= ENGINE | SAMPLING, one.here
        for command, flag in re.findall(r"'ringcore (\w+) --([a-z-]+)'", one.here):
            assert _has_flag(command, flag), one.here


@cache
def _has_flag(command: str, flag: str) -> bool:
    from typer.testing import CliRunner

    from ringcore.cli.app import make_app

    result = CliRunner().invoke(make_app([command]), [command, "--help"], env={"COLUMNS": "400"})
    return f"--{flag}" in result.output


def test_neutral_values_are_accepted_and_others_explained():
    given = {"trust_remote_code": False, "revision": None, "enable_chunked_prefill": True, "seed": 3}
    assert known_options(given, ENGINE, ENGINE_OPTIONS, "engine option") == {"seed": 3}
    with pytest.raises(
        UnknownOptionError, match=r"'trust_remote_code', which is vLLM's: code of a model folder is never"
    ):
        known_options({"trust_remote_code": True}, ENGINE, ENGINE_OPTIONS, "engine option")
    with pytest.raises(
        UnknownOptionError, match=r"'kv_cache_memory_bytes', which is vLLM's: it is kv_cache_bytes here"
    ):
        EngineConfig.from_options(model="m", kv_cache_memory_bytes=1 << 30)
    with pytest.raises(
        UnknownOptionError, match=r"sampling parameter 'guided_decoding', which is vLLM's: it is struct"
    ):
        SamplingParams(guided_decoding={"json": {}})
    assert SamplingParams(use_beam_search=False, spaces_between_special_tokens=True) == SamplingParams()


def test_a_name_to_import_is_ours_or_explained():
    with pytest.raises(ImportError, match=r"cannot import 'GuidedDecodingParams'.*it is StructuredOutputsParams here"):
        from ringcore import GuidedDecodingParams  # noqa: F401
    assert not set(IMPORTS) & set(ringcore.__all__)
    assert ringcore.AsyncLLM is ringcore.AsyncLLMEngine is ringcore.AsyncEngine
    assert SamplingParams(output_kind=ringcore.RequestOutputKind.FINAL_ONLY) == SamplingParams(output_kind="final")
    assert type(SamplingParams(output_kind=ringcore.RequestOutputKind.DELTA).output_kind) is str


def test_methods_of_llm():
    ours, theirs = {name for name in dir(ringcore.LLM) if name[0] != "_"}, set(NAMES["LLM"])
    assert theirs - ours == set(LLM_METHODS)
    assert set(DIFFERENT_METHODS) <= ours & theirs
    named = {name for text in LLM_METHODS.values() for name in re.findall(r"\bLLM\.(\w+)", text)}
    assert named - ours == {"config"}, "an attribute of the instance"
    llm = object.__new__(ringcore.LLM)
    with pytest.raises(AttributeError, match=r"LLM has no 'encode': it is LLM\.embed here"):
        llm.encode("a")
    assert not hasattr(llm, "nothing_of_it")


def test_engine_args():
    args = EngineArgs("m", max_model_len=64, trust_remote_code=False)
    assert {option.name for option in fields(args)} == ENGINE
    assert asdict(args) == asdict(EngineArgs(model="m")) | {"max_model_len": 64}
    assert args == AsyncEngineArgs(model="m", max_model_len=64)
    with pytest.raises(UnknownOptionError, match="'enable_lora', which is vLLM's"):
        EngineArgs("m", enable_lora=True)


def test_engine_args_make_a_config(tmp_path):
    args = EngineArgs(make_model_folder(tmp_path), load_format="dummy", max_model_len=64)
    assert args.create_engine_config() == EngineConfig.from_options(**asdict(args))
    assert args.create_engine_config().model.max_model_len == 64


def test_one_is_not_true():
    with pytest.raises(UnknownOptionError):
        known_options({"trust_remote_code": 0}, ENGINE, ENGINE_OPTIONS, "engine option")
