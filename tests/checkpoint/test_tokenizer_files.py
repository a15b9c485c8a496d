import json

import pytest
from tokenizers_made import byte_level, tokenizer_folder

from ringcore.checkpoint.tokenizer_files import read_tokenizer_folder
from ringcore.errors import ModelLoadError

TEXTS = ["the fox", " naïve 東京 🙂", "<|user|>hi<|end|>", "", "x <tool> y"]


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"add_bos_token": True},
        {"add_bos_token": False},
        {"add_bos_token": True, "add_eos_token": True},
        {"add_eos_token": True},
        {"add_bos_token": True, "bos_token": None},
        {"bos_token": {"__type": "AddedToken", "content": "<s>", "special": True}},
    ],
)
@pytest.mark.parametrize("processor", [True, False])
def test_special_tokens_are_added_as_transformers_does(tmp_path, config, processor):
    from tokenizers import processors
    from transformers import AutoTokenizer

    made = byte_level()
    if processor:
        ids = [("<s>", made.token_to_id("<s>"))]
        made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=ids)
    folder = tokenizer_folder(tmp_path / "t", made, **config)
    ours = read_tokenizer_folder(folder)
    theirs = AutoTokenizer.from_pretrained(str(folder))
    for text in TEXTS:
        assert ours.backend.encode(text).ids == theirs.encode(text)
        assert ours.backend.encode(text, add_special_tokens=False).ids == theirs.encode(text, add_special_tokens=False)


def test_a_limit_of_length_in_the_file_does_not_cut_prompts(tmp_path):
    made = byte_level()
    made.enable_truncation(3)
    made.enable_padding(length=50)
    ours = read_tokenizer_folder(tokenizer_folder(tmp_path / "t", made))
    assert ours.backend.encode("the quick brown fox").ids == byte_level().encode("the quick brown fox").ids


def test_special_tokens_in_their_older_place(tmp_path):
    folder = tokenizer_folder(tmp_path / "t", eos_token=None)
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": "<|end|>"}, "bos_token": "x"}))
    assert read_tokenizer_folder(folder).special_tokens == {"eos_token": "<|end|>", "bos_token": "<s>"}
    (folder / "tokenizer_config.json").unlink()
    assert read_tokenizer_folder(folder).special_tokens == {"eos_token": "<|end|>", "bos_token": "x"}


def test_where_the_chat_template_comes_from(tmp_path):
    assert read_tokenizer_folder(tokenizer_folder(tmp_path / "none")).chat_template is None
    field = tokenizer_folder(tmp_path / "field", chat_template="from the field")
    assert read_tokenizer_folder(field).chat_template == "from the field"
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    assert read_tokenizer_folder(tokenizer_folder(tmp_path / "named", chat_template=named)).chat_template == "yes"
    both = tokenizer_folder(tmp_path / "both", template="from the file", chat_template="from the field")
    assert read_tokenizer_folder(both).chat_template == "from the file"


def test_a_folder_without_tokenizer_json_goes_through_transformers(tmp_path):
    folder = tmp_path / "old"
    folder.mkdir()
    model = byte_level().model
    model.save(str(folder))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    ids = read_tokenizer_folder(folder).backend.encode("the quick fox").ids
    assert ids == byte_level().encode("the quick fox").ids


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("tokenizer.json", b"{}", "tokenizer.json: not a valid tokenizer"),
        ("tokenizer.json", b"\xff", "tokenizer.json: not a valid tokenizer"),
        ("tokenizer_config.json", b"[", "tokenizer_config.json: not valid JSON"),
        ("tokenizer_config.json", b'{"eos_token": 3}', "field 'eos_token' is 3, a token is needed"),
        ("tokenizer_config.json", b'{"chat_template": 3}', "'chat_template' is neither a string nor"),
        ("chat_template.jinja", b"\xff\xff", "chat_template.jinja: not UTF-8"),
        ("chat_template.jinja", b"x" * ((1 << 20) + 1), "chat_template.jinja: larger than"),
    ],
)
def test_a_broken_file_is_named(tmp_path, name, content, match):
    folder = tokenizer_folder(tmp_path / "t")
    (folder / name).write_bytes(content)
    with pytest.raises(ModelLoadError, match=match):
        read_tokenizer_folder(folder)


def test_no_tokenizer_at_all(tmp_path):
    with pytest.raises(ModelLoadError, match=r"tokenizer.json is missing.*; give the option tokenizer"):
        read_tokenizer_folder(tmp_path)


def test_an_overlong_tokenizer_is_not_read(tmp_path):
    folder = tokenizer_folder(tmp_path / "t")
    with open(folder / "tokenizer.json", "r+b") as file:
        file.truncate((256 << 20) + 1)  # sparse: takes no space
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json: larger than 268435456 bytes"):
        read_tokenizer_folder(folder)
