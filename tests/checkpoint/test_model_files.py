import json

import msgspec
import numpy as np
import pytest
from raw_files import model_folder, safetensors_file, tiny_gguf, tiny_metadata

from ringcore.checkpoint import ModelFiles, find_model
from ringcore.checkpoint.model_files import find_tokenizer
from ringcore.errors import ModelLoadError

INDEX = "model.safetensors.index.json"


def sharded(folder, weight_map):
    model_folder(folder)
    (folder / "model.safetensors").unlink()
    safetensors_file(folder / "model-1.safetensors", a=np.ones(2))
    safetensors_file(folder / "model-2.safetensors", b=np.ones(3))
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def gguf(path):
    return tiny_gguf(path, tiny_metadata(), {"token_embd.weight": np.ones((16, 32))})


def refused(match, model, load_format="auto"):
    with pytest.raises(ModelLoadError, match=match) as caught:
        find_model(model, load_format)
    assert "path" in caught.value.details


def test_a_folder(tmp_path):
    folder = model_folder(tmp_path / "m")
    expected = ModelFiles(
        "safetensors", str(folder), str(folder / "config.json"), [str(folder / "model.safetensors")], str(folder)
    )
    assert find_model(folder) == find_model(str(folder), "safetensors") == expected
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(expected), type=ModelFiles) == expected


def test_a_relative_path_becomes_absolute(tmp_path, monkeypatch):
    folder = model_folder(tmp_path / "m")
    monkeypatch.chdir(tmp_path)
    assert find_model("m").path == find_model("./m").path == str(folder)


def test_shards(tmp_path):
    folder = sharded(tmp_path / "m", {"a": "model-1.safetensors", "b": "model-2.safetensors"})
    assert find_model(folder).weight_files == [str(folder / f"model-{i}.safetensors") for i in (1, 2)]


def test_one_safetensors_file_of_any_name_will_do(tmp_path):
    folder = model_folder(tmp_path / "m")
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    assert find_model(folder).weight_files == [str(folder / "weights.safetensors")]
    safetensors_file(folder / "more.safetensors", b=np.ones(1))
    refused("2 .safetensors files but no model.safetensors.index.json", folder)


def test_gguf_as_a_file_and_in_a_folder(tmp_path):
    folder = tmp_path / "m"
    folder.mkdir()
    file = gguf(folder / "x.gguf")
    expected = ModelFiles("gguf", str(file), None, [str(file)], str(file))
    assert find_model(file) == find_model(folder) == find_model(folder, "gguf") == expected
    refused("load_format is 'safetensors'", file, "safetensors")
    gguf(folder / "y.gguf")
    refused("found x.gguf, y.gguf; give the path of the file", folder)
    assert find_model(folder / "y.gguf").path == str(folder / "y.gguf")


def test_safetensors_go_before_gguf_beside_them(tmp_path):
    folder = model_folder(tmp_path / "m")
    file = gguf(folder / "x.gguf")
    assert find_model(folder).kind == "safetensors"
    assert find_model(folder, "gguf").path == str(file)
    (folder / "model.safetensors").unlink()
    assert find_model(folder).path == str(file)


def test_dummy_needs_the_configuration_alone(tmp_path):
    folder = model_folder(tmp_path / "m")
    (folder / "model.safetensors").unlink()
    expected = ModelFiles("dummy", str(folder), str(folder / "config.json"), [], str(folder))
    assert find_model(folder, "dummy") == expected
    file = gguf(tmp_path / "x.gguf")
    assert find_model(file, "dummy") == ModelFiles("dummy", str(file), None, [], str(file))
    (folder / "config.json").unlink()
    refused("config.json is missing", folder, "dummy")


@pytest.mark.parametrize("model", ["./nothing", "/nothing/at/all", "~/nothing-here", "a/b/c", "../x"])
def test_no_such_folder(model, tmp_path, monkeypatch):
    """Beside an empty folder, so whatever lies beside the checkout."""
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    refused("no such folder", model)


