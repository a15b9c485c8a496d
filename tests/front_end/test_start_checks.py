"""Memory that a host does not have is refused before a process starts."""

import numpy as np
import pytest
from raw_files import model_folder, phi3_gguf, safetensors_file
from tokenizers_made import byte_level, tokenizer_folder

from ringcore import LLM
from ringcore.checkpoint import find_model, read_model_spec
from ringcore.checkpoint.expected_tensors import expected_tensors
from ringcore.config import EngineConfig
from ringcore.errors import CapacityError, EngineDeadError, ModelLoadError
from ringcore.executor.child_process import ChildProcess
from ringcore.families import FAMILIES
from ringcore.families.llama import LLAMA
from ringcore.front_end import folder_check
from ringcore.front_end.start_checks import check_host_memory
from ringcore.host.resources import Host

GIB = 2**30


class FakeHost(Host):
    def __init__(self, free_bytes: int) -> None:
        super().__init__()
        self.free_bytes = free_bytes

    def total_memory_bytes(self) -> int:
        return 2 * self.free_bytes

    def free_memory_bytes(self) -> int:
        return self.free_bytes


@pytest.fixture
def no_process(monkeypatch):
    def start(*args, **kwargs):
        raise AssertionError("a process is started")

    monkeypatch.setattr(ChildProcess, "start", start)


def config_of(folder, **options) -> EngineConfig:
    given = {"load_format": "dummy", "device": "cpu", "dtype": "float32"}
    return EngineConfig.from_options(model=folder, **given | options)


def refusal(config: EngineConfig, free_bytes: int) -> CapacityError:
    with pytest.raises(CapacityError) as caught:
        check_host_memory(config, FakeHost(free_bytes))
    return caught.value


@pytest.mark.parametrize(
    "changed",
    [
        {"head_dim": 4096, "num_attention_heads": 4096, "num_key_value_heads": 4096, "hidden_size": 4096},
        {"hidden_size": 1 << 17, "intermediate_size": 1 << 20, "num_hidden_layers": 1000},
        {"vocab_size": 1 << 22, "hidden_size": 1 << 16},
        {"max_position_embeddings": 1 << 27, "head_dim": 1024},
    ],
)
@pytest.mark.parametrize("device", ["cpu", "auto"])
def test_dummy_weights_larger_than_the_host_start_nothing(tmp_path, monkeypatch, no_process, device, changed):
    monkeypatch.setattr(Host, "has_gpu", lambda host: False)
    folder = tokenizer_folder(model_folder(tmp_path / "m", **changed), byte_level())
    with pytest.raises(CapacityError, match=r"host memory: .* GiB .* available, .* missing") as caught:
        LLM(folder, load_format="dummy", device=device)
    details = caught.value.details
    assert details["needed_bytes"] - details["available_bytes"] == details["missing_bytes"] > 0


@pytest.mark.parametrize(
    ("head_dim", "error"),
    [(10**9, "'head_dim' is 1000000000, it must be from 1 to 4096"), (4096, "has the shape")],
)
def test_a_checkpoint_of_other_sizes_starts_nothing(tmp_path, no_process, head_dim, error):
    folder = tokenizer_folder(model_folder(tmp_path / "m"), byte_level())
    shapes = expected_tensors(read_model_spec(find_model(folder, "dummy"), FAMILIES), LLAMA)
    safetensors_file(folder / "model.safetensors", **{name: np.zeros(shape) for name, shape in shapes.items()})
    model_config = (folder / "config.json").read_text()
    with pytest.raises(AssertionError, match="a process is started"):
        LLM(folder)
    (folder / "config.json").write_text(model_config[:-1] + f', "head_dim": {head_dim}}}')
    with pytest.raises(ModelLoadError, match=error):
        LLM(folder)


@pytest.fixture
def started(monkeypatch):
    """The names of the processes that are started."""
    start, names = ChildProcess.start, list[str]()

    def noted(name, *args):
        names.append(name)
        return start(name, *args)

    monkeypatch.setattr(ChildProcess, "start", noted)
    return names


def llama_folder(path, *left_out: str):
    folder = tokenizer_folder(model_folder(path, model_type="llama"), byte_level())
    shapes = expected_tensors(read_model_spec(find_model(folder, "dummy"), FAMILIES), LLAMA)
    tensors = {name: np.zeros(shape) for name, shape in shapes.items() if name not in left_out}
    safetensors_file(folder / "model.safetensors", **tensors)
    return folder


def test_a_tensor_that_transformers_model_misses_starts_no_engine(tmp_path, started):
    """The process that looks at the folder is the only one that starts."""
    missing = "model.layers.1.mlp.up_proj.weight"
    with pytest.raises(ModelLoadError, match=f"tensor '{missing}' is missing") as caught:
        LLM(llama_folder(tmp_path / "m", missing), model_impl="transformers")
    assert caught.value.details["tensor"] == missing
    assert started == ["folder check"]


