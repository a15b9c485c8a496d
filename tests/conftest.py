"""Fixtures that several tiers share: where real models lie, and tiny random ones made on the spot."""

from __future__ import annotations

import functools
import gc
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from samples import mark_samples

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ringcore"
LONGEST = ["test_kill_matrix.py", "test_leaks.py", "test_scheduler_properties.py", "test_self_healing.py"]


def pytest_addoption(parser):
    parser.addoption("--chaos-long", action="store_true", help="the long form of random tests (hours, not minutes)")
    parser.addoption("--all-types", action="store_true", help="every type of causal LM of transformers, not a sample")
    parser.addoption("--seen", type=Path, metavar="FILE", help="note what is seen of each type in FILE")


def pytest_configure(config):
    """RINGCORE_CHAOS_LONG=1 where pytest is started from another folder, and knows no option of ours."""
    # A shell without job control starts what it puts in the background deaf to Ctrl-C, and children inherit that.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # xdist hands the files that a dead worker had finished to the one that replaces it, which then waits for ever.
    if getattr(config.option, "maxworkerrestart", "") is None:
        config.option.maxworkerrestart = "0"
    is_long = getattr(config.option, "chaos_long", False) or os.environ.get("RINGCORE_CHAOS_LONG") == "1"
    config.option.chaos_long = is_long
    # The same examples every time; what nobody has found is looked for in the long form.
    if not is_long and config.pluginmanager.hasplugin("hypothesispytest"):
        from hypothesis import HealthCheck, settings

        # How long an example takes says something of the machine alone.
        slow = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
        settings.register_profile("short", derandomize=True, **slow)
        settings.load_profile("short")


def pytest_generate_tests(metafunc):
    """`@pytest.mark.types(...)`: the sample of types of causal LM that a test runs without --all-types."""
    sample = metafunc.definition.get_closest_marker("types")
    if sample is None:
        return
    types = sample.args
    if metafunc.config.option.all_types:
        from ringcore.model_executor.models.transformers.known_types import TYPES as types
    metafunc.parametrize("model_type", types)


def pytest_collection_modifyitems(config, items):
    """Where processes share the files: the longest first, so that no other waits for one of them at the end."""
    if not config.option.chaos_long:
        mark_samples(items)
        for item in items:
            is_asked_for = config.option.all_types and item.get_closest_marker("types")
            if item.get_closest_marker("long_form") and not is_asked_for:
                item.add_marker(pytest.mark.skip(reason="part of the long form"))
    if hasattr(config, "workerinput"):
        places = {name: place for place, name in enumerate(LONGEST)}
        items.sort(key=lambda item: places.get(item.path.name, len(places)))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection(session):
    """Looking for garbage takes a fifth of the time in which tests are loaded, and finds hardly any."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish(session):
    """Collecting garbage takes half a second in a process that has all tests loaded: they are left out of it. With
    Python's own thresholds it takes a tenth of the time of interpreted kernels, which make no cycles."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


@pytest.fixture(scope="session")
def is_long(pytestconfig) -> bool:
    return pytestconfig.option.chaos_long


@pytest.fixture(scope="session")
def all_types(pytestconfig) -> bool:
    return pytestconfig.option.all_types


@pytest.fixture(scope="session")
def seen_on(pytestconfig) -> Callable[..., None] | None:
    """Notes facts of a type in the file of --seen; None without one."""
    file = pytestconfig.option.seen
    if file is None:
        return None
    from benchmarks.machine import git_commit, machine_facts
    from benchmarks.models_page import note_seen

    machine, commit = machine_facts(), git_commit()
    paths = [os.path.relpath(path, pytestconfig.rootpath) for path in pytestconfig.args]
    command = " ".join(["pytest", *paths, "--all-types"])
    return lambda model_type, **facts: note_seen(file, model_type, machine, command, facts | {"commit": commit})


@pytest.fixture
def note(model_type, seen_on) -> Callable[..., None]:
    """note(fact=value, ...) of the type that the test is about: the fields of `benchmarks.models_page.SeenType`."""
    return functools.partial(seen_on, model_type) if seen_on is not None else lambda **facts: None


@pytest.fixture(scope="session")
def smollm2() -> str:
    folder = CACHE / "smollm2-135m"
    if not (folder / "model.safetensors").exists():
        pytest.skip("no SmolLM2-135M folder: run `make setup`")
    return str(folder)


@pytest.fixture(scope="session")
def smollm2_gguf() -> str:
    file = CACHE / "smollm2-135m.gguf"
    if not file.exists():
        pytest.skip("no SmolLM2-135M GGUF file: run `make setup`")
    return str(file)


@pytest.fixture(scope="session")
def qwen2() -> str:
    folder = os.environ.get("RINGCORE_TEST_QWEN2")
    if not folder:
        pytest.skip("opt-in: RINGCORE_TEST_QWEN2=FOLDER, the one of `scripts/fetch_model.py qwen2.5-coder-0.5b`")
    return folder


@pytest.fixture(scope="session")
def gemma3_gguf() -> str:
    file = os.environ.get("RINGCORE_TEST_GEMMA3")
    if not file:
        pytest.skip("opt-in: RINGCORE_TEST_GEMMA3=FILE, the .gguf file that tests/data/gemma-3-270m.json names")
    return file


@pytest.fixture(scope="session")
def tiny_qwen2(tmp_path_factory) -> str:
    """A random Qwen2 whose heads divide by two: 4 layers, 4 query and 2 KV heads of 16."""
    torch = pytest.importorskip("torch")
    from transformers import Qwen2Config, Qwen2ForCausalLM

    folder = tmp_path_factory.mktemp("tiny-qwen2")
    config = Qwen2Config(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        eos_token_id=319,
        bos_token_id=0,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = Qwen2ForCausalLM(config).float()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.normal_(0, 0.2 if "bias" in name else 0.12)
                if "norm" in name:
                    parameter.add_(1)
        model.save_pretrained(folder)
    return str(folder)
