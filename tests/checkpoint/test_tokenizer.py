import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from raw_files import model_folder
from samples import num_examples
from tokenizers_made import byte_level, sentencepiece, tokenizer_folder

from ringcore.checkpoint import find_model
from ringcore.checkpoint.tokenizer import Tokenizer, load_tokenizer
from ringcore.checkpoint.tokenizer_files import TokenizerFiles
from ringcore.errors import InvalidRequestError, ModelLoadError

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|user|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}>{% endif %}"
)
BYTES = Tokenizer(TokenizerFiles("here", byte_level(), {"eos_token": "<|end|>"}, None))
PIECES = Tokenizer(TokenizerFiles("here", sentencepiece(), {"eos_token": "</s>"}, None))
MADE = {"byte_level": BYTES, "sentencepiece": PIECES}
DATA = Path(__file__).parents[1] / "data"


# Any ids at all; of SentencePiece's byte tokens only such as form characters: see `IncrementalDecoder`.
ID_LISTS = {
    "byte_level": st.lists(st.integers(0, BYTES.vocab_size - 1), max_size=30),
    "sentencepiece": st.lists(
        st.integers(259, PIECES.vocab_size - 1).map(lambda i: [i])
        | st.sampled_from([[0], [1], [2]])
        | st.text(alphabet="é東🙂", max_size=3).map(lambda text: [3 + byte for byte in text.encode()]),
        max_size=12,
    ).map(lambda parts: [token_id for part in parts for token_id in part]),
}


def streamed(tokenizer, ids, skip=True, prompt=()):
    stream = tokenizer.stream(skip, prompt)
    pieces = [stream.append(token_id) for token_id in ids]
    return pieces, stream.flush()


# --- loading


def test_a_folder_a_file_and_the_models_own(tmp_path):
    folder = tokenizer_folder(model_folder(tmp_path / "m"), template=TEMPLATE)
    for source in (folder, str(folder), folder / "tokenizer.json", find_model(folder)):
        tokenizer = load_tokenizer(source)
        assert tokenizer.encode("the fox") == byte_level().encode("the fox").ids
        assert tokenizer.vocab_size == byte_level().get_vocab_size()
        assert tokenizer.eos_token_id == byte_level().token_to_id("<|end|>")
        assert tokenizer.bos_token_id == byte_level().token_to_id("<s>")


def test_nothing_there(tmp_path):
    with pytest.raises(ModelLoadError, match=r"tokenizer.json is missing"):
        load_tokenizer(model_folder(tmp_path / "m"))
    with pytest.raises(ModelLoadError, match="none is there"):
        load_tokenizer(tmp_path / "nothing" / "here" / "x")


# --- ids and text


@settings(max_examples=num_examples(50, 100), deadline=None)
@given(st.text(max_size=40))
def test_a_text_comes_back(text):
    if any("\ud800" <= c <= "\udfff" for c in text):
        with pytest.raises(InvalidRequestError, match="half of a surrogate pair"):
            BYTES.encode(text)
        return
    assert BYTES.decode(BYTES.encode(text), skip_special_tokens=False) == text


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("adds", [True, False])
def test_a_long_text_is_encoded_as_a_short_one(name, adds):
    text = "the quick fox, é東🙂 <s> " * 400
    assert MADE[name].encode(text, adds) == MADE[name]._backend.encode(text, add_special_tokens=adds).ids
    with pytest.raises(InvalidRequestError, match=f"character {len(text)} is half"):
        MADE[name].encode(text + "\ud800")


def test_half_a_surrogate_pair_is_a_typed_error():
    with pytest.raises(InvalidRequestError, match="prompt: character 2 is half of a surrogate pair"):
        BYTES.encode("ab\ud83d")


def test_special_tokens_are_single_ids_and_can_be_skipped():
    ids = BYTES.encode("hi<|end|><tool>")
    assert BYTES.eos_token_id in ids
    assert BYTES.decode(ids) == "hi<tool>"
    assert BYTES.decode(ids, skip_special_tokens=False) == "hi<|end|><tool>"
    assert "<|end|>" in BYTES.special_tokens
    assert "<tool>" not in BYTES.special_tokens