def looked_at(path, cache) -> None:
    model = EngineConfig.from_options(model=path, model_impl="transformers").model
    with folder_check.folder_check(model, str(cache)):
        pass


@pytest.mark.long_form
def test_a_tensor_that_a_gguf_file_lacks_starts_no_engine(tmp_path, started):
    file = phi3_gguf(tmp_path / "x.gguf", {"blk.1.ffn_down.weight": None})
    with pytest.raises(ModelLoadError, match=r"tensor 'model\.layers\.1\.mlp\.down_proj\.weight' is missing"):
        looked_at(file, tmp_path / "cache")
    assert started == ["folder check"]
    assert not (tmp_path / "cache").exists()


def other_folder(path):
    return llama_folder(path, "model.norm.weight")


def other_file(path):
    return phi3_gguf(path, {"output_norm.weight": np.zeros(31)})


@pytest.mark.parametrize(
    ("write", "write_other"), [(llama_folder, other_folder), (phi3_gguf, other_file)], ids=["safetensors", "gguf"]
)
def test_files_that_have_passed_are_not_looked_at_again(tmp_path, monkeypatch, started, write, write_other):
    monkeypatch.setattr(folder_check, "ENTRY", "passed_folder:main")
    path = write(tmp_path / "m.gguf")
    looked_at(path, tmp_path / "cache")
    looked_at(path, tmp_path / "cache")
    assert started == ["folder check"]
    looked_at(write_other(tmp_path / "other.gguf"), tmp_path / "cache")
    assert started == ["folder check"] * 2


def test_random_weights_are_not_looked_at(tmp_path, no_process):
    file = phi3_gguf(tmp_path / "x.gguf", {"output_norm.weight": None})
    model = EngineConfig.from_options(model=file, load_format="dummy").model
    with folder_check.folder_check(model, str(tmp_path / "cache")):
        pass


def test_a_check_that_dies_is_an_error_and_no_pass(tmp_path, monkeypatch):
    monkeypatch.setattr(folder_check, "ENTRY", "passed_folder:die")
    model = EngineConfig.from_options(model=llama_folder(tmp_path / "m"), model_impl="transformers").model
    with (
        pytest.raises(EngineDeadError, match=r"'folder check' \(pid \d+\) ended: exit code 3"),
        folder_check.folder_check(model, str(tmp_path / "cache")),
    ):
        pass
    assert not (tmp_path / "cache").exists()


def test_the_numbers_by_hand(tmp_path):
    """2 layers, 32 hidden, 4 heads and 2 KV heads of 8, 48 in the MLP, 128 tokens."""
    folder = model_folder(tmp_path / "m")
    matrices = 2 * 128 * 32 + 2 * (2 * 32 * 32 + 2 * 16 * 32 + 3 * 32 * 48)
    weights = 4 * (matrices + 5 * 32)
    angles = 20 * 64 * 4
    block = 2 * 2 * 16 * 2 * 8 * 4  # layers, keys and values, tokens, heads, their size, bytes
    error = refusal(config_of(folder), weights + angles + 5 * block - 1)  # 64 tokens and the null block
    assert error.details["needed_bytes"] == weights + angles + 5 * block
    assert error.details["missing_bytes"] == 1
    assert error.details["max_model_len"] == 63
    assert "lower max_model_len to 63, give a smaller model" in error.message
    assert error.details["budget"] == {
        "total_bytes": 2 * (error.details["needed_bytes"] - 1),
        "weights_bytes": weights,
        "rotary_embedding_bytes": angles,
        "kv_cache_bytes": 5 * block,
    }


@pytest.mark.parametrize("options", [{}, {"tensor_parallel_size": 2}, {"max_model_len": 40}, {"max_model_len": "auto"}])
def test_what_it_says_is_needed_and_what_it_says_fits(tmp_path, options):
    config = config_of(model_folder(tmp_path / "m"), **options)
    needed = refusal(config, 1000).details["needed_bytes"]
    check_host_memory(config, FakeHost(needed))
    error = refusal(config, needed - 1)
    if fits := error.details["max_model_len"]:
        check_host_memory(config_of(config.model.model, **options | {"max_model_len": fits}), FakeHost(needed - 1))


def test_an_executor_of_the_callers_own_is_not_asked(tmp_path):
    """It may compute nothing, as one that simulates."""
    folder = tokenizer_folder(model_folder(tmp_path / "m", vocab_size=1 << 22, hidden_size=1 << 16), byte_level())
    with LLM(folder, load_format="dummy", executor="ringcore.testing:FakeExecutor", kv_cache_bytes=1 << 40) as llm:
        assert llm.ready.num_blocks > 0
