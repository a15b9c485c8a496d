"""The processor for Ray Data: Ray's interface, and what rows become. Without a cluster."""

from __future__ import annotations

import ast
import asyncio
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest
from fake_engine import make_model_folder
from packaging.specifiers import SpecifierSet

from ringcore.serve.ray_engine import RAY_TESTED

INTERNAL = "llm/_internal/batch"


def ray_file(path: str) -> ast.Module:
    spec = find_spec("ray")
    assert spec is not None
    return ast.parse((Path(spec.origin).parent / INTERNAL / path).read_text())


def class_of(tree: ast.Module, name: str) -> ast.ClassDef:
    (found,) = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == name]
    return found


def fields_of(node: ast.ClassDef) -> set[str]:
    return {one.target.id for one in node.body if isinstance(one, ast.AnnAssign)}


def arguments_of(node: ast.ClassDef, method: str) -> list[str]:
    (found,) = [one for one in node.body if getattr(one, "name", None) == method]
    return [one.arg for one in found.args.args]


def test_rays_interface_is_the_one_that_was_tested():
    assert version("ray") in SpecifierSet(RAY_TESTED)
    base, stages = ray_file("processor/base.py"), ray_file("stages/base.py")
    assert fields_of(class_of(base, "ProcessorConfig")) == {"batch_size", "accelerator_type", "concurrency"}
    made_of = [
        "self",
        "config",
        "stages",
        "preprocess",
        "postprocess",
        "preprocess_map_kwargs",
        "postprocess_map_kwargs",
    ]
    assert arguments_of(class_of(base, "Processor"), "__init__") == made_of
    assert arguments_of(class_of(base, "ProcessorBuilder"), "register") == ["cls", "config_type", "builder"]
    assert "processor = cls._registry[type_name](config, **kwargs)" in ast.unparse(base)
    stage = class_of(stages, "StatefulStage")
    assert fields_of(stage) == {"fn", "fn_constructor_kwargs", "map_batches_kwargs"}
    udf = class_of(stages, "StatefulStageUDF")
    assert arguments_of(udf, "__init__") == ["self", "data_column", "expected_input_keys"]
    assert arguments_of(udf, "udf") == ["self", "rows"]
    assert "dataset.map_batches_internal(stage.fn, **kwargs)" in ast.unparse(base)


def test_rays_own_engines_have_the_columns():
    """What an example reads of one engine it finds of this one."""
    config = fields_of(class_of(ray_file("processor/vllm_engine_proc.py"), "vLLMEngineProcessorConfig"))
    config |= fields_of(class_of(ray_file("processor/base.py"), "OfflineProcessorConfig"))
    assert {"model_source", "engine_kwargs", "runtime_env", "max_concurrent_batches"} <= config
    assert {"max_tasks_in_flight_per_actor", "should_continue_on_error"} <= config
    named = {node.value for node in ast.walk(ray_file("stages/vllm_engine_stage.py")) if isinstance(node, ast.Constant)}
    named |= {node.target.id for node in ast.walk(ray_file("stages/vllm_engine_stage.py")) if _is_field(node)}
    assert {"generated_text", "num_input_tokens", "num_generated_tokens", "__inference_error__"} <= named
    assert {"messages", "prompt", "tokenized_prompt", "sampling_params"} <= named | _names(
        "stages/chat_template_stage.py"
    )


def _is_field(node: ast.AST) -> bool:
    return isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)


def _names(path: str) -> set[object]:
    return {node.value for node in ast.walk(ray_file(path)) if isinstance(node, ast.Constant)}


@pytest.fixture(scope="module")
def processor():
    for name in ("pandas", "pyarrow"):
        pytest.importorskip(name)
    from ringcore.batch.on_ray import processor

    return processor


def answers(processor, folder, rows, continues=True) -> list[dict]:
    """In the order of the rows."""

    async def scenario():
        options = {"model": folder, "load_format": "dummy", "executor": "ringcore.testing:FakeExecutor"}
        udf = processor.EngineUDF("data", [], options | {"max_model_len": 64}, continues)
        numbered = [row | {udf.IDX_IN_BATCH_COLUMN: i} for i, row in enumerate(rows)]
        try:
            found = [one async for one in udf.udf(numbered)]
        finally:
            await udf._engine.close()
            udf._loop = None
        return sorted(found, key=lambda one: one[udf.IDX_IN_BATCH_COLUMN])

    return asyncio.run(scenario())


def test_what_rows_become(processor, tmp_path):
    import numpy as np

    params = {"max_tokens": 5, "temperature": np.float32(0), "seed": 7, "stop": None, "detokenize": False}
    rows = [
        {"id": 1, "prompt": "ab", "sampling_params": params},
        {"prompt": "other", "tokenized_prompt": np.array([97, 98]), "sampling_params": params},
        {"prompt": "other", "messages": np.array([{"role": "user", "content": "a"}]), "sampling_params": params},
        {"prompt": "ab"} | {"sampling_params": params | {"max_tokens": -1}},
        {"prompt": "ab"} | {"sampling_params": params | {"no_such": 1}},
        {"question": "ab", "sampling_params": params},
    ]
    text, ids, chat, *wrong = answers(processor, make_model_folder(tmp_path), rows)
    assert (text["num_input_tokens"], text["num_generated_tokens"], text["finish_reason"]) == (2, 5, "length")
    assert text["generated_text"] == ids["generated_text"] != chat["generated_text"]
    assert [one["__inference_error__"] for one in (text, ids, chat)] == ["", "", ""]
    assert [one["generated_text"] for one in wrong] == ["", "", ""]
    assert "max_tokens" in wrong[0]["__inference_error__"]
    assert "no_such" in wrong[1]["__inference_error__"]
    assert "the row has none of messages, tokenized_prompt" in wrong[2]["__inference_error__"]


def test_a_row_that_fails_ends_the_job_unless_it_may_continue(processor, tmp_path):
    with pytest.raises(ValueError, match="the row has none of"):
        answers(processor, make_model_folder(tmp_path), [{"question": "ab"}], continues=False)


def test_a_wrong_option_is_refused_before_anything_starts(processor, tmp_path):
    from ray.data.llm import build_processor

    options = {"max_modellen": 64, "load_format": "dummy"}
    config = processor.RingcoreProcessorConfig(model_source=make_model_folder(tmp_path), engine_kwargs=options)
    with pytest.raises(TypeError, match="max_model_len"):
        build_processor(config)


def test_an_engine_has_the_resources_of_all_its_ranks(processor, tmp_path):
    from ray.data.llm import build_processor

    folder = make_model_folder(tmp_path)
    common = {"load_format": "dummy", "tensor_parallel_size": 2}

    def stage_of(engine_kwargs, **options):
        config = processor.RingcoreProcessorConfig(model_source=folder, engine_kwargs=engine_kwargs, **options)
        return build_processor(config).get_stage_by_name("EngineStage").map_batches_kwargs

    assert stage_of(common)["num_gpus"] == 2
    assert stage_of(common | {"device": "cpu"})["num_cpus"] == 2
    own = stage_of(common, resources_per_rank={"GPU": 1, "CPU": 3, "slot": 1}, accelerator_type="H100")
    assert (own["num_gpus"], own["num_cpus"], own["resources"]) == (2, 6, {"slot": 2})
    assert own["accelerator_type"] == "H100"
