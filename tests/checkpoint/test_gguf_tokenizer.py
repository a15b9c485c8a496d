import numpy as np
import pytest
from raw_files import tiny_gguf, tiny_metadata
from tokenizers_made import WORDS, byte_level, byte_level_keys, sentencepiece, sentencepiece_keys

from ringcore.checkpoint.gguf_tokenizer import read_gguf_tokenizer
from ringcore.checkpoint.tokenizer import load_tokenizer
from ringcore.errors import ModelLoadError

TEXTS = [
    "foxfox",
    *WORDS,
    "",
    " ",
    "it's I'LL we're",
    "x<|user|>y<|end|><tool> z",
    "1 12 123 1234",
    "a\r\n\tb  c",
    "e\u0301",
    "ab\u3000!?",
    "</s> the",
]


def read(tmp_path, metadata, template=None):
    if template is not None:
        metadata = [*metadata, ("tokenizer.chat_template", "str", template)]
    path = tiny_gguf(tmp_path / "x.gguf", [*tiny_metadata(), *metadata], {"token_embd.weight": np.ones((4, 32))})
    return read_gguf_tokenizer(str(path))


def test_byte_level_is_the_tokenizer_it_was_made_from(tmp_path):
    made, files = byte_level(), read(tmp_path, byte_level_keys(), template="{{ messages }}")
    for text in TEXTS:
        ids = made.encode(text).ids
        assert files.backend.encode(text).ids == ids
        for skip in (True, False):
            assert files.backend.decode(ids, skip_special_tokens=skip) == made.decode(ids, skip_special_tokens=skip)
    assert files.special_tokens == {"bos_token": "<s>", "eos_token": "<|end|>"}
    assert files.chat_template == "{{ messages }}"
    assert files.backend.token_to_id("[PAD999]") is None
    assert files.backend.get_vocab_size() == made.get_vocab_size()


# What the families' own tokenizer.json files have; the regular expressions are those of Qwen2 and Llama 3.
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@pytest.mark.parametrize("pre", ["smollm", "qwen2", "llama-bpe"])
def test_the_split_before_the_merges(tmp_path, pre):
    from tokenizers import Regex, pre_tokenizers

    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre == "smollm")
    first = {
        "smollm": pre_tokenizers.Digits(individual_digits=True),
        "qwen2": pre_tokenizers.Split(Regex(QWEN2), "isolated"),
        "llama-bpe": pre_tokenizers.Split(Regex(LLAMA3), "isolated"),
    }[pre]
    expected = pre_tokenizers.Sequence([first, level])
    backend = read(tmp_path, byte_level_keys(pre)).backend
    for text in TEXTS:
        assert backend.pre_tokenizer.pre_tokenize_str(text) == expected.pre_tokenize_str(text)
    if pre == "qwen2":
        assert backend.normalizer.normalize_str("e\u0301") == "\u00e9"
    else:
        assert backend.normalizer is None


def test_llama3_takes_a_word_of_its_vocabulary_whole(tmp_path):
    """Its vocabulary has words that no merge leads to."""
    tokens = [*sorted(byte_level().get_vocab(), key=byte_level().get_vocab().get), "zzz"]
    own = {"tokens": ("[str]", tokens), "token_type": ("[i32]", [1] * len(tokens)), "bos_token_id": None}
    assert read(tmp_path, byte_level_keys("llama-bpe", **own)).backend.encode("zzz").tokens == ["zzz"]
    assert read(tmp_path, byte_level_keys("gpt-2", **own)).backend.encode("zzz").tokens == ["z", "z", "z"]


@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_agrees_with_transformers(tmp_path, model):
    conversion = pytest.importorskip("transformers.integrations.gguf")
    if not hasattr(conversion, "convert_gguf_tokenizer"):
        pytest.skip("this transformers has the conversion elsewhere")

    metadata = byte_level_keys("qwen2") if model == "gpt2" else sentencepiece_keys(merges=False)
    values = {key.removeprefix("tokenizer.ggml."): item for key, _, item in metadata}
    theirs, _ = conversion.convert_gguf_tokenizer(
        "llama",
        {
            "tokenizer_type": model,
            "pre_tokenizer_type": values.get("pre"),
            **{key: values[key] for key in ("tokens", "token_type", "merges", "scores") if key in values},
        },
    )
    ours = read(tmp_path, metadata).backend
    for text in TEXTS:
        if text != "e\u0301":  # theirs lacks Qwen2's normalizer
            assert ours.encode(text, add_special_tokens=False).ids == theirs.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("merges", [True, False])