@pytest.mark.parametrize("name", MADE)
def test_the_text_of_one_token(name):
    tokenizer = MADE[name]
    ids = tokenizer.encode("the fox", add_special_tokens=False)
    first = " the" if name == "sentencepiece" else "the"  # SentencePiece has the space before every word
    assert "".join(map(tokenizer.token_text, ids)) == first + " fox"
    assert tokenizer.token_text(tokenizer.eos_token_id) in ("<|end|>", "</s>")
    assert tokenizer.token_text(10**6) == ""
    cut = tokenizer.encode("ж", add_special_tokens=False)
    assert len(cut) > 1
    assert tokenizer.token_text(cut[-1]) == "\ufffd"


# --- streaming


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("skip", [True, False])
@settings(max_examples=num_examples(60, 150), deadline=None)
@given(data=st.data())
def test_the_pieces_joined_are_the_whole(name, skip, data):
    tokenizer = MADE[name]
    ids = data.draw(ID_LISTS[name])
    pieces, rest = streamed(tokenizer, ids, skip)
    assert "".join(pieces) + rest == tokenizer.decode(ids, skip)


@settings(max_examples=num_examples(60, 150), deadline=None)
@given(text=st.text(alphabet="aé東🙂 \n", max_size=30), prompt=st.text(alphabet="bü京 ", max_size=20))
def test_no_piece_holds_half_a_character(text, prompt):
    # One token a byte, so that every character but ASCII is cut.
    alphabet = byte_level().get_vocab()
    spelled = byte_level().pre_tokenizer.pre_tokenize_str(text)
    ids = [alphabet[symbol] for word, _ in spelled for symbol in word]
    pieces, rest = streamed(BYTES, ids, True, BYTES.encode(prompt))
    assert "".join(pieces) == text
    assert rest == ""
    assert not any("\ufffd" in piece for piece in pieces)


def test_a_character_comes_whole_with_its_last_byte():
    ids = [byte_level().get_vocab()[symbol] for (symbol,) in zip("ðŁĻĤ", strict=True)]  # 🙂 in the byte alphabet
    assert streamed(BYTES, ids) == (["", "", "", "🙂"], "")
    assert streamed(BYTES, ids[:3]) == (["", "", ""], "\ufffd")


def test_a_completion_keeps_the_space_of_its_first_word():
    prompt, word = PIECES.encode("the"), PIECES.encode("the fox")[len(PIECES.encode("the")) :]
    assert streamed(PIECES, word, prompt=prompt) == ([" fox"], "")
    assert streamed(PIECES, word) == (["fox"], "")


def test_a_prompt_that_ends_within_a_character():
    vocab = byte_level().get_vocab()
    start, end = [vocab["Ã"]], [vocab["©"], vocab["a"]]  # é, cut
    assert streamed(BYTES, end, prompt=start) == (["", "\ufffda"], "")


def test_flush_is_empty_after_a_whole_text_and_idempotent():
    stream = BYTES.stream()
    assert "".join(stream.append(i) for i in BYTES.encode("ok é")) == "ok é"
    assert (stream.flush(), stream.flush()) == ("", "")


def test_a_run_that_is_no_text_is_given_out_in_the_end():
    bad = byte_level().get_vocab()["ð"]
    pieces, rest = streamed(BYTES, [bad] * 1000)
    assert "".join(pieces) + rest == "\ufffd" * 1000
    assert sum(map(bool, pieces)) == 1000 // 64
    special = BYTES.eos_token_id
    pieces, rest = streamed(BYTES, [special] * 200 + BYTES.encode(" end"))
    assert "".join(pieces) + rest == " end"


@pytest.mark.parametrize("invalid", [-1, 1 << 40, "x", None])
def test_a_token_that_is_none_is_our_bug(invalid):
    with pytest.raises((OverflowError, TypeError)):
        BYTES.stream().append(invalid)