def test_no_such_file(tmp_path):
    refused("no such file", str(tmp_path / "x.gguf"))
    refused("no such file", "x.gguf")


def test_a_file_that_is_no_model(tmp_path):
    (tmp_path / "weights.bin").write_bytes(b"x")
    refused("no .gguf file; give the model's folder", tmp_path / "weights.bin")


@pytest.mark.parametrize("model", ["no-such-name", "nobody/no-such-model"])
def test_a_hub_id_that_cannot_be_had(tmp_path, monkeypatch, model):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    refused("as a hub id it cannot be downloaded: .*; check the name and the network", model)
    refused("cannot be downloaded", model, "dummy")
    refused("may hold many .gguf files", model, "gguf")


def test_a_hub_id_is_downloaded(tmp_path, monkeypatch):
    import huggingface_hub

    folder = model_folder(tmp_path / "snapshot")
    asked = []

    def snapshot_download(repo, allow_patterns):
        asked.append((repo, allow_patterns))
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert find_model("org/name").path == str(folder)
    assert find_model("org/name", "dummy").kind == "dummy"
    assert [repo for repo, _ in asked] == ["org/name", "org/name"]
    assert ["*.safetensors" in patterns for _, patterns in asked] == [True, False]
    assert not any(pattern.endswith((".bin", ".pt", ".py")) for _, patterns in asked for pattern in patterns)


def test_missing_config(tmp_path):
    folder = model_folder(tmp_path / "m")
    (folder / "config.json").unlink()
    refused("config.json is missing", folder)


def test_no_weights(tmp_path):
    folder = model_folder(tmp_path / "m")
    (folder / "model.safetensors").unlink()
    refused("has no weights: model.safetensors or", folder)
    (folder / "pytorch_model.bin").write_bytes(b"x")
    refused("only as pytorch_model.bin.*safetensors only", folder)


def test_truncated_weights(tmp_path):
    folder = model_folder(tmp_path / "m")
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    refused("model.safetensors: truncated: tensor 'a'", folder)
    file.write_bytes(b"")
    refused("model.safetensors: has 0 bytes", folder)


def test_a_missing_shard_is_named(tmp_path):
    folder = sharded(tmp_path / "m", {"a": "model-1.safetensors", "b": "model-3.safetensors"})
    refused("shard model-3.safetensors is missing; .* names it for 'b'", folder)


@pytest.mark.parametrize(
    "shard", ["../model-2.safetensors", "/etc/passwd", "sub/model.safetensors", "model.bin", 3, ".."]
)
def test_an_index_stays_in_its_folder(tmp_path, shard):
    folder = sharded(tmp_path / "m", {"a": "model-1.safetensors", "b": shard})
    safetensors_file(tmp_path / "model-2.safetensors", b=np.ones(3))
    refused("a .safetensors file beside it is needed", folder)


def test_an_index_that_is_wrong(tmp_path):
    folder = sharded(tmp_path / "m", {"a": "model-1.safetensors", "b": "model-1.safetensors"})
    refused("model-1.safetensors: has no tensor 'b', though", folder)
    sharded(folder, {"a": "model-1.safetensors", "b": "model-1.safetensors", "c": "model-2.safetensors"})
    refused("has no tensor 'b'", folder)
    (folder / INDEX).write_text(json.dumps({"weight_map": {}}))
    refused("'weight_map' is missing or empty", folder)
    (folder / INDEX).write_text("{")
    refused("not valid JSON", folder)


def test_tokenizer_places(tmp_path):
    folder = model_folder(tmp_path / "m")
    (folder / "tokenizer.json").write_text("{}")
    assert find_tokenizer(folder) == find_tokenizer(folder / "tokenizer.json") == folder
    file = gguf(tmp_path / "x.gguf")
    assert find_tokenizer(str(file)) == file
    for wrong in ("./nothing", folder / "config.json", "x.gguf"):
        with pytest.raises(ModelLoadError, match=r"give a folder with a tokenizer.json, a .gguf file or a hub id"):
            find_tokenizer(wrong)
