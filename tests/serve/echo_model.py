"""A chat model that says what it is told: the last user message, word for word, and then ends.

Alternatives in that message, between "||", are for the choices of one request: a choice takes the one of its seed.
Every byte is a token. Markers that a test names are tokens too, special or not.
"""

from __future__ import annotations

import json
from pathlib import Path

from echo_worker import SAID_ID, SAY_ID, EchoMultiproc
from fake_engine import make_model_folder
from running_service import RunningService, served
from tokenizers import AddedToken, Tokenizer

SAY, SAID = "<|say|>", "<|said|>"  # around what the model is to say, in the prompt
MAX_MODEL_LEN = 2048

_TEMPLATE = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"
    "{% for m in messages %}{{ m.role }}:{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}({{ c.function.arguments.city }})"
    "{% endfor %};{% endfor %}"
    f"{SAY}{{{{ (messages | selectattr('role', 'equalto', 'user') | list | last).content }}}}{SAID}"
    "{% if thinking is defined %}{{ '<think>\n' if thinking else '<think>\n\n</think>\n\n' }}{% endif %}"
)
# What tells the form that a model was trained on; nothing of it is written out.
HERMES_MARKS = '{# <tool_call> {"name": ..., "arguments": ...} #}'
LLAMA_MARKS = '{# <|start_header_id|> {"name": ..., "parameters": ...} tool_calls #}'


_EOS_TEXT = "<|end|>"  # of the fake model


def serve_echo(
    folder: Path,
    marks: str,
    special: tuple[str, ...] = (),
    plain: tuple[str, ...] = (),
    eos: str = _EOS_TEXT,
    **options,
):
    """A service of this model, whose template has `marks`; special, plain: markers that are one token; eos: the text of
    the end-of-text token."""
    _make_folder(folder, marks, special, plain, eos)
    engine_options = {"executor": EchoMultiproc, "max_model_len": MAX_MODEL_LEN}
    running: RunningService = served(str(folder), engine_options, **options)
    return running


def _make_folder(
    folder: Path, marks: str, special: tuple[str, ...], plain: tuple[str, ...], eos: str = _EOS_TEXT
) -> None:
    make_model_folder(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_text((folder / name).read_text().replace(_EOS_TEXT, eos))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in (SAY, SAID, *special)])
    tokenizer.add_tokens([AddedToken(text, special=False) for text in plain])
    assert (tokenizer.token_to_id(SAY), tokenizer.token_to_id(SAID)) == (SAY_ID, SAID_ID)
    tokenizer.save(str(folder / "tokenizer.json"))
    _change(folder / "tokenizer_config.json", chat_template=marks + _TEMPLATE)
    _change(folder / "config.json", max_position_embeddings=MAX_MODEL_LEN)


def _change(file: Path, **fields) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