def test_an_id_beyond_the_vocabulary_has_no_text():
    stream = BYTES.stream()
    assert stream.append(99999) == ""
    assert stream.append(BYTES.encode("a")[0]) == "a"


# --- chat


def test_a_conversation_becomes_ids(tmp_path):
    from transformers import AutoTokenizer

    folder = tokenizer_folder(tmp_path / "t", template=TEMPLATE, add_bos_token=True)
    ours, theirs = load_tokenizer(folder), AutoTokenizer.from_pretrained(str(folder))
    messages = [{"role": "user", "content": "the fox"}, {"role": "user", "content": "<|end|> 🙂"}]
    for prompt in (True, False):
        ids = ours.apply_chat_template(messages, add_generation_prompt=prompt)
        assert ids == theirs.apply_chat_template(messages, add_generation_prompt=prompt, return_dict=False)
        assert ids.count(ours.bos_token_id) == 1  # the template writes it; encoding adds no second
    assert ours.has_chat_template


def test_tools_and_variables_of_the_template(tmp_path):
    from transformers import AutoTokenizer

    template = TEMPLATE + "{{ tools | tojson }}{% if enable_thinking is false %}<|end|>{% endif %}"
    folder = tokenizer_folder(tmp_path / "t", template=template)
    ours, theirs = load_tokenizer(folder), AutoTokenizer.from_pretrained(str(folder))
    assert ours.chat_template == template
    messages, tools = [{"role": "user", "content": "the fox"}], [{"type": "function", "function": {"name": "dog"}}]
    ids = ours.apply_chat_template(messages, True, tools=tools, chat_template_kwargs={"enable_thinking": False})
    expected = theirs.apply_chat_template(
        messages, tools=tools, add_generation_prompt=True, enable_thinking=False, return_dict=False
    )
    assert ids == expected
    assert ids != ours.apply_chat_template(messages, True, tools=tools)


def test_no_chat_template_is_the_requests_error():
    assert not BYTES.has_chat_template
    assert BYTES.chat_template is None
    with pytest.raises(InvalidRequestError, match="messages: the model in here has no chat template") as caught:
        BYTES.apply_chat_template([{"role": "user", "content": "x"}])
    assert caught.value.details["field"] == "messages"


# --- real models


def check_reference(name, tokenizer):
    data = json.loads((DATA / f"{name}.json").read_text())
    for entry in data["entries"]:
        if entry["chat"]:
            ids = tokenizer.apply_chat_template([{"role": "user", "content": entry["prompt"]}])
        else:
            ids = tokenizer.encode(entry["prompt"])
        assert ids == entry["prompt_token_ids"]


@pytest.mark.real_model
def test_smollm2_from_the_folder_and_from_gguf(smollm2, smollm2_gguf):
    from transformers import AutoTokenizer

    folder, gguf = load_tokenizer(smollm2), load_tokenizer(smollm2_gguf)
    check_reference("smollm2-135m", folder)
    check_reference("smollm2-135m", gguf)
    theirs = AutoTokenizer.from_pretrained(smollm2)
    rng = np.random.default_rng(0)
    texts = ["Hello  world\n\n 12345 <|im_start|>x", "naïve 東京🙂", "def f(x):\n\treturn x**2\r\n", "  it's  I'LL "]
    texts += ["".join(map(chr, rng.integers(32, 1500, 60))) for _ in range(30)]
    for text in texts:
        assert folder.encode(text) == gguf.encode(text) == theirs.encode(text)
    for _ in range(30):
        ids = rng.integers(0, folder.vocab_size, 40).tolist()
        for skip in (True, False):
            whole = theirs.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            pieces, rest = streamed(gguf, ids, skip)
            assert "".join(pieces) + rest == folder.decode(ids, skip) == whole
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert gguf.apply_chat_template(messages) == theirs.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False
    )
    assert (folder.eos_token_id, gguf.eos_token_id) == (2, 2)


@pytest.mark.opt_in_model
def test_qwen2_from_the_folder(qwen2):
    check_reference("qwen2.5-coder-0.5b", load_tokenizer(qwen2))