def test_sentencepiece_is_the_tokenizer_it_was_made_from(tmp_path, merges):
    """Also where the merges are not in the file and come from the scores."""
    made, backend = sentencepiece(), read(tmp_path, sentencepiece_keys(merges)).backend
    for text in TEXTS:
        ids = made.encode(text, add_special_tokens=False).ids
        assert backend.encode(text, add_special_tokens=False).ids == ids
        assert backend.decode(ids) == made.decode(ids)


@pytest.mark.parametrize(
    ("metadata", "ids"),
    [
        (byte_level_keys(), "plain"),
        (byte_level_keys(add_bos_token=("bool", True)), "bos"),
        (byte_level_keys("llama-bpe"), "bos"),  # as llama.cpp has it
        (byte_level_keys("llama-bpe", add_bos_token=("bool", False)), "plain"),
        (byte_level_keys("llama-bpe", bos_token_id=None), "plain"),
        (byte_level_keys(add_bos_token=("bool", True), add_eos_token=("bool", True)), "both"),
        (sentencepiece_keys(), "bos"),
        (sentencepiece_keys(add_bos_token=("bool", False)), "plain"),
    ],
)
def test_special_tokens_around_a_text(tmp_path, metadata, ids):
    files = read(tmp_path, metadata)
    bos = files.backend.token_to_id("<s>")
    plain = files.backend.encode("the fox", add_special_tokens=False).ids
    expected = {"plain": plain, "bos": [bos, *plain], "both": [bos, *plain, files.backend.token_to_id("<|end|>")]}
    assert files.backend.encode("the fox").ids == expected[ids]


def test_no_space_is_put_before_a_text_where_the_file_says_so(tmp_path):
    backend = read(tmp_path, sentencepiece_keys(add_space_prefix=("bool", False))).backend
    assert backend.encode("the", add_special_tokens=False).tokens == ["t", "he"]
    assert backend.decode(backend.encode(" the").ids) == " the"


def test_the_tokenizer_of_a_model_file(tmp_path):
    read(tmp_path, byte_level_keys())
    tokenizer = load_tokenizer(tmp_path / "x.gguf")
    assert tokenizer.decode(tokenizer.encode("the fox 東")) == "the fox 東"
    assert tokenizer.eos_token_id == byte_level().token_to_id("<|end|>")


@pytest.mark.parametrize(
    ("metadata", "match"),
    [
        ([], "'tokenizer.ggml.model' is missing"),
        (byte_level_keys(model=("str", "t5")), "'tokenizer.ggml.model' is 't5'; known: gpt2, llama"),
        (byte_level_keys("tekken"), "'tokenizer.ggml.pre' is 'tekken'; known: default"),
        (byte_level_keys(tokens=None), "'tokenizer.ggml.tokens' is missing"),
        (byte_level_keys(tokens=("[i32]", [1, 2])), "'tokenizer.ggml.tokens' is no list of strings"),
        (byte_level_keys(token_type=("[i32]", [1, 2])), "has 2 values for"),
        (byte_level_keys(merges=("[str]", ["a b c"])), "holds 'a b c', two parts"),
        (byte_level_keys(merges=("[str]", ["zz qq"])), "the vocabulary is not valid"),
        (byte_level_keys(eos_token_id=("u32", 5000)), "'tokenizer.ggml.eos_token_id' is 5000"),
        (sentencepiece_keys(False, scores=None), "'tokenizer.ggml.scores' is missing"),
        (sentencepiece_keys(False, scores=("[f32]", [1.0])), "does not have one score for each"),
    ],
)
def test_refusals(tmp_path, metadata, match):
    with pytest.raises(ModelLoadError, match=match):
        read(tmp_path, metadata)
